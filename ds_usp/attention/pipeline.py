"""Attention over a mesh, part by part of the heads: exchange, ring, exchange back.

While one part of the heads is computed, the next one arrives and the one before it travels home.
Nothing hides the first arrival and the last departure, so these parts are small. Forward three
tensors arrive and one departs, backward one arrives and three depart: it goes through the parts
from the last to the first, which is the smallest.

Letters of the shapes: b batch, s tokens of this rank, S tokens of its ring rank, h query heads,
g key/value heads, of all ranks (in the arguments) or of one part on one rank; d head dim, e that of
values and outputs.
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
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.uniform_all_to_all import PendingExchange, PreallocatedSend
from ds_usp.config import without_multicast
from ds_usp.kernels.score_mod import PLAIN, ScoreMod
from ds_usp.kernels.sinks import apply_sinks, sink_gradient


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that one attention over a mesh needs besides its tensors.

    Args:
        parts: the heads, in the parts in which they are computed.
        rings: the attention of each part.
        with_lse: the log-sum-exp is asked for.
        staging: bytes that copy engines need on each rank, by kind of traffic.
        spec: what the kernel does to scores.
    """

    chunks: tuple[ChunkExchanges, ...]
    ring_calls: tuple[RingCall, ...]
    return_lse: bool
    staging_bytes: Mapping[str, int]
    score_mod: ScoreMod = PLAIN

    @property
    def local_heads(self) -> bool:
        """The heads of this rank's tokens are all computed here: no exchange, all ring or none."""
        return self.mesh.ulysses_degree == 1

    @property
    def mesh(self) -> SequenceMesh:
        """The ranks."""
        return self.ring_calls[0].mesh

    @property
    def single_shot(self) -> bool:
        """All of it is computed at once, where the tensors are."""
        return self.local_heads and len(self.chunks) == 1

    def reserve_resources(self, device: torch.device) -> None:
        """Make room for copy engines and groups for a double ring; collective where there is not
        enough yet."""
        if self.ring_calls[0].schedule.outer_steps:
            self.mesh.create_outer_groups()
        if self.staging_bytes and self.mesh.needs_reserve(self.staging_bytes):
            with without_multicast():
                self.mesh.reserve(self.staging_bytes, device)
        if self.staging_bytes:
            self.mesh.consistency.begin_pass()

    def mark_pass_done(self) -> None:
        """Note that a pass has ended well."""
        if self.staging_bytes:
            self.mesh.consistency.end_pass()

    def score_mod_for_chunk(self, index: int, scores: Scores, x: torch.Tensor) -> ChunkScoreMod:
        """The scores of one part of a call on tensors of this batch and device."""
        chunk = self.chunks[index]
        return ChunkScoreMod(self.mesh, chunk, self.score_mod, scores, x.shape[0], x.device)

    @property
    def has_ring(self) -> bool:
        """Keys and values of other ring ranks come here, or go there."""
        return self.ring_calls[0].schedule.ring_degree > 1


class SavedChunk(NamedTuple):
    """What backward needs of one part: q ``[b, S, h, d]``, k ``[b, S, g, d]``, v ``[b, S, g, e]``,
    out ``[b, S, h, e]``, lse ``[b, h, S]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class _InflightChunk(NamedTuple):
    """One part: its exchange, taken when it is computed at the latest, and its keys and values."""

    exchange: PendingExchange
    kv_stream: KVStream

    def close(self) -> None:
        """After an error: nothing may stay under way."""
        try:
            self.exchange.drain()
        finally:
            self.kv_stream.close()


class _ChunkPipeline:
    """Brings the parts of the heads to where they are computed, ahead of it, and takes them home.

    All that computes and packs is on the current stream; copy engines and messages run beside it.
    What has to be waited for is asked for early and taken late:

    - A part is packed and sent before the part before it is computed. Then its keys and values go
      on their way around the ring, if they are here. Else they come with the part, which is sent
      another part ahead to be here by then; what comes first sets out in the middle of a part.
    - The gradients of a part that come around the ring are summed and sent home in the middle of
      the next one; where nothing comes around the ring a part goes home at once.

    Args:
        call: what is computed.
        order: the parts, in the order in which they are computed.
        send: begins a part's exchange.
        walk: lets a part's keys and values go on their way around the ring; forward they come with
            its exchange.
        backward: they are here, and what goes home has to wait for what comes around the ring.
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
        """Compute each part, which :meth:`leave` is to be told of. What it has needed is free
        before the next ones come."""
        for position, index in enumerate(self._chunk_order):
            self._current = position
            self._post_until(position + 1)
            self._start_kv_of(position)
            self._post_until(position + self._lookahead)
            if self._kv_early or (self._has_ring and position > 1):  # it had a part's time to come
                self._start_kv_of(position + 1)
            compute(index, self._ready[0])
            del self._ready[0]
        for exchange in self._returning:
            exchange.wait()

    def mid_chunk(self) -> None:
        """In the middle of a part's computation."""
        if self._deferred_return is not None:
            deferred, self._deferred_return = self._deferred_return, None
            self._post_return(*deferred)
        if self._has_ring:
            self._start_kv_of(self._current + 1)
        while not self._defer_return and self._returning:  # it went home beside this part
            self._returning.pop(0).wait()

    def return_chunk(
        self, post: Callable[[], PendingExchange], on_error: Callable[[], None] = noop
    ) -> None:
        """A part is computed and may go home.

        Args:
            task: begins the exchange.
            undo: for it, after an error.
        """
        if self._defer_return and self._current + 1 < len(self._chunk_order):
            self._deferred_return = post, on_error
        else:
            self._post_return(post, on_error)

    def close(self) -> None:
        """After an error: nothing may stay under way, or the next call would take it."""
        with ExitStack() as stack:  # all of it, whatever fails
            for exchange in (*self._returning, *self._in_flight):
                stack.callback(exchange.drain)
            for chunk in self._ready:
                stack.callback(chunk.close)
            if self._deferred_return is not None:
                stack.callback(self._deferred_return[1])

    def _post_until(self, last: int) -> None:
        """All parts up to this one, those that have not."""
        for index in self._chunk_order[self._num_posted : last + 1]:
            self._in_flight.append(self._post_exchange(index))
            self._num_posted += 1

    def _start_kv_of(self, position: int) -> None:
        """A part that comes next, if it has not: its keys and values travel."""
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
        """Begin the trip home; the one before it must have ended, so that its memory is free."""
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
    """Out ``[b, s, h, e]``, the log-sum-exp ``[b, h, s]`` if asked for, and what backward needs."""

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
    and, where sinks are learned, this rank's share of theirs ``[h]``."""
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
            if not grads:  # as late as can be: they are as large as all that has come so far
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


def staging_bytes_by_kind(
    chunks: Sequence[ChunkExchanges],
    ring_calls: Sequence[RingCall],
    q: torch.Tensor,
    v: torch.Tensor,
) -> dict[str, int]:
    """Bytes of each kind of traffic that a rank packs at most at once, for copy engines.

    Args:
        q, v: ``[b, s, h, d]``, ``[b, s, g, e]``.
    """
    ring, schedules = ring_calls[0], [ring.schedule for ring in ring_calls]
    if not ring.use_copy_engines:
        return {}
    batch, dim, value_dim = q.shape[0], q.shape[3], v.shape[3]
    acc_dtype = torch.promote_types(q.dtype, torch.float32).itemsize
    sizes = {
        "all_to_all": max(
            max(
                chunk.qkv.staging_bytes(batch, (dim, dim, value_dim), q.element_size()),
                chunk.out.staging_bytes(batch, (value_dim,), q.element_size()),
                chunk.out.staging_bytes(batch, (1,), acc_dtype),  # the log-sum-exp
            )
            for chunk in chunks
        )
    }
    if ring.schedule.ring_degree > 1:
        token = max(chunk.qkv.widths()[1] for chunk in chunks) * batch * (dim + value_dim)
        sizes["ring_kv"] = ring.schedule.max_local_tokens * token * q.element_size()
        tokens = ring.schedule.max_recv_tokens
        if ring.kernel.caps.writes_grads_in_place:  # a rank's own gradients beside those that leave
            tokens = max(tokens, *(schedule.max_merged_tokens for schedule in schedules))
        sizes["ring_dkv"] = tokens * token * ring.kernel.caps.grad_dtype(q.dtype).itemsize
    return sizes
