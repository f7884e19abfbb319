"""The steps of the ring as data: what a rank computes, what comes to it and what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from ds_usp.geometry.double_ring import Piece, Rings, Window
from ds_usp.geometry.kernel_calls import KernelCall, calls_of
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.segments import Segment, cut
from ds_usp.geometry.tiles import ANY_BAND, TileSupport, plan_tiles
from ds_usp.geometry.visibility import Runs, least_gap, united

Place = Literal["alone", "first", "later", "last"]
_RING_OF_A_HOST = 8


@dataclass(frozen=True, slots=True)
class RingStep:
    """Attention of this rank's queries with the keys and values of one rank, or of several.

    Tokens travel straight from the rank that holds them to their user, and only those that the
    user's queries see. Their gradients travel the same way back. In window 0 each rank holds what
    it owns, in a later one what has come for its node.

    Args:
        own: the keys are what this rank holds, all of it, where it stands; nothing travels.
        takes: whose tokens the keys are, in the order in which they lie. This rank's own may come
            last among those of others; only the others' travel.
        comes: the same tokens among what a rank of the node holds, and that rank.
        gives: tokens of what this rank holds that others take in this step.
        given_at: for each of them, the first of its tokens among all that the other one takes.
        calls: what kernels are called with. The own step's cover every query row.
        window: 0, or the number of :attr:`RingSchedule.windows` that have come.
    """

    own: bool
    takes: tuple[Piece, ...]
    comes: tuple[Piece, ...]
    gives: tuple[Piece, ...]
    given_at: tuple[int, ...]
    calls: tuple[KernelCall, ...]
    window: int = 0

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
        if self.window:
            keys = f"window {self.window}, {'held' if self.own else keys}"
        gives = f", gives {' '.join(map(str, self.gives))}" if self.gives else ""
        return f"{keys}: {work}{gives}"


@dataclass(frozen=True)
class RingSchedule:
    """All steps of one ring rank. Every rank of the ring has as many in which keys travel.

    Args:
        steps: forward.
        backward_steps: backward.
        most_owned: most tokens that any rank of the ring owns.
        most_taken_anywhere: most tokens that any rank of the ring takes in one step.
        most_mixed_anywhere: most tokens of a step, on any rank, in which its own lie among them.
        windows: what crosses the network, in order; none where blocks go straight to their users.
    """

    ring_rank: int
    ring_degree: int
    steps: tuple[RingStep, ...]
    backward_steps: tuple[RingStep, ...]
    most_owned: int
    most_taken_anywhere: int
    most_mixed_anywhere: int = 0
    windows: tuple[Window, ...] = ()

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

    @cached_property
    def packed(self) -> Runs:
        """Of what this rank owns, what it packs: what others take of it, forward or backward, and
        what lies among theirs in a step. Short gaps are packed too."""
        steps = [step for step in (*self.steps, *self.backward_steps) if not step.window]
        taken = [piece for step in steps for piece in step.gives]
        taken += [piece for window in self.windows for piece in window.gives]
        mixed = [piece for step in steps if not step.own for piece in step.comes]
        taken += [piece for piece in mixed if piece.rank == self.ring_rank]
        runs = ((piece.start, piece.stop) for piece in taken)
        return united(runs, least_gap(self.most_owned))

    def __str__(self) -> str:
        head = f"ring rank {self.ring_rank} of {self.ring_degree}, {self.pairs} pairs"
        far = (f"window {at} {each}" for at, each in enumerate(self.windows, 1))
        return "\n  ".join([head, *far, *map(str, self.steps)])


@lru_cache(maxsize=64)
def ring_schedule(
    layout: TokenLayout,
    mask: MaskSpec,
    ring_rank: int,
    support: TileSupport = ANY_BAND,
    gather: bool = False,
    place: Place = "alone",
    kv_layout: TokenLayout | None = None,
    inner: int | None = None,
) -> RingSchedule:
    """Plan one rank's steps.

    Block by block: the own one first, while the next one comes; offsets at which no rank has work
    are not visited. A window shortens the ring and sends only the tokens at the border; of a block
    that a causal mask half hides only the visible half travels.

    Args:
        gather: the blocks of all other ranks of a node in one step: fewer, larger kernel calls and
            fewer sums over steps, for memory that grows with the ring.
        place: of this part among the parts of the heads. ``"alone"``: nothing else is computed
            while its blocks travel. The own block's backward is then cut in two, so that its
            first part hides the first block's arrival and its last part the way home of the last
            gradients; and of gathered blocks one comes first, which hides the others' arrival.
            ``"first"``: only the own block hides the arrival. ``"later"``: the part before hides
            it, so the own block is computed together with gathered ones where that takes fewer
            kernel calls: they are larger, and there are fewer sums. ``"last"``: backward the
            part before hides the arrival, but only the own block the way home: it ends the part,
            except in a double ring.
        kv_layout: where the keys are, if they are of another sequence than the queries.
        inner: ring ranks of a node: a double ring, whose blocks cross the network once for
            all of them (see :mod:`ds_usp.geometry.double_ring`). None: blocks go straight to their
            users.

    Raises:
        LayoutError: no such rank.
        ConfigError: ``inner`` does not divide the ring.
    """
    if place == "last":
        plan = ring_schedule(layout, mask, ring_rank, support, gather, "first", kv_layout, inner)
        own, *others = plan.steps
        return plan if plan.windows else replace(plan, backward_steps=(*others, own))
    rings = Rings(layout, kv_layout or layout, mask, inner)
    own = _own_step(rings, ring_rank, support)
    useful = [offset for offset in rings.offsets(0) if offset]
    visits = [[offset] for offset in useful]
    if gather:
        visits = [useful[:1], useful[1:]] if place == "alone" else [useful]
    visits = [visit for visit in visits if visit]
    near = tuple(_step(rings, ring_rank, visit, support) for visit in visits)
    windows, far = _later_windows(rings, ring_rank, support, gather)
    steps = backward = (own, *near, *far)
    if len(steps) > 1 and place == "alone":
        length = layout.ring_length(ring_rank)
        first, last = (
            _own_step(rings, ring_rank, support, rows)
            for rows in ((0, length // 2), (length // 2, length))
        )
        backward = (first, *near, *far, last)
    ranks, most_mixed = range(layout.ring), 0
    if gather and place == "later" and near:
        most_mixed = _most_mixed(rings, useful, support)
        if whole := _mixed(rings, ring_rank, useful, support, (own, near[0])):
            steps = backward = (whole, *far)
    return RingSchedule(
        ring_rank,
        layout.ring,
        steps,
        backward,
        max(map(rings.keys.ring_length, ranks)),
        max((_columns(rings, rank, visit) for visit in visits for rank in ranks), default=0),
        most_mixed,
        windows,
    )


def _later_windows(
    rings: Rings, ring_rank: int, support: TileSupport, gather: bool
) -> tuple[tuple[Window, ...], tuple[RingStep, ...]]:
    """The windows after the first of which anybody sees anything, and their steps."""
    windows: list[Window] = []
    steps: list[RingStep] = []
    for window in rings.windows[1:]:
        offsets = rings.offsets(window)
        if not offsets:
            continue
        windows.append(rings.window(ring_rank, window))
        others = [offset for offset in offsets if offset]
        visits = [others] if gather and others else [[offset] for offset in others]
        # What this rank holds comes first, seen or not: it hides the first of the others.
        found = [_own_step(rings, ring_rank, support, window=window)]
        found += [_step(rings, ring_rank, visit, support, window) for visit in visits]
        steps += [replace(step, window=len(windows)) for step in found]
    return tuple(windows), tuple(steps)


def _columns(rings: Rings, rank: int, offsets: Sequence[int]) -> int:
    """Tokens that a rank takes in a step of window 0."""
    return sum(piece.length for piece, _ in rings.taken(rank, 0, offsets))


def _own_step(
    rings: Rings,
    ring_rank: int,
    support: TileSupport,
    rows: tuple[int, int] | None = None,
    window: int = 0,
) -> RingStep:
    """What this rank holds itself, for all query rows or for some."""
    queries = rings.queries.ring_segments(ring_rank)
    rows = rows or (0, rings.queries.ring_length(ring_rank))
    keys = rings.held_segments(ring_rank, window)
    takes, comes = _pieces(rings, ring_rank, window, [0])
    return RingStep(True, takes, comes, (), (), _calls(queries, keys, rings.mask, support, rows))


def _step(
    rings: Rings,
    ring_rank: int,
    offsets: Sequence[int],
    support: TileSupport,
    window: int = 0,
) -> RingStep:
    """What the ranks some offsets before this one in its node hold; offset 0 is this rank
    itself."""
    takes, comes = _pieces(rings, ring_rank, window, offsets)
    users = sorted(rings.near(ring_rank, -offset) for offset in offsets)
    gives, given_at = [], []
    for user in users:
        if user == ring_rank:
            continue
        at = 0
        for holder, start, stop in _pieces(rings, user, window, offsets)[1]:
            if holder == ring_rank:
                gives.append(Piece(user, start, stop))
                given_at.append(at)
            at += stop - start
    keys = tuple(
        segment
        for owner, start, stop in takes
        for segment in cut(rings.keys.ring_segments(owner), start, stop)
    )
    calls = _calls(rings.queries.ring_segments(ring_rank), keys, rings.mask, support)
    return RingStep(False, takes, comes, tuple(gives), tuple(given_at), calls)


def _mixed(
    rings: Rings,
    rank: int,
    offsets: Sequence[int],
    support: TileSupport,
    apart: tuple[RingStep, RingStep],
) -> RingStep | None:
    """What a rank holds itself and what the ranks some offsets before it hold, in one step; None if
    that takes as many kernel calls as the two apart."""
    if not apart[1].takes:
        return None
    whole = _step(rings, rank, [*offsets, 0], support)
    return whole if len(whole.calls) < sum(len(step.calls) for step in apart) else None


def _most_mixed(rings: Rings, offsets: Sequence[int], support: TileSupport) -> int:
    """Most columns of such a step on any rank. Of documents, of which every batch has others, and
    in large rings a bound: every rank would plan for all too long."""
    ranks = range(rings.queries.ring)
    if rings.mask.documents or len(ranks) > _RING_OF_A_HOST:
        return max(_columns(rings, rank, [*offsets, 0]) for rank in ranks)
    most = 0
    for rank in ranks:
        apart = _own_step(rings, rank, support), _step(rings, rank, offsets, support)
        if whole := _mixed(rings, rank, offsets, support, apart):
            most = max(most, whole.columns)
    return most


def _pieces(
    rings: Rings, rank: int, window: int, offsets: Sequence[int]
) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """What a rank takes, by owner, and by holder."""
    found = rings.taken(rank, window, offsets)
    return tuple(piece for piece, _ in found), tuple(piece for _, piece in found)


def _calls(
    queries: Sequence[Segment],
    keys: Sequence[Segment],
    mask: MaskSpec,
    support: TileSupport,
    rows: tuple[int, int] | None = None,
) -> tuple[KernelCall, ...]:
    """The kernel calls for all queries or for some rows of them, the largest first: it hides what
    other ranks are waited for after the first call."""
    shard, columns = (sum(each.length for each in segments) for segments in (queries, keys))
    start, stop = rows or (0, shard)
    some = cut(queries, start, stop) if rows else queries
    tiles = [
        [tile.shifted(start, 0) for tile in found] if start else found
        for sample in range(max(1, len(mask.documents)))
        for found in [plan_tiles(some, keys, mask, support, sample)]
    ]
    if mask.documents:
        found = calls_of(tiles, stop - start, columns)
    else:
        found = tuple(map(KernelCall.of, tiles[0]))
    return tuple(sorted(found, key=lambda call: -call.pairs))
