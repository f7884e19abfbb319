"""The forward pass of an attention call that projects its own heads.

It is that of plain attention, by the same schedule. What is posted does not exist before: the rows
of a chunk are multiplied where its exchange is posted, so that the product runs under the exchange
of the chunk before.

Letters of the shapes as in :mod:`ds_usp.attention.projection`; t are all tokens of this rank, of
all samples.

Source: the order K, V, Q of Yuan et al. (ATC 24), here chunk by chunk of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_usp.attention.forward_pass import ForwardChunk, ForwardPass
from ds_usp.attention.plan import SavedChunk
from ds_usp.attention.projected_plan import ProjectedChunk, ProjectedPlan
from ds_usp.attention.projection import QKV_KINDS, Weights, select_rows
from ds_usp.attention.rotary import Rotary, turn_in_place
from ds_usp.attention.runtime import NO_KV
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
        out: the output's weight ``[c_out, h e]``.
        rotary: cos and sin ``[s, r]`` of this rank's tokens, or their positions.
    """

    x: torch.Tensor
    weights: Weights
    biases: Weights
    out: torch.Tensor
    rotary: Rotary | None

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

    def wait_first(self) -> None:
        """Wait for the first one only."""
        self._exchanges[0].wait()

    def drain(self) -> None:
        """Drain each."""
        for exchange in self._exchanges:
            exchange.drain()


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
        # With K and V before Q, the product of Q follows their post.
        covered = Op.KV_POST if plan.attention.local_heads else Op.A2A_POST
        self.exposed = without(plan.attention.forward_exposed, covered if plan.kv_first else None)

    def post_heads(self, chunk: ForwardChunk, _: int, __: int) -> None:
        """Project a chunk and post it."""
        projected = self._projected.chunks[chunk.index]
        if not self._projected.kv_first:
            tensors = self._project(chunk, projected.kinds)
            overlapped = (Op.A2A_POST, chunk.index, 0, 0) not in self.exposed
            chunk.exchange = projected.qkv.post_to_heads(tensors, overlapped=overlapped)
            return
        kv = projected.kv.post_to_heads(self._project(chunk, KEYS_VALUES))
        chunk.exchange = kv
        q = projected.q.post_to_heads(self._project(chunk, QUERIES))
        chunk.exchange = SeveralExchanges(q, kv)

    def slice_heads(self, chunk: ForwardChunk, _: int, __: int) -> None:
        """Without Ulysses: project keys and values; see :meth:`post_kv` for the queries."""
        k, v = self._project(chunk, KEYS_VALUES)
        chunk.local_kv = k, v

    def post_kv(self, chunk: ForwardChunk, number: int, call: int) -> None:
        """Without Ulysses, also project the queries under the first exchange."""
        super().post_kv(chunk, number, call)
        self._project_queries(chunk)

    def attend(self, chunk: ForwardChunk, step: int, number: int) -> None:
        """Queries of a chunk without exchanges are projected here."""
        self._project_queries(chunk)
        super().attend(chunk, step, number)

    def end(self, chunk: ForwardChunk, step: int, number: int) -> None:
        """With ``keep="input"`` only the log-sum-exp is saved."""
        self._project_queries(chunk)
        super().end(chunk, step, number)
        if self._projected.keeps_input and self.saved:
            empty = NO_KV[0]
            self.saved[-1] = SavedChunk(empty, empty, empty, empty, self.saved[-1].lse)

    def _project_queries(self, chunk: ForwardChunk) -> None:
        if hasattr(chunk, "q"):
            return
        (chunk.q,) = self._project(chunk, QUERIES)
        chunk.accumulator = OutputAccumulator(chunk.q, chunk.local_kv[1].shape[3])

    def _project(self, chunk: ForwardChunk, kinds: Sequence[int]) -> list[torch.Tensor]:
        plan = self._projected
        return self._inputs.project(plan, plan.chunks[chunk.index], kinds)

    handlers = dict(ForwardPass.handlers) | {
        Op.A2A_POST: post_heads,
        Op.SLICE_HEADS: slice_heads,
        Op.KV_POST: post_kv,
        Op.ATTN: attend,
        Op.END: end,
    }


def without(exposed: frozenset[Instr], *ops: Op | None) -> frozenset[Instr]:
    """The posts that overlap nothing, without those of these operations."""
    return frozenset(instr for instr in exposed if instr.op not in ops)
