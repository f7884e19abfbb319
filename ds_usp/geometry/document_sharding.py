"""The ``balanced`` token layout: packed documents, sharded so that ring ranks hold as many tokens
and compute as much causal attention each. ``layout.py`` asks, once for each set of documents."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

from ds_usp.geometry.segments import Segment, coalesce, even_split

# Work of the busiest rank, over the mean, below which no more documents are split.
_MAX_IMBALANCE = 1.05
# Work of the busiest rank, over the mean, below which pairs of ranks are not rebalanced.
_EVEN_ENOUGH = 1.005
# Splits that are looked at for one layout: 10 to 20 ms of a CPU.
_MAX_SPLITS = 15_000
# Short documents next to each other stay together up to 1 / this number of a rank's tokens.
_GROUPS_PER_RANK = 32
# What it costs to communicate as many tokens as a rank has, as a fraction of its work.
_COMMUNICATION_COST = 0.02
# A cost of a pair of ranks below which no further split run is tried.
_GOOD_ENOUGH = 1.002

Run = tuple[int, int]  # tokens start : stop of the sequence


# Two goals that disagree: equal tokens (memory, and every other layer of the model) and equal
# causal pairs (attention's time). A document of n tokens has n * n / 2 pairs, so one long document
# outweighs many short ones of as many tokens. Token counts are kept equal, to one. Short documents
# stay whole on one rank, so that nothing of them is communicated; the longest are a zigzag each,
# and ever shorter ones, until the busiest rank has at most 5 % more work than the mean or a
# document is too short for a zigzag. What is left uneven is evened out between pairs of ranks,
# below.
#
# Every rank runs this on its own and must find the same layout: ties are broken by rank, and the
# search has a budget of looks and not of time (documents differ with every batch, and the CPU
# shards them before its step).
#
# A document of a tree sees its ancestors, too, and every token of it as many more keys. Where its
# ancestors are does not count: a prompt that many answers see is long, and so a zigzag.
class Documents(NamedTuple):
    """Packed documents, or a tree of them.

    Args:
        borders: cumulative lengths.
        contexts: of each document the tokens of its ancestors; empty: none has any.
    """

    borders: tuple[int, ...]
    contexts: tuple[int, ...] = ()

    def causal_pairs(self, start: int, stop: int) -> int:
        """(query, key) pairs of the queries ``start : stop``, each with the keys of its document up
        to itself, and of its ancestors."""
        borders, pairs, index = self.borders, 0, bisect_right(self.borders, start)
        while start < stop:
            begin, end = borders[index - 1], min(borders[index], stop)
            pairs += (
                (end - begin) * (end - begin + 1) - (start - begin) * (start - begin + 1)
            ) // 2
            if self.contexts:
                pairs += (end - start) * self.contexts[index - 1]
            start, index = end, index + 1
        return pairs


@dataclass
class _RankLoad:
    """The load of one ring rank: its runs, their causal pairs, and tokens that are still free."""

    documents: Documents
    capacity: int = 0
    work: int = 0
    runs: list[Run] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def assign(self, start: int, stop: int) -> None:
        if stop > start:
            self.runs.append((start, stop))
            self.work += self.documents.causal_pairs(start, stop)


@lru_cache(maxsize=64)
def balance_documents(documents: Documents, ring: int) -> tuple[tuple[Segment, ...], ...]:
    """The tokens of every ring rank, ascending, as the note above says."""
    # Documents of more tokens are split: at first those that no rank can hold.
    max_whole = -(-documents.borders[-1] // ring)
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


def _rebalance_all(documents: Documents, shards: list[list[Run]]) -> list[list[Run]]:
    """Rebalance the busiest and the idlest rank, as often as it helps; updates the shards."""
    work = [sum(documents.causal_pairs(*run) for run in runs) for runs in shards]
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
            work[rank] = sum(documents.causal_pairs(*run) for run in runs)
    return shards


def _imbalance(loads: list[_RankLoad]) -> float:
    work = [load.work for load in loads]
    return max(work) * len(work) / sum(work)


def _assign_documents(documents: Documents, ring: int, max_whole: int) -> list[_RankLoad]:
    """Loads in which documents of more tokens than ``max_whole`` are a zigzag each."""
    loads = [_RankLoad(documents) for _ in range(ring)]
    borders = documents.borders
    for start, stop in pairwise(borders):
        if ring > 1 and stop - start > max_whole:
            _assign_zigzag(start, stop, loads)
    # Tokens that do not divide go to the ranks that have more tokens already.
    for index, load in enumerate(sorted(loads, key=lambda load: -load.tokens)):
        begin, end = even_split(borders[-1], ring, index)
        load.capacity = end - begin - load.tokens
    groups = list(_group_small_documents(borders, max_whole if ring > 1 else borders[-1], ring))
    groups.sort(key=lambda group: (group[0] - group[1], group[0]))
    for group in groups:
        _assign_group(group, loads)
    return loads


def _assign_zigzag(start: int, stop: int, loads: list[_RankLoad]) -> None:
    """Assign each rank two chunks of a document; what does not divide goes to the ranks with the
    fewest tokens."""
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


def _group_small_documents(borders: tuple[int, ...], max_whole: int, ring: int) -> Iterator[Run]:
    """Runs of the documents of up to ``max_whole`` tokens, adjacent ones together up to
    1 / ``_GROUPS_PER_RANK`` of a rank's tokens."""
    max_group = -(-borders[-1] // (ring * _GROUPS_PER_RANK))
    group: Run | None = None
    for start, stop in pairwise(borders):
        short = stop - start <= max_whole
        if group and not (short and stop - group[0] <= max_group):
            yield group
            group = None
        if short:
            group = (group[0] if group else start, stop)
    if group:
        yield group


def _assign_group(group: Run, loads: list[_RankLoad]) -> None:
    """Assign a run to the least loaded rank that has the capacity, or split it where the capacity
    of the rank with most of it ends."""
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


# ------------------------------------------------------------------------------------------------
# Rebalancing between two ranks: as many tokens each, work more even.


@dataclass(frozen=True)
class _DocumentRun:
    """A run of tokens, of whole or split documents, and its causal pairs."""

    start: int
    stop: int
    work: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


_NO_RUN = _DocumentRun(0, 0, 0)
_Swap = tuple[_DocumentRun | None, _DocumentRun | None]


# Every rank runs this search on its own and must find the same layout, so its budget is a number of
# looks and not a time.
class SearchBudget:
    """How many more splits may be looked at; each look takes one off."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining


def rebalance_pair(
    documents: Documents, runs_a: Sequence[Run], runs_b: Sequence[Run], budget: SearchBudget
) -> tuple[list[Run], list[Run]]:
    """Runs for the same two ranks, as many tokens for each as before, with work more even.

    Runs stay whole but for one, which fills up the tokens of both: its front goes to one rank and
    its back to the other. For a choice of that run, the shortest first, the others are assigned
    greedily, the one of most work first, and swapped as long as that helps.
    """
    tokens = sum(stop - start for start, stop in runs_a)
    pool = [
        _DocumentRun(start, stop, documents.causal_pairs(start, stop))
        for start, stop in _merge_adjacent(documents.borders, [*runs_a, *runs_b])
    ]
    total = sum(run.tokens for run in pool), sum(run.work for run in pool)
    load_before = max(
        sum(documents.causal_pairs(*run) for run in runs) for runs in (runs_a, runs_b)
    )
    best_cost = _cost(
        total, load_before, _split_document_tokens(documents.borders, [*runs_a, *runs_b])
    )
    best = list(runs_a), list(runs_b)
    for split_run in sorted(pool, key=lambda run: run.tokens):
        if best_cost <= _GOOD_ENOUGH or budget.remaining <= 0:
            break
        split = _PairSplit(documents, tokens, total, split_run, budget)
        cost = split.assign(sorted((r for r in pool if r is not split_run), key=lambda r: -r.work))
        if cost < best_cost and split.max_load <= load_before:
            best_cost, best = cost, split.runs()
    return best


def _merge_adjacent(borders: Sequence[int], runs: Sequence[Run]) -> list[Run]:
    """The runs, ascending; two that meet inside of a document, where one was split, are joined."""
    at_borders, merged = set(borders), list[Run]()
    for start, stop in sorted(runs):
        if merged and merged[-1][1] == start and start not in at_borders:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return merged


def _split_document_tokens(borders: Sequence[int], runs: Sequence[Run]) -> int:
    """Tokens in front of a split between two ranks, which the rank behind the split needs."""
    splits = {start for start, _ in runs} - set(borders)
    return sum(stop - start for start, stop in runs if stop in splits)


def _cost(total: tuple[int, int], max_load: int, communicated_tokens: int) -> float:
    """Work of the busier rank over the mean, and what is communicated; ``total``: tokens and work
    of both ranks."""
    tokens, work = total
    communication = 2 * communicated_tokens / max(tokens, 1)
    return 2 * max_load / max(work, 1) + _COMMUNICATION_COST * communication


class _PairSplit:
    """An assignment of runs to two ranks, of which one run is split between them.

    Args:
        tokens: of the first rank.
        total: tokens and work of both ranks.

    Attributes:
        max_load: work of the busier rank, once all is assigned.
    """

    def __init__(
        self,
        documents: Documents,
        tokens: int,
        total: tuple[int, int],
        split_run: _DocumentRun,
        budget: SearchBudget,
    ) -> None:
        self._documents, self._tokens, self._total = documents, tokens, total
        self._split_run, self._budget, self.max_load = split_run, budget, total[1]
        self._assigned: tuple[list[_DocumentRun], list[_DocumentRun]] = [], []
        self._front_first = True

    def assign(self, runs: Sequence[_DocumentRun]) -> float:
        """Assign whole runs, choose the split and set ``max_load``: once, before :meth:`runs`.
        Returns the cost, infinite if the split run cannot fill up both ranks."""
        tokens, loads = 0, [0, 0]  # tokens of the first rank, work of both
        for run in runs:
            side = int(loads[1] < loads[0] or tokens + run.tokens > self._tokens)
            self._assigned[side].append(run)
            tokens += run.tokens if side == 0 else 0
            loads[side] += run.work
        work, cost = loads[0], self._cost_of(tokens, loads[0])
        while self._budget.remaining > 0:
            swapped_cost, swap = self._best_swap(tokens, work)
            if swapped_cost >= cost:
                break
            cost = swapped_cost
            for side, swapped in enumerate(swap):
                if swapped is not None:
                    self._assigned[side].remove(swapped)
                    self._assigned[1 - side].append(swapped)
            tokens = sum(run.tokens for run in self._assigned[0])
            work = sum(run.work for run in self._assigned[0])
        cost, self._front_first, self.max_load = self._fill_with_split_run(tokens, work)
        return cost

    def runs(self) -> tuple[list[Run], list[Run]]:
        first, second = ([(run.start, run.stop) for run in runs] for runs in self._assigned)
        split = self._split_at(sum(run.tokens for run in self._assigned[0]), self._front_first)
        front, back = (self._split_run.start, split), (split, self._split_run.stop)
        halves = (front, back) if self._front_first else (back, front)
        for runs, half in zip((first, second), halves, strict=True):
            if half[1] > half[0]:
                runs.append(half)
        return first, second

    def _split_at(self, tokens: int, front_first: bool) -> int:
        """Return where the split run is split if the first rank has so many tokens without it."""
        missing, run = self._tokens - tokens, self._split_run
        return run.start + missing if front_first else run.stop - missing

    def _best_swap(self, tokens: int, work: int) -> tuple[float, _Swap]:
        """The cost of the cheapest swap, and the run (or None) that each of the two ranks gives."""
        first_runs, second_runs = ([*runs, None] for runs in self._assigned)
        self._budget.remaining -= len(first_runs) * len(second_runs)
        best: tuple[float, _Swap] = inf, (None, None)
        for moved_out in first_runs:
            for moved_in in second_runs:
                given, taken = moved_out or _NO_RUN, moved_in or _NO_RUN
                new_tokens = tokens - given.tokens + taken.tokens
                cost = self._cost_of(new_tokens, work - given.work + taken.work)
                if cost < best[0]:
                    best = cost, (moved_out, moved_in)
        return best

    def _cost_of(self, tokens: int, work: int) -> float:
        """Return the cost of a first rank with so many whole tokens and so much work. Where the
        split run cannot fill up both ranks it is 10, above any other, and the tokens in excess."""
        missing = self._tokens - tokens
        beyond = max(-missing, missing - self._split_run.tokens, 0)
        return 10.0 + beyond if beyond else self._fill_with_split_run(tokens, work)[0]

    def _fill_with_split_run(self, tokens: int, work: int) -> tuple[float, bool, int]:
        """The cost, whether the first rank has the front, and the work of the busier rank."""
        run, options = self._split_run, []
        if not 0 <= self._tokens - tokens <= run.tokens:
            return inf, True, self._total[1]
        for front_first in (True, False):
            split = self._split_at(tokens, front_first)
            front = self._documents.causal_pairs(run.start, split)
            load = work + (front if front_first else run.work - front)
            max_load = max(load, self._total[1] - load)
            communicated = split - run.start if split < run.stop else 0
            options.append((_cost(self._total, max_load, communicated), front_first, max_load))
        return min(options)
