"""The files that flags name, looked at before torch is imported: nothing is read or written."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ds_usp import CheckpointError, DataError

LATEST = "latest"  # the file of a checkpoint folder that names its newest checkpoint


def check_files(args: Namespace) -> None:
    """Refuse data and checkpoints that are not there.

    Raises:
        DataError, CheckpointError: the message names the flag and the path.
    """
    data_files(args)
    if args.load and not (Path(args.load) / LATEST).is_file():
        raise CheckpointError(
            f"--load {args.load} holds no finished checkpoint of this trainer: there is no "
            f"{Path(args.load) / LATEST}. Leave --load out for the first run"
        )


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
        DataError: a path that is neither, paths of both kinds, or pairs without ``--vocab-size``.
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
    return paths, bool(indexed)
