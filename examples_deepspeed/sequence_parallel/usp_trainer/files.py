"""The files that flags name, looked at before torch is imported: nothing is read or written."""

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
UNFINISHED = "unfinished_"  # begins the name of a checkpoint that is being written


def check_files(args: Namespace) -> None:
    """Refuse data and checkpoints that are not there.

    Raises:
        DataError, CheckpointError: the message names the flag and the path.
    """
    data_files(args)
    if args.load:
        checkpoint_to_load(Path(args.load))


def checkpoint_to_load(folder: Path) -> tuple[str, dict[str, Any]]:
    """As :func:`latest_checkpoint`, which must be there.

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
        CheckpointError: there is one, and what names or describes it is damaged or gone.
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
        why = f"{error.strerror}" if isinstance(error, OSError) else "not as it was saved"
        named = f" ({', '.join(finished)} are here)" if finished else ""
        raise CheckpointError(
            f"{folder} holds a checkpoint that cannot be read: {reading}: {why}. Copy it again "
            f"from where it is whole, or write the name of another checkpoint into {latest}{named}"
        ) from error
    return name, metadata


def blend(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Paths and their weights of ``--data-path``: ``a b``, without weights, or ``0.3 a 0.7 b``.

    Raises:
        DataError: a weight that is none, or a path without one where others have one.
    """
    if not words or not _is_number(words[0]) or Path(words[0]).is_file():
        return list(words), None
    paths, weights = list(words[1::2]), words[::2]
    if len(paths) != len(weights):
        raise DataError(
            f"--data-path {' '.join(words)}: {len(weights)} weights for {len(paths)} paths. Give "
            "each path a weight before it (0.3 a 0.7 b), or none of them"
        )
    for weight, path in zip(weights, paths, strict=True):
        if not _is_number(weight) or not 0 < float(weight) < math.inf:
            raise DataError(
                f"--data-path: the weight of {path} is {weight!r}; it must be a finite number "
                "above 0. Give each path a weight before it (0.3 a 0.7 b), or none of them"
            )
    return paths, [float(weight) for weight in weights]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def data_files(args: Namespace) -> tuple[list[str], bool]:
    """The paths of ``--data-path``, and whether they are prefixes of Megatron ``.bin/.idx`` pairs;
    texts otherwise.

    Raises:
        DataError: a path that is neither, paths of both kinds, pairs without ``--vocab-size``, or
            text with another one than it has.
    """
    paths, _ = blend(args.data_path or ())
    indexed = [path for path in paths if Path(f"{path}.idx").is_file()]
    for path in paths:
        if path not in indexed and not Path(path).is_file():
            raise DataError(
                f"--data-path {path}: No such file or directory; there is no {path}.idx either"
            )
    if indexed and len(indexed) < len(paths):
        raise DataError(
            f"--data-path mixes .bin/.idx data ({', '.join(indexed)}) with text; the two have "
            "different token ids. Encode the text with the same tokenizer"
        )
    for path in indexed:
        data = Path(f"{path}.bin")
        if not data.is_file() or not data.stat().st_size:
            raise DataError(f"{path}.bin is missing or empty, although {path}.idx is there")
    if indexed and not args.vocab_size:
        raise DataError(
            f"{indexed[0]}.idx does not say how many token ids its tokenizer has. Give "
            "--vocab-size N, where N-1 is the end of document"
        )
    if not indexed and args.vocab_size not in (None, TEXT_VOCAB_SIZE):
        raise DataError(
            f"--vocab-size {args.vocab_size} is for .bin/.idx data; text is read as bytes and has "
            f"{TEXT_VOCAB_SIZE} token ids. Leave it out, or give the prefix of encoded data"
        )
    return paths, bool(indexed)
