"""The functional form: exchange heads, walk the ring, exchange back. Differentiable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch

from ds_usp.attention.call_plan import plan_call
from ds_usp.attention.custom_ops import attention
from ds_usp.attention.pipeline import (
    AttentionPlan,
    SavedChunk,
    pipelined_backward,
    pipelined_forward,
)
from ds_usp.attention.score_mod import NO_SCORE_MOD, Scores
from ds_usp.attention.tracing import graph_break, layout_spec, make_op_spec
from ds_usp.attention.tuning import AUTO_TUNING, Tuning
from ds_usp.attention.validation import check_on_all_ranks, exchange_label, is_on_cpu
from ds_usp.comm.all_to_all import HeadAllToAll
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.kernels.registry import AUTO
from ds_usp.memory.saved_attention import compute_or_replay


class SeqAllToAll(torch.autograd.Function):
    """A head exchange and, backwards, its reverse."""

    @staticmethod
    def forward(
        ctx: Any, head_exchange: HeadAllToAll, to_heads: bool, call: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """See :class:`HeadAllToAll` for the shapes; ``call`` is the number of the call."""
        ctx.exchange, ctx.to_heads, ctx.call = head_exchange, to_heads, call
        if to_heads:
            return tuple(x.contiguous() for x in head_exchange.to_heads(tensors))
        places = head_exchange.places(tensors)
        head_exchange.to_sequence(tensors, places)
        return places

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gradients go the way back; those of a head with several users are summed."""
        consistency, part = ctx.exchange.mesh.consistency, exchange_label(ctx.to_heads)
        consistency.check_backward(ctx.call, part, wait=is_on_cpu(grads[0]))
        back = SeqAllToAll.apply(ctx.exchange, not ctx.to_heads, ctx.call, *grads)
        return None, None, None, *back


class UnifiedAttention(torch.autograd.Function):
    """Attention of this rank's tokens with the whole sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        mesh: SequenceMesh,
        call: AttentionPlan,
        scores: Scores,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :func:`ds_usp.attention.pipeline.attend` for the shapes; ``sinks`` are those of
        ``scores``, which autograd sees as an argument only."""
        out, lse, kept = pipelined_forward(
            call, scores, q, k, v, save_for_backward=any(ctx.needs_input_grad)
        )
        ctx.mesh, ctx.call, ctx.scores = mesh, call, replace(scores, sinks=None)
        ctx.number, ctx.is_on_cpu = mesh.consistency.number, is_on_cpu(q)
        ctx.shapes, ctx.out_shape = (q.shape, k.shape, v.shape), out.shape
        if call.local_heads:  # a part's tensors are views of these
            ctx.save_for_backward(sinks, q, k, v, out, *(part.lse for part in kept))
        else:
            ctx.save_for_backward(sinks, *(x for part in kept for x in part))
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # none is ever there for the log-sum-exp
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, _: None) -> tuple[Any, ...]:
        """See :func:`ds_usp.attention.pipeline.attend_backward`."""
        if torch.is_grad_enabled():  # create_graph=True; kernels have no second derivative
            raise UnsupportedAttentionError(
                "the gradient of attention was asked to be differentiable itself "
                "(create_graph=True), which no kernel here computes"
            )
        call: AttentionPlan = ctx.call
        ctx.mesh.consistency.check_backward(ctx.number, wait=ctx.is_on_cpu)
        sinks, *saved = ctx.saved_tensors
        if call.local_heads:
            whole, lses = saved[:4], saved[4:]
            views = (
                (*part.qkv.to_heads(whole[:3]), *part.out.to_heads(whole[3:]))
                for part in call.chunks
            )
            kept = [SavedChunk._make((*each, lse)) for each, lse in zip(views, lses, strict=True)]
        else:
            kept = [SavedChunk._make(saved[at : at + 5]) for at in range(0, len(saved), 5)]
        if dout is None:  # the other ranks wait for this one's part
            dout = saved[0].new_zeros(ctx.out_shape)
        scores = replace(ctx.scores, sinks=sinks)
        grads = pipelined_backward(call, scores, dout.contiguous(), ctx.shapes, kept)
        return None, None, None, *grads


def head_exchange(
    head_exchange: HeadAllToAll, to_heads: bool, call: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Differentiable head exchange; with one Ulysses rank the tensors themselves.

    Args:
        call: the number of the call it is part of, which its backward pass says to the ranks.
    """
    if head_exchange.mesh.ulysses_degree == 1:
        return tensors
    exchanged: tuple[torch.Tensor, ...] = SeqAllToAll.apply(head_exchange, to_heads, call, *tensors)
    return exchanged


@overload
def usp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout | str,
    mask: MaskSpec,
    softmax_scale: float | None = ...,
    dropout_p: float = ...,
    kernel: str = ...,
    return_lse: Literal[False] = ...,
    tuning: Tuning = ...,
    scores: Scores = ...,
    kv_layout: TokenLayout | str | None = ...,
) -> torch.Tensor: ...


@overload
def usp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout | str,
    mask: MaskSpec,
    softmax_scale: float | None = ...,
    dropout_p: float = ...,
    kernel: str = ...,
    return_lse: Literal[True],
    tuning: Tuning = ...,
    scores: Scores = ...,
    kv_layout: TokenLayout | str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def usp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout | str,
    mask: MaskSpec,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    kernel: str = AUTO,
    return_lse: bool = False,
    tuning: Tuning = AUTO_TUNING,
    scores: Scores = NO_SCORE_MOD,
    kv_layout: TokenLayout | str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over a sequence that is spread over the ranks of a mesh.

    Collective over the mesh: all its ranks make the same call with their own tokens.

    Shapes:
        q ``[b, s_local, h, d]``, k ``[b, s_local, h_kv, d]``, v ``[b, s_local, h_kv, e]`` ->
        ``[b, s_local, h, e]``; ``e`` may be another head dim than ``d`` (MLA, arXiv 2405.04434).
        With ``return_lse`` also the log-sum-exp of the scores, and the sinks, as the softmax takes
        them, ``[b, h, s_local]`` in fp32 (fp64 for fp64), which carries no gradient.

    Args:
        mesh: the process groups.
        layout: which tokens each rank holds; ``mesh.layout(kind, seq_len)`` makes one that fits. A
            kind alone (``"zigzag"``) means as many tokens on every rank:
            ``mesh.layout(kind, s_local * mesh.sp_degree)``.
        mask: who sees whom, in global positions.
        softmax_scale: factor of the scores; None is ``d ** -0.5``.
        dropout_p: share of the softmax's weights that are dropped, with the seed of ``scores``.
            Only the kernel ``eager`` drops by position, so that degrees change nothing.
        kernel: ``"auto"`` or the name of a row of ``ds_usp.kernels.registry.KERNELS``.
        return_lse: also return the log-sum-exp.
        tuning: how the work is cut, where the default is not the fastest.
        scores: soft cap, ALiBi, sinks, the seed of dropout.
        kv_layout: where the tokens of k and v are, if they are another sequence than q's
            (cross-attention); each rank then holds its share of both. The mask must be full.

    Under ``torch.use_deterministic_algorithms(True)`` only kernels with a deterministic backward
    are taken. Under ``torch.compile`` it is the op ``ds_usp::attention`` of the graph, but for
    documents, which are outside of it.

    Raises:
        LayoutError, ConfigError, UnsupportedAttentionError: this call cannot be served.
        MeshError: the ranks disagree about the call.

    Every rank raises in all of these cases, before anything moves. On GPUs a rank that departs
    from a call on which all agreed before is reported a few calls later or when the backward pass
    begins (see ``Agreement``).

    Source: USP, arXiv 2405.07719, algorithm 1.
    """

    options: dict[str, Any] = {
        "layout": layout,
        "mask": mask,
        "softmax_scale": softmax_scale,
        "dropout_p": dropout_p,
        "kernel": kernel,
        "tuning": tuning,
        "kv_layout": kv_layout,
    }
    if torch.compiler.is_compiling() and isinstance(mesh, SequenceMesh):
        told = {**options, "layout": layout_spec(layout, q, mesh)}
        told["kv_layout"] = None if kv_layout is None else layout_spec(kv_layout, k, mesh)
        ask = make_op_spec(q, k, v, mesh=mesh, scores=scores, return_lse=return_lse, **told)
        if ask is not None:
            out, *rest = attention(q, k, v, scores.sinks, scores.alibi_slopes, *ask)
            return (out, rest[0].detach()) if return_lse else out
    return _usp_attention(q, k, v, mesh, scores, return_lse, options)


@graph_break
def _usp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mesh: SequenceMesh,
    scores: Scores,
    return_lse: bool,
    options: dict[str, Any],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`usp_attention` outside of graphs."""

    def compute(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv, learned = inputs[:3], replace(scores, sinks=inputs[3]) if inputs[3:] else scores
        call = check_on_all_ranks(
            mesh,
            lambda: plan_call(*qkv, mesh=mesh, scores=learned, return_lse=return_lse, **options),
            q,
            options["layout"],
        )
        out, lse = UnifiedAttention.apply(mesh, call, learned, *inputs)
        return (out, lse) if return_lse else (out,)

    # What is no Scores is refused with the rest, on every rank.
    known = scores if isinstance(scores, Scores) else NO_SCORE_MOD
    inputs = (q, k, v) if known.sinks is None else (q, k, v, known.sinks)
    outputs = compute_or_replay(
        compute, inputs, (mesh, return_lse, *options.values(), known.static_values)
    )
    return (outputs[0], outputs[1]) if return_lse else outputs[0]
