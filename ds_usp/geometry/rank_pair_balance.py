"""Rebalancing of packed documents between two ring ranks: as many tokens each, work more even."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

Run = tuple[int, int]  # tokens start : stop of the sequence

# What it costs to communicate as many tokens as a rank has, as a fraction of its work.
_COMMUNICATION_COST = 0.02
# A cost below which no further split run is tried.
_GOOD_ENOUGH = 1.002


@dataclass(frozen=True)
class _DocumentRun:
    """A run of tokens, of whole or split documents, and its causal pairs."""

    start: int
    stop: int
    work: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


_Swap = tuple[_DocumentRun | None, _DocumentRun | None]


# Every rank runs this search on its own and must find the same layout, so its budget is a number of
# looks and not a time.
class SearchBudget:
    """How many more splits may be looked at: documents differ with every batch, and the CPU shards
    them before its step. A count and not a clock, for all ranks must come to the same layout."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining


def rebalance_pair(
    documents: Sequence[int], runs_a: Sequence[Run], runs_b: Sequence[Run], budget: SearchBudget
) -> tuple[list[Run], list[Run]]:
    """Runs for the same two ranks, as many tokens for each as before, with work more even.

    Runs stay whole but for one, which fills up the tokens of both: its front goes to one rank and
    its back to the other. For a choice of that run, the shortest first, the others are assigned
    greedily, the one of most work first, and swapped as long as that helps.

    Args:
        documents: cumulative sequence lengths.
        runs_a, runs_b: runs of both ranks.
        budget: splits that may be looked at; those that were are taken off.
    """
    tokens = sum(stop - start for start, stop in runs_a)
    pool = [
        _DocumentRun(start, stop, causal_pairs(documents, start, stop))
        for start, stop in _merge_adjacent(documents, [*runs_a, *runs_b])
    ]
    total = sum(run.tokens for run in pool), sum(run.work for run in pool)
    load_before = max(_total_pairs(documents, runs) for runs in (runs_a, runs_b))
    best_cost = _cost(total, load_before, _split_document_tokens(documents, [*runs_a, *runs_b]))
    best = list(runs_a), list(runs_b)
    for split_run in sorted(pool, key=lambda run: run.tokens):
        if best_cost <= _GOOD_ENOUGH or budget.remaining <= 0:
            break
        split = _PairSplit(documents, tokens, total, split_run, budget)
        cost = split.assign(sorted((r for r in pool if r is not split_run), key=lambda r: -r.work))
        if cost < best_cost and split.max_load <= load_before:
            best_cost, best = cost, split.runs()
    return best


def causal_pairs(documents: Sequence[int], start: int, stop: int) -> int:
    """(query, key) pairs of the queries ``start`` to ``stop`` (half open), each with the keys of
    its document up to itself.

    Args:
        documents: cumulative sequence lengths.
    """
    pairs, index = 0, bisect_right(documents, start)
    while start < stop:
        begin, end = documents[index - 1], min(documents[index], stop)
        pairs += ((end - begin) * (end - begin + 1) - (start - begin) * (start - begin + 1)) // 2
        start, index = end, index + 1
    return pairs


def _total_pairs(documents: Sequence[int], runs: Iterable[Run]) -> int:
    return sum(causal_pairs(documents, *run) for run in runs)


def _merge_adjacent(documents: Sequence[int], runs: Sequence[Run]) -> list[Run]:
    """The runs in order; two that a split inside of a document made of one run are joined again."""
    borders, merged = set(documents), list[Run]()
    for start, stop in sorted(runs):
        if merged and merged[-1][1] == start and start not in borders:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return merged


def _split_document_tokens(documents: Sequence[int], runs: Sequence[Run]) -> int:
    """Tokens in front of a split between these two ranks, which the one behind it needs."""
    splits = {start for start, _ in runs} - set(documents)
    return sum(stop - start for start, stop in runs if stop in splits)


def _cost(total: tuple[int, int], max_load: int, communicated_tokens: int) -> float:
    """Work of the busier rank over the mean, and what is communicated.

    Args:
        total: tokens and work of both ranks.
    """
    tokens, work = total
    communication = 2 * communicated_tokens / max(tokens, 1)
    return 2 * max_load / max(work, 1) + _COMMUNICATION_COST * communication


class _PairSplit:
    """An assignment of runs to two ranks, of which one run is split between them.

    Args:
        tokens: of the first rank.
        total: tokens and work of both ranks.
        split_run: the run that is split.

    Attributes:
        max_load: work of the busier rank, once all is assigned.
    """

    def __init__(
        self,
        documents: Sequence[int],
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
        """Assign whole runs; the cost, infinite if the split one cannot fill up both ranks."""
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
            tokens, work = (
                sum(run.tokens for run in self._assigned[0]),
                sum(run.work for run in self._assigned[0]),
            )
        cost, self._front_first, self.max_load = self._fill_with_split_run(tokens, work)
        return cost

    def runs(self) -> tuple[list[Run], list[Run]]:
        """The runs of both ranks, with the split run's two halves."""
        first, second = ([(run.start, run.stop) for run in runs] for runs in self._assigned)
        split = self._split_at(sum(run.tokens for run in self._assigned[0]), self._front_first)
        front, back = (self._split_run.start, split), (split, self._split_run.stop)
        halves = (front, back) if self._front_first else (back, front)
        for runs, half in zip((first, second), halves, strict=True):
            if half[1] > half[0]:
                runs.append(half)
        return first, second

    def _split_at(self, tokens: int, front_first: bool) -> int:
        """The token at which the split run is split if the first rank has so many tokens without
        it."""
        missing, run = self._tokens - tokens, self._split_run
        return run.start + missing if front_first else run.stop - missing

    def _best_swap(self, tokens: int, work: int) -> tuple[float, _Swap]:
        """The cost of the cheapest swap, and the run (or None) that each of the two ranks gives."""
        first_runs, second_runs = ([*runs, None] for runs in self._assigned)
        self._budget.remaining -= len(first_runs) * len(second_runs)
        best: tuple[float, _Swap] = inf, (None, None)
        for moved_out in first_runs:
            for moved_in in second_runs:
                new_tokens = (
                    tokens
                    - (moved_out.tokens if moved_out else 0)
                    + (moved_in.tokens if moved_in else 0)
                )
                new_work = (
                    work - (moved_out.work if moved_out else 0) + (moved_in.work if moved_in else 0)
                )
                cost = self._cost_of(new_tokens, new_work)
                if cost < best[0]:
                    best = cost, (moved_out, moved_in)
        return best

    def _cost_of(self, tokens: int, work: int) -> float:
        """The cost with whole runs of so many tokens and so much work on the first rank; where the
        split run cannot fill up both ranks, far more, and the more the further off."""
        missing = self._tokens - tokens
        beyond = max(-missing, missing - self._split_run.tokens, 0)
        return 10.0 + beyond if beyond else self._fill_with_split_run(tokens, work)[0]

    def _fill_with_split_run(self, tokens: int, work: int) -> tuple[float, bool, int]:
        """The cost with the split run, whether the first rank has its front, and the work of the
        busier rank."""
        run, options = self._split_run, []
        if not 0 <= self._tokens - tokens <= run.tokens:
            return inf, True, self._total[1]
        for front_first in (True, False):
            split = self._split_at(tokens, front_first)
            front = causal_pairs(self._documents, run.start, split)
            load = work + (front if front_first else run.work - front)
            max_load = max(load, self._total[1] - load)
            communicated = split - run.start if split < run.stop else 0
            options.append((_cost(self._total, max_load, communicated), front_first, max_load))
        return min(options)
