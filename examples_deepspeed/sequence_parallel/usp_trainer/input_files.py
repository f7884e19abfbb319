"""Checks of the files that flags name, before torch is imported; reads metadata only."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_usp import CheckpointError, DataError

LATEST = "latest"  # the file of a checkpoint folder that names its newest checkpoint
METADATA = "usp_metadata.json"  # in every checkpoint
TEXT_VOCAB_SIZE = 257  # token ids of text that is read as bytes: these and the end of document
UNFINISHED = "unfinished_"  # prefix of the folder of a checkpoint that is being written


def check_files(args: Namespace) -> None:
    """Refuse data and checkpoints that do not exist.

    Raises:
        DataError, CheckpointError: the message names the flag and the path.
    """
    data_files(args)
    if args.load:
        checkpoint_to_load(Path(args.load))


def checkpoint_to_load(folder: Path) -> tuple[str, dict[str, Any]]:
    """:func:`latest_checkpoint`, which must exist.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        raise CheckpointError(
            f"--load {folder} holds no finished checkpoint of this trainer: there is no "
            f"{folder / LATEST}. Leave --load out for the first run"
        )
    return checkpoint


def latest_checkpoint(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Name and metadata of the latest finished checkpoint; None: the folder holds none.

    Raises:
        CheckpointError: there is one, and ``latest`` or its metadata is damaged or missing.
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
        reading = folder / name / METADATA
        metadata = json.loads(reading.read_text())
        int(metadata["progress"]["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{error.strerror}" if isinstance(error, OSError) else "its content was changed"
        alternatives = f" (available: {', '.join(finished)})" if finished else ""
        raise CheckpointError(
            f"{folder} holds a checkpoint that cannot be read: {reading}: {reason}. Copy it again "
            "from an intact copy, or write the name of another checkpoint into "
            f"{latest}{alternatives}"
        ) from error
    return name, metadata


def parse_blend(items: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Paths and their weights of ``--data-path``: ``a b``, without weights, or ``0.3 a 0.7 b``.

    Raises:
        DataError: an invalid weight, or a path without one where others have one.
    """
    if not items or not _is_number(items[0]) or Path(items[0]).is_file():
        return list(items), None
    paths, weights = list(items[1::2]), items[::2]
    if len(paths) != len(weights):
        raise DataError(
            f"--data-path {' '.join(items)}: {len(weights)} weights for {len(paths)} paths. Give "
            "each path a weight before it (0.3 a 0.7 b), or none of them"
        )
    for weight, path in zip(weights, paths, strict=True):
        if not _is_number(weight) or not 0 < float(weight) < math.inf:
            raise DataError(
                f"--data-path: the weight of {path} is {weight!r}; it must be a finite number "
                "above 0. Give each path a weight before it (0.3 a 0.7 b), or none of them"
            )
    return paths, [float(weight) for weight in weights]


def _is_number(item: str) -> bool:
    try:
        float(item)
    except ValueError:
        return False
    return True


def find_data(items: Sequence[str]) -> tuple[list[str], bool]:
    """The paths of ``--data-path``, and whether they are prefixes of Megatron ``.bin/.idx`` pairs;
    texts otherwise.

    Raises:
        DataError: a path that is neither, or paths of both kinds.
    """
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
    """:func:`find_data` for the flags, with a check of ``--vocab-size``.

    Raises:
        DataError: also pairs without ``--vocab-size``, or text with another one than it has.
    """
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
