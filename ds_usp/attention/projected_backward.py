"""The backward pass of an attention call that projects its own heads.

It is that of plain attention, with the products where the schedule has them
(:mod:`ds_usp.geometry.projected_schedule`).

Letters of the shapes as in :mod:`ds_usp.attention.projected_forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_usp.attention.kv_exchange import KV
from ds_usp.attention.passes import BackwardChunk, BackwardPass
from ds_usp.attention.plan import SavedChunk
from ds_usp.attention.projected_forward import (
    QUERIES,
    Inputs,
    SeveralExchanges,
    chunk_views,
    wait_first,
)
from ds_usp.attention.projected_plan import ProjectedPlan
from ds_usp.attention.projection import QKV_KINDS, select_rows, unselect_rows
from ds_usp.attention.rotary import turn_in_place
from ds_usp.attention.score_mod import Scores
from ds_usp.comm.channel import PendingExchange
from ds_usp.geometry.pipeline_schedule import Instr, Op
from ds_usp.kernels.merge import GradAccumulator


@dataclass
class ProjectedGrads:
    """Gradients of the inputs; None where they are not needed.

    Args:
        x: ``[t, c]``.
        weights, biases: those of queries, keys and values.
        out, out_bias: of the output's weight and bias.
    """

    x: torch.Tensor | None = None
    weights: list[torch.Tensor] | None = None
    biases: list[torch.Tensor] | None = None
    out: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Needed:
    """Which gradients are needed."""

    x: bool
    weights: bool
    biases: bool
    out: bool
    out_bias: bool


class ProjectedBackward(BackwardPass):
    """Backward: from the gradient of the projected output to those of the inputs.

    Args:
        dy: ``[b, s, c_out]``.
        out: the attention output ``[b, s, h e]``.
        saved: of each chunk; with ``keep="input"`` only their log-sum-exp.
        sizes: of q, k and v.
    """

    def __init__(
        self,
        plan: ProjectedPlan,
        scores: Scores,
        inputs: Inputs,
        needed: Needed,
        dy: torch.Tensor,
        out: torch.Tensor,
        saved: Sequence[SavedChunk],
    ) -> None:
        # The output's gradient does not exist yet; the pass takes dtype and device from it.
        super().__init__(plan.attention, scores, inputs.x, (), saved)
        self._projected, self._inputs, self._needed = plan, inputs, needed
        self._dy, self._out = dy.reshape(-1, dy.shape[-1]), out
        self._whole_dout: torch.Tensor | None = None
        self._group_kv: dict[int, KV] = {}
        self.results = ProjectedGrads()
        # Of each chunk, to be posted: what is projected again; the output's gradient, and the
        # output; gradients of its queries, keys and values.
        self._made: dict[int, list[torch.Tensor]] = {}
        self._douts: dict[int, tuple[torch.Tensor, ...]] = {}
        self._sums: dict[int, Sequence[GradAccumulator]] = {}
        total, weight = plan.columns[-1], inputs.weights[0]
        # Gradients of q, k and v of all chunks, chunk by chunk, and of the rows of the weights.
        self._features = inputs.x.new_empty(*inputs.x.shape[:2], total)
        self._row_grads = weight.new_empty(total, weight.shape[1]) if needed.weights else None
        self._bias_grads = weight.new_empty(total) if needed.biases else None

    # ---------------------------------------------------------------- the output's gradient

    def project(self, chunk: BackwardChunk, instr: Instr) -> None:
        """With ``keep="input"``: project a chunk again."""
        projected = self._projected.chunks[chunk.index]
        kinds = QKV_KINDS[: len(projected.again.ranges)]
        self._made[chunk.index] = self._inputs.project(self._projected, projected, kinds)

    def grad_out(self, chunk: BackwardChunk, instr: Instr) -> None:
        """The gradient of the attention output: of all chunks; with ``keep="input"`` of one."""
        plan, projected = self._projected, self._projected.chunks[chunk.index]
        if not plan.keeps_input:
            self._whole_dout = self._dout_of(self._inputs.out)
            return
        columns = [self._inputs.out[:, start:stop] for _, start, stop in projected.dout_columns]
        dout = self._dout_of(columns[0] if len(columns) == 1 else torch.cat(columns, dim=1))
        self._douts[chunk.index] = dout, self._out.unflatten(-1, (plan.geometry.heads, -1))

    def post_first(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Post what was projected again."""
        exchange = self._projected.chunks[chunk.index].again
        chunk.exchange = exchange.post_to_heads(self._made.pop(chunk.index))

    def post_heads(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Post the gradient of the output."""
        if self._projected.keeps_input:
            exchange = self._projected.chunks[chunk.index].dout
            outs = exchange.post_to_heads(self._douts.pop(chunk.index))
            chunk.exchange = SeveralExchanges(outs, chunk.exchange)
            return
        if self._whole_dout is not None:
            chunk.exchange = chunk.exchanges.out.post_to_heads((self._whole_dout,))
        if not chunk.index and not self.plan.local_heads:
            self._whole_dout = None

    def wait_heads(self, chunk: BackwardChunk, instr: Instr) -> None:
        """With ``keep="input"`` also take the tensors that were exchanged again."""
        if self._projected.keeps_input:
            dout, out, q, *kv = chunk.exchange.wait()
            group = chunk.exchanges.kv_chunk
            if kv:
                self._group_kv[group] = kv[0], kv[1]
            k, v = self._group_kv[group]
            chunk.saved = SavedChunk(q, k, v, out.contiguous(), chunk.saved.lse)
            chunk.local_kv = k, v
            chunk.exchange = PendingExchange(lambda: (dout.contiguous(),))
        super().wait_heads(chunk, instr)

    def slice_heads(self, chunk: BackwardChunk, instr: Instr) -> None:
        """The same without Ulysses."""
        if self._projected.keeps_input:
            self.post_first(chunk, instr)
        self.post_heads(chunk, instr)
        self.wait_heads(chunk, instr)

    def _dout_of(self, weight: torch.Tensor) -> torch.Tensor:
        """The gradient ``[b, s, heads, e]`` of the attention output, of the weight's columns."""
        dim = self._projected.geometry.value_dim
        dout = self._dy @ weight
        return dout.view(*self._inputs.x.shape[:2], -1, dim)

    def grad_out_weight(self, _: BackwardChunk, __: Instr) -> None:
        """The gradients of the output's weight and bias."""
        if self._needed.out:
            self.results.out = self._dy.t() @ self._out.reshape(-1, self._out.shape[-1])
        if self._needed.out_bias:
            self.results.out_bias = self._dy.sum(0)

    # ---------------------------------------------------------------- gradients of q, k and v

    def stage_return(self, chunk: BackwardChunk, instr: Instr) -> None:
        """See :meth:`BackwardPass.stage_return`."""
        sizes = [x.shape for x in self._views(chunk)]
        exchange = self._projected.chunks[chunk.index].qkv
        chunk.staging = exchange.preallocate_send(self._inputs.x, sizes)

    def end(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Without Ulysses the last chunk's queries are done here: keys and values come around the
        ring meanwhile."""
        super().end(chunk, instr)
        if self._projected.keeps_input:
            if chunk.exchanges.kv_chunk == chunk.index:
                del self._group_kv[chunk.index]
            del chunk.saved
        elif self.plan.local_heads and not chunk.index:
            (queries, *_) = self._views(chunk)
            chunk.dq.write(queries)
            self._rotate_back([queries])

    def post_return_first(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Post the gradients of the only chunk's queries."""
        sums, outs = self.sums_of(chunk), self._views(chunk)
        self._sums[chunk.index] = sums
        exchange = self._projected.chunks[chunk.index].q
        chunk.exchange = exchange.post_to_sequence(sums[:1], outs[:1])

    def wait_return_first(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Wait for them."""
        if isinstance(chunk.exchange, SeveralExchanges):
            chunk.exchange.wait_for(0)
        self._rotate_back(self._views(chunk)[:1])

    def post_return(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Post the gradients of a chunk, or those that :meth:`post_return_first` left."""
        projected, outs = self._projected.chunks[chunk.index], self._views(chunk)
        rest = self._sums.pop(chunk.index, None)
        if rest is not None:
            kv = projected.kv.post_to_sequence(rest[1:], outs[1:])
            chunk.exchange = SeveralExchanges(chunk.exchange, kv)
        else:
            sources = self.sums_of(chunk)[: len(outs)]
            overlapped = instr not in self.exposed
            chunk.exchange = projected.qkv.post_to_sequence(
                sources, outs, chunk.staging, overlapped=overlapped
            )
        chunk.grad_exchange = chunk.outer_grad_exchange = chunk.staging = None
        del chunk.dq

    def wait_return(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Wait for the return; what :meth:`wait_return_first` has rotated stays."""
        first = 1 if isinstance(chunk.exchange, SeveralExchanges) else 0
        super().wait_return(chunk, instr)
        self._rotate_back(self._views(chunk)[first:2])

    def store(self, chunk: BackwardChunk, instr: Instr) -> None:
        """The same without Ulysses: the gradients are written where they belong; :meth:`end` has
        written the last chunk's queries."""
        sources, outs = self.sums_of(chunk), self._views(chunk)
        first = 1 if not self._projected.keeps_input and not chunk.index else 0
        for out, source in list(zip(outs, sources, strict=True))[first:]:
            source.write(out)
        chunk.grad_exchange = chunk.outer_grad_exchange = None
        del chunk.dq
        self._rotate_back(outs[first:2])

    def _views(self, chunk: BackwardChunk) -> list[torch.Tensor]:
        """Where the gradients of a chunk's q, and k and v, are written: ``[b, s, heads, dim]``."""
        plan, projected = self._projected, self._projected.chunks[chunk.index]
        first, stop = plan.columns[chunk.index : chunk.index + 2]
        features = self._features[..., first:stop]
        return chunk_views(plan, projected, projected.kinds, features)

    # ---------------------------------------------------------------- gradients of the inputs

    def grad_weight(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Of all rows of a chunk."""
        columns = self._projected.columns
        self._add_rows(columns[chunk.index], columns[chunk.index + 1])

    def grad_weight_queries(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Of the rows of chunk 0's queries."""
        self._add_rows(0, self._num_queries)

    def grad_weight_kv(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Of the rows of its keys and values."""
        self._add_rows(self._num_queries, self._projected.columns[1])

    def grad_weight_rest(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Of the rows of all other chunks."""
        self._add_rows(self._projected.columns[1], self._projected.columns[-1])

    @property
    def _num_queries(self) -> int:
        """Features of chunk 0's queries."""
        return self._projected.chunks[0].num_rows(QUERIES)

    def _add_rows(self, first: int, stop: int) -> None:
        """The gradients of these rows of the weights and biases, chunk by chunk."""
        if first == stop:
            return
        features = self._features.flatten(0, 1)[:, first:stop]
        if self._row_grads is not None:
            torch.mm(features.t(), self._inputs.rows, out=self._row_grads[first:stop])
        if self._bias_grads is not None:
            self._bias_grads[first:stop] = features.sum(0)

    def _rotate_back(self, views: Sequence[torch.Tensor]) -> None:
        """Rotate gradients of queries and keys, in place."""
        if self._inputs.rotary is None or not views:
            return
        turn_in_place(views, self._inputs.rotary, transposed=True)

    def grad_input(self, _: BackwardChunk, __: Instr) -> None:
        """After the last chunk: the gradient of x, and rows in the weights' own order."""
        inputs, results, runs = self._inputs, self.results, self._projected.runs
        if self._needed.x:
            results.x = self._features.flatten(0, 1) @ select_rows(inputs.weights, runs)
        if self._row_grads is not None:
            results.weights = unselect_rows(self._row_grads, runs, inputs.weights)
        if self._bias_grads is not None:
            results.biases = unselect_rows(self._bias_grads, runs, inputs.biases)

    handlers = dict(BackwardPass.handlers) | {
        Op.PROJECT: project,
        Op.GRAD_OUT: grad_out,
        Op.GRAD_OUT_WEIGHT: grad_out_weight,
        Op.A2A_FIRST_POST: post_first,
        Op.A2A_FIRST_WAIT: wait_first,
        Op.A2A_POST: post_heads,
        Op.A2A_WAIT: wait_heads,
        Op.SLICE_HEADS: slice_heads,
        Op.RETURN_STAGE: stage_return,
        Op.END: end,
        Op.RETURN_FIRST_POST: post_return_first,
        Op.RETURN_FIRST_WAIT: wait_return_first,
        Op.RETURN_POST: post_return,
        Op.RETURN_WAIT: wait_return,
        Op.STORE: store,
        Op.GRAD_WEIGHT: grad_weight,
        Op.GRAD_WEIGHT_KV: grad_weight_kv,
        Op.GRAD_WEIGHT_Q: grad_weight_queries,
        Op.GRAD_WEIGHT_REST: grad_weight_rest,
        Op.GRAD_INPUT: grad_input,
    }
