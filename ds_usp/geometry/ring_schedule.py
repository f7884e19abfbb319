"""The steps of the ring as data: what a rank computes, what comes to it and what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from ds_usp.geometry.double_ring import DoubleRing, OuterStep, TokenRange
from ds_usp.geometry.kernel_calls import KernelCall, kernel_calls_from_tiles
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.segments import Segment, slice_segments
from ds_usp.geometry.tiles import ANY_BAND, TileSupport, plan_tiles
from ds_usp.geometry.visibility import Runs, merge_runs, min_gap

ChunkPosition = Literal["only", "local_first", "local_merged", "local_last"]
_MAX_RING_PLANNED_FOR_ALL = 8


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

    is_local: bool
    kv_ranges: tuple[TokenRange, ...]
    recv_ranges: tuple[TokenRange, ...]
    send_ranges: tuple[TokenRange, ...]
    peer_offsets: tuple[int, ...]
    calls: tuple[KernelCall, ...]
    outer_step: int = 0

    @property
    def num_kv_tokens(self) -> int:
        """Key tokens."""
        return sum(token_range.length for token_range in self.kv_ranges)

    @property
    def num_sent_tokens(self) -> int:
        """Tokens that leave, as often as they do."""
        return sum(token_range.length for token_range in self.send_ranges)

    @property
    def pairs(self) -> int:
        """(query, key) pairs computed in this step, of all samples that have their own."""
        return sum(call.pairs for call in self.calls)

    def __str__(self) -> str:
        work = "; ".join(map(str, self.calls)) or "nothing"
        keys = "own" if self.is_local else f"of {' '.join(map(str, self.kv_ranges)) or 'nobody'}"
        if self.outer_step:
            keys = f"window {self.outer_step}, {'held' if self.is_local else keys}"
        send_ranges = f", gives {' '.join(map(str, self.send_ranges))}" if self.send_ranges else ""
        return f"{keys}: {work}{send_ranges}"


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
    max_local_tokens: int
    max_recv_tokens: int
    max_merged_tokens: int = 0
    outer_steps: tuple[OuterStep, ...] = ()

    @property
    def pairs(self) -> int:
        """(query, key) pairs that this rank computes."""
        return sum(step.pairs for step in self.steps)

    @property
    def max_recv_per_step(self) -> int:
        """Most tokens of others that come here in one step."""
        return max(
            (
                sum(
                    token_range.length
                    for token_range in step.kv_ranges
                    if token_range.rank != self.ring_rank
                )
                for step in self.steps
            ),
            default=0,
        )

    @property
    def max_sent_per_step(self) -> int:
        """Tokens whose gradients come back from one step: what a buffer must hold."""
        return max(step.num_sent_tokens for step in self.steps)

    @cached_property
    def packed_runs(self) -> Runs:
        """Of what this rank owns, what it packs: what others take of it, forward or backward, and
        what lies among theirs in a step. Short gaps are packed too."""
        steps = [step for step in (*self.steps, *self.backward_steps) if not step.outer_step]
        taken = [token_range for step in steps for token_range in step.send_ranges]
        taken += [
            token_range for outer_step in self.outer_steps for token_range in outer_step.send_ranges
        ]
        mixed = [
            token_range for step in steps if not step.is_local for token_range in step.recv_ranges
        ]
        taken += [token_range for token_range in mixed if token_range.rank == self.ring_rank]
        runs = ((token_range.start, token_range.stop) for token_range in taken)
        return merge_runs(runs, min_gap(self.max_local_tokens))

    def __str__(self) -> str:
        head = f"ring rank {self.ring_rank} of {self.ring_degree}, {self.pairs} pairs"
        outer_ring_steps = (f"window {at} {each}" for at, each in enumerate(self.outer_steps, 1))
        return "\n  ".join([head, *outer_ring_steps, *map(str, self.steps)])


@lru_cache(maxsize=64)
def ring_schedule(
    layout: TokenLayout,
    mask: MaskSpec,
    ring_rank: int,
    support: TileSupport = ANY_BAND,
    gather: bool = False,
    position: ChunkPosition = "only",
    kv_layout: TokenLayout | None = None,
    inner: int | None = None,
) -> RingSchedule:
    """Plan one rank's steps.

    Stepwise: the local block first, while the next one is received; offsets at which no rank has
    work are skipped. A window shortens the ring and sends only the tokens at the border; of a block
    that a causal mask half hides only the visible half is sent.

    Args:
        gather: all-gathered KV: the blocks of all other ranks of a node in one step. Fewer, larger
            kernel calls and fewer merges of partial results, for memory that grows with the ring.
        position: of this head chunk among the chunks of a call. ``"only"``: nothing else is
            computed while its blocks are in flight. The local block's backward is then split in
            two, so that its first half overlaps the first receive and its second half the return
            of the last gradients; and of all-gathered blocks one is received first, which overlaps
            the others. ``"local_first"``: only the local block overlaps the receive.
            ``"local_merged"``: the previous chunk overlaps it, so the local block is computed
            together with the all-gathered ones where that takes fewer kernel calls: they are
            larger, and there are fewer merges. ``"local_last"``: backward the previous chunk
            overlaps the receive, but only the local block the gradient return: it ends the chunk,
            except in a double ring.
        kv_layout: where the keys are, if they are of another sequence than the queries.
        inner: ring ranks of a node: a double ring, whose blocks cross the network once for
            all of them (see :mod:`ds_usp.geometry.double_ring`). None: blocks go straight to their
            users.

    Raises:
        LayoutError: no such rank.
        ConfigError: ``inner`` does not divide the ring.
    """
    if position == "local_last":
        plan = ring_schedule(
            layout, mask, ring_rank, support, gather, "local_first", kv_layout, inner
        )
        own, *others = plan.steps
        return plan if plan.outer_steps else replace(plan, backward_steps=(*others, own))
    ring = DoubleRing(layout, kv_layout or layout, mask, inner)
    own = _local_step(ring, ring_rank, support)
    useful = [offset for offset in ring.offsets(0) if offset]
    visits = [[offset] for offset in useful]
    if gather:
        visits = [useful[:1], useful[1:]] if position == "only" else [useful]
    visits = [visit for visit in visits if visit]
    inner_steps = tuple(_step(ring, ring_rank, visit, support) for visit in visits)
    outer_steps, outer_ring_steps = _outer_steps(ring, ring_rank, support, gather)
    steps = backward = (own, *inner_steps, *outer_ring_steps)
    if len(steps) > 1 and position == "only":
        length = layout.ring_length(ring_rank)
        first, last = (
            _local_step(ring, ring_rank, support, rows)
            for rows in ((0, length // 2), (length // 2, length))
        )
        backward = (first, *inner_steps, *outer_ring_steps, last)
    ranks, max_merged = range(layout.ring), 0
    if gather and position == "local_merged" and inner_steps:
        max_merged = _max_merged_tokens(ring, useful, support)
        if whole := _merged_local_step(ring, ring_rank, useful, support, (own, inner_steps[0])):
            steps = backward = (whole, *outer_ring_steps)
    return RingSchedule(
        ring_rank,
        layout.ring,
        steps,
        backward,
        max(map(ring.keys.ring_length, ranks)),
        max((_num_kv_tokens(ring, rank, visit) for visit in visits for rank in ranks), default=0),
        max_merged,
        outer_steps,
    )


def _outer_steps(
    ring: DoubleRing, ring_rank: int, support: TileSupport, gather: bool
) -> tuple[tuple[OuterStep, ...], tuple[RingStep, ...]]:
    """The windows after the first of which anybody sees anything, and their steps."""
    outer_steps: list[OuterStep] = []
    steps: list[RingStep] = []
    for outer_step in ring.outer_steps[1:]:
        offsets = ring.offsets(outer_step)
        if not offsets:
            continue
        outer_steps.append(ring.outer_step(ring_rank, outer_step))
        others = [offset for offset in offsets if offset]
        visits = [others] if gather and others else [[offset] for offset in others]
        # What this rank holds comes first, seen or not: it hides the first of the others.
        found = [_local_step(ring, ring_rank, support, outer_step=outer_step)]
        found += [_step(ring, ring_rank, visit, support, outer_step) for visit in visits]
        steps += [replace(step, outer_step=len(outer_steps)) for step in found]
    return tuple(outer_steps), tuple(steps)


def _num_kv_tokens(ring: DoubleRing, rank: int, offsets: Sequence[int]) -> int:
    """Tokens that a rank takes in a step of window 0."""
    return sum(token_range.length for token_range, _ in ring.recv_ranges(rank, 0, offsets))


def _local_step(
    ring: DoubleRing,
    ring_rank: int,
    support: TileSupport,
    rows: tuple[int, int] | None = None,
    outer_step: int = 0,
) -> RingStep:
    """What this rank holds itself, for all query rows or for some."""
    queries = ring.queries.ring_segments(ring_rank)
    rows = rows or (0, ring.queries.ring_length(ring_rank))
    keys = ring.relayed_segments(ring_rank, outer_step)
    kv_ranges, recv_ranges = _token_ranges(ring, ring_rank, outer_step, [0])
    return RingStep(
        True, kv_ranges, recv_ranges, (), (), _calls(queries, keys, ring.mask, support, rows)
    )


def _step(
    ring: DoubleRing,
    ring_rank: int,
    offsets: Sequence[int],
    support: TileSupport,
    outer_step: int = 0,
) -> RingStep:
    """What the ranks some offsets before this one in its node hold; offset 0 is this rank
    itself."""
    kv_ranges, recv_ranges = _token_ranges(ring, ring_rank, outer_step, offsets)
    users = sorted(ring.inner_peer(ring_rank, -offset) for offset in offsets)
    send_ranges, peer_offsets = [], []
    for user in users:
        if user == ring_rank:
            continue
        at = 0
        for holder, start, stop in _token_ranges(ring, user, outer_step, offsets)[1]:
            if holder == ring_rank:
                send_ranges.append(TokenRange(user, start, stop))
                peer_offsets.append(at)
            at += stop - start
    keys = tuple(
        segment
        for owner, start, stop in kv_ranges
        for segment in slice_segments(ring.keys.ring_segments(owner), start, stop)
    )
    calls = _calls(ring.queries.ring_segments(ring_rank), keys, ring.mask, support)
    return RingStep(False, kv_ranges, recv_ranges, tuple(send_ranges), tuple(peer_offsets), calls)


def _merged_local_step(
    ring: DoubleRing,
    rank: int,
    offsets: Sequence[int],
    support: TileSupport,
    separate_steps: tuple[RingStep, RingStep],
) -> RingStep | None:
    """What a rank holds itself and what the ranks some offsets before it hold, in one step; None if
    that takes as many kernel calls as the two apart."""
    if not separate_steps[1].kv_ranges:
        return None
    whole = _step(ring, rank, [*offsets, 0], support)
    return whole if len(whole.calls) < sum(len(step.calls) for step in separate_steps) else None


def _max_merged_tokens(ring: DoubleRing, offsets: Sequence[int], support: TileSupport) -> int:
    """Most columns of such a step on any rank. Of documents, of which every batch has others, and
    in large rings a bound: every rank would plan for all too long."""
    ranks = range(ring.queries.ring)
    if ring.mask.documents or len(ranks) > _MAX_RING_PLANNED_FOR_ALL:
        return max(_num_kv_tokens(ring, rank, [*offsets, 0]) for rank in ranks)
    most = 0
    for rank in ranks:
        separate_steps = _local_step(ring, rank, support), _step(ring, rank, offsets, support)
        if whole := _merged_local_step(ring, rank, offsets, support, separate_steps):
            most = max(most, whole.num_kv_tokens)
    return most


def _token_ranges(
    ring: DoubleRing, rank: int, outer_step: int, offsets: Sequence[int]
) -> tuple[tuple[TokenRange, ...], tuple[TokenRange, ...]]:
    """What a rank takes, by owner, and by holder."""
    found = ring.recv_ranges(rank, outer_step, offsets)
    return tuple(token_range for token_range, _ in found), tuple(
        token_range for _, token_range in found
    )


def _calls(
    queries: Sequence[Segment],
    keys: Sequence[Segment],
    mask: MaskSpec,
    support: TileSupport,
    rows: tuple[int, int] | None = None,
) -> tuple[KernelCall, ...]:
    """The kernel calls for all queries or for some rows of them, the largest first: it hides what
    other ranks are waited for after the first call."""
    shard, num_kv_tokens = (sum(each.length for each in segments) for segments in (queries, keys))
    start, stop = rows or (0, shard)
    some = slice_segments(queries, start, stop) if rows else queries
    tiles = [
        [tile.shifted(start, 0) for tile in found] if start else found
        for sample in range(max(1, len(mask.documents)))
        for found in [plan_tiles(some, keys, mask, support, sample)]
    ]
    if mask.documents:
        found = kernel_calls_from_tiles(tiles, stop - start, num_kv_tokens)
    else:
        found = tuple(map(KernelCall.of, tiles[0]))
    return tuple(sorted(found, key=lambda call: -call.pairs))
