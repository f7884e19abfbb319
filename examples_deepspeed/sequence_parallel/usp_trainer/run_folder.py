"""The folders that a run writes to: one trainer at a time, and no later checkpoint overwritten."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import time
from argparse import Namespace
from pathlib import Path

from ds_usp import CheckpointError, ConfigError
from usp_trainer.files import latest_checkpoint

LOCK = ".usp_lock"
CACHE = "data"  # of encoded text, in the output folder unless --data-cache-path names another
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def saved_step(folder: str | Path) -> int | None:
    """The step of the latest finished checkpoint in ``folder``; None: there is none.

    Raises:
        CheckpointError: there is one that cannot be read.
    """
    checkpoint = latest_checkpoint(Path(folder))
    return checkpoint and int(checkpoint[1]["progress"]["step"])


def check_not_behind(args: Namespace) -> None:
    """Refuse to save behind a checkpoint that is there. Reads only.

    Raises:
        CheckpointError: ``--save`` holds a later step than the one that this run begins from, or
            one that cannot be read.
    """
    if args.save is None or args.overwrite_output:
        return
    try:
        there = saved_step(args.save)
    except CheckpointError as error:
        raise CheckpointError(
            f"--save {error}; give another folder, or replace it with --overwrite-output"
        ) from error
    begin = (saved_step(args.load) or 0) if args.load else 0
    if there is not None and there > begin:
        raise CheckpointError(
            f"--save {args.save} holds a checkpoint of step {there}, this run begins at step "
            f"{begin}. Continue it with --load {args.save}, give another folder, or replace it "
            "with --overwrite-output"
        )


def check_free(folder: Path) -> None:
    """Refuse a folder that another process has locked. Writes nothing.

    Raises:
        ConfigError: the message names that process.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _held(folder, descriptor) from None
    except OSError:
        pass  # what that means is said when the lock is taken
    finally:
        os.close(descriptor)


def _held(folder: Path, descriptor: int) -> ConfigError:
    holder = os.read(descriptor, 4096).decode(errors="replace").strip()
    return ConfigError(
        f"another trainer writes to {folder}: {holder or 'it has not said which'}. "
        "Wait for it, end it, or give another --output-dir and --save"
    )


class FolderLock:
    """The lock of one folder: held by one process, let go when it ends in whatever way.

    ``flock`` on a file in the folder, which names the process that holds it. On NFS it holds among
    all machines that mount the folder with locks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / LOCK
        missing = (path for path in (folder, *folder.parents) if not path.exists())
        self.created = list(missing)  # innermost first
        folder.mkdir(parents=True, exist_ok=True)
        self._file: int | None = None
        try:
            while not self._locked():
                pass
        except BaseException:
            self._remove_created()
            raise

    def _locked(self) -> bool:
        """Whether the lock is held, or cannot be had here; False: its file was just removed."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.stat(self._path)
        except OSError as error:
            held = _held(self.folder, descriptor)
            os.close(descriptor)
            if isinstance(error, FileNotFoundError):
                return False
            if error.errno in _NO_LOCKS:
                print(f"{self.folder} cannot be locked ({error.strerror}): start no second run")
                return True
            if not isinstance(error, BlockingIOError):
                raise
            raise held from None
        if not os.path.samestat(there, os.fstat(descriptor)):
            os.close(descriptor)
            return False
        self._file = descriptor
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        holder = f"process {os.getpid()} on {socket.gethostname()}, started {since}\n"
        os.ftruncate(descriptor, 0)
        os.write(descriptor, holder.encode())
        return True

    def release(self) -> None:
        """Let the lock go and remove its file."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def refuse(self) -> None:
        """Let go of it after a start that was refused: what that start made is removed."""
        self.release()
        if self.folder in self.created:
            shutil.rmtree(self.folder / CACHE, ignore_errors=True)
        self._remove_created()

    def _remove_created(self) -> None:
        with contextlib.suppress(OSError):  # somebody else has put something there
            for folder in self.created:
                folder.rmdir()


class RunFolders:
    """The folders that ``--output-dir`` and ``--save`` name, locked. Rank 0 makes one.

    Raises:
        ConfigError: another trainer writes to one of them.
        CheckpointError: ``--save`` holds a later checkpoint.
    """

    def __init__(self, args: Namespace) -> None:
        folders = dict.fromkeys(Path(f).resolve() for f in (args.output_dir, args.save) if f)
        self._locks: list[FolderLock] = []
        for folder in folders:  # before anything is made
            check_free(folder)
        check_not_behind(args)
        try:
            for folder in folders:
                self._locks.append(FolderLock(folder))
            check_not_behind(args)  # the run that held the lock a moment ago may have saved
        except BaseException:
            self.close(refused=True)
            raise

    def close(self, *, refused: bool) -> None:
        """Let go of all; after a refused start also remove what it made."""
        for lock in reversed(self._locks):
            if refused:
                lock.refuse()
            else:
                lock.release()
