"""Chunked attention over a mesh: all-to-all to heads, ring attention, all-to-all to sequence.

A software pipeline over head chunks: while one chunk is computed, the exchange of the next one and
the return of the one before are in flight. The first exchange and the last return are exposed, so
those chunks are small. Forward exchanges three tensors and returns one, backward exchanges one and
returns three: it goes through the chunks from the last to the first, which is the smallest.

Letters of the shapes: b batch, s tokens of this rank, S tokens of its ring rank, h query heads,
g key/value heads, of all ranks (in the arguments) or of one chunk on one rank; d head dim, e that
of values and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ds_usp.attention.ring import (
    KVStream,
    RingCall,
    RingGradReducer,
    noop,
    ring_backward,
    ring_forward,
)
from ds_usp.attention.score_mod import ChunkScoreMod, Scores
from ds_usp.attention.validation import ChunkExchanges
from ds_usp.comm.all_to_all import HeadAllToAll
from ds_usp.comm.channel import PendingExchange
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.packing import PreallocatedSend
from ds_usp.config import without_multicast
from ds_usp.kernels.score_mod import PLAIN, ScoreMod
from ds_usp.kernels.sinks import apply_sinks, sink_gradient


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that one attention over a mesh needs besides its tensors.

    Args:
        chunks: the head exchanges of each head chunk.
        ring_calls: the ring attention of each head chunk.
        return_lse: the log-sum-exp is a result too.
        staging_bytes: that copy engines need on each rank, by kind of exchange.
        score_mod: what the kernel does to scores.
    """

    chunks: tuple[ChunkExchanges, ...]
    ring_calls: tuple[RingCall, ...]
    return_lse: bool
    staging_bytes: Mapping[str, int]
    score_mod: ScoreMod = PLAIN

    @property
    def local_heads(self) -> bool:
        """This rank computes all heads of its tokens: there is no head exchange."""
        return self.mesh.ulysses_degree == 1

    @property
    def mesh(self) -> SequenceMesh:
        """The ranks."""
        return self.ring_calls[0].mesh

    @property
    def single_shot(self) -> bool:
        """One chunk and no exchange: the inputs are used as they are."""
        return self.local_heads and len(self.chunks) == 1

    def reserve_resources(self, device: torch.device) -> None:
        """Open the process groups of a double ring, reserve staging buffers of copy engines and
        start a pass; collective where there are too few buffers yet."""
        if self.ring_calls[0].schedule.outer_steps:
            self.mesh.create_outer_groups()
        if self.staging_bytes and self.mesh.needs_reserve(self.staging_bytes):
            with without_multicast():
                self.mesh.reserve(self.staging_bytes, device)
        if self.staging_bytes:
            self.mesh.consistency.begin_pass()

    def mark_pass_done(self) -> None:
        """Count a pass as ended, not aborted."""
        if self.staging_bytes:
            self.mesh.consistency.end_pass()

    def score_mod_for_chunk(self, index: int, scores: Scores, x: torch.Tensor) -> ChunkScoreMod:
        """The score modifiers of one chunk, for tensors like ``x`` (batch, device)."""
        chunk = self.chunks[index]
        return ChunkScoreMod(self.mesh, chunk, self.score_mod, scores, x.shape[0], x.device)

    def unpack_saved(self, tensors: Sequence[torch.Tensor]) -> list[SavedChunk]:
        """The saved tensors of each chunk, from those of all chunks one after the other, or,
        without a head exchange, from q, k, v and out of all heads and each chunk's lse."""
        if not self.local_heads:
            return [SavedChunk._make(tensors[i : i + 5]) for i in range(0, len(tensors), 5)]
        views = ((*x.qkv.to_heads(tensors[:3]), *x.out.to_heads(tensors[3:4])) for x in self.chunks)
        return [SavedChunk._make((*x, lse)) for x, lse in zip(views, tensors[4:], strict=True)]

    @property
    def has_ring(self) -> bool:
        """Keys and values are exchanged among ring ranks."""
        return self.ring_calls[0].schedule.ring_degree > 1


class SavedChunk(NamedTuple):
    """Tensors of one chunk saved for backward: q ``[b, S, h, d]``, k ``[b, S, g, d]``,
    v ``[b, S, g, e]``, out ``[b, S, h, e]``, lse ``[b, h, S]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class _InflightChunk(NamedTuple):
    """One chunk: its head exchange, waited for before it is computed, and its KV stream."""

    exchange: PendingExchange
    kv_stream: KVStream

    def close(self) -> None:
        """After an error: no exchange may remain in flight."""
        try:
            self.exchange.drain()
        finally:
            self.kv_stream.close()


class _ChunkPipeline:
    """Posts the exchanges of head chunks ahead of their computation, and their returns behind it.

    Kernels and packing run on the current stream; copy engines or NCCL run beside it. Exchanges
    are posted as soon as possible and waited for just before use:

    - A chunk's exchange is posted before the chunk before it is computed. Then its KV stream is
      started, if its keys and values are local. Else they are received with the exchange, which is
      posted one more chunk ahead; for the first chunks the stream is started mid-chunk.
    - A chunk whose KV gradients come around the ring is returned in the middle of the next chunk,
      when they have been summed; without a ring it is returned at once.

    Args:
        plan: what is computed.
        order: the chunks, in the order in which they are computed.
        post_exchange: posts a chunk's head exchange.
        start_kv: starts a chunk's KV stream; forward its keys and values are from the exchange.
        backward: keys and values are saved tensors, and a return waits for KV gradients.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        order: Sequence[int],
        post_exchange: Callable[[int], PendingExchange],
        start_kv: Callable[[int, PendingExchange], KVStream],
        *,
        backward: bool,
    ) -> None:
        self._chunk_order, self._post_exchange, self._start_kv = order, post_exchange, start_kv
        self._has_ring = plan.has_ring
        self._defer_return = self._has_ring and backward
        self._kv_early = self._has_ring and (backward or plan.local_heads)
        self._lookahead = 2 if self._has_ring and not self._kv_early else 1
        self._current = self._num_posted = self._num_started = 0
        self._in_flight: list[PendingExchange] = []
        self._ready: list[_InflightChunk] = []
        self._returning: list[PendingExchange] = []
        self._deferred_return: tuple[Callable[[], PendingExchange], Callable[[], None]] | None = (
            None
        )

    def run(self, compute: Callable[[int, _InflightChunk], None]) -> None:
        """Compute each chunk; ``compute`` must call :meth:`return_chunk`. What a chunk needed is
        freed before the next one is received."""
        for position, index in enumerate(self._chunk_order):
            self._current = position
            self._post_until(position + 1)
            self._start_kv_of(position)
            self._post_until(position + self._lookahead)
            if self._kv_early or (
                self._has_ring and position > 1
            ):  # in flight for one chunk already
                self._start_kv_of(position + 1)
            compute(index, self._ready[0])
            del self._ready[0]
        for exchange in self._returning:
            exchange.wait()

    def mid_chunk(self) -> None:
        """Call after the first kernel of a chunk: post what waited for it, and wait for returns."""
        if self._deferred_return is not None:
            deferred, self._deferred_return = self._deferred_return, None
            self._post_return(*deferred)
        if self._has_ring:
            self._start_kv_of(self._current + 1)
        while not self._defer_return and self._returning:  # its return overlapped this chunk
            self._returning.pop(0).wait()

    def return_chunk(
        self, post: Callable[[], PendingExchange], on_error: Callable[[], None] = noop
    ) -> None:
        """Return a computed chunk, now or mid-chunk of the next one.

        Args:
            post: posts the return exchange.
            on_error: releases what it would return, after an error.
        """
        if self._defer_return and self._current + 1 < len(self._chunk_order):
            self._deferred_return = post, on_error
        else:
            self._post_return(post, on_error)

    def close(self) -> None:
        """After an error: wait for all in flight, or the next call would receive it."""
        with ExitStack() as stack:  # all of it, whatever fails
            for exchange in (*self._returning, *self._in_flight):
                stack.callback(exchange.drain)
            for chunk in self._ready:
                stack.callback(chunk.close)
            if self._deferred_return is not None:
                stack.callback(self._deferred_return[1])

    def _post_until(self, last: int) -> None:
        """Post the exchanges of all chunks up to this position that are not posted yet."""
        for index in self._chunk_order[self._num_posted : last + 1]:
            self._in_flight.append(self._post_exchange(index))
            self._num_posted += 1

    def _start_kv_of(self, position: int) -> None:
        """Start the KV stream of the chunk at a position, if it is the next one and exists."""
        if self._num_started <= position < len(self._chunk_order):
            exchange = self._in_flight[0]
            self._ready.append(
                _InflightChunk(exchange, self._start_kv(self._chunk_order[position], exchange))
            )
            self._in_flight.pop(0)
            self._num_started += 1

    def _post_return(
        self, post: Callable[[], PendingExchange], on_error: Callable[[], None]
    ) -> None:
        """Post a return; wait for the one before it, whose buffers are then free."""
        try:
            self._returning.append(post())
        except BaseException:
            on_error()
            raise
        while len(self._returning) > 1:
            self._returning.pop(0).wait()


def pipelined_forward(
    plan: AttentionPlan,
    scores: Scores,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    save_for_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, list[SavedChunk]]:
    """Out ``[b, s, h, e]``, the log-sum-exp ``[b, h, s]`` if the plan returns it, and the tensors
    of each chunk to save for backward."""

    def post_exchange(index: int) -> PendingExchange:
        return plan.chunks[index].qkv.post_to_heads((q, k, v))

    def start_kv(index: int, exchange: PendingExchange) -> KVStream:
        ring = plan.ring_calls[index]
        return KVStream(ring, ring.schedule.steps, *exchange.wait()[1:])

    def return_chunk(exchanges: ChunkExchanges, saved: SavedChunk) -> PendingExchange:
        exchange = exchanges.out.post_to_sequence((saved.out,), (out,))
        if lse is None:
            return exchange
        exchange.wait()
        return exchanges.out.post_to_sequence((saved.lse.transpose(1, 2).unsqueeze(-1),), (lse,))

    def compute_chunk(index: int, chunk: _InflightChunk) -> None:
        """Ring attention of one received chunk; keeps its tensors if needed, posts the return."""
        score_mod, tensors = plan.score_mod_for_chunk(index, scores, q), chunk.exchange.wait()
        result = ring_forward(
            plan.ring_calls[index], tensors[0], chunk.kv_stream, score_mod, pipeline.mid_chunk
        )
        if scores.sinks is not None:
            result = apply_sinks(*result, score_mod.slice_heads(scores.sinks))
        saved = SavedChunk._make((*tensors, *result))
        if save_for_backward or plan.single_shot:
            saved_chunks.append(saved)
        if not plan.single_shot:
            pipeline.return_chunk(partial(return_chunk, plan.chunks[index], saved))

    plan.reserve_resources(q.device)
    saved_chunks: list[SavedChunk] = []
    out = q if plan.single_shot else q.new_empty(*q.shape[:3], v.shape[3])
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(*q.shape[:3], 1, dtype=acc_dtype) if plan.return_lse else None
    pipeline = _ChunkPipeline(
        plan, range(len(plan.chunks)), post_exchange, start_kv, backward=False
    )
    with closing(pipeline):
        pipeline.run(compute_chunk)
    plan.mark_pass_done()
    if plan.single_shot:
        return saved_chunks[0].out, saved_chunks[0].lse if plan.return_lse else None, saved_chunks
    return out, None if lse is None else lse.squeeze(-1).transpose(1, 2), saved_chunks


def pipelined_backward(
    plan: AttentionPlan,
    scores: Scores,
    dout: torch.Tensor,
    shapes: Sequence[torch.Size],
    saved_chunks: Sequence[SavedChunk],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients ``dq [b, s, h, d]``, ``dk [b, s, g, d]`` and ``dv [b, s, g, e]``, of these shapes,
    and, where sinks require a gradient, this rank's summand of theirs ``[h]``."""
    grads: tuple[torch.Tensor, ...] = ()

    def post_exchange(index: int) -> PendingExchange:
        return plan.chunks[index].out.post_to_heads((dout,))

    def start_kv(index: int, exchange: PendingExchange) -> KVStream:
        ring = plan.ring_calls[index]
        return KVStream(ring, ring.schedule.backward_steps, *saved_chunks[index][1:3])

    def return_chunk(
        exchange: HeadAllToAll, reducer: RingGradReducer, staging: PreallocatedSend | None
    ) -> PendingExchange:
        return exchange.post_to_sequence(reducer.accumulators(), grads, staging)

    def compute_chunk(index: int, chunk: _InflightChunk) -> None:
        """Gradients of one received chunk; posts their return, or keeps those of an only chunk."""
        nonlocal grads
        score_mod, ring = plan.score_mod_for_chunk(index, scores, dout), plan.ring_calls[index]
        (dout_heads,) = chunk.exchange.wait()
        saved, exchange = saved_chunks[index], plan.chunks[index].qkv
        in_place = ring.writes_grads_in_place(dout.dtype)
        staging = exchange.preallocate_send(dout, shapes) if in_place else None
        buffers = staging.views if staging else ()
        reducer = ring_backward(
            ring, dout_heads, *saved, chunk.kv_stream, score_mod, pipeline.mid_chunk, buffers
        )
        try:
            if sinks is not None and dsinks is not None:
                dsink = sink_gradient(dout_heads, *saved[3:], score_mod.slice_heads(sinks))
                score_mod.slice_heads(dsinks).copy_(dsink)
            if plan.single_shot:
                grads = reducer.result()
                return
            if not grads:  # just before use: they are as large as all received so far
                grads = tuple(dout.new_empty(shape) for shape in shapes)
        except BaseException:
            reducer.close()
            raise
        pipeline.return_chunk(partial(return_chunk, exchange, reducer, staging), reducer.close)

    plan.reserve_resources(dout.device)
    sinks = scores.sinks
    dsinks = torch.zeros_like(sinks) if sinks is not None and sinks.requires_grad else None
    pipeline = _ChunkPipeline(
        plan, range(len(plan.chunks))[::-1], post_exchange, start_kv, backward=True
    )
    with closing(pipeline):
        pipeline.run(compute_chunk)
    plan.mark_pass_done()
    dq, dk, dv = grads
    return dq, dk, dv, dsinks
