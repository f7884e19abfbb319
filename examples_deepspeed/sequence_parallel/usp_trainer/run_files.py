"""The files of a run: data and checkpoints that flags name, checked before torch is imported, and
output folders, locked by one run at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import json
import math
import os
import shutil
import socket
import stat
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_usp import CheckpointError, ConfigError, DataError

LATEST = "latest"  # the file of a checkpoint folder that names its newest checkpoint
METADATA = "usp_metadata.json"  # in every checkpoint
TEXT_VOCAB_SIZE = 257  # token ids of text that is read as bytes: these and the end of document
UNFINISHED = "unfinished_"  # prefix of the folder of a checkpoint that is being written
LOCK = ".usp_lock"
CACHE = "data"  # of encoded text, in the output folder unless --data-cache-path names another
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def check_files(args: Namespace) -> None:
    """DataError or CheckpointError for data and checkpoints that do not exist."""
    data_files(args)
    if args.load:
        checkpoint_to_load(Path(args.load))


def check_packages(args: Namespace) -> None:
    """Refuse a flag whose package is not installed, with the command that installs it, and flags of
    wandb without a project (ConfigError)."""
    for flag, value, package in (
        ("--tensorboard-dir", args.tensorboard_dir, "tensorboard"),
        ("--wandb-project", args.wandb_project, "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{flag} {value} needs the package {package}, which is not installed: pip install "
                f"{package}"
            )
    for flag, value in (
        ("--wandb-exp-name", args.wandb_exp_name),
        ("--wandb-save-dir", args.wandb_save_dir),
    ):
        if value and not args.wandb_project:
            raise ConfigError(f"{flag} {value} needs --wandb-project")


def checkpoint_to_load(folder: Path) -> tuple[str, dict[str, Any]]:
    """Name and metadata of the latest finished checkpoint; CheckpointError if there is none."""
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        raise CheckpointError(
            f"--load {folder} holds no finished checkpoint of this trainer: there is no "
            f"{folder / LATEST}. Leave --load out for the first run"
        )
    return checkpoint


def latest_checkpoint(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Name and metadata of the latest finished checkpoint; None: the folder holds none.

    Raises CheckpointError if there is one, and ``latest`` or its metadata is damaged or missing.
    """
    latest = folder / LATEST
    finished = sorted(
        path.parent.name
        for path in folder.glob(f"*/{METADATA}")
        if not path.parent.name.startswith(UNFINISHED)
    )
    if not finished and not latest.exists():
        return None
    reading = latest
    try:
        name = latest.read_text().strip()
        # A name, no path: what is loaded, and what saving replaces, lies in this folder.
        if name != Path(name).name or name == "..":
            raise ValueError(name)
        reading = folder / name / METADATA
        metadata = json.loads(reading.read_text())
        _check_metadata(metadata)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its content was changed"
        alternatives = f" (available: {', '.join(finished)})" if finished else ""
        raise CheckpointError(
            f"{folder} holds a checkpoint that cannot be read: {reading}: {reason}. Copy it again "
            "from an intact copy, or write the name of another checkpoint into "
            f"{latest}{alternatives}"
        ) from error
    return name, metadata


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """ValueError, KeyError or TypeError for what no trainer has written: another nesting of JSON,
    or files outside of the checkpoint's folder."""
    progress = metadata["progress"]
    if not all(type(progress[name]) is int and progress[name] >= 0 for name in progress):
        raise ValueError(progress)
    if not {"step"} <= set(progress) <= {"step", "samples"}:
        raise ValueError(progress)
    json.dumps(metadata)  # what is nested too deep for this has no checksum either
    for name in metadata.get("files", {}):
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise ValueError(name)


def replace_file(path: Path, content: str | Callable[[Any], object]) -> None:
    """Write a file under a second name and rename it over ``path``.

    It is whole at any moment, and nothing is followed: a symbolic link at either name gives way to
    the file, and what it points to, perhaps put there by another user, stays as it is.

    Args:
        content: text, or a function that writes to the open binary file.

    Raises:
        OSError: it could not be written, with the path and the fix.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        with new.open("xb") as file:
            file.write(content.encode()) if isinstance(content, str) else content(file)
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError, step: int | None = None) -> OSError:
    """The error of a write with its path, which the system leaves out, and a fix where the disk is
    full or files are limited; numpy's has no number."""
    when = "" if step is None else f" at step {step}"
    text = f"{path}: {error.strerror or error}{when}"
    if error.errno not in (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OSError(text)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    return OSError(
        f"{text} ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB free there). Free space, or "
        "raise the limit of file sizes (ulimit -f), then start again, with --load if a checkpoint "
        "was saved"
    )


def parse_blend(items: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Paths and their weights of ``--data-path``: ``a b``, without weights, or ``0.3 a 0.7 b``.

    Raises DataError for an invalid weight, or a path without one where others have one."""

    def number(item: str) -> float | None:
        try:
            return float(item)
        except ValueError:
            return None

    if not items or number(items[0]) is None or Path(items[0]).is_file():
        return list(items), None
    paths, weights = list(items[1::2]), items[::2]
    if len(paths) != len(weights):
        raise DataError(
            f"--data-path {' '.join(items)}: {len(weights)} weights for {len(paths)} paths. Give "
            "each path a weight before it (0.3 a 0.7 b), or none of them"
        )
    for weight, path in zip(weights, paths, strict=True):
        if not 0 < (number(weight) or 0) < math.inf:
            raise DataError(
                f"--data-path: the weight of {path} is {weight!r}; it must be a finite number "
                "above 0. Give each path a weight before it (0.3 a 0.7 b), or none of them"
            )
    return paths, [float(weight) for weight in weights]


def find_data(items: Sequence[str]) -> tuple[list[str], bool]:
    """The paths of ``--data-path``, and whether they are prefixes of Megatron ``.bin/.idx`` pairs;
    texts otherwise. A path that is neither, or paths of both kinds, raise DataError."""
    paths, _ = parse_blend(items)
    indexed = [path for path in paths if Path(f"{path}.idx").is_file()]
    for path in paths:
        if path not in indexed and not Path(path).is_file():
            raise DataError(f"--data-path {path}: No such file or directory, and no {path}.idx")
    if indexed and len(indexed) < len(paths):
        raise DataError(
            f"--data-path mixes .bin/.idx data ({', '.join(indexed)}) with text; the two have "
            "different token ids. Encode the text with the same tokenizer"
        )
    for path in indexed:
        data = Path(f"{path}.bin")
        if not data.is_file() or not data.stat().st_size:
            raise DataError(f"{path}.bin is missing or empty, but {path}.idx exists")
    return paths, bool(indexed)


def data_files(args: Namespace) -> tuple[list[str], bool]:
    """As :func:`find_data`, for the flags; pairs without ``--vocab-size``, or text with another one
    than it has, raise DataError too."""
    paths, indexed = find_data(args.data_path or ())
    if indexed and not args.vocab_size:
        raise DataError(
            f"{paths[0]}.idx does not contain the number of token ids of its tokenizer. Give "
            "--vocab-size N, where N-1 is the end of document"
        )
    if not indexed and args.vocab_size not in (None, TEXT_VOCAB_SIZE):
        raise DataError(
            f"--vocab-size {args.vocab_size} is for .bin/.idx data; text is read as bytes and has "
            f"{TEXT_VOCAB_SIZE} token ids. Leave it out, or give the prefix of encoded data"
        )
    return paths, indexed


def saved_step(folder: str | Path) -> int | None:
    """The step of the latest finished checkpoint in ``folder``; None: there is none. One that
    cannot be read raises CheckpointError."""
    checkpoint = latest_checkpoint(Path(folder))
    return checkpoint and int(checkpoint[1]["progress"]["step"])


def check_not_behind(args: Namespace) -> None:
    """Refuse a ``--save`` folder that holds a later step than the first of this run, or one that
    cannot be read (CheckpointError). Reads only."""
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
    """Refuse a folder that another process has locked, which the ConfigError names. Reads only."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # reported when the lock is taken
        return
    try:
        _flock(folder, descriptor)
    except OSError:
        pass  # reported when the lock is taken
    finally:
        os.close(descriptor)


def _flock(folder: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 4096).decode(errors="replace").strip()
        raise ConfigError(
            f"another trainer writes to {folder}: {holder or 'unknown process'}. "
            "Wait for it, end it, or give another --output-dir and --save"
        ) from None


class FolderLock:
    """A lock of one folder, by ``flock`` on a file in it that contains the name of the process:
    released when that ends for any reason. On NFS it applies to all nodes that mount the folder
    with locks."""

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
        # In a folder that others may write to, the name may lead to a file that is not ours.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self._path, flags, 0o644)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise
            raise self._foreign() from error
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
                raise self._foreign()
            _flock(self.folder, descriptor)
            if not os.path.samestat(os.stat(self._path), os.fstat(descriptor)):
                return False
            self._file = descriptor
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"{self.folder} cannot be locked ({error.strerror}): do not start a second run")
            return True
        finally:
            if self._file is None:
                os.close(descriptor)
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        holder = f"process {os.getpid()} on {socket.gethostname()}, started {since}\n"
        os.ftruncate(descriptor, 0)
        os.write(descriptor, holder.encode())
        return True

    def _foreign(self) -> ConfigError:
        return ConfigError(
            f"{self._path} is no file of this trainer but a link to another one, or no plain file, "
            "and is left as it is: remove it, or give another --output-dir and --save"
        )

    def release(self, *, refused: bool = False) -> None:
        """Release the lock and remove its file; after a refused start also what that created."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None
        if refused:
            if self.folder in self.created:
                shutil.rmtree(self.folder / CACHE, ignore_errors=True)
            self._remove_created()

    def _remove_created(self) -> None:
        with contextlib.suppress(OSError):  # not empty: another process wrote to it
            for folder in self.created:
                folder.rmdir()


class RunFolders:
    """The locks of ``--output-dir`` and ``--save``. Only rank 0 creates one.

    Raises ConfigError if another trainer writes to one of them, CheckpointError if ``--save`` holds
    a later checkpoint."""

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
        for lock in reversed(self._locks):
            lock.release(refused=refused)
