"""The steps of ring attention as data: what a rank receives, computes and sends in each. Each rank
plans its own for a new call (``attention/plan.py``); the planner counts what they send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_traffic import Ring, TokenRange, merge_runs, min_gap, total_length
from ds_usp.geometry.segments import Runs, Segment, slice_segments
from ds_usp.geometry.tiles import (
    ANY_BAND,
    KernelCall,
    TileSupport,
    kernel_calls_from_tiles,
    plan_tiles,
)

# Note [blocks go from owner to user, gradients from user to owner]
#
# A ring that relays (rank 0 -> 1 -> 2 -> 3 -> 0) carries every block past every rank. Here a step
# is a permutation of direct messages between owners and users:
#
#   step 1   0 -> 1   1 -> 2   2 -> 3   3 -> 0        each to the rank one further
#   step 2   0 -> 2   1 -> 3   2 -> 0   3 -> 1        two further: not over the one between
#
# On one switch a message to any rank costs the same, and a user takes only the tokens that its
# queries see: 3/4 of the bytes of relayed KV under a causal zigzag. An offset at which no rank sees
# anything has no step at all, so a window shortens the ring, and the border is all that it sends.
#
# dK/dV that went around with the block would be a running sum: a rank could send only after its own
# kernel and after the message from the rank before, and the sum would travel in fp32 or be rounded
# at each hop. Sent straight to the owner in the kernel's dtype, each is one message under the next
# step's kernel, the sum is fp32 at the owner, and only the last step's gradients are exposed.
#
# Note [where the local block is computed]
#
# This block needs no exchange and hides one; which one needs that depends on the chunks around:
#
#   only          [half][remote][half]   backward: nothing else hides the first receive and the last
#                                        return of dK/dV. Of all-gathered blocks one comes first, in
#                                        a step of its own, to hide the others
#   local_first   [local][remote]        no chunk before, or one too small to hide the receive
#   local_merged  [local + remote]       the chunk before is large enough. All-gathered, and where
#                                        that saves kernel calls: larger ones, fewer merges
#   local_last    [remote][local]        backward's last chunk: no chunk after it hides the return
#                                        of its dK/dV
ChunkPosition = Literal["only", "local_first", "local_merged", "local_last"]
# Ranks of the largest ring for which every rank plans the merged steps of all.
_MAX_RING_PLANNED_FOR_ALL = 8


@dataclass(frozen=True, slots=True)
class RingStep:
    """Attention of this rank's queries with the keys and values of one rank, or of several.

    Args:
        is_local: the keys are all of this rank's own, in place; nothing is exchanged.
        kv_ranges: whose tokens the keys are, in the buffer's order. This rank's own may come last
            among those of others; only the others' are received.
        send_ranges: tokens that this rank sends in this step, and their receivers.
        peer_offsets: for each of ``send_ranges``, the index of its first token among all that its
            receiver gets.
        calls: the kernel calls. Those of the local step, or of its two halves, cover every row.

    Attributes:
        num_kv_tokens: key tokens.
        num_sent_tokens: tokens sent; one that several ranks receive counts for each of them.
    """

    is_local: bool
    kv_ranges: tuple[TokenRange, ...]
    send_ranges: tuple[TokenRange, ...]
    peer_offsets: tuple[int, ...]
    calls: tuple[KernelCall, ...]
    num_kv_tokens: int = field(init=False, compare=False, repr=False)
    num_sent_tokens: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_tokens", total_length(self.kv_ranges))
        object.__setattr__(self, "num_sent_tokens", total_length(self.send_ranges))

    @property
    def pairs(self) -> int:
        """(query, key) pairs, of one sample where all have the same tiles, else of all samples."""
        return sum(call.pairs for call in self.calls)

    def __str__(self) -> str:
        work = "; ".join(map(str, self.calls)) or "nothing"
        ranges = " ".join(map(str, self.kv_ranges)) or "no rank"
        keys = "local" if self.is_local else f"from {ranges}"
        sends = f", sends {' '.join(map(str, self.send_ranges))}" if self.send_ranges else ""
        return f"{keys}: {work}{sends}"


@dataclass(frozen=True)
class RingSchedule:
    """All steps of one ring rank. Every rank of the ring has equally many that exchange keys, and
    the same maxima, by which all size their staging buffers.

    Args:
        ring_rank, ring_degree: the rank, and how many the ring has.
        steps, backward_steps: of the forward and of the backward pass.
        max_local_tokens: most key tokens that any rank of the ring has.
        max_recv_tokens: most tokens that any rank of the ring receives in one step.
        max_merged_tokens: most key tokens, on any rank, of a step with the rank's own among them.
    """

    ring_rank: int
    ring_degree: int
    steps: tuple[RingStep, ...]
    backward_steps: tuple[RingStep, ...]
    max_local_tokens: int
    max_recv_tokens: int
    max_merged_tokens: int = 0

    @property
    def pairs(self) -> int:
        return sum(step.pairs for step in self.steps)

    @cached_property
    def packed_runs(self) -> Runs:
        """The runs of this rank's own tokens that it packs: what it sends, forward or backward, and
        what a step has among others' tokens. Short gaps are packed too."""
        steps = (*self.steps, *self.backward_steps)
        packed = [sent for step in steps for sent in step.send_ranges]
        merged = (kv for step in steps if not step.is_local for kv in step.kv_ranges)
        packed += [kv for kv in merged if kv.rank == self.ring_rank]
        runs = ((start, stop) for _, start, stop in packed)
        return merge_runs(runs, min_gap(self.max_local_tokens))

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
    position: ChunkPosition = "only",
    kv_layout: TokenLayout | None = None,
) -> RingSchedule:
    """Plan one rank's steps. An attention call combines the ``steps`` of one position with the
    ``backward_steps`` of another.

    Args:
        layout, mask: of the queries, equal on all ranks; ``ring_rank``: whose steps.
        support: what the kernel computes in one call, as of :func:`plan_tiles`.
        gather: all-gathered KV: the blocks of all other ranks in one step.
        position: of this head chunk among the chunks of a call (the note above).
        kv_layout: where the keys are, if they are of another sequence than the queries.

    Raises:
        LayoutError: no such rank.
    """
    ring = Ring(layout, kv_layout or layout, mask)
    local = _local_step(ring, ring_rank, support)
    useful = ring.offsets()
    visits: list[tuple[int, ...]] = [(offset,) for offset in useful]
    if gather:
        visits = [useful[:1], useful[1:]] if position == "only" else [useful]
    visits = [offsets for offsets in visits if offsets]
    remote = [_remote_step(ring, ring_rank, offsets, support) for offsets in visits]
    steps = backward = (local, *remote)
    if len(steps) > 1 and position == "only":
        rows = ring.queries.ring_length(ring_rank)
        half = _half(ring.queries.ring_segments(ring_rank))
        first, last = (
            _local_step(ring, ring_rank, support, part) for part in ((0, half), (half, rows))
        )
        backward = (first, *remote, last)
    elif position == "local_last":
        backward = (*remote, local)
    max_merged = 0
    if gather and position == "local_merged" and remote:
        max_merged = _max_merged_tokens(ring, useful, support)
        merged = _merged_local_step(ring, ring_rank, useful, support, (local, remote[0]))
        if merged:
            steps = backward = (merged,)
    ranks = range(ring.degree)
    return RingSchedule(
        ring_rank,
        ring.degree,
        steps,
        backward,
        max(map(ring.keys.ring_length, ranks)),
        max((_num_recv_tokens(ring, rank, visit) for visit in visits for rank in ranks), default=0),
        max_merged,
    )


def _half(queries: Sequence[Segment]) -> int:
    """The row at which a shard is cut in two. Of an odd length the first half is longer where that
    ends a segment: remote steps begin there too, and a row between would be merged by itself."""
    ends = list(accumulate(x.length for x in queries))
    half, odd = divmod(ends[-1], 2)
    return half + 1 if odd and half + 1 in ends else half


def _num_recv_tokens(ring: Ring, rank: int, offsets: Sequence[int]) -> int:
    return total_length(ring.kv_ranges(rank, offsets))


def _local_step(
    ring: Ring, ring_rank: int, support: TileSupport, rows: tuple[int, int] | None = None
) -> RingStep:
    """The step with this rank's own keys, for all query rows or for some."""
    queries = ring.queries.ring_segments(ring_rank)
    calls = _calls(queries, ring.keys.ring_segments(ring_rank), ring.mask, support, rows)
    return RingStep(True, ring.kv_ranges(ring_rank, [0]), (), (), calls)


def _remote_step(
    ring: Ring, ring_rank: int, offsets: Sequence[int], support: TileSupport
) -> RingStep:
    """The step with the keys of this rank's peers at some offsets; offset 0 is the rank itself."""
    kv_ranges = ring.kv_ranges(ring_rank, offsets)
    send_ranges, peer_offsets = [], []
    for user in sorted({(ring_rank + offset) % ring.degree for offset in offsets} - {ring_rank}):
        peer_offset = 0
        for owner, start, stop in ring.kv_ranges(user, offsets):
            if owner == ring_rank:
                send_ranges.append(TokenRange(user, start, stop))
                peer_offsets.append(peer_offset)
            peer_offset += stop - start
    keys = [
        segment
        for owner, start, stop in kv_ranges
        for segment in slice_segments(ring.keys.ring_segments(owner), start, stop)
    ]
    calls = _calls(ring.queries.ring_segments(ring_rank), keys, ring.mask, support)
    return RingStep(False, kv_ranges, tuple(send_ranges), tuple(peer_offsets), calls)


def _merged_local_step(
    ring: Ring,
    rank: int,
    offsets: Sequence[int],
    support: TileSupport,
    separate_steps: tuple[RingStep, RingStep],
) -> RingStep | None:
    """A rank's own keys and its peers' in one step, in the place of ``separate_steps``, the local
    and the remote one; None if that saves no kernel call."""
    if not separate_steps[1].kv_ranges:
        return None
    merged = _remote_step(ring, rank, [*offsets, 0], support)
    return merged if len(merged.calls) < sum(len(step.calls) for step in separate_steps) else None


def _max_merged_tokens(ring: Ring, offsets: Sequence[int], support: TileSupport) -> int:
    """Most key tokens of a merged step on any rank; 0 without one. An upper bound with documents,
    which are others in each batch, and in large rings, where planning for all takes too long."""
    ranks = range(ring.degree)
    if ring.mask.documents or len(ranks) > _MAX_RING_PLANNED_FOR_ALL:
        return max(_num_recv_tokens(ring, rank, [*offsets, 0]) for rank in ranks)
    merged_steps = (
        _merged_local_step(
            ring,
            rank,
            offsets,
            support,
            (_local_step(ring, rank, support), _remote_step(ring, rank, offsets, support)),
        )
        for rank in ranks
    )
    return max((step.num_kv_tokens for step in merged_steps if step), default=0)


def _calls(
    queries: Sequence[Segment],
    keys: Sequence[Segment],
    mask: MaskSpec,
    support: TileSupport,
    rows: tuple[int, int] | None = None,
) -> tuple[KernelCall, ...]:
    """The kernel calls for all queries or some rows of them, the largest first: it overlaps the
    exchanges that are waited for after the first call."""
    num_queries, num_keys = (sum(x.length for x in segments) for segments in (queries, keys))
    start, stop = rows or (0, num_queries)
    queries = slice_segments(queries, start, stop)
    tiles = [
        [tile.shifted(start, 0) for tile in plan_tiles(queries, keys, mask, support, sample)]
        for sample in range(max(1, len(mask.documents)))
    ]
    if mask.documents:
        calls = kernel_calls_from_tiles(tiles, stop - start, num_keys)
    else:
        calls = tuple(map(KernelCall.of, tiles[0]))
    return tuple(sorted(calls, key=lambda call: -call.pairs))
