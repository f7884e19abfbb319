"""The files that flags name, looked at before torch is imported: nothing is read or written."""

from __future__ import annotations

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
    indexed_data(args.data_path or ())
    if args.load and not (Path(args.load) / LATEST).is_file():
        raise CheckpointError(
            f"--load {args.load} holds no finished checkpoint of this trainer: there is no "
            f"{Path(args.load) / LATEST}. Leave --load out for the first run"
        )


def indexed_data(paths: Sequence[str]) -> list[str]:
    """The prefixes of Megatron ``.bin/.idx`` pairs: all of the paths, or none where all are texts.

    Raises:
        DataError: a path that is neither, or paths of both kinds.
    """
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
    return indexed
