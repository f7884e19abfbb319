"""The steps of the ring as data: what a rank computes, what comes to it and what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ds_usp.geometry.calls import KernelCall, calls_of
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.segments import Segment, cut
from ds_usp.geometry.tiles import ANY_BAND, TileSupport, plan_tiles
from ds_usp.geometry.visible import visible_runs


class Piece(NamedTuple):
    """Tokens ``start : stop`` of a ring rank's own, and that rank or another one that uses them."""

    rank: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.rank}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class RingStep:
    """Attention of this rank's queries with the keys and values of one rank, or of several.

    Tokens travel straight from their owner to their user, and only those that the user's queries
    see. Their gradients travel the same way back.

    Args:
        own: the keys are this rank's own, all of them, where they stand; nothing travels.
        takes: whose tokens the keys are, in the order in which they lie.
        gives: this rank's tokens that others take in this step.
        given_at: for each of them, the first of its tokens among all that the other one takes.
        calls: what kernels are called with. The own step's cover every query row.
    """

    own: bool
    takes: tuple[Piece, ...]
    gives: tuple[Piece, ...]
    given_at: tuple[int, ...]
    calls: tuple[KernelCall, ...]

    @property
    def columns(self) -> int:
        """Key tokens."""
        return sum(piece.length for piece in self.takes)

    @property
    def given(self) -> int:
        """Tokens that leave, as often as they do."""
        return sum(piece.length for piece in self.gives)

    @property
    def pairs(self) -> int:
        """(query, key) pairs computed in this step, of all samples that have their own."""
        return sum(call.pairs for call in self.calls)

    def __str__(self) -> str:
        work = "; ".join(map(str, self.calls)) or "nothing"
        keys = "own" if self.own else f"of {' '.join(map(str, self.takes)) or 'nobody'}"
        gives = f", gives {' '.join(map(str, self.gives))}" if self.gives else ""
        return f"{keys}: {work}{gives}"


@dataclass(frozen=True)
class RingSchedule:
    """All steps of one ring rank. Every rank of the ring has as many.

    Args:
        steps: forward.
        backward_steps: backward.
        most_owned: most tokens that any rank of the ring owns.
        most_taken_anywhere: most tokens that any rank of the ring takes in one step.
    """

    ring_rank: int
    ring_degree: int
    steps: tuple[RingStep, ...]
    backward_steps: tuple[RingStep, ...]
    most_owned: int
    most_taken_anywhere: int

    @property
    def pairs(self) -> int:
        """(query, key) pairs that this rank computes."""
        return sum(step.pairs for step in self.steps)

    @property
    def most_taken(self) -> int:
        """Tokens of the largest block that comes here in one step: what a buffer must hold."""
        return max((step.columns for step in self.steps if not step.own), default=0)

    @property
    def most_given(self) -> int:
        """Tokens whose gradients come back from one step: what a buffer must hold."""
        return max(step.given for step in self.steps)

    def __str__(self) -> str:
        head = f"ring rank {self.ring_rank} of {self.ring_degree}, {self.pairs} pairs"
        return "\n  ".join([head, *map(str, self.steps)])


@lru_cache(maxsize=64)
def ring_schedule(
    layout: TokenLayout,
    mask: MaskSpec,
    ring_rank: int,
    support: TileSupport = ANY_BAND,
    gather: bool = False,
    alone: bool = True,
) -> RingSchedule:
    """Plan one rank's steps.

    Block by block: the own one first, while the next one comes; offsets at which no rank has work
    are not visited. A window shortens the ring and sends only the tokens at the border; of a block
    that a causal mask half hides only the visible half travels.

    Args:
        gather: the blocks of all other ranks in one step: fewer, larger kernel calls and fewer
            sums over steps, for memory that grows with the ring.
        alone: no other part of the heads is computed while this one's blocks travel. The own
            block's backward is then cut in two, so that its first part hides the first block's
            arrival and its last part the way home of the last gradients; and of gathered blocks
            one comes first, which hides the others' arrival.
    """
    own = _own_step(layout, mask, ring_rank, support)
    useful = [offset for offset in _useful_offsets(layout, mask) if offset]
    visits = [[offset] for offset in useful]
    if gather:
        visits = [useful[:1], useful[1:]] if alone else [useful]
    visits = [visit for visit in visits if visit]
    others = tuple(_step(layout, mask, ring_rank, visit, support) for visit in visits)
    backward = (own, *others)
    if others and alone:
        length = layout.ring_length(ring_rank)
        first, last = (
            _own_step(layout, mask, ring_rank, support, rows)
            for rows in ((0, length // 2), (length // 2, length))
        )
        backward = (first, *others, last)
    runs = visible_runs(layout, mask)
    taken = (
        sum(b - a for offset in visit for a, b in runs[rank][(rank - offset) % layout.ring])
        for visit in visits
        for rank in range(layout.ring)
    )
    owned = max(layout.ring_length(rank) for rank in range(layout.ring))
    steps = (own, *others)
    return RingSchedule(ring_rank, layout.ring, steps, backward, owned, max(taken, default=0))


def _own_step(
    layout: TokenLayout,
    mask: MaskSpec,
    ring_rank: int,
    support: TileSupport,
    rows: tuple[int, int] | None = None,
) -> RingStep:
    """This rank's own block, for all query rows or for some."""
    mine = layout.ring_segments(ring_rank)
    length = layout.ring_length(ring_rank)
    calls = _calls(mine, mine, mask, support, rows or (0, length))
    return RingStep(True, (Piece(ring_rank, 0, length),), (), (), calls)


def _step(
    layout: TokenLayout,
    mask: MaskSpec,
    ring_rank: int,
    offsets: Sequence[int],
    support: TileSupport,
) -> RingStep:
    """The blocks of the ranks some offsets before this one, in the order of the ranks."""
    takes = _taken(layout, mask, ring_rank, offsets)
    users = sorted((ring_rank + offset) % layout.ring for offset in offsets)
    gives, given_at = [], []
    for user in users:
        at = 0
        for owner, start, stop in _taken(layout, mask, user, offsets):
            if owner == ring_rank:
                gives.append(Piece(user, start, stop))
                given_at.append(at)
            at += stop - start
    keys = tuple(
        segment
        for owner, start, stop in takes
        for segment in cut(layout.ring_segments(owner), start, stop)
    )
    calls = _calls(layout.ring_segments(ring_rank), keys, mask, support)
    return RingStep(False, takes, tuple(gives), tuple(given_at), calls)


def _calls(
    queries: Sequence[Segment],
    keys: Sequence[Segment],
    mask: MaskSpec,
    support: TileSupport,
    rows: tuple[int, int] | None = None,
) -> tuple[KernelCall, ...]:
    """The kernel calls for all queries or for some rows of them."""
    shard, columns = (sum(each.length for each in segments) for segments in (queries, keys))
    start, stop = rows or (0, shard)
    some = cut(queries, start, stop) if rows else queries
    tiles = [
        [tile.shifted(start, 0) for tile in found] if start else found
        for sample in range(max(1, len(mask.documents)))
        for found in [plan_tiles(some, keys, mask, support, sample)]
    ]
    if not mask.documents:
        return tuple(map(KernelCall.of, tiles[0]))
    return calls_of(tiles, stop - start, columns)


def _taken(
    layout: TokenLayout, mask: MaskSpec, ring_rank: int, offsets: Sequence[int]
) -> tuple[Piece, ...]:
    """What a rank takes from those some offsets before it, in the order of the ranks."""
    runs = visible_runs(layout, mask)[ring_rank]
    owners = sorted((ring_rank - offset) % layout.ring for offset in offsets)
    return tuple(Piece(owner, *run) for owner in owners for run in runs[owner])


def _useful_offsets(layout: TokenLayout, mask: MaskSpec) -> tuple[int, ...]:
    """How far before their users the owners stand of which anything is seen."""
    ranks, runs = range(layout.ring), visible_runs(layout, mask)
    return tuple(
        offset
        for offset in ranks
        if offset == 0 or any(runs[rank][(rank - offset) % layout.ring] for rank in ranks)
    )
