"""Cuts of packed documents that give ring ranks as many tokens and as much attention each.

Short documents stay whole, so that nothing of them travels; those whose work would not balance
otherwise are cut into a zigzag each. What is left uneven then is evened out between pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from ds_usp.geometry.resplit import Run, SearchBudget, causal_pairs, rebalance_pair
from ds_usp.geometry.segments import Segment, coalesce

# Work of the busiest rank, over the mean, that is not worth more cuts.
_TOLERATED = 1.05
# The same that is not worth dealing out anew what two ranks have.
_EVEN_ENOUGH = 1.005
# Splits that are looked at for one layout: 10 to 20 ms of a host.
_MAX_SPLITS = 15_000
# Short documents next to each other stay together up to this part of a rank's tokens.
_GROUPS_PER_RANK = 32


@dataclass
class _RankLoad:
    """What one ring rank gets."""

    capacity: int = 0
    work: int = 0
    runs: list[Run] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def assign(self, start: int, stop: int, work: int) -> None:
        if stop > start:
            self.runs.append((start, stop))
            self.work += work


@lru_cache(maxsize=64)
def balance_documents(documents: tuple[int, ...], ring: int) -> tuple[tuple[Segment, ...], ...]:
    """The tokens of every ring rank, ascending.

    Ranks hold as many tokens as an even cut gives them, to one. Documents longer than a rank's
    tokens are cut; as long as a rank has more than 1.05 of the mean work (causal pairs), those of
    half that length are, and so on. Then the busiest and the idlest rank share anew, as often as
    that helps.

    Args:
        documents: cumulative borders.
    """
    longest = -(-documents[-1] // ring)
    best: list[_RankLoad] = []
    while True:
        loads = _assign_documents(documents, ring, longest)
        if not best or _imbalance(loads) < _imbalance(best):
            best = loads
        longest //= 2
        if _imbalance(best) <= _TOLERATED or longest < 2 * ring:
            break
    even = _rebalance_all(documents, [load.runs for load in best])
    return tuple(
        coalesce(Segment(start, stop - start) for start, stop in sorted(runs)) for runs in even
    )


def _rebalance_all(documents: tuple[int, ...], loads: list[list[Run]]) -> list[list[Run]]:
    """Shares of as many tokens each, with work more even."""
    work = [sum(causal_pairs(documents, *run) for run in runs) for runs in loads]
    budget = SearchBudget(_MAX_SPLITS)
    for _ in range(2 * len(loads)):
        busiest, idlest = (work.index(each) for each in (max(work), min(work)))
        if work[busiest] * len(work) <= _EVEN_ENOUGH * sum(work):
            break
        pair = rebalance_pair(documents, loads[busiest], loads[idlest], budget)
        if sorted(pair[0]) == sorted(loads[busiest]):
            break
        for rank, runs in zip((busiest, idlest), pair, strict=True):
            loads[rank] = runs
            work[rank] = sum(causal_pairs(documents, *run) for run in runs)
    return loads


def _imbalance(loads: list[_RankLoad]) -> float:
    work = [load.work for load in loads]
    return max(work) * len(work) / sum(work)


def _assign_documents(documents: tuple[int, ...], ring: int, longest: int) -> list[_RankLoad]:
    """Shares in which documents of more tokens than ``longest`` are cut."""
    loads = [_RankLoad() for _ in range(ring)]
    for start, stop in pairwise(documents):
        if ring > 1 and stop - start > longest:
            _zigzag(start, stop, loads)
    _enforce_capacity(documents[-1], loads)
    bundles = list(_group_small_documents(documents, longest if ring > 1 else documents[-1], ring))
    bundles.sort(key=lambda bundle: (bundle[0] - bundle[-1], bundle[0]))
    for bundle in bundles:
        _assign_largest_first(bundle, loads)
    return loads


def _zigzag(start: int, stop: int, loads: list[_RankLoad]) -> None:
    """Cut a document into two chunks for each rank; what does not divide goes where least is."""
    ring = len(loads)
    each, rest = divmod(stop - start, 2 * ring)
    lengths, tokens = [each] * 2 * ring, [load.tokens for load in loads]
    for _ in range(rest):
        open_ranks = (r for r in range(ring) if lengths[2 * ring - 1 - r] == each)
        rank = min(open_ranks, key=lambda r: (tokens[r], r))
        tokens[rank] += 1
        lengths[rank if lengths[rank] == each else 2 * ring - 1 - rank] += 1
    at = start
    for chunk, length in enumerate(lengths):
        load = loads[min(chunk, 2 * ring - 1 - chunk)]
        load.assign(at, at + length, _pairs(at - start, at + length - start))
        at += length


def _enforce_capacity(total: int, loads: list[_RankLoad]) -> None:
    """Room for as many tokens as an even cut gives; who has more already gets what is over."""
    each, rest = divmod(total, len(loads))
    for index, load in enumerate(sorted(loads, key=lambda load: -load.tokens)):
        load.capacity = each + (index < rest) - load.tokens


def _group_small_documents(
    documents: tuple[int, ...], longest: int, ring: int
) -> Iterator[list[int]]:
    """Borders of short documents, those next to each other together as long as they are few
    tokens."""
    most = -(-documents[-1] // (ring * _GROUPS_PER_RANK))
    bundle: list[int] = []
    for start, stop in pairwise(documents):
        short = stop - start <= longest
        if bundle and not (short and stop - bundle[0] <= most):
            yield bundle
            bundle = []
        if short:
            bundle = [*bundle, stop] if bundle else [start, stop]
    if bundle:
        yield bundle


def _assign_largest_first(borders: list[int], loads: list[_RankLoad]) -> None:
    """Give documents to the rank with the least work that has room for them, or cut them where the
    room of the one with most of it ends."""
    at = borders[0]
    while at < borders[-1]:
        fits = [load for load in loads if load.capacity >= borders[-1] - at]
        load = min(fits or loads, key=lambda each: each.work if fits else -each.capacity)
        stop = min(borders[-1], at + load.capacity)
        load.assign(at, stop, _work(borders, at, stop))
        load.capacity -= stop - at
        at = stop


def _work(borders: list[int], start: int, stop: int) -> int:
    """Causal pairs whose queries are there."""
    return sum(
        _pairs(max(begin, start) - begin, min(end, stop) - begin)
        for begin, end in pairwise(borders)
        if begin < stop and start < end
    )


def _pairs(start: int, stop: int) -> int:
    """Causal pairs of a document's tokens from ``start`` to ``stop``."""
    return (stop * (stop + 1) - start * (start + 1)) // 2
