"""All-to-all between heads and sequence among the Ulysses ranks, packed into one exchange.

``attention/validation.py`` plans the exchanges of a new shape, ``passes.py`` and ``functional.py``
run them in each forward and backward pass. Only posting communicates. Letters of the shapes: B
batch, s tokens of one rank, S tokens of the ring rank (all Ulysses ranks of it), H heads of a
tensor, h heads that one Ulysses rank computes, D head dim. All but B may differ from tensor to
tensor (q, k, v).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from math import prod
from typing import cast

import torch
import torch.distributed as dist

from ds_usp.comm.channel import NO_RANGE, PendingExchange, exchange_range, profiler_enabled
from ds_usp.comm.fused_exchange import FusedExchange
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.packing import DeferredSum, PreallocatedSend, copy_or_sum_into
from ds_usp.comm.uniform_all_to_all import CopyEngineAllToAll, UniformAllToAll
from ds_usp.geometry.layout import Run, TokenLayout, TokenSlices

HeadRanges = tuple[tuple[int, int], ...]  # by Ulysses rank, half-open
Slices = Sequence[Sequence[torch.Tensor]]  # for or from each Ulysses rank


# What the exchange does, on Ulysses 2 with 4 heads. Before it a rank holds all heads of half the
# tokens, after it half the heads of all tokens; attention is exact on either half alone.
#
#              heads 0 1 2 3                       heads 0 1 2 3
#     tokens   r0 r0 r0 r0        to heads ->      r0 r0 r1 r1
#              r1 r1 r1 r1        <- to sequence   r0 r0 r1 r1
#
# q, k and v go in one exchange: a message costs its latency once, and NCCL reaches the rate of the
# links for large messages only. Two ways lead there. Where all ranks use equally many heads of
# tokens that lie in one or two slices a rank, one dense buffer is packed, on GPUs by one kernel
# (UniformAllToAll). Else (6 heads on 4 ranks, KV heads shared by ranks, joint tokens) the slices
# are copied one by one here: slower, and right for any ranges and runs. A short call, which the
# host's work decides, may take a third: FlashInfer's kernel, once a tensor (FusedExchange).
@dataclass(frozen=True)
class HeadAllToAll:
    """The Ulysses all-to-all of some tensors (q, k, v) within one ring rank: what posts is
    collective over its Ulysses ranks.

    Args:
        mesh: the process groups.
        layouts: for each tensor, where its tokens are.
        ranges: for each tensor, the half-open head range that each Ulysses rank uses. Ranges may
            overlap: such a head goes to each of its users, and their results are summed (in fp32)
            on the way back.
        copies: use copy engines where all ranks use equally many heads.
        fused: use FlashInfer's kernel where the ranks have equal shares of all heads and tokens.
    """

    mesh: SequenceMesh
    layouts: tuple[TokenLayout, ...]
    ranges: tuple[HeadRanges, ...]
    copies: bool = False
    fused: bool = False

    def to_heads(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All tokens of the ring rank for this rank's heads: ``[B, s, H, D] -> [B, S, h, D]``. The
        results may be views, dense in their features, of one tensor."""
        return self.post_to_heads(tensors, overlapped=False).wait()

    def to_sequence(
        self, sources: Sequence[torch.Tensor | DeferredSum], outs: Sequence[torch.Tensor]
    ) -> None:
        """All heads of the exchange for this rank's tokens: ``[B, S, h, D] -> [B, s, H, D]``.

        Args:
            sources: tensors, or deferred sums, which are written to the send buffer directly.
            outs: ``[B, s, H, D]``, whose heads of the exchange are written. Where ranges overlap
                all heads are written, so the exchange must have all heads of the tensor.
        """
        self.post_to_sequence(sources, outs, overlapped=False).wait()

    def post_to_heads(
        self, tensors: Sequence[torch.Tensor], *, overlapped: bool = True
    ) -> PendingExchange:
        """Start :meth:`to_heads` of tensors of one dtype and device: callers check it, as others
        would be cast to the first's. On one Ulysses rank results are views of the tensors;
        ``overlapped`` as of :meth:`P2PChannel.post`, for copy engines alone."""
        if self.is_fused:
            with self._count_fused(tensors):
                return PendingExchange(partial(tuple, self._fused.to_heads(tensors)))
        if self._uniform is not None:
            return self._uniform.post_to_heads(tensors, self._all_to_all, overlapped=overlapped)
        ranks = range(self.mesh.ulysses_degree)
        if len(ranks) == 1:
            views = []
            for x, ((first, stop),) in zip(tensors, self.ranges, strict=True):
                views.append(x if stop - first == x.shape[2] else x[:, :, first:stop])
            return PendingExchange(partial(tuple, views))
        outs = []
        for x, layout, heads in zip(tensors, self.layouts, self.local_heads, strict=True):
            tokens = layout.ring_length(self.mesh.ring_rank)
            outs.append(x.new_empty(x.shape[0], tokens, heads, x.shape[3]))
        sends = [self._sequence_slices(tensors, rank) for rank in ranks]
        recvs = [self._head_slices(outs, rank) for rank in ranks]
        work, received = self._exchange(sends, recvs)

        def unpack() -> tuple[torch.Tensor, ...]:
            _unpack(received, recvs)
            return tuple(outs)

        return PendingExchange(unpack, work)

    def preallocate_send(
        self, like: torch.Tensor, sizes: Sequence[torch.Size]
    ) -> PreallocatedSend | None:
        """The staging buffer of a later :meth:`post_to_sequence` to outputs of these sizes, in the
        dtype of ``like``, for a kernel to write into; None if there is no such buffer."""
        if self.is_fused or self._uniform is None:
            return None
        return self._uniform.preallocate_send(like, sizes)

    def post_to_sequence(
        self,
        sources: Sequence[torch.Tensor | DeferredSum],
        outs: Sequence[torch.Tensor],
        prealloc: PreallocatedSend | None = None,
        *,
        overlapped: bool = True,
    ) -> PendingExchange:
        """Start :meth:`to_sequence`; ``outs`` are written once it has been waited for. ``prealloc``
        is of :meth:`preallocate_send`: sources that are its views are not packed again."""
        if self.is_fused:
            with self._count_fused(outs):
                self._fused.to_sequence(sources, outs)
            return PendingExchange(tuple)
        if self._uniform is not None:
            return self._uniform.post_to_sequence(
                sources, outs, self._all_to_all, prealloc, overlapped=overlapped
            )
        ranks = range(self.mesh.ulysses_degree)
        if len(ranks) == 1:
            for out, source, ((first, stop),) in zip(outs, sources, self.ranges, strict=True):
                heads = out if stop - first == out.shape[2] else out[:, :, first:stop]
                copy_or_sum_into(heads, source)
            return PendingExchange(tuple)
        tensors = [x if isinstance(x, torch.Tensor) else x.result() for x in sources]
        # A KV head that several ranks used comes back from each of them: their gradients are parts
        # of one sum. It is made in fp32, for in bf16 each addition would round again.
        accumulators = [_accumulator(out, r) for out, r in zip(outs, self.ranges, strict=True)]
        sends = [self._head_slices(tensors, rank) for rank in ranks]
        recvs = [self._sequence_slices(accumulators, rank) for rank in ranks]
        work, received = self._exchange(sends, recvs)
        is_summed = [  # in the order of _sequence_slices, equal for each rank
            _overlap(ranges)
            for layout, ranges in zip(self.layouts, self.ranges, strict=True)
            for _ in _runs_with_offsets(layout, self.mesh.ring_rank, self.mesh.ulysses_rank)
        ]

        def unpack() -> tuple[torch.Tensor, ...]:
            _unpack(received, recvs, is_summed)
            for out, accumulator in zip(outs, accumulators, strict=True):
                if accumulator is not out:
                    out.copy_(accumulator)
            return ()

        return PendingExchange(unpack, work)

    def alloc_outputs(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """New outputs of :meth:`to_sequence` ``[B, s, H, D]``, of an exchange of all heads."""
        return tuple(
            x.new_empty(x.shape[0], layout.length(self.mesh.rank), ranges[-1][1], x.shape[3])
            for x, layout, ranges in zip(tensors, self.layouts, self.ranges, strict=True)
        )

    @cached_property
    def local_heads(self) -> tuple[int, ...]:
        """Heads of each tensor that this rank computes."""
        rank = self.mesh.ulysses_rank
        return tuple(stop - first for first, stop in (ranges[rank] for ranges in self.ranges))

    def staging_bytes(self, batch: int, dims: Sequence[int], itemsize: int) -> int:
        """Bytes that :meth:`SequenceMesh.reserve` needs for one copy-engine exchange of tensors of
        these head dims, either way; 0: no copy engine carries it."""
        if not isinstance(self._uniform, CopyEngineAllToAll):
            return 0
        layout, *_ = self.layouts  # of all tensors, or the exchange were not uniform
        tokens = max(layout.length(rank) for rank in range(layout.degree))  # all reserve as much
        return self._uniform.staging_bytes(tokens, batch, dims, itemsize)

    @cached_property
    def is_fused(self) -> bool:
        """FlashInfer's kernel carries the exchange: asked for, and each rank has one slice, in the
        order of the ranks, and an equal share of all heads and of all tokens."""
        if not self.fused:
            return False
        ranks = range(self.mesh.ulysses_degree)
        for layout, ranges in zip(self.layouts, self.ranges, strict=True):
            slices = TokenSlices.from_runs(layout.runs(self.mesh.ring_rank), len(ranks))
            if slices is None or not slices.in_rank_order or len(set(slices.lengths)) > 1:
                return False
            _, share = ranges[0]  # the heads of the first rank
            if ranges != tuple((rank * share, (rank + 1) * share) for rank in ranks):
                return False
        return True

    @property
    def _fused(self) -> FusedExchange:
        return cast(FusedExchange, self.mesh.copy_engines["fused"])

    def _count_fused(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        """Count the exchange of tensors ``[B, s, H, D]`` in the ledger; its range in a profile."""
        ranks = self.mesh.ulysses_degree
        sent_bytes = sum([x.numel() * x.element_size() for x in tensors]) // ranks * (ranks - 1)
        self.mesh.ledger.add("all_to_all", sent_bytes)
        return exchange_range("all_to_all", sent_bytes) if profiler_enabled() else NO_RANGE

    def fused_bytes(self, batch: int, dims: Sequence[int], itemsize: int) -> int:
        """Bytes of the largest tensor of these head dims that FlashInfer's kernel exchanges."""
        if not self.is_fused:
            return 0
        tokens = [layout.length(self.mesh.rank) for layout in self.layouts]  # as on other ranks
        heads = [ranges[-1][1] for ranges in self.ranges]
        return batch * max(map(prod, zip(tokens, heads, dims, strict=True))) * itemsize

    @cached_property
    def _uniform(self) -> UniformAllToAll | None:
        """The exchange of one dense buffer, if every rank uses equally many heads, at equal
        distances, and holds the same slices of all tensors: one, in the order of the ranks, or with
        copy engines up to two in any order; else None."""
        ulysses = self.mesh.ulysses_degree
        if ulysses == 1 or not all(map(_is_uniform, self.ranges)):
            return None
        runs = [layout.runs(self.mesh.ring_rank) for layout in self.layouts]
        slices, *others = {TokenSlices.from_runs(row, ulysses) for row in runs}
        if slices is None or others:
            return None
        # all_to_all_single writes what a rank sent to the place of that rank; copy engines write
        # each slice wherever it belongs, so only they serve an order such as context_parallel's.
        if not (self.copies or slices.in_rank_order):
            return None
        kind = CopyEngineAllToAll if self.copies else UniformAllToAll
        return kind(self.mesh, slices, self.ranges)

    def _sequence_slices(self, tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Views of sequence shards: this rank's tokens, the heads of Ulysses rank ``rank``. They
        have the order of that rank's :meth:`_head_slices`: messages have no other tags."""
        return [
            x[:, run.start : run.stop, begin:end]
            for x, layout, ranges in zip(tensors, self.layouts, self.ranges, strict=True)
            for begin, end in [ranges[rank]]
            for _, run in _runs_with_offsets(layout, self.mesh.ring_rank, self.mesh.ulysses_rank)
        ]

    def _head_slices(self, tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Views of head shards: the token runs of Ulysses rank ``rank``, for this rank's heads."""
        return [
            x.narrow(1, offset, run.length)
            for x, layout in zip(tensors, self.layouts, strict=True)
            for offset, run in _runs_with_offsets(layout, self.mesh.ring_rank, rank)
        ]

    def _exchange(self, sends: Slices, recvs: Slices) -> tuple[dist.Work, torch.Tensor]:
        """Post an all-to-all of any slices; the work, and the receive buffer (:func:`_unpack`)."""
        sent = [sum(x.numel() for x in slices) for slices in sends]
        received = [sum(x.numel() for x in slices) for slices in recvs]
        send_buffer = sends[0][0].new_empty(sum(sent))
        recv_buffer = send_buffer.new_empty(sum(received))
        offset = 0
        for x in (x for slices in sends for x in slices):
            send_buffer[offset : offset + x.numel()].view(x.shape).copy_(x)
            offset += x.numel()
        return self._all_to_all(send_buffer, recv_buffer, sent, received), recv_buffer

    def _all_to_all(
        self,
        send_buffer: torch.Tensor,
        recv_buffer: torch.Tensor,
        sent: list[int],
        received: list[int],
    ) -> dist.Work:
        """Post and count an ``all_to_all_single`` of dense buffers; ``sent``, ``received``:
        elements for and from each Ulysses rank."""
        to_peers = sum(sent) - sent[self.mesh.ulysses_rank]
        sent_bytes = to_peers * send_buffer.element_size()
        on_other_nodes = self.mesh.other_nodes.get("ulysses", ())
        between_nodes = sum(map(sent.__getitem__, on_other_nodes)) * send_buffer.element_size()
        self.mesh.ledger.add("all_to_all", sent_bytes, between_nodes)
        flat, group = (recv_buffer.view(-1), send_buffer.view(-1)), self.mesh.ulysses_group
        with exchange_range("all_to_all", sent_bytes) if profiler_enabled() else NO_RANGE:
            work = dist.all_to_all_single(*flat, received, sent, group=group, async_op=True)
        return cast(dist.Work, work)


def _unpack(buffer: torch.Tensor, recvs: Slices, is_summed: Sequence[bool] = ()) -> None:
    """Copy the receive buffer of :meth:`HeadAllToAll._exchange` into the slices, or add it to them.

    Args:
        buffer: flat: rank after rank, each rank's slices one after the other, dense.
        recvs: the views to write, for each rank.
        is_summed: for each slice of a rank, whether it is added; empty: all are copied.
    """
    offset = 0
    for slices in recvs:
        for out, adds in zip(slices, is_summed or [False] * len(slices), strict=True):
            x = buffer[offset : offset + out.numel()].view(out.shape)
            out.add_(x) if adds else out.copy_(x)
            offset += out.numel()


def _accumulator(out: torch.Tensor, ranges: HeadRanges) -> torch.Tensor:
    """The fp32 buffer in which results of shared heads are summed; ``out`` if none are shared."""
    if not _overlap(ranges):
        return out
    return torch.zeros_like(out, dtype=torch.promote_types(out.dtype, torch.float32))


@lru_cache(maxsize=4096)
def _runs_with_offsets(
    layout: TokenLayout, ring_rank: int, ulysses_rank: int
) -> tuple[tuple[int, Run], ...]:
    """A Ulysses rank's runs of tokens, each with its offset in the ring rank's order."""
    runs = layout.runs(ring_rank)
    offsets = accumulate((run.length for run in runs), initial=0)
    pairs = zip(offsets, runs, strict=False)
    return tuple((offset, run) for offset, run in pairs if run.ulysses_rank == ulysses_rank)


def _is_uniform(ranges: HeadRanges) -> bool:
    """Return whether each rank has equally many heads, none of them shared, at equal distances."""
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ranges)}
    return not _overlap(ranges) and len(steps) == 1 and len(set(next(iter(steps)))) == 1


def _overlap(ranges: HeadRanges) -> bool:
    return any(stop > first for (_, stop), (first, _) in pairwise(ranges))
