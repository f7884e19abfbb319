"""Checksums of the files of a checkpoint, computed by all ranks together."""

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
    """The checksum of each file, on every rank. Collective: each rank reads a share of the bytes.

    Args:
        sizes: bytes of each file, by its path in ``folder``; the same on every rank.

    Raises:
        CheckpointError: on every rank; a rank cannot read a file of its share.
    """
    found: dict[str, str] = {}
    unreadable = None
    try:
        for name in _shares(sizes, dist.get_world_size())[dist.get_rank()]:
            found[name] = file_checksum(folder / name)
    except OSError as error:
        unreadable = f"rank {dist.get_rank()} cannot read {folder / name}: {error.strerror}"
    everyone: list[tuple[dict[str, str], str | None]] = [({}, None)] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, unreadable))
    for part, problem in everyone:
        if problem:
            raise CheckpointError(f"{problem}. All ranks must see the folder")
        found |= part
    return found


def _shares(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """The files of each rank: the largest first, each to the rank with the fewest bytes."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += sizes[name]
    return shares


def differing(saved: Mapping[str, str], found: Mapping[str, str]) -> Sequence[str]:
    """The files whose checksums differ, sorted."""
    return sorted(name for name, checksum in saved.items() if found.get(name) != checksum)
