"""The tokens that each ring rank sends and receives, on integers, for ``ring_schedule.py``: of all
ranks on each, so that sender and receiver agree without a message."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.segments import Runs, ShardIndex
from ds_usp.geometry.tiles import visible_columns

# Tokens between two visible runs are not sent if they are 1 / this number of their owner's tokens
# or more: to send fewer costs less than another message.
_MIN_GAP_FRACTION = 32


class TokenRange(NamedTuple):
    """Tokens ``start : stop`` of the ring rank ``rank``, as its ``ring_segments`` count them; where
    this rank sends, of its own tokens, and ``rank`` receives them."""

    rank: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.rank}[{self.start}:{self.stop}]"


def total_length(ranges: Iterable[TokenRange]) -> int:
    """Number of tokens in all ranges."""
    return sum([stop - start for _, start, stop in ranges])


class Ring:
    """The tokens that each rank of a ring receives.

    Args:
        queries, keys: layouts of the query and of the key tokens.
        mask: which of them attend to each other.
    """

    def __init__(self, queries: TokenLayout, keys: TokenLayout, mask: MaskSpec) -> None:
        self.queries, self.keys, self.mask = queries, keys, mask
        self.degree = queries.ring
        self._visible = visible_runs(queries, mask, keys)

    def offsets(self) -> tuple[int, ...]:
        """The offsets at which any rank sees a token of the rank so many before it."""
        ranks = range(self.degree)
        return tuple(
            offset
            for offset in range(1, self.degree)
            if any(self._visible[rank][(rank - offset) % self.degree] for rank in ranks)
        )

    def kv_ranges(self, rank: int, offsets: Sequence[int]) -> tuple[TokenRange, ...]:
        """Return what a rank receives from the ranks at some offsets before it, the farthest first;
        offset 0 is the rank itself, with all its own tokens."""
        ranges: list[TokenRange] = []
        for offset in sorted(offsets, reverse=True):
            owner = (rank - offset) % self.degree
            own_shard = ((0, self.keys.ring_length(rank)),)
            runs = self._visible[rank][owner] if offset else own_shard
            ranges += (TokenRange(owner, *run) for run in runs)
        return tuple(ranges)


@lru_cache(maxsize=64)
def visible_runs(
    layout: TokenLayout, mask: MaskSpec, kv_layout: TokenLayout | None = None
) -> tuple[tuple[Runs, ...], ...]:
    """Half-open runs of the owner's tokens that the user's queries see in any sample, ``[user]
    [owner]``, both ring ranks; counted as in :class:`TokenRange`. Short gaps are included."""
    ranks = range(layout.ring)
    kv_layout = kv_layout or layout
    # One index of all ranks' tokens, one after the other, and where each rank's begin.
    (queries, q_firsts), (keys, k_firsts) = (_index_of_ranks(x) for x in (layout, kv_layout))
    visible: list[list[list[tuple[int, int]]]] = [[[] for _ in ranks] for _ in ranks]
    for sample in range(max(1, len(mask.documents))):
        for area in chain.from_iterable(mask.areas_of(sample)):
            rows = queries.between(area.q_start, area.q_stop)
            for k, k_at in keys.between(area.k_start, area.k_stop):
                owner = bisect_right(k_firsts, k_at) - 1
                for q, q_at in rows:
                    if seen := visible_columns(q, k, area[4:]):
                        start = k_at - k_firsts[owner]
                        runs = visible[bisect_right(q_firsts, q_at) - 1][owner]
                        runs.append((start + seen[0], start + seen[1]))
    gaps = [min_gap(kv_layout.ring_length(owner)) for owner in ranks]
    return tuple(
        tuple(merge_runs(runs, gap) for runs, gap in zip(row, gaps, strict=True)) for row in visible
    )


def _index_of_ranks(layout: TokenLayout) -> tuple[ShardIndex, list[int]]:
    shards = [layout.ring_segments(rank) for rank in range(layout.ring)]
    lengths = map(layout.ring_length, range(layout.ring))
    return ShardIndex(chain.from_iterable(shards)), list(accumulate(lengths, initial=0))


def min_gap(num_tokens: int) -> int:
    """Fewest invisible tokens between two runs that an owner of ``num_tokens`` does not send."""
    return max(1, -(-num_tokens // _MIN_GAP_FRACTION))


def merge_runs(runs: Iterable[tuple[int, int]], gap: int) -> Runs:
    """The union of runs, and of the gaps between them that are shorter than ``gap``."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if merged and start - merged[-1][1] < gap:
            previous = merged.pop()
            start, stop = previous[0], max(previous[1], stop)
        merged.append((start, stop))
    return tuple(merged)
