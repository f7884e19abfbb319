"""The ``balanced`` token layout: packed documents, sharded so that ring ranks hold as many tokens
and compute as much causal attention each.

Short documents stay whole on one rank, so that nothing of them is communicated; longer ones whose
work would not balance otherwise are a zigzag each. What is left uneven is then evened out between
pairs of ranks (:mod:`ds_usp.geometry.rank_pair_balance`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from ds_usp.geometry.rank_pair_balance import Run, SearchBudget, causal_pairs, rebalance_pair
from ds_usp.geometry.segments import Segment, coalesce, even_split

# Work of the busiest rank, over the mean, below which no more documents are split.
_MAX_IMBALANCE = 1.05
# The same, below which pairs of ranks are not rebalanced.
_EVEN_ENOUGH = 1.005
# Splits that are looked at for one layout: 10 to 20 ms of a CPU.
_MAX_SPLITS = 15_000
# Short documents next to each other stay together up to this fraction of a rank's tokens.
_GROUPS_PER_RANK = 32


# Two goals that disagree: equal tokens (memory, and every other layer of the model) and equal
# causal pairs (attention's time). A document of n tokens has n * n / 2 pairs, so one long document
# outweighs many short ones of as many tokens. Token counts are kept equal, to one; work is brought
# within 5 % by splitting the fewest, longest documents over all ranks, because each split one is
# communicated.
@dataclass
class _RankLoad:
    """What is assigned to one ring rank: its runs, their causal pairs, and tokens still free."""

    documents: tuple[int, ...]
    capacity: int = 0
    work: int = 0
    runs: list[Run] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def assign(self, start: int, stop: int) -> None:
        if stop > start:
            self.runs.append((start, stop))
            self.work += causal_pairs(self.documents, start, stop)


@lru_cache(maxsize=64)
def balance_documents(documents: tuple[int, ...], ring: int) -> tuple[tuple[Segment, ...], ...]:
    """The tokens of every ring rank, ascending.

    Ranks hold as many tokens as an even split gives them, to one. Documents longer than a rank's
    tokens are split; as long as a rank has more than 1.05 of the mean work (causal pairs), those of
    half that length are, and so on. Then the most and the least loaded rank are rebalanced, as
    often as that helps.

    Args:
        documents: cumulative sequence lengths.
        ring: number of ring ranks.
    """
    max_whole = -(-documents[-1] // ring)
    best: list[_RankLoad] = []
    while True:
        loads = _assign_documents(documents, ring, max_whole)
        if not best or _imbalance(loads) < _imbalance(best):
            best = loads
        max_whole //= 2
        if _imbalance(best) <= _MAX_IMBALANCE or max_whole < 2 * ring:
            break
    balanced = _rebalance_all(documents, [load.runs for load in best])
    return tuple(
        coalesce(Segment(start, stop - start) for start, stop in sorted(runs)) for runs in balanced
    )


def _rebalance_all(documents: tuple[int, ...], shards: list[list[Run]]) -> list[list[Run]]:
    """Rebalance the busiest and the idlest rank, as often as it helps; updates the shards."""
    work = [sum(causal_pairs(documents, *run) for run in runs) for runs in shards]
    budget = SearchBudget(_MAX_SPLITS)
    for _ in range(2 * len(shards)):
        busiest, idlest = work.index(max(work)), work.index(min(work))
        if work[busiest] * len(work) <= _EVEN_ENOUGH * sum(work):
            break
        rebalanced = rebalance_pair(documents, shards[busiest], shards[idlest], budget)
        if sorted(rebalanced[0]) == sorted(shards[busiest]):
            break
        for rank, runs in zip((busiest, idlest), rebalanced, strict=True):
            shards[rank] = runs
            work[rank] = sum(causal_pairs(documents, *run) for run in runs)
    return shards


def _imbalance(loads: list[_RankLoad]) -> float:
    work = [load.work for load in loads]
    return max(work) * len(work) / sum(work)


def _assign_documents(documents: tuple[int, ...], ring: int, max_whole: int) -> list[_RankLoad]:
    """Loads in which documents of more tokens than ``max_whole`` are a zigzag each."""
    loads = [_RankLoad(documents) for _ in range(ring)]
    for start, stop in pairwise(documents):
        if ring > 1 and stop - start > max_whole:
            _assign_zigzag(start, stop, loads)
    # Who has more tokens already gets what does not divide.
    for index, load in enumerate(sorted(loads, key=lambda load: -load.tokens)):
        begin, end = even_split(documents[-1], ring, index)
        load.capacity = end - begin - load.tokens
    groups = list(_group_small_documents(documents, max_whole if ring > 1 else documents[-1], ring))
    groups.sort(key=lambda group: (group[0] - group[1], group[0]))
    for group in groups:
        _assign_group(group, loads)
    return loads


def _assign_zigzag(start: int, stop: int, loads: list[_RankLoad]) -> None:
    """Split a document into two chunks for each rank; what does not divide goes to the ranks with
    the fewest tokens."""
    ring = len(loads)
    even, rest = divmod(stop - start, 2 * ring)
    lengths, tokens = [even] * 2 * ring, [load.tokens for load in loads]
    for _ in range(rest):
        not_full = (r for r in range(ring) if lengths[2 * ring - 1 - r] == even)
        rank = min(not_full, key=lambda r: (tokens[r], r))
        tokens[rank] += 1
        lengths[rank if lengths[rank] == even else 2 * ring - 1 - rank] += 1
    for chunk, length in enumerate(lengths):
        loads[min(chunk, 2 * ring - 1 - chunk)].assign(start, start + length)
        start += length


def _group_small_documents(documents: tuple[int, ...], max_whole: int, ring: int) -> Iterator[Run]:
    """Runs of documents of up to ``max_whole`` tokens, adjacent ones together while they are
    few tokens."""
    max_group = -(-documents[-1] // (ring * _GROUPS_PER_RANK))
    group: Run | None = None
    for start, stop in pairwise(documents):
        short = stop - start <= max_whole
        if group and not (short and stop - group[0] <= max_group):
            yield group
            group = None
        if short:
            group = (group[0] if group else start, stop)
    if group:
        yield group


def _assign_group(group: Run, loads: list[_RankLoad]) -> None:
    """Assign a group to the least loaded rank that has the capacity for it, or split it where the
    capacity of the rank with most of it ends."""
    start, end = group
    while start < end:
        fits = [load for load in loads if load.capacity >= end - start]
        if fits:
            load = min(fits, key=lambda load: load.work)
        else:
            load = max(loads, key=lambda load: load.capacity)
        stop = min(end, start + load.capacity)
        load.assign(start, stop)
        load.capacity -= stop - start
        start = stop
