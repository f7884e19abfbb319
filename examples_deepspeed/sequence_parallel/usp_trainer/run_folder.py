"""Output folders: locked by one run at a time, and no later checkpoint is overwritten."""

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
from usp_trainer.input_files import latest_checkpoint

LOCK = ".usp_lock"
CACHE = "data"  # of encoded text, in the output folder unless --data-cache-path names another
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def saved_step(folder: str | Path) -> int | None:
    """The step of the latest finished checkpoint in ``folder``; None: there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    checkpoint = latest_checkpoint(Path(folder))
    return checkpoint and int(checkpoint[1]["progress"]["step"])


def check_not_behind(args: Namespace) -> None:
    """Refuse a ``--save`` folder with a later checkpoint. Reads only.

    Raises:
        CheckpointError: ``--save`` holds a later step than the first of this run, or a checkpoint
            that cannot be read.
    """
    if args.save is None or args.overwrite_output:
        return
    try:
        saved = saved_step(args.save)
    except CheckpointError as error:
        raise CheckpointError(
            f"--save {error}; give another folder, or replace it with --overwrite-output"
        ) from error
    first_step = (saved_step(args.load) or 0) if args.load else 0
    if saved is not None and saved > first_step:
        raise CheckpointError(
            f"--save {args.save} holds a checkpoint of step {saved}, this run begins at step "
            f"{first_step}. Continue it with --load {args.save}, give another folder, or replace "
            "it with --overwrite-output"
        )


def check_free(folder: Path) -> None:
    """Refuse a folder that another process has locked. Reads only.

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
        raise _locked_error(folder, descriptor) from None
    except OSError:
        pass  # reported when the lock is taken
    finally:
        os.close(descriptor)


def _locked_error(folder: Path, descriptor: int) -> ConfigError:
    """The error for a folder that another process locked; the lock file names that process."""
    holder = os.read(descriptor, 4096).decode(errors="replace").strip()
    return ConfigError(
        f"another trainer writes to {folder}: {holder or 'unknown process'}. "
        "Wait for it, end it, or give another --output-dir and --save"
    )


class FolderLock:
    """A lock of one folder, released when its process ends for any reason.

    ``flock`` on a file in the folder that contains the name of the process. On NFS it applies to
    all nodes that mount the folder with locks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / LOCK
        missing = (path for path in (folder, *folder.parents) if not path.exists())
        self.created = list(missing)  # innermost first
        folder.mkdir(parents=True, exist_ok=True)
        self._file: int | None = None
        try:
            while not self._try_lock():
                pass
        except BaseException:
            self._remove_created()
            raise

    def _try_lock(self) -> bool:
        """True: locked, or locks are not supported here; False: its file was just removed."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            on_disk = os.stat(self._path)
        except OSError as error:
            locked = _locked_error(self.folder, descriptor)
            os.close(descriptor)
            if isinstance(error, FileNotFoundError):
                return False
            if error.errno in _NO_LOCKS:
                print(
                    f"{self.folder} cannot be locked ({error.strerror}): do not start a second run"
                )
                return True
            if not isinstance(error, BlockingIOError):
                raise
            raise locked from None
        if not os.path.samestat(on_disk, os.fstat(descriptor)):
            os.close(descriptor)
            return False
        self._file = descriptor
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        holder = f"process {os.getpid()} on {socket.gethostname()}, started {since}\n"
        os.ftruncate(descriptor, 0)
        os.write(descriptor, holder.encode())
        return True

    def release(self) -> None:
        """Release the lock and remove its file."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def release_and_clean_up(self) -> None:
        """Release the lock after a refused start and remove what that start created."""
        self.release()
        if self.folder in self.created:
            shutil.rmtree(self.folder / CACHE, ignore_errors=True)
        self._remove_created()

    def _remove_created(self) -> None:
        with contextlib.suppress(OSError):  # not empty: another process wrote to it
            for folder in self.created:
                folder.rmdir()


class RunFolders:
    """The locks of ``--output-dir`` and ``--save``. Only rank 0 creates one.

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
            check_not_behind(args)  # again: the previous holder of the lock may have saved
        except BaseException:
            self.close(refused=True)
            raise

    def close(self, *, refused: bool) -> None:
        """Release all locks; after a refused start also remove what it created."""
        for lock in reversed(self._locks):
            if refused:
                lock.release_and_clean_up()
            else:
                lock.release()
