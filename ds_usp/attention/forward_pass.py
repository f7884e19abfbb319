"""The forward pass of an attention call; see ``ds_usp.attention.runtime``.

Online softmax over KV blocks as in Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ds_usp.attention.kv_exchange import KV
from ds_usp.attention.plan import AttentionPlan, SavedChunk
from ds_usp.attention.runtime import DONE, KV_HANDLERS, NO_KV, ChunkState, Pass
from ds_usp.attention.score_mod import Scores
from ds_usp.geometry.pipeline_schedule import Op
from ds_usp.kernels.merge import OutputAccumulator
from ds_usp.kernels.sinks import apply_sinks


def attention_forward(
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
    run = ForwardPass(plan, scores, (q, k, v), save=save_for_backward)
    run.execute(plan.forward)
    return run.out, run.lse, run.saved


class ForwardChunk(ChunkState):
    """State of a chunk forward.

    Attributes:
        q: its queries.
        accumulator: of the output.
        result: the output and the log-sum-exp, when all kernel calls are done.
    """

    q: torch.Tensor
    accumulator: OutputAccumulator
    result: tuple[torch.Tensor, torch.Tensor]


class ForwardPass(Pass[ForwardChunk]):
    """The forward pass; see :func:`attention_forward`."""

    def __init__(
        self, plan: AttentionPlan, scores: Scores, qkv: Sequence[torch.Tensor], *, save: bool
    ) -> None:
        q, _, v = qkv
        chunks = list(map(partial(ForwardChunk, plan), range(len(plan.chunks))))
        super().__init__(plan, scores, chunks, q, plan.forward_exposed)
        self._qkv, self._save = qkv, save
        self._group_kv: KV = NO_KV  # of the last chunk that has exchanged any
        self.saved: list[SavedChunk] = []
        self.lse: torch.Tensor | None = None
        if not plan.single_shot:
            self.out = q.new_empty(*q.shape[:3], v.shape[3])
            if plan.return_lse:
                dtype = torch.promote_types(q.dtype, torch.float32)
                self._lse_out = q.new_empty(*q.shape[:3], 1, dtype=dtype)
                self.lse = self._lse_out.squeeze(-1).transpose(1, 2)

    def post_heads(self, chunk: ForwardChunk, _: int, __: int) -> None:
        exchange = chunk.exchanges.qkv
        overlapped = (Op.A2A_POST, chunk.index, 0, 0) not in self.exposed
        tensors = self._qkv[: len(exchange.ranges)]
        chunk.exchange = exchange.post_to_heads(tensors, overlapped=overlapped)

    def wait_heads(self, chunk: ForwardChunk, _: int, __: int) -> None:
        chunk.q, *kv = chunk.exchange.wait()
        chunk.exchange = DONE
        if kv:
            self._group_kv = kv[0], kv[1]
        chunk.local_kv = self._group_kv
        chunk.accumulator = OutputAccumulator(chunk.q, chunk.local_kv[1].shape[3])

    def slice_heads(self, chunk: ForwardChunk, _: int, __: int) -> None:
        self.post_heads(chunk, 0, 0)
        self.wait_heads(chunk, 0, 0)

    def attend(self, chunk: ForwardChunk, step: int, number: int) -> None:
        if chunk.step != step:
            self.begin_step(chunk, step)
        call = chunk.steps[step].calls[number]
        out, lse = chunk.kernel.forward((chunk.q, *chunk.kv), call, scale=chunk.ring.scale)
        chunk.accumulator.add(out, lse, (call.q_start, call.q_stop))

    def end(self, chunk: ForwardChunk, _: int, __: int) -> None:
        k, v = chunk.local_kv
        chunk.free_kv()
        result = chunk.accumulator.result()
        if self.scores.sinks is not None:
            sinks = self.score_mod_of(chunk).slice_heads(self.scores.sinks)
            result = apply_sinks(*result, sinks)
        if chunk.index + 1 == len(self.plan.chunks) or self.plan.chunks[chunk.index + 1].has_kv:
            self._group_kv = NO_KV
        if self._save or self.plan.single_shot:
            self.saved.append(SavedChunk(chunk.q, k, v, *result))
        chunk.result = result
        del chunk.q, chunk.accumulator

    def _post_return(self, chunk: ForwardChunk, _: int, __: int) -> None:
        sources = chunk.result[:1]
        overlapped = (Op.RETURN_POST, chunk.index, 0, 0) not in self.exposed
        chunk.exchange = chunk.exchanges.out.post_to_sequence(
            sources, (self.out,), overlapped=overlapped
        )
        if not self.plan.return_lse:
            del chunk.result

    def _post_lse(self, chunk: ForwardChunk, _: int, __: int) -> None:
        lse = chunk.result[1].transpose(1, 2).unsqueeze(-1)
        chunk.exchange = chunk.exchanges.out.post_to_sequence((lse,), (self._lse_out,))
        del chunk.result

    def _store(self, chunk: ForwardChunk, _: int, __: int) -> None:
        out, lse = chunk.result
        del chunk.result
        if self.plan.single_shot:
            self.out, self.lse = out, lse if self.plan.return_lse else None
            return
        chunk.exchanges.out.to_sequence((out,), (self.out,))
        if self.plan.return_lse:
            lse = lse.transpose(1, 2).unsqueeze(-1)
            chunk.exchanges.out.to_sequence((lse,), (self._lse_out,))

    handlers = dict(KV_HANDLERS) | {
        Op.A2A_POST: post_heads,
        Op.A2A_WAIT: wait_heads,
        Op.SLICE_HEADS: slice_heads,
        Op.ATTN: attend,
        Op.END: end,
        Op.RETURN_POST: _post_return,
        Op.LSE_POST: _post_lse,
        Op.STORE: _store,
    }
