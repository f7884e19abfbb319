"""Slices of a ring rank's tokens, for exchanges of whole slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_usp.geometry.layout import Run

MAX_PER_RANK = 2


class TokenSlice(NamedTuple):
    """Tokens ``start : stop`` in the ring rank's order, all of one Ulysses rank.

    Attributes:
        row: of the first one in that rank's shard.
    """

    start: int
    stop: int
    row: int

    @property
    def length(self) -> int:
        """Tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class TokenSlices:
    """The slices of the ring rank's tokens, of any lengths.

    Attributes:
        of_rank: each Ulysses rank's slices, ascending, as they follow each other in its shard.
    """

    of_rank: tuple[tuple[TokenSlice, ...], ...]

    @classmethod
    def of_runs(cls, runs: Sequence[Run], ranks: int) -> TokenSlices | None:
        """The slices of a ring rank's runs; None if a rank has no token, more than two slices, or
        slices in another order than the ring rank's."""
        slices: list[list[TokenSlice]] = [[] for _ in range(ranks)]
        start = 0
        for run in runs:
            of_rank = slices[run.ulysses_rank]
            if of_rank and run.start < of_rank[-1].row:
                return None
            of_rank.append(TokenSlice(start, start + run.length, run.start))
            start += run.length
        if not all(1 <= len(of_rank) <= MAX_PER_RANK for of_rank in slices):
            return None
        return cls(tuple(map(tuple, slices)))

    @property
    def ranks(self) -> int:
        """Ulysses ranks."""
        return len(self.of_rank)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rank."""
        return [sum([x.length for x in slices]) for slices in self.of_rank]

    @property
    def in_rank_order(self) -> bool:
        """The ranks' shards follow each other."""
        slices = [x for of_rank in self.of_rank for x in of_rank]
        return len(slices) == self.ranks and slices == sorted(slices)
