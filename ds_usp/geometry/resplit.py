"""Two ring ranks' documents, dealt out anew so that both have as much attention to compute."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Run = tuple[int, int]

# What it costs that as many tokens as a rank has are needed elsewhere, as a part of its work.
_COMMUNICATION_COST = 0.02
# A cost below which no further run is tried.
_GOOD_ENOUGH = 1.002


@dataclass(frozen=True)
class _DocumentRun:
    """A run of tokens and its causal pairs."""

    start: int
    stop: int
    work: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class SearchBudget:
    """How many more splits may be looked at: documents differ with every batch, and the host deals
    them out before its step. A count and not a clock, for all ranks must find the same."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining


def rebalance_pair(
    documents: Sequence[int], runs_a: Sequence[Run], runs_b: Sequence[Run], budget: SearchBudget
) -> tuple[list[Run], list[Run]]:
    """Runs for the same two ranks, as many tokens for each as before, with work more even.

    Runs stay whole but for one, which fills up the tokens of both: its first part goes to one rank
    and its second part to the other. For a choice of that run, the shortest first, the others are
    dealt out, the one of most work first, and swapped as long as that helps.

    Args:
        documents: cumulative borders.
        mine, theirs: runs of both ranks, of whole or cut documents.
        tries: that are left; those that are used are taken off.
    """
    tokens = sum(stop - start for start, stop in runs_a)
    pool = [
        _DocumentRun(start, stop, causal_pairs(documents, start, stop))
        for start, stop in _merge_adjacent(documents, [*runs_a, *runs_b])
    ]
    both = sum(piece.tokens for piece in pool), sum(piece.work for piece in pool)
    before = max(sum(causal_pairs(documents, *run) for run in runs) for runs in (runs_a, runs_b))
    least = _cost(both, before, _split_document_tokens(documents, runs_a, runs_b))
    found = list(runs_a), list(runs_b)
    for split_run in sorted(pool, key=lambda piece: piece.tokens):
        if least <= _GOOD_ENOUGH or budget.remaining <= 0:
            break
        split = _PairSplit(documents, tokens, both, split_run, budget)
        cost = split.assign(sorted((p for p in pool if p is not split_run), key=lambda p: -p.work))
        if cost < least and split.max_load <= before:
            least, found = cost, split.runs()
    return found


def causal_pairs(documents: Sequence[int], start: int, stop: int) -> int:
    """(query, key) pairs whose queries are there, each with the keys of its document before it."""
    total, at = 0, start
    index = bisect_right(documents, start)
    while at < stop:
        begin, end = documents[index - 1], min(documents[index], stop)
        total += ((end - begin) * (end - begin + 1) - (at - begin) * (at - begin + 1)) // 2
        at, index = end, index + 1
    return total


def _merge_adjacent(documents: Sequence[int], runs: Sequence[Run]) -> Iterator[Run]:
    """Runs in order; those that a cut inside of a document made of one are one again."""
    borders, joined = set(documents), list[Run]()
    for start, stop in sorted(runs):
        if joined and joined[-1][1] == start and start not in borders:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    yield from joined


def _split_document_tokens(
    documents: Sequence[int], runs_a: Sequence[Run], runs_b: Sequence[Run]
) -> int:
    """Tokens in front of a cut between these two ranks, which the one behind it needs."""
    starts = {start for runs in (runs_a, runs_b) for start, _ in runs} - set(documents)
    cut = (stop - start for runs in (runs_a, runs_b) for start, stop in runs if stop in starts)
    return sum(cut)


def _cost(both: tuple[int, int], max_load: int, communicated_tokens: int) -> float:
    """Work of the busier rank over the mean, and what travels; of tokens and work of both."""
    tokens, work = both
    return 2 * max_load / max(work, 1) + _COMMUNICATION_COST * 2 * communicated_tokens / max(
        tokens, 1
    )


class _PairSplit:
    """A run that is cut, and the others for one rank or the other.

    Args:
        tokens: that the first rank shall have.
        both: tokens and work of both ranks.
        seam: the run that is cut.

    Attributes:
        most_work: of the busier rank, once all is dealt out.
    """

    def __init__(
        self,
        documents: Sequence[int],
        tokens: int,
        both: tuple[int, int],
        split_run: _DocumentRun,
        budget: SearchBudget,
    ) -> None:
        self._documents, self._tokens, self._both, self._split_run = (
            documents,
            tokens,
            both,
            split_run,
        )
        self._budget, self.max_load = budget, both[1]
        self._assigned: tuple[list[_DocumentRun], list[_DocumentRun]] = [], []
        self._head_first = True

    def assign(self, pieces: Sequence[_DocumentRun]) -> float:
        """Deal out whole runs; the cost, infinite if the cut one cannot fill up both ranks."""
        sums = [[0, 0], [0, 0]]  # tokens and work of both
        for piece in pieces:
            side = min((0, 1), key=lambda s: sums[s][1])
            if side == 0 and sums[0][0] + piece.tokens > self._tokens:
                side = 1
            self._assigned[side].append(piece)
            sums[side][0] += piece.tokens
            sums[side][1] += piece.work
        now = self._cost(sums[0][0], sums[0][1])
        while self._budget.remaining > 0:
            then, swap = self._best_swap(sums[0][0], sums[0][1])
            if then >= now:
                break
            now = then
            for side, chosen in enumerate(swap):
                if chosen is not None:
                    self._assigned[side].remove(chosen)
                    self._assigned[1 - side].append(chosen)
            sums[0] = [
                sum(p.tokens for p in self._assigned[0]),
                sum(p.work for p in self._assigned[0]),
            ]
        final, self._head_first, self.max_load = self._fill_with_split_run(sums[0][0], sums[0][1])
        return final

    def runs(self) -> tuple[list[Run], list[Run]]:
        """Of both ranks."""
        found = tuple([(p.start, p.stop) for p in side] for side in self._assigned)
        lacking = self._tokens - sum(p.tokens for p in self._assigned[0])
        split_run, order = self._split_run, (0, 1) if self._head_first else (1, 0)
        cut = split_run.start + (lacking if self._head_first else split_run.tokens - lacking)
        for side, run in zip(order, ((split_run.start, cut), (cut, split_run.stop)), strict=True):
            if run[1] > run[0]:
                found[side].append(run)
        return found[0], found[1]

    def _best_swap(
        self, tokens: int, work: int
    ) -> tuple[float, tuple[_DocumentRun | None, _DocumentRun | None]]:
        """The cheapest exchange of a run, or none, for a run, or none."""
        ours, theirs = ([*side, None] for side in self._assigned)
        self._budget.remaining -= len(ours) * len(theirs)
        best: tuple[float, tuple[_DocumentRun | None, _DocumentRun | None]] = (
            float("inf"),
            (None, None),
        )
        for mine in ours:
            for other in theirs:
                t = tokens - (mine.tokens if mine else 0) + (other.tokens if other else 0)
                w = work - (mine.work if mine else 0) + (other.work if other else 0)
                cost = self._cost(t, w)
                if cost < best[0]:
                    best = cost, (mine, other)
        return best

    def _cost(self, tokens: int, work: int) -> float:
        """With whole runs of so many tokens and so much work on the first rank; where the cut one
        cannot fill up, far more, and the more the further off."""
        lacking = self._tokens - tokens
        beyond = max(-lacking, lacking - self._split_run.tokens, 0)
        return 10.0 + beyond if beyond else self._fill_with_split_run(tokens, work)[0]

    def _fill_with_split_run(self, tokens: int, work: int) -> tuple[float, bool, int]:
        """The cost with the cut run, whether the first rank has its first part, and the work of the
        busier one."""
        split_run, lacking = self._split_run, self._tokens - tokens
        if not 0 <= lacking <= split_run.tokens:
            return float("inf"), True, self._both[1]
        found = []
        for head in (True, False):
            cut = split_run.start + (lacking if head else split_run.tokens - lacking)
            first = causal_pairs(self._documents, split_run.start, cut)
            mine = work + (first if head else split_run.work - first)
            inside = split_run.start < cut < split_run.stop
            communicated_tokens = cut - split_run.start if inside else 0
            most = max(mine, self._both[1] - mine)
            found.append((_cost(self._both, most, communicated_tokens), head, most))
        return min(found)
