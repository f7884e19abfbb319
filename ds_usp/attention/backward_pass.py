"""The backward pass of an attention call; see ``ds_usp.attention.runtime``.

It starts from the final log-sum-exp, which makes every KV block independent (FlashAttention-2,
arXiv 2307.08691). Gradients of remote KV are sent in the dtype in which the kernel returns them. A
relay rank sums its node's gradients of the relayed block and sends the owner the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ds_usp.attention.kv_exchange import KVGradExchange, KVGrads, KVTransfer
from ds_usp.attention.plan import AttentionPlan, SavedChunk
from ds_usp.attention.runtime import DONE, KV_HANDLERS, ChunkState, Pass
from ds_usp.attention.score_mod import Scores
from ds_usp.comm.packing import PreallocatedSend
from ds_usp.geometry.pipeline_schedule import Op
from ds_usp.kernels.api import BackwardInputs, GradBuffers
from ds_usp.kernels.merge import GradAccumulator
from ds_usp.kernels.sinks import sink_gradient

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention_backward(
    plan: AttentionPlan,
    scores: Scores,
    dout: torch.Tensor,
    shapes: Sequence[torch.Size],
    saved_chunks: Sequence[SavedChunk],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients ``dq [b, s, h, d]``, ``dk [b, s, g, d]`` and ``dv [b, s, g, e]``, of these shapes,
    and, where sinks require a gradient, this rank's summand of it ``[h]``."""
    run = BackwardPass(plan, scores, dout, shapes, saved_chunks)
    run.execute(plan.backward)
    return *run.grads, run.dsinks


class BackwardChunk(ChunkState):
    """State of a chunk backward.

    Attributes:
        saved: its tensors of the forward pass.
        dout: the gradient of its output.
        dq: the gradient of its queries.
        dkv: gradients of the local KV (0) and of those relayed in an outer step.
        step_grads: where gradients of the ring step are summed.
        staging: of the return, where a kernel writes its gradients there.
    """

    saved: SavedChunk
    dout: torch.Tensor
    dq: GradAccumulator
    dkv: dict[int, KVGrads]
    step_grads: tuple[GradAccumulator, ...] = ()
    staging: PreallocatedSend | None = None
    grad_exchange: KVGradExchange | None = None
    outer_grad_exchange: KVGradExchange | None = None

    def open_grads(self) -> KVGradExchange:
        """The exchange of KV gradients in the ring; opened once."""
        if self.grad_exchange is None:
            self.grad_exchange = self._open("ring_dkv", self.transfers)
        return self.grad_exchange

    def open_outer_grads(self) -> KVGradExchange:
        """The exchange of KV gradients across nodes; opened once."""
        if self.outer_grad_exchange is None:
            self.outer_grad_exchange = self._open("ring_dkv_outer", self.ring.outer_transfers)
        return self.outer_grad_exchange

    def _open(self, kind: str, transfers: Sequence[KVTransfer]) -> KVGradExchange:
        k, v = self.saved.k, self.saved.v
        dtype = self.ring.kernel.caps.grad_dtype(k.dtype)
        return KVGradExchange(self.open_channel(kind), transfers, dtype, k, v)


class BackwardPass(Pass[BackwardChunk]):
    """The backward pass; see :func:`attention_backward`."""

    def __init__(
        self,
        plan: AttentionPlan,
        scores: Scores,
        dout: torch.Tensor,
        shapes: Sequence[torch.Size],
        saved_chunks: Sequence[SavedChunk],
    ) -> None:
        indices = range(len(plan.chunks))
        chunks = list(map(partial(BackwardChunk, plan, backward=True), indices))
        for chunk, saved in zip(chunks, saved_chunks, strict=True):
            chunk.saved, chunk.local_kv = saved, (saved.k, saved.v)
        super().__init__(plan, scores, chunks, dout, plan.backward_exposed)
        self._dout, self._shapes = dout, shapes
        self._grads: Grads | None = None
        self._dkv: dict[int, KVGrads] = {}  # that chunks of one KV group share
        sinks = scores.sinks
        trained = sinks is not None and sinks.requires_grad
        self.dsinks = torch.zeros_like(sinks) if trained and sinks is not None else None

    @property
    def grads(self) -> Grads:
        """Of q, k and v. Allocated when the first chunk's are returned."""
        if self._grads is None:
            dq, dk, dv = (self._dout.new_empty(shape) for shape in self._shapes)
            self._grads = dq, dk, dv
        return self._grads

    def post_heads(self, chunk: BackwardChunk, _: int, __: int) -> None:
        overlapped = (Op.A2A_POST, chunk.index, 0, 0) not in self.exposed
        chunk.exchange = chunk.exchanges.out.post_to_heads((self._dout,), overlapped=overlapped)

    def wait_heads(self, chunk: BackwardChunk, _: int, __: int) -> None:
        (chunk.dout,) = chunk.exchange.wait()
        chunk.exchange = DONE
        q, k, v = chunk.saved[:3]
        chunk.dq = GradAccumulator(q)
        group = chunk.exchanges.kv_chunk
        if group not in self._dkv:
            self._dkv[group] = GradAccumulator(k), GradAccumulator(v)
        chunk.dkv = {0: self._dkv[group]}

    def slice_heads(self, chunk: BackwardChunk, _: int, __: int) -> None:
        self.post_heads(chunk, 0, 0)
        self.wait_heads(chunk, 0, 0)

    def wait_outer_kv(self, chunk: BackwardChunk, number: int, call: int) -> None:
        """Also start the sums of the block's gradients."""
        super().wait_outer_kv(chunk, number, call)
        k, v = chunk.relayed_kv
        chunk.dkv[number + 1] = GradAccumulator(k), GradAccumulator(v)

    def stage_return(self, chunk: BackwardChunk, _: int, __: int) -> None:
        chunk.staging = chunk.exchanges.qkv.preallocate_send(self._dout, self._shapes)

    def begin_step(self, chunk: BackwardChunk, index: int) -> None:
        """Also choose where the step's gradients are summed."""
        super().begin_step(chunk, index)
        step = chunk.steps[index]
        if step.is_local:
            chunk.step_grads = chunk.dq, *chunk.dkv[step.outer_step]
        else:
            k, v = chunk.kv
            chunk.step_grads = chunk.dq, GradAccumulator(k), GradAccumulator(v)

    def attend(self, chunk: BackwardChunk, step: int, number: int) -> None:
        if chunk.step != step:
            self.begin_step(chunk, step)
        call = chunk.steps[step].calls[number]
        q, _, _, out, lse = chunk.saved
        grads = chunk.kernel.backward(
            BackwardInputs(chunk.dout, q, *chunk.kv, out, lse),
            call,
            scale=chunk.ring.scale,
            grad_buffers=None if number else self._grad_buffers(chunk, step),
        )
        keys = [(call.k_start, call.k_stop)]
        dq, dk, dv = chunk.step_grads
        dq.add(grads[0], [(call.q_start, call.q_stop)])
        dk.add(grads[1], keys)
        dv.add(grads[2], keys)

    def _grad_buffers(self, chunk: BackwardChunk, index: int) -> GradBuffers | None:
        """Where the first kernel call of a step writes its gradients: into a send buffer, if it has
        all KV tokens of the step. Those of other calls are added there."""
        step = chunk.steps[index]
        if step.is_local:
            if chunk.staging is None:
                return None
            dq, dk, dv = chunk.staging.views
            return dq, dk, dv
        if not chunk.ring.writes_block_in_place(step):
            return None
        number = [x.step for x in chunk.transfers].index(index)
        return None, *chunk.open_grads().staging_views(number)

    def _post_dkv(self, chunk: BackwardChunk, number: int, _: int) -> None:
        index = chunk.transfers[number].step
        if chunk.step != index:  # this rank has no kernel calls in it
            self.begin_step(chunk, index)
        _dq, dk, dv = chunk.step_grads
        target = chunk.dkv[chunk.steps[index].outer_step]
        chunk.open_grads().post(number, (dk, dv), target)
        chunk.step_grads = ()

    def _wait_dkv(self, chunk: BackwardChunk, _: int, __: int) -> None:
        chunk.open_grads().wait()

    def _post_outer_dkv(self, chunk: BackwardChunk, number: int, _: int) -> None:
        chunk.open_outer_grads().post(number, chunk.dkv.pop(number + 1), chunk.dkv[0])

    def _wait_outer_dkv(self, chunk: BackwardChunk, _: int, __: int) -> None:
        chunk.open_outer_grads().wait()

    def end(self, chunk: BackwardChunk, _: int, __: int) -> None:
        sinks = self.scores.sinks
        if sinks is not None and self.dsinks is not None:
            score_mod, (_q, _k, _v, out, lse) = self.score_mod_of(chunk), chunk.saved
            dsink = sink_gradient(chunk.dout, out, lse, score_mod.slice_heads(sinks))
            score_mod.slice_heads(self.dsinks).copy_(dsink)
        chunk.free_kv()
        chunk.step_grads = ()
        del chunk.dout

    def sums_of(self, chunk: BackwardChunk) -> tuple[GradAccumulator, ...]:
        """The gradients of a chunk, which are complete, and no longer kept here."""
        if chunk.exchanges.has_kv:
            del self._dkv[chunk.index]
        return chunk.dq, *chunk.dkv.pop(0)

    def post_return(self, chunk: BackwardChunk, _: int, __: int) -> None:
        exchange, sources = chunk.exchanges.qkv, self.sums_of(chunk)
        count = len(exchange.ranges)  # without dk and dv, if the group has more chunks
        overlapped = (Op.RETURN_POST, chunk.index, 0, 0) not in self.exposed
        chunk.exchange = exchange.post_to_sequence(
            sources[:count], self.grads[:count], chunk.staging, overlapped=overlapped
        )
        chunk.grad_exchange = chunk.outer_grad_exchange = chunk.staging = None
        del chunk.dq

    def store(self, chunk: BackwardChunk, _: int, __: int) -> None:
        sources = self.sums_of(chunk)
        if self.plan.single_shot:
            dq, dk, dv = (source.result() for source in sources)
            self._grads = dq, dk, dv
        else:
            chunk.exchanges.qkv.to_sequence(sources, self.grads)
        chunk.grad_exchange = chunk.outer_grad_exchange = None
        del chunk.dq

    handlers = dict(KV_HANDLERS) | {
        Op.A2A_POST: post_heads,
        Op.A2A_WAIT: wait_heads,
        Op.SLICE_HEADS: slice_heads,
        Op.OUTER_KV_WAIT: wait_outer_kv,
        Op.RETURN_STAGE: stage_return,
        Op.ATTN: attend,
        Op.DKV_POST: _post_dkv,
        Op.DKV_WAIT: _wait_dkv,
        Op.OUTER_DKV_POST: _post_outer_dkv,
        Op.OUTER_DKV_WAIT: _wait_outer_dkv,
        Op.END: end,
        Op.RETURN_POST: post_return,
        Op.STORE: store,
    }
