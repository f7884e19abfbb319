"""The backward pass of an attention call that projects its own heads.

It is that of plain attention, by the same schedule. What returns is used where it is waited for:
the gradient of the output's weight is computed under the first exchange, that of the other weights,
of the chunks that are there, under the return of the last one.

Letters of the shapes as in :mod:`ds_usp.attention.projected_forward`.

Source: for ``keep="input"`` Untied Ulysses (arXiv 2602.21196), here with overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_usp.attention.backward_pass import BackwardChunk, BackwardPass
from ds_usp.attention.kv_exchange import KV
from ds_usp.attention.plan import SavedChunk
from ds_usp.attention.projected_forward import (
    QUERIES,
    Inputs,
    SeveralExchanges,
    chunk_views,
    without,
)
from ds_usp.attention.projected_plan import ProjectedPlan
from ds_usp.attention.projection import QKV_KINDS, select_rows, unselect_rows
from ds_usp.attention.rotary import turn_in_place
from ds_usp.attention.score_mod import Scores
from ds_usp.comm.channel import PendingExchange
from ds_usp.geometry.pipeline_schedule import Op


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
        self.exposed = without(plan.attention.backward_exposed, Op.A2A_POST, Op.RETURN_POST)
        self.results = ProjectedGrads()
        self._out_done = False
        total, weight = plan.columns[-1], inputs.weights[0]
        # Gradients of q, k and v of all chunks, chunk by chunk, and of the rows of the weights.
        self._features = torch.empty(0)
        if not plan.keeps_input:
            self._features = inputs.x.new_empty(*inputs.x.shape[:2], total)
        self._of_chunk: dict[int, torch.Tensor] = {}
        self._row_grads = weight.new_empty(total, weight.shape[1]) if needed.weights else None
        self._bias_grads = weight.new_empty(total) if needed.biases else None
        self._x_sum: torch.Tensor | None = None

    # ---------------------------------------------------------------- the output's gradient

    def post_heads(self, chunk: BackwardChunk, _: int, __: int) -> None:
        """Multiply the gradient of the output, and post it."""
        projected = self._projected.chunks[chunk.index]
        if not self._projected.keeps_input:
            if self._whole_dout is None:
                self._whole_dout = self._dout_of(self._inputs.out)
            chunk.exchange = chunk.exchanges.out.post_to_heads((self._whole_dout,))
            if not chunk.index and not self.plan.local_heads:
                self._whole_dout = None
            return
        plan, kinds = self._projected, QKV_KINDS[: len(projected.again.ranges)]
        out = self._out.unflatten(-1, (plan.geometry.heads, -1))
        qkv = projected.again.post_to_heads(self._inputs.project(plan, projected, kinds))
        chunk.exchange = qkv
        columns = [self._inputs.out[:, start:stop] for _, start, stop in projected.dout_columns]
        dout = self._dout_of(columns[0] if len(columns) == 1 else torch.cat(columns, dim=1))
        outs = projected.dout.post_to_heads((dout, out))
        chunk.exchange = SeveralExchanges(outs, qkv)

    def wait_heads(self, chunk: BackwardChunk, step: int, number: int) -> None:
        """The output's weight is done under the first exchange. With ``keep="input"`` also take
        the tensors that were exchanged again."""
        self._finish_out()
        if self._projected.keeps_input:
            dout, out, q, *kv = chunk.exchange.wait()
            group = chunk.exchanges.kv_chunk
            if kv:
                self._group_kv[group] = kv[0], kv[1]
            k, v = self._group_kv[group]
            chunk.saved = SavedChunk(q, k, v, out.contiguous(), chunk.saved.lse)
            chunk.local_kv = k, v
            chunk.exchange = PendingExchange(lambda: (dout.contiguous(),))
        super().wait_heads(chunk, step, number)

    def slice_heads(self, chunk: BackwardChunk, _: int, __: int) -> None:
        """The same without Ulysses."""
        self.post_heads(chunk, 0, 0)
        self.wait_heads(chunk, 0, 0)

    def _dout_of(self, weight: torch.Tensor) -> torch.Tensor:
        """The gradient ``[b, s, heads, e]`` of the attention output, of the weight's columns."""
        dim = self._projected.geometry.value_dim
        dout = self._dy @ weight
        return dout.view(*self._inputs.x.shape[:2], -1, dim)

    def _finish_out(self) -> None:
        """The gradients of the output's weight and bias, once."""
        if self._out_done:
            return
        self._out_done = True
        if self._needed.out:
            self.results.out = self._dy.t() @ self._out.reshape(-1, self._out.shape[-1])
        if self._needed.out_bias:
            self.results.out_bias = self._dy.sum(0)

    # ---------------------------------------------------------------- gradients of q, k and v

    def stage_return(self, chunk: BackwardChunk, _: int, __: int) -> None:
        """See :meth:`BackwardPass.stage_return`."""
        sizes = [x.shape for x in self._views(chunk)]
        exchange = self._projected.chunks[chunk.index].qkv
        chunk.staging = exchange.preallocate_send(self._inputs.x, sizes)

    def end(self, chunk: BackwardChunk, step: int, number: int) -> None:
        """Without Ulysses, the last chunk's queries and the weights' gradients of all others are
        done here: keys and values come around the ring meanwhile."""
        super().end(chunk, step, number)
        if self._projected.keeps_input:
            if chunk.exchanges.kv_chunk == chunk.index:
                del self._group_kv[chunk.index]
            del chunk.saved
        elif self.plan.local_heads and not chunk.index:
            (queries, *_) = self._views(chunk)
            chunk.dq.write(queries)
            self._rotate_back([queries])
            self._add_rows(0, self._projected.chunks[0].num_rows(QUERIES))
            self._add_rows(self._projected.columns[1], self._projected.columns[-1])

    def post_return(self, chunk: BackwardChunk, _: int, __: int) -> None:
        """Post the gradients of a chunk, the only one's queries first."""
        projected, outs = self._projected.chunks[chunk.index], self._views(chunk)
        sources = self.sums_of(chunk)[: len(outs)]
        if len(self._projected.chunks) > 1 or chunk.staging is not None:
            chunk.exchange = projected.qkv.post_to_sequence(sources, outs, chunk.staging)
        else:
            chunk.exchange = projected.q.post_to_sequence(sources[:1], outs[:1])
            kv = projected.kv.post_to_sequence(sources[1:], outs[1:])
            chunk.exchange = SeveralExchanges(chunk.exchange, kv)
        chunk.grad_exchange = chunk.outer_grad_exchange = chunk.staging = None
        del chunk.dq

    def wait_return(self, chunk: BackwardChunk, step: int, number: int) -> None:
        """Under the last return: the weights' gradients of all chunks before."""
        keeps_input, columns = self._projected.keeps_input, self._projected.columns
        if not chunk.index and not keeps_input:
            self._add_rows(columns[1], columns[-1])
        exchange, queries_done = chunk.exchange, 0
        if isinstance(exchange, SeveralExchanges):  # the only chunk: the queries under the others
            exchange.wait_first()
            queries_done = self._take_queries(chunk)
        super().wait_return(chunk, step, number)
        self._take_chunk(chunk, queries_done)

    def store(self, chunk: BackwardChunk, _: int, __: int) -> None:
        """The same without Ulysses: the gradients are written where they belong."""
        sources, outs = self.sums_of(chunk), self._views(chunk)
        early = not self._projected.keeps_input and not chunk.index
        for i, (out, source) in enumerate(zip(outs, sources, strict=True)):
            if i or not early:
                source.write(out)
        chunk.grad_exchange = chunk.outer_grad_exchange = None
        del chunk.dq
        self._take_chunk(chunk, self._projected.chunks[0].num_rows(QUERIES) if early else 0)

    def _views(self, chunk: BackwardChunk) -> list[torch.Tensor]:
        """Where the gradients of a chunk's q, and k and v, are written: ``[b, s, heads, dim]``."""
        plan, projected = self._projected, self._projected.chunks[chunk.index]
        if plan.keeps_input:
            features = self._of_chunk.get(chunk.index)
            if features is None:
                width, shape = projected.num_rows(projected.kinds), self._inputs.x.shape[:2]
                features = self._inputs.x.new_empty(*shape, width)
                self._of_chunk[chunk.index] = features
        else:
            first, stop = plan.columns[chunk.index : chunk.index + 2]
            features = self._features[..., first:stop]
        return chunk_views(plan, projected, projected.kinds, features)

    # ---------------------------------------------------------------- gradients of the inputs

    def _take_queries(self, chunk: BackwardChunk) -> int:
        """Use the gradients of the only chunk's queries, which are there; their features."""
        self._rotate_back(self._views(chunk)[:1])
        count = self._projected.chunks[chunk.index].num_rows(QUERIES)
        if not self._projected.keeps_input:
            self._add_rows(0, count)
        return count

    def _take_chunk(self, chunk: BackwardChunk, queries_done: int) -> None:
        """Use the gradients of a chunk, all of which are there.

        Args:
            queries_done: features of its queries, if they have been used.
        """
        plan, columns = self._projected, self._projected.columns
        self._rotate_back(self._views(chunk)[1 if queries_done else 0 : 2])
        if plan.keeps_input:
            self._take_features(chunk)
        elif not chunk.index:
            self._add_rows(queries_done, columns[1])
        if not chunk.index:
            self._finish()

    def _take_features(self, chunk: BackwardChunk) -> None:
        """``keep="input"``: all gradients of one chunk; its own are freed."""
        plan, projected = self._projected, self._projected.chunks[chunk.index]
        features = self._of_chunk.pop(chunk.index).flatten(0, 1)
        first, stop = plan.columns[chunk.index : chunk.index + 2]
        self._add_rows(first, stop, features)
        if self._needed.x:
            part = features @ select_rows(self._inputs.weights, projected.runs(projected.kinds))
            if self._x_sum is None:
                dtype = torch.promote_types(part.dtype, torch.float32)
                self._x_sum = part.to(dtype) if len(plan.chunks) > 1 else part
            else:
                self._x_sum += part

    def _add_rows(self, first: int, stop: int, features: torch.Tensor | None = None) -> None:
        """The gradients of these rows of the weights and biases, chunk by chunk."""
        if first == stop:
            return
        if features is None:
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

    def _finish(self) -> None:
        """After the last chunk: the gradient of x, and rows in the weights' own order."""
        plan, inputs, results = self._projected, self._inputs, self.results
        runs = plan.runs
        if self._needed.x and plan.keeps_input and self._x_sum is not None:
            results.x = self._x_sum.to(inputs.x.dtype)
        elif self._needed.x:
            results.x = self._features.flatten(0, 1) @ select_rows(inputs.weights, runs)
        if self._row_grads is not None:
            results.weights = unselect_rows(self._row_grads, runs, inputs.weights)
        if self._bias_grads is not None:
            results.biases = unselect_rows(self._bias_grads, runs, inputs.biases)

    handlers = dict(BackwardPass.handlers) | {
        Op.A2A_POST: post_heads,
        Op.A2A_WAIT: wait_heads,
        Op.SLICE_HEADS: slice_heads,
        Op.RETURN_STAGE: stage_return,
        Op.END: end,
        Op.RETURN_POST: post_return,
        Op.RETURN_WAIT: wait_return,
        Op.STORE: store,
    }
