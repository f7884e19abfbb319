"""Self-attention with its linear layers, which are multiplied chunk by chunk of heads: for memory.

Plain attention between linear layers keeps queries, keys and values for backward, and has them for
all heads at once. Here a chunk of heads is projected just before its all-to-all, under that of the
chunk before, and nothing of it is kept but its log-sum-exp: backward projects the chunks again, and
exchanges them again, which takes one more exchange of queries, keys, values and the output. The
schedule is that of attention with these products (``projected_schedule.py``), and the two passes
are attention's, with the handlers of the products: one loop executes both.

What keeps it off by default: it is slower, by 2 to 13 % of a layer on NVLink (2 H200), for up to
17 % less memory at the peak (``scripts/bench/results/projected.csv``).

Letters of the shapes: b batch, s tokens of this rank, t those of all samples, c features of a
token, h query heads, g key/value heads, d head dim of queries and keys, e of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ds_usp.attention.functional import usp_attention
from ds_usp.attention.kv_exchange import KV
from ds_usp.attention.passes import NO_KV, BackwardChunk, BackwardPass, ForwardChunk, ForwardPass
from ds_usp.attention.plan import (
    AttentionOptions,
    AttentionPlan,
    SavedChunk,
    explain_keywords,
    plan_call,
)
from ds_usp.attention.score_mod import NO_SCORE_MOD, Scores
from ds_usp.attention.tuning import AUTO_TUNING, Tuning
from ds_usp.comm.all_to_all import HeadAllToAll, HeadRanges
from ds_usp.comm.call_record import Signature
from ds_usp.comm.channel import PendingExchange
from ds_usp.comm.mesh import SequenceMesh, check_on_all_ranks
from ds_usp.errors import ConfigError, UnsupportedAttentionError, warn_once
from ds_usp.experimental.projected_schedule import (
    ProjectedOp,
    projected_backward,
    projected_forward,
)
from ds_usp.experimental.projection import (
    QKV_KINDS,
    Geometry,
    Projection,
    Rows,
    Weights,
    check_heads,
    select_rows,
    split_heads,
    unselect_rows,
)
from ds_usp.geometry.heads import HeadSplit
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.pipeline_schedule import Instr, Op, pipeline_schedule
from ds_usp.kernels.registry import AUTO
from ds_usp.kernels.rotary import Rotary, RotaryPositions, apply_rotary, rotate_in_place, rotated
from ds_usp.lowlevel import refuse_second_derivative
from ds_usp.memory.saved_attention import is_saving
from ds_usp.settings import removal

Keep = Literal["input"]
_ONLY_LSE = SavedChunk(*NO_KV, *NO_KV, NO_KV[0])

# ---------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class ProjectedChunk:
    """One head chunk. Its tensors have the heads of all ranks in this chunk, one after the other.

    Args:
        rows: of the weights, for queries, keys and values.
        num_heads: of the tensors, likewise.
        qkv: the exchange of q and, with the chunk that exchanges them, k and v; of the gradients
            on their way back.
        again: the exchange of what backward projects again: of q, and, with the first chunk of a
            KV group in backward, k and v.
        dout: of the output's gradient, of this chunk, and the output, of all heads.
        dout_columns: columns of the output's weight.
    """

    rows: tuple[tuple[Rows, ...], ...]
    num_heads: tuple[int, int, int]
    qkv: HeadAllToAll
    again: HeadAllToAll
    dout: HeadAllToAll
    dout_columns: tuple[Rows, ...]

    @property
    def kinds(self) -> tuple[int, ...]:
        """Those whose gradients return with this chunk: (0, 1, 2), or (0,) inside a KV group."""
        return QKV_KINDS[: len(self.qkv.ranges)]

    def runs(self, kinds: Sequence[int]) -> tuple[Rows, ...]:
        return tuple(rows for kind in kinds for rows in self.rows[kind])

    def num_rows(self, kinds: Sequence[int]) -> int:
        return sum(rows.stop - rows.start for rows in self.runs(kinds))

    @classmethod
    def of_attention(cls, plan: AttentionPlan, index: int, geometry: Geometry) -> ProjectedChunk:
        """The chunk of an attention plan, whose exchanges are of all heads' tensors."""
        attention = plan.chunks[index]
        group = attention.kv_chunk
        last_of_group = index + 1 == len(plan.chunks) or plan.chunks[index + 1].kv_chunk != group
        all_queries, all_keys = attention.qkv.ranges[0], plan.chunks[group].qkv.ranges[1]
        (query_heads, queries), (key_heads, keys) = _compact(all_queries), _compact(all_keys)

        def exchange(*ranges: HeadRanges) -> HeadAllToAll:
            out = attention.out
            return HeadAllToAll(out.mesh, out.layouts[:1] * len(ranges), ranges, out.copies)

        heads = query_heads, key_heads, key_heads
        return cls(
            tuple(geometry.rows(kind, heads[kind]) for kind in QKV_KINDS),
            (len(query_heads), len(key_heads), len(key_heads)),
            exchange(queries, *((keys, keys) if attention.has_kv else ())),
            exchange(queries, *((keys, keys) if last_of_group else ())),
            exchange(queries, all_queries),
            geometry.out_columns(query_heads),
        )


def _compact(ranges: HeadRanges) -> tuple[tuple[int, ...], HeadRanges]:
    """The heads of all ranks, each once, ascending, and the ranges among these."""
    heads = tuple(sorted({head for first, stop in ranges for head in range(first, stop)}))
    places = {head: place for place, head in enumerate(heads)}
    return heads, tuple((places[first], places[stop - 1] + 1) for first, stop in ranges)


@dataclass(frozen=True)
class ProjectedPlan:
    """An attention plan whose chunks are projected; its schedules have the products."""

    attention: AttentionPlan
    geometry: Geometry
    chunks: tuple[ProjectedChunk, ...]

    @classmethod
    def add_products(
        cls, plan: AttentionPlan, geometry: Geometry, batch: int, itemsize: int
    ) -> ProjectedPlan:
        indices = range(len(plan.chunks))
        chunks = tuple(ProjectedChunk.of_attention(plan, index, geometry) for index in indices)
        plan = replace(plan, forward=projected_forward(plan.forward))
        if not plan.backward:
            return cls(plan, geometry, chunks)
        schedule = pipeline_schedule(
            [ring.schedule for ring in plan.ring_calls],
            ulysses=not plan.local_heads,
            backward=True,
            stage_return=any(instr.op is Op.RETURN_STAGE for instr in plan.backward),
            kv_saved=False,
        )
        staging = dict(plan.staging_bytes)
        if staging:  # the gradient of the output goes with the output
            dims = geometry.value_dim, geometry.value_dim
            largest = max(chunk.dout.staging_bytes(batch, dims, itemsize) for chunk in chunks)
            staging["all_to_all"] = max(staging["all_to_all"], largest)
        backward = projected_backward(schedule)
        return cls(replace(plan, backward=backward, staging_bytes=staging), geometry, chunks)

    @cached_property
    def runs(self) -> tuple[Rows, ...]:
        return tuple(run for chunk in self.chunks for run in chunk.runs(chunk.kinds))

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """The first feature of each chunk among those of all chunks, and their number."""
        edges = [0]
        for chunk in self.chunks:
            edges.append(edges[-1] + chunk.num_rows(chunk.kinds))
        return tuple(edges)

    def views(self, index: int, kinds: Sequence[int], features: torch.Tensor) -> list[torch.Tensor]:
        """The tensors ``[b, s, heads, dim]`` of a chunk that lie one after the other in the
        features of a token."""
        chunk, dim = self.chunks[index], self.geometry.head_dim
        parts = features.split([chunk.num_rows((kind,)) for kind in kinds], dim=-1)
        return [
            x.unflatten(-1, (chunk.num_heads[kind], dim(kind)))
            for kind, x in zip(kinds, parts, strict=True)
        ]


# -------------------------------------------------------------------------------------- the passes


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
    out_bias: torch.Tensor | None
    rotary: Rotary | None

    @property
    def rows(self) -> torch.Tensor:
        return self.x.reshape(-1, self.x.shape[-1])

    def project(self, plan: ProjectedPlan, index: int, kinds: Sequence[int]) -> list[torch.Tensor]:
        """Queries, keys or values of a chunk, ``[b, s, heads, dim]`` each, rotated."""
        runs = plan.chunks[index].runs(kinds)
        bias = select_rows(self.biases, runs) if self.biases else None
        features = nn.functional.linear(self.rows, select_rows(self.weights, runs), bias)
        tensors = plan.views(index, kinds, features.view(*self.x.shape[:2], -1))
        if self.rotary is not None:  # queries come first, then keys
            _rotate_in_place(tensors[:2], self.rotary)
        return tensors


def _rotate_in_place(
    tensors: Sequence[torch.Tensor], rotary: Rotary, *, transposed: bool = False
) -> None:
    """Heads ``[b, s, h, d]``, or gradients by the transpose."""
    if isinstance(rotary, RotaryPositions):
        rotary.rotate_in_place(tensors, 1, transposed=transposed)
    else:
        rotate_in_place(tensors, *rotary, token_dim=1, transposed=transposed)


class ProjectedForward(ForwardPass):
    """Forward: projects each chunk where it is posted. ``stand_ins`` of q, k and v are for shapes,
    dtype and device."""

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
        self._unposted: dict[int, list[torch.Tensor]] = {}  # of each chunk, to be posted
        self.y: torch.Tensor

    def project(self, chunk: ForwardChunk, instr: Instr) -> None:
        kinds = self._projected.chunks[chunk.index].kinds
        self._unposted[chunk.index] = self._inputs.project(self._projected, chunk.index, kinds)

    def post_heads(self, chunk: ForwardChunk, instr: Instr) -> None:
        exchange = self._projected.chunks[chunk.index].qkv
        overlapped = instr not in self.exposed
        tensors = self._unposted.pop(chunk.index)
        chunk.exchange = exchange.post_to_heads(tensors, overlapped=overlapped)

    def end(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Of a chunk only the log-sum-exp is kept."""
        super().end(chunk, instr)
        if self.saved:
            self.saved[-1] = _ONLY_LSE._replace(lse=self.saved[-1].lse)

    def project_out(self, _: ForwardChunk, instr: Instr) -> None:
        inputs = self._inputs
        self.y = nn.functional.linear(self.out.flatten(2), inputs.out, inputs.out_bias)

    handlers = dict(ForwardPass.handlers) | {
        ProjectedOp.PROJECT: project,
        ProjectedOp.PROJECT_OUT: project_out,
        Op.A2A_POST: post_heads,
        Op.END: end,
    }


class _TwoExchanges(PendingExchange):
    """Two exchanges in flight as one: their results one after the other."""

    def __init__(self, first: PendingExchange, second: PendingExchange) -> None:
        self.first, self.second = first, second

    def wait(self) -> tuple[torch.Tensor, ...]:
        return *self.first.wait(), *self.second.wait()

    def drain(self) -> None:
        self.first.drain()
        self.second.drain()


class Needed(NamedTuple):
    """Which gradients are needed."""

    x: bool
    out: bool
    out_bias: bool
    weights: bool
    biases: bool


class ProjectedBackward(BackwardPass):
    """Backward: from the gradient of the projected output to those of the inputs.

    Args:
        dy: ``[b, s, c_out]``.
        out: the attention output ``[b, s, h e]``.
        lses: the log-sum-exp of each chunk.

    Attributes:
        dx, dout_weight, dout_bias, dweights, dbiases: the gradients that are needed.
    """

    dx: torch.Tensor | None = None
    dout_weight: torch.Tensor | None = None
    dout_bias: torch.Tensor | None = None
    dweights: Sequence[torch.Tensor] = ()
    dbiases: Sequence[torch.Tensor] = ()

    def __init__(
        self,
        plan: ProjectedPlan,
        scores: Scores,
        inputs: Inputs,
        needed: Needed,
        dy: torch.Tensor,
        out: torch.Tensor,
        lses: Sequence[torch.Tensor],
    ) -> None:
        saved = [_ONLY_LSE._replace(lse=lse) for lse in lses]
        # The output's gradient does not exist yet; the pass takes dtype and device from it.
        super().__init__(plan.attention, scores, inputs.x, (), saved)
        self._projected, self._inputs, self._needed = plan, inputs, needed
        self._dy, self._out = dy.reshape(-1, dy.shape[-1]), out
        self._group_kv: dict[int, KV] = {}
        # Of each chunk, to be posted: what is projected again; the output's gradient, and the
        # output.
        self._unposted: dict[int, list[torch.Tensor]] = {}
        self._douts: dict[int, tuple[torch.Tensor, ...]] = {}
        total, weight = plan.columns[-1], inputs.weights[0]
        # Gradients of q, k and v of all chunks, chunk by chunk, and of the rows of the weights.
        self._features = inputs.x.new_empty(*inputs.x.shape[:2], total)
        self._row_grads = weight.new_empty(total, weight.shape[1]) if needed.weights else None
        self._bias_grads = weight.new_empty(total) if needed.biases else None

    # ------------------------------------------------------ a chunk, and its output's gradient

    def project(self, chunk: BackwardChunk, instr: Instr) -> None:
        kinds = QKV_KINDS[: len(self._projected.chunks[chunk.index].again.ranges)]
        self._unposted[chunk.index] = self._inputs.project(self._projected, chunk.index, kinds)

    def post_again(self, chunk: BackwardChunk, instr: Instr) -> None:
        exchange = self._projected.chunks[chunk.index].again
        chunk.exchange = exchange.post_to_heads(self._unposted.pop(chunk.index))

    def grad_out(self, chunk: BackwardChunk, instr: Instr) -> None:
        geometry, inputs = self._projected.geometry, self._inputs
        runs = self._projected.chunks[chunk.index].dout_columns
        columns = [inputs.out[:, start:stop] for _, start, stop in runs]
        dout = self._dy @ (columns[0] if len(columns) == 1 else torch.cat(columns, dim=1))
        dout = dout.view(*inputs.x.shape[:2], -1, geometry.value_dim)
        self._douts[chunk.index] = dout, self._out.unflatten(-1, (geometry.heads, -1))

    def grad_out_weight(self, _: BackwardChunk, instr: Instr) -> None:
        if self._needed.out:
            self.dout_weight = self._dy.t() @ self._out.reshape(-1, self._out.shape[-1])
        if self._needed.out_bias:
            self.dout_bias = self._dy.sum(0)

    def post_heads(self, chunk: BackwardChunk, instr: Instr) -> None:
        exchange = self._projected.chunks[chunk.index].dout
        outs = exchange.post_to_heads(self._douts.pop(chunk.index))
        chunk.exchange = _TwoExchanges(outs, chunk.exchange)

    def wait_again(self, chunk: BackwardChunk, instr: Instr) -> None:
        if isinstance(chunk.exchange, _TwoExchanges):
            chunk.exchange.second.wait()

    def wait_heads(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Take what plain attention has saved: the chunk's queries, its group's keys and values."""
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
        self.post_again(chunk, instr)
        self.post_heads(chunk, instr)
        self.wait_heads(chunk, instr)

    # -------------------------------------------------------------- gradients of q, k and v

    def stage_return(self, chunk: BackwardChunk, instr: Instr) -> None:
        sizes = [x.shape for x in self._views(chunk)]
        exchange = self._projected.chunks[chunk.index].qkv
        chunk.staging = exchange.preallocate_send(self._inputs.x, sizes)

    def end(self, chunk: BackwardChunk, instr: Instr) -> None:
        super().end(chunk, instr)
        if chunk.exchanges.kv_chunk == chunk.index:
            del self._group_kv[chunk.index]
        del chunk.saved

    def post_return(self, chunk: BackwardChunk, instr: Instr) -> None:
        outs = self._views(chunk)
        sources = self.take_grads(chunk)[: len(outs)]
        overlapped = instr not in self.exposed
        chunk.exchange = self._projected.chunks[chunk.index].qkv.post_to_sequence(
            sources, outs, chunk.staging, overlapped=overlapped
        )
        chunk.grad_exchange = chunk.outer_grad_exchange = chunk.staging = None
        del chunk.dq

    def wait_return(self, chunk: BackwardChunk, instr: Instr) -> None:
        super().wait_return(chunk, instr)
        self._rotate_back(chunk)

    def store(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Without Ulysses: the gradients are written where they belong."""
        for out, source in zip(self._views(chunk), self.take_grads(chunk), strict=True):
            source.write(out)
        chunk.grad_exchange = chunk.outer_grad_exchange = None
        del chunk.dq
        self._rotate_back(chunk)

    def _rotate_back(self, chunk: BackwardChunk) -> None:
        if self._inputs.rotary is not None:
            _rotate_in_place(self._views(chunk)[:2], self._inputs.rotary, transposed=True)

    def _views(self, chunk: BackwardChunk) -> list[torch.Tensor]:
        """Where the gradients of a chunk's q, and k and v, are written: ``[b, s, heads, dim]``."""
        plan, index = self._projected, chunk.index
        first, stop = plan.columns[index : index + 2]
        return plan.views(index, plan.chunks[index].kinds, self._features[..., first:stop])

    # ------------------------------------------------------------------ gradients of the inputs

    def grad_weight(self, chunk: BackwardChunk, instr: Instr) -> None:
        first, stop = self._projected.columns[chunk.index : chunk.index + 2]
        features = self._features.flatten(0, 1)[:, first:stop]
        if self._row_grads is not None:
            torch.mm(features.t(), self._inputs.rows, out=self._row_grads[first:stop])
        if self._bias_grads is not None:
            self._bias_grads[first:stop] = features.sum(0)

    def grad_input(self, _: BackwardChunk, instr: Instr) -> None:
        """The gradient of x, and rows in the weights' own order."""
        inputs, runs = self._inputs, self._projected.runs
        if self._needed.x:
            dx = self._features.flatten(0, 1) @ select_rows(inputs.weights, runs)
            self.dx = dx.view(inputs.x.shape)
        if self._row_grads is not None:
            self.dweights = unselect_rows(self._row_grads, runs, inputs.weights)
        if self._bias_grads is not None:
            self.dbiases = unselect_rows(self._bias_grads, runs, inputs.biases)

    handlers = dict(BackwardPass.handlers) | {
        ProjectedOp.PROJECT: project,
        ProjectedOp.AGAIN_POST: post_again,
        ProjectedOp.AGAIN_WAIT: wait_again,
        ProjectedOp.GRAD_OUT: grad_out,
        ProjectedOp.GRAD_OUT_WEIGHT: grad_out_weight,
        ProjectedOp.GRAD_WEIGHT: grad_weight,
        ProjectedOp.GRAD_INPUT: grad_input,
        Op.A2A_POST: post_heads,
        Op.A2A_WAIT: wait_heads,
        Op.SLICE_HEADS: slice_heads,
        Op.RETURN_STAGE: stage_return,
        Op.END: end,
        Op.RETURN_POST: post_return,
        Op.RETURN_WAIT: wait_return,
        Op.STORE: store,
    }


# --------------------------------------------------------------------------------------- the call


class _Call(NamedTuple):
    """A call besides its tensors; ``positions``: rotary is :class:`RotaryPositions`;
    ``grad_enabled``: the caller's grad mode."""

    mesh: SequenceMesh
    plan: ProjectedPlan
    scores: Scores
    positions: bool
    grad_enabled: bool

    def inputs(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        out_bias: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        *qkv: torch.Tensor,
    ) -> Inputs:
        """``qkv``: weights, then biases, if there are any."""
        rotary: Rotary | None = None
        if cos is not None and sin is not None:
            rotary = RotaryPositions(cos, sin) if self.positions else (cos, sin)
        count = self.plan.geometry.num_weights
        return Inputs(x, qkv[:count], qkv[count:], out, out_bias, rotary)


class ProjectedAttention(torch.autograd.Function):
    """Attention from the layer's input to the output of its last projection."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, sinks: torch.Tensor | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """x ``[b, s, c]`` -> ``[b, s, c_out]``; for the tensors see :meth:`_Call.inputs`."""
        save = call.grad_enabled and any(ctx.needs_input_grad)
        inputs = call.inputs(*tensors)
        stand_ins = _stand_ins(inputs.x, call.plan.geometry)
        run = ProjectedForward(call.plan, call.scores, inputs, stand_ins, save=save)
        run.execute(call.plan.attention.forward)
        if save:
            # Autograd keeps the sinks.
            ctx.call = call._replace(scores=replace(call.scores, sinks=None))
            ctx.call_number = call.mesh.consistency.number
            ctx.is_on_cpu, ctx.num_tensors = inputs.x.device.type == "cpu", len(tensors)
            lses = [chunk.lse for chunk in run.saved]
            ctx.save_for_backward(sinks, *tensors, run.out.flatten(2), *lses)
        return run.y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        consistency = call.mesh.consistency
        with consistency.raising_everywhere():
            refuse_second_derivative("projected_attention", UnsupportedAttentionError)
            sinks, *saved = ctx.saved_tensors  # once, or hooks would unpack them again
        consistency.check_backward(ctx.call_number, wait=ctx.is_on_cpu)
        tensors, (out, *lses) = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
        inputs, scores = call.inputs(*tensors), replace(call.scores, sinks=sinks)
        x, out_weight, out_bias, _, _, *qkv = ctx.needs_input_grad[2:]
        count = call.plan.geometry.num_weights
        needed = Needed(x, out_weight, out_bias, any(qkv[:count]), any(qkv[count:]))
        # Under autocast products would change dtype, which is the plan's in every exchange.
        with torch.autocast(inputs.x.device.type, enabled=False):
            run = ProjectedBackward(call.plan, scores, inputs, needed, dy, out, lses)
            run.execute(call.plan.attention.backward)
        dqkv: list[torch.Tensor | None] = [None] * len(qkv)
        dqkv[: len(run.dweights)] = run.dweights
        dqkv[count : count + len(run.dbiases)] = run.dbiases
        return None, run.dsinks, run.dx, run.dout_weight, run.dout_bias, None, None, *dqkv


def _stand_ins(x: torch.Tensor, geometry: Geometry) -> list[torch.Tensor]:
    """Of q, k and v: one element each, expanded to the shape."""
    b, s = x.shape[:2]
    h, g, d, e = geometry[:4]
    return [x.new_empty(()).expand(b, s, *shape) for shape in ((h, d), (g, d), (g, e))]


@explain_keywords
def projected_attention(
    x: torch.Tensor,
    projection: Projection,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout | str,
    mask: MaskSpec,
    rotary: Rotary | None = None,
    keep: Keep = "input",
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    kernel: str = AUTO,
    tuning: Tuning = AUTO_TUNING,
    scores: Scores = NO_SCORE_MOD,
    plain: Callable[[], torch.Tensor] | None = None,
    why_plain: str | None = None,
) -> torch.Tensor:
    """Self-attention with its projections, over a sequence sharded over a mesh: what
    :func:`ds_usp.usp_attention` between linear layers computes, in less memory. Collective over the
    mesh. Experimental.

    A chunk of heads is projected just before its exchange, under that of the chunk before. For
    backward nothing is kept of it: it is projected and exchanged again, which takes one more
    exchange of queries, keys, values and the attention output.

    Shapes:
        x ``[b, s_local, c]`` -> ``[b, s_local, c_out]``; the weights' in :class:`Projection`.

    Args:
        projection: the weights. Their gradients are returned once a pass.
        rotary: cos and sin ``[s_local, r]`` of this rank's tokens, which turn queries and keys
            (:func:`ds_usp.training.apply_rotary`), or :class:`ds_usp.training.RotaryPositions`
            of the tokens, without a table.
        keep: what is kept for backward besides the attention output and its log-sum-exp:
            ``"input"``, x.
        tuning: ``Tuning(chunks="auto")`` is the number of
            :func:`ds_usp.geometry.heads.HeadSplit.memory_chunks`.
        softmax_scale, dropout_p, kernel, scores: as of :func:`ds_usp.usp_attention`.
        mesh, layout, mask: likewise.
        plain: what computes the plain path, as a framework's own layers; None: linear layers of
            these weights around :func:`ds_usp.usp_attention`.
        why_plain: a reason of the caller's to take it.

    The plain path is taken, with one line in the log that names the reason: under
    ``keep_attention``, ``torch.compile`` (no line) and autocast, and with weights of another dtype
    or a tensor subclass (fp8, DTensor), or partitioned by ZeRO-3. On a single rank it is taken too:
    nothing is exchanged.

    Raises:
        ConfigError: tensors that do not fit the projection.
        LayoutError, UnsupportedAttentionError, MeshError: as :func:`ds_usp.usp_attention`.

    Every rank raises in all of these cases, before any data is sent.
    """
    options = AttentionOptions(
        mesh, layout, mask, softmax_scale, dropout_p, kernel, False, tuning, scores
    )
    alone = isinstance(mesh, SequenceMesh) and mesh.sp_degree == 1
    usable = isinstance(projection, Projection)  # else every rank raises, below
    reason = None if alone or not usable else why_plain or plain_reason(x, projection)
    if (alone and usable) or reason is not None:
        if reason and not torch.compiler.is_compiling():
            warn_plain(reason, mesh)
        return plain() if plain else plain_attention(x, projection, rotary, options)
    check = partial(_plan, x, projection, rotary, keep, options)
    plan = check_on_all_ranks(mesh, check, x, layout)
    is_positions = isinstance(rotary, RotaryPositions)
    call = _Call(mesh, plan, scores, is_positions, torch.is_grad_enabled())
    qkv = *projection.weights, *projection.biases
    around = x, projection.out, projection.out_bias, *(rotary or (None, None))
    y: torch.Tensor = ProjectedAttention.apply(call, scores.sinks, *around, *qkv)
    return y


def _plan(
    x: torch.Tensor,
    projection: Projection,
    rotary: Rotary | None,
    keep: str,
    options: AttentionOptions,
) -> tuple[Signature, ProjectedPlan]:
    check_keep(keep)
    if not isinstance(projection, Projection):
        raise ConfigError(f"projection={projection!r} must be a Projection of the weights")
    geometry, weights = projection.geometry, projection.weights
    if x.ndim != 3 or x.shape[2] != weights[0].shape[1]:
        raise ConfigError(
            f"x must be [batch, tokens, {weights[0].shape[1]}] for these weights, got "
            f"{list(x.shape)}"
        )
    if rotary is not None:
        check_local_rotary(rotary, x.shape[1], geometry.dim)
    requires_grad = x.requires_grad or any(w.requires_grad for w in projection.tensors)
    if options.tuning.chunks == "auto":
        split = HeadSplit(geometry.heads, geometry.kv_heads, options.mesh.ulysses_degree)
        chunks = split.memory_chunks(options.mesh.ring_degree)
        options = options._replace(tuning=replace(options.tuning, chunks=chunks))
    q, k, v = (y.requires_grad_(requires_grad) for y in _stand_ins(x, geometry))
    compared, attention = plan_call(q, k, v, options)
    by_positions = isinstance(rotary, RotaryPositions)
    kind = f" by positions ({rotary[1].dtype})" if rotary is not None and by_positions else ""
    signature = Signature.of(
        compared,
        f"projected by {len(weights)} weights ({geometry.order})",
        f"{len(projection.biases)} biases",
        "no rotary" if rotary is None else f"rotary{kind}",
    )
    backward = requires_grad and torch.is_grad_enabled()
    key = "projected", id(attention), geometry, backward, x.shape[0], x.dtype
    plans = options.mesh.plans
    if key not in plans:
        plans[key] = ProjectedPlan.add_products(attention, geometry, x.shape[0], x.element_size())
    plan: ProjectedPlan = plans[key]
    return signature, plan


def check_local_rotary(rotary: Rotary, tokens: int, head_dim: int) -> None:
    """Check that a table ``[s, r]``, or positions, are those of a rank's tokens.

    Raises:
        ConfigError: shapes that do not fit; a table or inverse frequencies that are trained.
    """
    if isinstance(rotary, RotaryPositions):
        rotary.check()
        positions, inverse = rotary
        if positions.shape != (tokens,) or inverse.ndim != 1 or 2 * len(inverse) > head_dim:
            raise ConfigError(
                f"rotary must be positions [s] of this rank's {tokens} tokens and at most "
                f"{head_dim // 2} inverse frequencies; got {list(positions.shape)} and "
                f"{list(inverse.shape)}"
            )
        return
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        raise ConfigError("rotary must be two tables, cos and sin [s, r], or RotaryPositions")
    cos, sin = rotary
    fits = cos.ndim == 2 and cos.shape == sin.shape and len(cos) == tokens
    if not fits or cos.shape[1] % 2 or cos.shape[1] > head_dim:
        raise ConfigError(
            f"rotary must be cos and sin [s, r] of this rank's {tokens} tokens, r even and "
            f"at most {head_dim}; got {list(cos.shape)} and {list(sin.shape)}"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ConfigError("rotary tables get no gradient: give them without requires_grad")


def check_keep(keep: object) -> None:
    """ConfigError for another ``keep`` than ``"input"``."""
    if keep != "input":
        raise ConfigError(removal("keep", keep) or f"keep={keep!r} must be 'input'")


# --------------------------------------------------------------------------------- the plain path


def warn_plain(reason: str, mesh: SequenceMesh) -> None:
    """Say once why projections are not computed under their exchange."""
    text = f"projections are computed before attention, not under its exchanges: {reason}"
    warn_once(text, rank=mesh.rank if isinstance(mesh, SequenceMesh) else 0)


def plain_reason(x: torch.Tensor, projection: Projection) -> str | None:
    """Why a call takes the plain path; None if it need not."""
    if torch.compiler.is_compiling():
        return "torch.compile traces plain attention"
    if is_saving():
        return "keep_attention keeps attention without its projections"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on; convert the weights instead"
    return weights_reason(projection.tensors, x.dtype, gathered=projection.gathered)


def weights_reason(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, *, gathered: bool = False
) -> str | None:
    """Why only their own layers can multiply these weights and biases; None if others can
    (``gathered`` as of :class:`Projection`)."""
    for weight in tensors:
        if hasattr(weight, "ds_id") and not gathered:
            return "weights are partitioned (ZeRO-3), and gathered by their own layers"
        if type(weight) not in (torch.Tensor, nn.Parameter):
            return f"a weight is a {type(weight).__name__}"
        if weight.dtype != dtype:
            return f"a weight is {weight.dtype}, the input {dtype}"
    return None


def plain_attention(
    x: torch.Tensor, projection: Projection, rotary: Rotary | None, options: AttentionOptions
) -> torch.Tensor:
    """The same as :func:`projected_attention`, one after the other."""
    q, k, v = projection.plain(x)
    out = attend_rotated(q, k, v, rotary, options)
    return nn.functional.linear(out.flatten(2), projection.out, projection.out_bias)


def attend_rotated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: Rotary | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of queries and keys that are still to be rotated."""
    if rotary is not None:
        if isinstance(rotary, RotaryPositions):
            q, k = rotated(q, rotary, 1), rotated(k, rotary, 1)
        else:
            q, k = apply_rotary((q, k), *rotary, token_dim=1)
    out: torch.Tensor = usp_attention(q, k, v, **options._asdict())
    return out


# ------------------------------------------------------------------------------------- the module


class USPSelfAttention(nn.Module):
    """Self-attention over a mesh, with the linear layers before and after it.

    With ``overlap`` the rows of their weights are multiplied chunk by chunk of heads, forward and
    again in backward, by :func:`ds_usp.projected_attention`; otherwise, and where that cannot be,
    the layers are called as they are, with :func:`ds_usp.usp_attention` between them, and one line
    in the log names the reason. Weights keep their names in checkpoints: ``qkv``, or ``qkv.0`` to
    ``qkv.2``, and ``out``.

    Args:
        qkv: one linear layer, or three; see :class:`ds_usp.Projection` for their rows.
        out: the linear layer after attention.
        heads, kv_heads: query heads and key/value heads.
        mesh, layout, mask, softmax_scale, kernel, tuning, scores: as of
            :func:`ds_usp.usp_attention`.
        order: of the rows of one ``qkv`` layer: ``"qkv"`` or ``"grouped"``.
        q_norm, k_norm: modules that normalize queries and keys ``[b, s, heads, d]`` before they
            are rotated; with them the plain path is taken.
        overlap: multiply chunk by chunk: less memory, for 2 to 13 % of a layer's time (2 H200).
        keep: what is kept for backward then.

    Raises:
        ConfigError: arguments that do not fit.
    """

    @explain_keywords
    def __init__(
        self,
        qkv: nn.Module | Sequence[nn.Module],
        out: nn.Module,
        heads: int,
        kv_heads: int,
        *,
        mesh: SequenceMesh,
        layout: TokenLayout | str,
        mask: MaskSpec,
        order: str = "qkv",
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        overlap: bool = False,
        keep: Keep = "input",
        softmax_scale: float | None = None,
        kernel: str = AUTO,
        tuning: Tuning = AUTO_TUNING,
        scores: Scores = NO_SCORE_MOD,
    ) -> None:
        super().__init__()
        if not isinstance(mesh, SequenceMesh):
            raise ConfigError(
                f"mesh={mesh!r} must be a SequenceMesh: SequenceMesh.from_group(group, "
                "ulysses_degree=...), or SequenceMesh.single() for one process"
            )
        if overlap not in (True, False):
            reason = removal("overlap", overlap)
            raise ConfigError(reason or f"overlap={overlap!r} must be True or False")
        check_keep(keep)
        if not isinstance(qkv, nn.Module):
            qkv = nn.ModuleList(qkv)
        check_heads(heads, kv_heads, len(qkv) if isinstance(qkv, nn.ModuleList) else 1, order)
        self.qkv = qkv
        self.out, self.q_norm, self.k_norm = out, q_norm, k_norm
        self.heads, self.kv_heads, self.order = heads, kv_heads, order
        self.overlap = overlap
        self._options = AttentionOptions(
            mesh, layout, mask, softmax_scale, 0.0, kernel, False, tuning, scores
        )

    def forward(
        self, x: torch.Tensor, rotary: Rotary | None = None, *, mask: MaskSpec | None = None
    ) -> torch.Tensor:
        """Attention of this rank's tokens with the whole sequence. Collective over the mesh.

        Shapes:
            x ``[b, s_local, c]`` -> ``[b, s_local, c_out]``.

        Args:
            rotary: cos and sin ``[s_local, r]`` of this rank's tokens.
            mask: of this call, as of packed documents, instead of the module's.
        """
        options = self._options if mask is None else self._options._replace(mask=mask)
        plain = partial(self._plain, x, rotary, options)
        if not self.overlap:
            return plain()
        reason = self._plain_reason()
        if reason is not None:
            if not torch.compiler.is_compiling():
                warn_plain(reason, options.mesh)
            return plain()
        call = options._asdict()
        for name in ("return_lse", "kv_layout", "label"):
            del call[name]
        return projected_attention(x, self._projection(), rotary=rotary, plain=plain, **call)

    @property
    def _layers(self) -> tuple[nn.Module, ...]:
        return tuple(self.qkv) if isinstance(self.qkv, nn.ModuleList) else (self.qkv,)

    def _plain_reason(self) -> str | None:
        """Why the layers must be called themselves; None if their weights say all that they do."""
        if self.q_norm is not None or self.k_norm is not None:
            return "queries or keys are normalized between their projection and attention"
        for layer in (*self._layers, self.out):
            if type(layer) is not nn.Linear:  # as of LoRA, fp8, tensor parallelism, parametrization
                return f"a projection is a {type(layer).__name__}, no torch.nn.Linear"
            hooks = layer._forward_hooks, layer._forward_pre_hooks
            if any(hooks) or layer._backward_hooks or layer._backward_pre_hooks:
                return "a projection has hooks, which only its own call runs"
            if "forward" in vars(layer):  # as Accelerate's offload does
                return "a projection's forward is replaced"
        if len({layer.bias is None for layer in self._layers}) > 1:
            return "some of the query, key and value layers have a bias, others none"
        return None

    def _projection(self) -> Projection:
        layers: Any = self._layers
        weights, biases = (tuple(getattr(x, name) for x in layers) for name in ("weight", "bias"))
        one = len(layers) == 1
        bias = None if biases[0] is None else biases[0] if one else biases
        out: Any = self.out
        weight = weights[0] if one else weights
        heads = self.heads, self.kv_heads
        return Projection(weight, out.weight, *heads, bias, out.bias, self.order)

    def _plain(
        self, x: torch.Tensor, rotary: Rotary | None, options: AttentionOptions
    ) -> torch.Tensor:
        projected = [layer(x) for layer in self._layers]
        h, g = self.heads, self.kv_heads
        counts = (h, g, g) if len(projected) == 3 else (h + 2 * g,)
        features = [y.shape[-1] for y in projected]
        if any(n % count for n, count in zip(features, counts, strict=True)):
            raise ConfigError(
                f"{features} features of the qkv layers are no multiples of the heads in each, "
                f"{list(counts)}: {h} query and {g} key/value heads"
            )
        dims = features[0] // counts[0], features[-1] // counts[-1]
        q, k, v = split_heads(projected, Geometry(h, g, *dims, len(projected), self.order))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        out: torch.Tensor = self.out(attend_rotated(q, k, v, rotary, options).flatten(2))
        return out
