"""The forward pass of an attention call that projects its own heads.

It is that of plain attention, with the products where the schedule has them
(:mod:`ds_usp.geometry.projected_schedule`). What is posted does not exist before.

Letters of the shapes as in :mod:`ds_usp.attention.projection`; t are all tokens of this rank, of
all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_usp.attention.passes import DONE, NO_KV, ChunkState, ForwardChunk, ForwardPass
from ds_usp.attention.plan import SavedChunk
from ds_usp.attention.projected_plan import ProjectedChunk, ProjectedPlan
from ds_usp.attention.projection import QKV_KINDS, Weights, select_rows
from ds_usp.attention.rotary import Rotary, turn_in_place
from ds_usp.attention.score_mod import Scores
from ds_usp.comm.channel import PendingExchange
from ds_usp.geometry.pipeline_schedule import Instr, Op
from ds_usp.kernels.merge import OutputAccumulator

QUERIES, KEYS_VALUES = QKV_KINDS[:1], QKV_KINDS[1:]


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call.

    Args:
        x: ``[b, s, c]``.
        weights, biases: of queries, keys and values; no biases, or as many.
        out: the output's weight ``[c_out, h e]``; ``out_bias`` its bias.
        rotary: cos and sin ``[s, r]`` of this rank's tokens, or their positions.
    """

    x: torch.Tensor
    weights: Weights
    biases: Weights
    out: torch.Tensor
    rotary: Rotary | None
    out_bias: torch.Tensor | None

    @property
    def rows(self) -> torch.Tensor:
        """x as ``[t, c]``."""
        return self.x.reshape(-1, self.x.shape[-1])

    def project(
        self, plan: ProjectedPlan, chunk: ProjectedChunk, kinds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Queries, keys or values of a chunk, ``[b, s, heads, dim]`` each, rotated."""
        runs = chunk.runs(kinds)
        bias = select_rows(self.biases, runs) if self.biases else None
        made = torch.nn.functional.linear(self.rows, select_rows(self.weights, runs), bias)
        tensors = chunk_views(plan, chunk, kinds, made.view(*self.x.shape[:2], -1))
        rotated = [i for i, kind in enumerate(kinds) if kind < 2]
        if self.rotary is not None and rotated:
            turn_in_place([tensors[i] for i in rotated], self.rotary)
        return tensors


def chunk_views(
    plan: ProjectedPlan, chunk: ProjectedChunk, kinds: Sequence[int], features: torch.Tensor
) -> list[torch.Tensor]:
    """The tensors of a chunk ``[b, s, heads, dim]`` that lie one after the other in the features
    of a token."""
    views = features.split([chunk.num_rows((kind,)) for kind in kinds], dim=-1)
    return [
        x.unflatten(-1, (chunk.num_heads[kind], plan.geometry.head_dim(kind)))
        for kind, x in zip(kinds, views, strict=True)
    ]


class SeveralExchanges(PendingExchange):
    """Exchanges in flight as one: their results one after the other."""

    def __init__(self, *exchanges: PendingExchange) -> None:
        self._exchanges = exchanges

    def wait(self) -> tuple[torch.Tensor, ...]:
        """All results; of an exchange that has been waited for without another wait."""
        return tuple(x for exchange in self._exchanges for x in exchange.wait())

    def wait_for(self, index: int) -> None:
        """Wait for one of them only."""
        self._exchanges[index].wait()

    def drain(self) -> None:
        """Drain each."""
        for exchange in self._exchanges:
            exchange.drain()


def wait_first(_: object, chunk: ChunkState, __: Instr) -> None:
    """Wait for the part of a chunk's all-to-all that was posted first, in either pass."""
    if isinstance(chunk.exchange, SeveralExchanges):
        chunk.exchange.wait_for(1)


class ProjectedForward(ForwardPass):
    """Forward: projects each chunk where it is posted.

    Args:
        stand_ins: of q, k and v, for shapes, dtype and device.
    """

    def __init__(
        self,
        plan: ProjectedPlan,
        scores: Scores,
        inputs: Inputs,
        stand_ins: Sequence[torch.Tensor],
        *,
        save: bool,
    ) -> None:
        super().__init__(plan.attention, scores, stand_ins, save=save)
        self._projected, self._inputs = plan, inputs
        self._made: dict[int, list[torch.Tensor]] = {}  # of each chunk, to be posted
        self.y: torch.Tensor

    def project(self, chunk: ForwardChunk, instr: Instr) -> None:
        """All that is exchanged with a chunk."""
        self._made[chunk.index] = self._product(chunk, self._projected.chunks[chunk.index].kinds)

    def project_kv(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Keys and values."""
        self._made[chunk.index] = self._product(chunk, KEYS_VALUES)

    def project_queries(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Queries; without Ulysses they are used as they are."""
        made = self._product(chunk, QUERIES)
        if not self.plan.local_heads:
            self._made[chunk.index] = made
            return
        (chunk.q,) = made
        chunk.accumulator = OutputAccumulator(chunk.q, chunk.local_kv[1].shape[3])

    def project_out(self, _: ForwardChunk, __: Instr) -> None:
        """The output ``[b, s, c_out]``."""
        inputs = self._inputs
        self.y = torch.nn.functional.linear(self.out.flatten(2), inputs.out, inputs.out_bias)

    def post_first(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Post keys and values."""
        exchange = self._projected.chunks[chunk.index].kv
        chunk.exchange = exchange.post_to_heads(self._made.pop(chunk.index))

    def post_heads(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Post a chunk, or its queries."""
        projected, made = self._projected.chunks[chunk.index], self._made.pop(chunk.index)
        if chunk.exchange is not DONE:
            chunk.exchange = SeveralExchanges(projected.q.post_to_heads(made), chunk.exchange)
            return
        overlapped = instr not in self.exposed
        chunk.exchange = projected.qkv.post_to_heads(made, overlapped=overlapped)

    def slice_heads(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Without Ulysses: take keys and values."""
        k, v = self._made.pop(chunk.index)
        chunk.local_kv = k, v

    def end(self, chunk: ForwardChunk, instr: Instr) -> None:
        """With ``keep="input"`` only the log-sum-exp is saved."""
        super().end(chunk, instr)
        if self._projected.keeps_input and self.saved:
            empty = NO_KV[0]
            self.saved[-1] = SavedChunk(empty, empty, empty, empty, self.saved[-1].lse)

    def _product(self, chunk: ForwardChunk, kinds: Sequence[int]) -> list[torch.Tensor]:
        plan = self._projected
        return self._inputs.project(plan, plan.chunks[chunk.index], kinds)

    handlers = dict(ForwardPass.handlers) | {
        Op.PROJECT: project,
        Op.PROJECT_KV: project_kv,
        Op.PROJECT_Q: project_queries,
        Op.PROJECT_OUT: project_out,
        Op.A2A_FIRST_POST: post_first,
        Op.A2A_FIRST_WAIT: wait_first,
        Op.A2A_POST: post_heads,
        Op.SLICE_HEADS: slice_heads,
        Op.END: end,
    }
