"""SHA-256 checksums of the files of a checkpoint, computed in parallel by all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from ds_usp import CheckpointError

ALGORITHM = "sha256"
_BLOCK_BYTES = 1 << 22


def file_checksum(path: Path) -> str:
    """The checksum of one file, read in blocks."""
    digest = hashlib.new(ALGORITHM)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def text_checksum(text: str) -> str:
    """The checksum of a text."""
    return hashlib.new(ALGORITHM, text.encode()).hexdigest()


def checksums(folder: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    """The checksum of each file, on every rank. Collective: each rank reads some of the files.

    Args:
        sizes: bytes of each file, by its path in ``folder``; the same on every rank.

    Raises:
        CheckpointError: on every rank; a rank cannot read one of its files.
    """
    digests: dict[str, str] = {}
    unreadable = None
    try:
        for name in _assign_files(sizes, dist.get_world_size())[dist.get_rank()]:
            digests[name] = file_checksum(folder / name)
    except OSError as error:
        unreadable = f"rank {dist.get_rank()} cannot read {folder / name}: {error.strerror}"
    all_ranks: list[tuple[dict[str, str], str | None]] = [({}, None)] * dist.get_world_size()
    dist.all_gather_object(all_ranks, (digests, unreadable))
    for rank_digests, problem in all_ranks:
        if problem:
            raise CheckpointError(f"{problem}. All ranks must see the folder")
        digests |= rank_digests
    return digests


def _assign_files(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """The files of each rank: the largest first, each to the rank with the fewest bytes."""
    files_of_rank: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        files_of_rank[rank].append(name)
        loads[rank] += sizes[name]
    return files_of_rank


def mismatching_files(saved: Mapping[str, str], digests: Mapping[str, str]) -> Sequence[str]:
    """The files whose checksums differ, sorted."""
    return sorted(name for name, checksum in saved.items() if digests.get(name) != checksum)
