"""Two ring ranks' documents, dealt out anew so that both have as much attention to compute."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Run = tuple[int, int]

# What it costs that as many tokens as a rank has are needed elsewhere, as a part of its work.
_TRAVEL = 0.02
# A cost below which no further run is tried.
_GOOD = 1.002


@dataclass(frozen=True)
class _Piece:
    """A run of tokens and its causal pairs."""

    start: int
    stop: int
    work: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class Tries:
    """How many more splits may be looked at: documents differ with every batch, and the host deals
    them out before its step. A count and not a clock, for all ranks must find the same."""

    def __init__(self, left: int) -> None:
        self.left = left


def resplit(
    documents: Sequence[int], mine: Sequence[Run], theirs: Sequence[Run], tries: Tries
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
    tokens = sum(stop - start for start, stop in mine)
    pool = [
        _Piece(start, stop, causal_pairs(documents, start, stop))
        for start, stop in _joined(documents, [*mine, *theirs])
    ]
    both = sum(piece.tokens for piece in pool), sum(piece.work for piece in pool)
    before = max(sum(causal_pairs(documents, *run) for run in runs) for runs in (mine, theirs))
    least = _cost(both, before, _cut_tokens(documents, mine, theirs))
    found = list(mine), list(theirs)
    for seam in sorted(pool, key=lambda piece: piece.tokens):
        if least <= _GOOD or tries.left <= 0:
            break
        split = _Split(documents, tokens, both, seam, tries)
        cost = split.deal(sorted((p for p in pool if p is not seam), key=lambda p: -p.work))
        if cost < least and split.most_work <= before:
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


def _joined(documents: Sequence[int], runs: Sequence[Run]) -> Iterator[Run]:
    """Runs in order; those that a cut inside of a document made of one are one again."""
    borders, joined = set(documents), list[Run]()
    for start, stop in sorted(runs):
        if joined and joined[-1][1] == start and start not in borders:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    yield from joined


def _cut_tokens(documents: Sequence[int], mine: Sequence[Run], theirs: Sequence[Run]) -> int:
    """Tokens in front of a cut between these two ranks, which the one behind it needs."""
    starts = {start for runs in (mine, theirs) for start, _ in runs} - set(documents)
    cut = (stop - start for runs in (mine, theirs) for start, stop in runs if stop in starts)
    return sum(cut)


def _cost(both: tuple[int, int], most_work: int, travelling: int) -> float:
    """Work of the busier rank over the mean, and what travels; of tokens and work of both."""
    tokens, work = both
    return 2 * most_work / max(work, 1) + _TRAVEL * 2 * travelling / max(tokens, 1)


class _Split:
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
        seam: _Piece,
        tries: Tries,
    ) -> None:
        self._documents, self._tokens, self._both, self._seam = documents, tokens, both, seam
        self._tries, self.most_work = tries, both[1]
        self._sides: tuple[list[_Piece], list[_Piece]] = [], []
        self._head_first = True

    def deal(self, pieces: Sequence[_Piece]) -> float:
        """Deal out whole runs; the cost, infinite if the cut one cannot fill up both ranks."""
        sums = [[0, 0], [0, 0]]  # tokens and work of both
        for piece in pieces:
            side = min((0, 1), key=lambda s: sums[s][1])
            if side == 0 and sums[0][0] + piece.tokens > self._tokens:
                side = 1
            self._sides[side].append(piece)
            sums[side][0] += piece.tokens
            sums[side][1] += piece.work
        now = self._cost(sums[0][0], sums[0][1])
        while self._tries.left > 0:
            then, swap = self._best_swap(sums[0][0], sums[0][1])
            if then >= now:
                break
            now = then
            for side, chosen in enumerate(swap):
                if chosen is not None:
                    self._sides[side].remove(chosen)
                    self._sides[1 - side].append(chosen)
            sums[0] = [sum(p.tokens for p in self._sides[0]), sum(p.work for p in self._sides[0])]
        final, self._head_first, self.most_work = self._filled(sums[0][0], sums[0][1])
        return final

    def runs(self) -> tuple[list[Run], list[Run]]:
        """Of both ranks."""
        found = tuple([(p.start, p.stop) for p in side] for side in self._sides)
        lacking = self._tokens - sum(p.tokens for p in self._sides[0])
        seam, order = self._seam, (0, 1) if self._head_first else (1, 0)
        cut = seam.start + (lacking if self._head_first else seam.tokens - lacking)
        for side, run in zip(order, ((seam.start, cut), (cut, seam.stop)), strict=True):
            if run[1] > run[0]:
                found[side].append(run)
        return found[0], found[1]

    def _best_swap(
        self, tokens: int, work: int
    ) -> tuple[float, tuple[_Piece | None, _Piece | None]]:
        """The cheapest exchange of a run, or none, for a run, or none."""
        ours, theirs = ([*side, None] for side in self._sides)
        self._tries.left -= len(ours) * len(theirs)
        best: tuple[float, tuple[_Piece | None, _Piece | None]] = float("inf"), (None, None)
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
        beyond = max(-lacking, lacking - self._seam.tokens, 0)
        return 10.0 + beyond if beyond else self._filled(tokens, work)[0]

    def _filled(self, tokens: int, work: int) -> tuple[float, bool, int]:
        """The cost with the cut run, whether the first rank has its first part, and the work of the
        busier one."""
        seam, lacking = self._seam, self._tokens - tokens
        if not 0 <= lacking <= seam.tokens:
            return float("inf"), True, self._both[1]
        found = []
        for head in (True, False):
            cut = seam.start + (lacking if head else seam.tokens - lacking)
            first = causal_pairs(self._documents, seam.start, cut)
            mine = work + (first if head else seam.work - first)
            inside = seam.start < cut < seam.stop
            travelling = cut - seam.start if inside else 0
            most = max(mine, self._both[1] - mine)
            found.append((_cost(self._both, most, travelling), head, most))
        return min(found)
