"""Slices of equal length of a ring rank's tokens, for exchanges of whole slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_usp.geometry.layout import Run

_MAX_PER_RANK = 2


@dataclass(frozen=True)
class TokenSlices:
    """The slices of equal length of the ring rank's tokens.

    Attributes:
        of_rank: for each Ulysses rank the numbers of its slices in the ring rank's order,
            ascending, as they follow each other in its shard.
    """

    of_rank: tuple[tuple[int, ...], ...]

    @classmethod
    def of_runs(cls, runs: Sequence[Run], ranks: int) -> TokenSlices | None:
        """The slices of a ring rank's runs; None if they are not of equal length, or more than two
        a rank."""
        total = sum([run.length for run in runs])
        for count in range(1, _MAX_PER_RANK + 1):
            length, rest = divmod(total, ranks * count)
            if rest or not length or any(run.length % length for run in runs):
                continue
            order = [
                (run.ulysses_rank, start)
                for run in runs
                for start in range(run.start, run.stop, length)
            ]
            numbers = {slice_: number for number, slice_ in enumerate(order)}
            wanted = [[(rank, k * length) for k in range(count)] for rank in range(ranks)]
            if set(numbers) != {slice_ for row in wanted for slice_ in row}:
                continue
            of_rank = tuple([tuple([numbers[slice_] for slice_ in row]) for row in wanted])
            if all(list(row) == sorted(row) for row in of_rank):
                return cls(of_rank)
        return None

    @property
    def per_rank(self) -> int:
        """Slices of a rank."""
        return len(self.of_rank[0])

    @property
    def in_rank_order(self) -> bool:
        """The ranks' shards follow each other."""
        return self.of_rank == tuple((rank,) for rank in range(len(self.of_rank)))
