"""The steps of the ring as data: what a rank computes, what comes to it and what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ds_usp.geometry.calls import KernelCall, calls_of
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.segments import Segment, cut
from ds_usp.geometry.tiles import ANY_BAND, TileSupport, plan_tiles
from ds_usp.geometry.visible import visible_runs

Place = Literal["alone", "first", "later"]


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
        takes: whose tokens the keys are, in the order in which they lie. This rank's own may come
            last among those of others; only the others' travel.
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
        """Most tokens of others that come here in one step."""
        return max(
            (
                sum(piece.length for piece in step.takes if piece.rank != self.ring_rank)
                for step in self.steps
            ),
            default=0,
        )

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
    place: Place = "alone",
    kv_layout: TokenLayout | None = None,
) -> RingSchedule:
    """Plan one rank's steps.

    Block by block: the own one first, while the next one comes; offsets at which no rank has work
    are not visited. A window shortens the ring and sends only the tokens at the border; of a block
    that a causal mask half hides only the visible half travels.

    Args:
        gather: the blocks of all other ranks in one step: fewer, larger kernel calls and fewer
            sums over steps, for memory that grows with the ring.
        place: of this part among the parts of the heads. ``"alone"``: nothing else is computed
            while its blocks travel. The own block's backward is then cut in two, so that its
            first part hides the first block's arrival and its last part the way home of the last
            gradients; and of gathered blocks one comes first, which hides the others' arrival.
            ``"first"``: only the own block hides the arrival. ``"later"``: the part before hides
            it, so the own block is computed together with gathered ones where that takes fewer
            kernel calls: they are larger, and there are fewer sums.
        kv_layout: where the keys are, if they are of another sequence than the queries.
    """
    shards = _Shards(layout, kv_layout or layout, mask)
    own = _own_step(shards, ring_rank, support)
    useful = [offset for offset in _useful_offsets(shards) if offset]
    visits = [[offset] for offset in useful]
    if gather:
        visits = [useful[:1], useful[1:]] if place == "alone" else [useful]
    visits = [visit for visit in visits if visit]
    others = tuple(_step(shards, ring_rank, visit, support) for visit in visits)
    steps = backward = (own, *others)
    if others and place == "alone":
        length = layout.ring_length(ring_rank)
        first, last = (
            _own_step(shards, ring_rank, support, rows)
            for rows in ((0, length // 2), (length // 2, length))
        )
        backward = (first, *others, last)
    runs = visible_runs(shards.queries, shards.mask, shards.keys)
    taken = (
        sum(b - a for offset in visit for a, b in runs[rank][(rank - offset) % layout.ring])
        for visit in visits
        for rank in range(layout.ring)
    )
    if gather and place == "later" and others and others[0].takes:
        whole = _step(shards, ring_rank, [*useful, 0], support)
        if len(whole.calls) < len(own.calls) + len(others[0].calls):
            steps = backward = (whole,)
    owned = max(shards.keys.ring_length(rank) for rank in range(layout.ring))
    return RingSchedule(ring_rank, layout.ring, steps, backward, owned, max(taken, default=0))


class _Shards(NamedTuple):
    """Where queries and keys are, and which of them meet."""

    queries: TokenLayout
    keys: TokenLayout
    mask: MaskSpec


def _own_step(
    shards: _Shards,
    ring_rank: int,
    support: TileSupport,
    rows: tuple[int, int] | None = None,
) -> RingStep:
    """This rank's own block, for all query rows or for some."""
    queries, keys = (each.ring_segments(ring_rank) for each in shards[:2])
    rows = rows or (0, shards.queries.ring_length(ring_rank))
    calls = _calls(queries, keys, shards.mask, support, rows)
    return RingStep(True, (Piece(ring_rank, 0, shards.keys.ring_length(ring_rank)),), (), (), calls)


def _step(
    shards: _Shards,
    ring_rank: int,
    offsets: Sequence[int],
    support: TileSupport,
) -> RingStep:
    """The blocks of the ranks some offsets before this one; offset 0 is this rank itself."""
    takes = _taken(shards, ring_rank, offsets)
    users = sorted((ring_rank + offset) % shards.keys.ring for offset in offsets)
    gives, given_at = [], []
    for user in users:
        if user == ring_rank:
            continue
        at = 0
        for owner, start, stop in _taken(shards, user, offsets):
            if owner == ring_rank:
                gives.append(Piece(user, start, stop))
                given_at.append(at)
            at += stop - start
    keys = tuple(
        segment
        for owner, start, stop in takes
        for segment in cut(shards.keys.ring_segments(owner), start, stop)
    )
    calls = _calls(shards.queries.ring_segments(ring_rank), keys, shards.mask, support)
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


def _taken(shards: _Shards, ring_rank: int, offsets: Sequence[int]) -> tuple[Piece, ...]:
    """What a rank takes from those some offsets before it, the farthest first.

    In this order the keys that a causal zigzag's front half sees lie next to each other, and those
    of both halves end at their diagonals.
    """
    runs = visible_runs(shards.queries, shards.mask, shards.keys)[ring_rank]
    pieces: list[Piece] = []
    for offset in sorted(offsets, reverse=True):
        owner = (ring_rank - offset) % shards.keys.ring
        seen = runs[owner] if offset else ((0, shards.keys.ring_length(owner)),)
        pieces += (Piece(owner, *run) for run in seen)
    return tuple(pieces)


def _useful_offsets(shards: _Shards) -> tuple[int, ...]:
    """How far before their users the owners stand of which anything is seen."""
    runs = visible_runs(shards.queries, shards.mask, shards.keys)
    ranks = range(shards.keys.ring)
    return tuple(
        offset
        for offset in ranks
        if offset == 0 or any(runs[rank][(rank - offset) % len(ranks)] for rank in ranks)
    )
