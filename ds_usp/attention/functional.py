"""The functional form: exchange heads, walk the ring, exchange back. Differentiable."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist

from ds_usp.attention.pipeline import Kept, USPCall, attend, attend_backward, staging
from ds_usp.attention.request import (
    agreed,
    check_keys,
    check_layout,
    check_mask,
    check_tensors,
    checked_scale,
    head_split,
    head_traffic,
    refuse_dropout,
)
from ds_usp.attention.ring import RingCall
from ds_usp.attention.scores import NO_SCORES, Scores, check_scores
from ds_usp.attention.tuning import AUTO_TUNING, Tuning, check_tuning
from ds_usp.comm.all_to_all import HeadExchange
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.schedule import ring_schedule
from ds_usp.kernels.api import KernelRequest
from ds_usp.kernels.merge import fallback
from ds_usp.kernels.registry import AUTO, missing_libraries, select_kernel
from ds_usp.memory.keep import kept
from ds_usp.notices import notice

# Lengths may differ from call to call. Documents do so with every batch, and have large plans.
_MOST_PLANS = 1024
_MOST_PLANS_OF_DOCUMENTS = 32


class SeqAllToAll(torch.autograd.Function):
    """A head exchange and, backwards, its reverse."""

    @staticmethod
    def forward(
        ctx: Any, exchange: HeadExchange, to_heads: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """See :class:`HeadExchange` for the shapes."""
        ctx.exchange, ctx.to_heads = exchange, to_heads
        if to_heads:
            return tuple(x.contiguous() for x in exchange.to_heads(tensors))
        places = exchange.places(tensors)
        exchange.to_sequence(tensors, places)
        return places

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gradients go the way back; those of a head with several users are summed."""
        ctx.exchange.mesh.agreement.settle()
        return None, None, *SeqAllToAll.apply(ctx.exchange, not ctx.to_heads, *grads)


class UnifiedAttention(torch.autograd.Function):
    """Attention of this rank's tokens with the whole sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        mesh: SequenceMesh,
        call: USPCall,
        scores: Scores,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :func:`ds_usp.attention.pipeline.attend` for the shapes; ``sinks`` are those of
        ``scores``, which autograd sees as an argument only."""
        out, lse, kept = attend(call, scores, q, k, v, keep=any(ctx.needs_input_grad))
        ctx.mesh, ctx.call, ctx.scores = mesh, call, replace(scores, sinks=None)
        ctx.shapes, ctx.out_shape = (q.shape, k.shape, v.shape), out.shape
        if call.stays:  # a part's tensors are views of these
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
        call: USPCall = ctx.call
        ctx.mesh.agreement.settle()
        sinks, *saved = ctx.saved_tensors
        if call.stays:
            whole, lses = saved[:4], saved[4:]
            views = (
                (*part.qkv.to_heads(whole[:3]), *part.out.to_heads(whole[3:]))
                for part in call.parts
            )
            kept = [Kept._make((*each, lse)) for each, lse in zip(views, lses, strict=True)]
        else:
            kept = [Kept._make(saved[at : at + 5]) for at in range(0, len(saved), 5)]
        if dout is None:  # the other ranks wait for this one's part
            dout = saved[0].new_zeros(ctx.out_shape)
        scores = replace(ctx.scores, sinks=sinks)
        grads = attend_backward(call, scores, dout.contiguous(), ctx.shapes, kept)
        return None, None, None, *grads


def plan_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    mask: MaskSpec,
    softmax_scale: float | None,
    dropout_p: float,
    kernel: str,
    with_lse: bool = False,
    tuning: Tuning = AUTO_TUNING,
    scores: Scores = NO_SCORES,
    kv_layout: TokenLayout | None = None,
) -> tuple[str, USPCall]:
    """Check this rank's part of a call; see :func:`usp_attention`. A call like an earlier one is
    not checked again.

    Returns:
        A description, which must be the same on every rank, and the plan.
    """
    sizes = tuple((x.shape, x.dtype, x.device, x.requires_grad) for x in (q, k, v))
    kv_layout = kv_layout or layout
    options = layout, kv_layout, mask, softmax_scale, dropout_p, kernel, with_lse, tuning
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    modes = torch.is_grad_enabled(), _is_deterministic(), capturing
    kind = scores.kind if isinstance(scores, Scores) else scores
    key = sizes, modes, type(softmax_scale), type(dropout_p), options, kind
    try:
        found: tuple[str, USPCall] | None = mesh.plans.get(key)
    except TypeError:  # an argument that cannot be hashed cannot be right; the checks say which
        found = None
    if found is None:
        found = _new_plan(
            q,
            k,
            v,
            mesh=mesh,
            layouts=(layout, kv_layout),
            mask=mask,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
            kernel=kernel,
            with_lse=with_lse,
            tuning=tuning,
            scores=scores,
        )
        if len(mesh.plans) >= (_MOST_PLANS_OF_DOCUMENTS if mask.documents else _MOST_PLANS):
            mesh.plans.clear()
        mesh.plans[key] = found
    text, call = found
    return (f"{text}, dropout seed {scores.dropout_seed}" if call.spec.dropout_p else text), call


def _new_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layouts: tuple[TokenLayout, TokenLayout],
    mask: MaskSpec,
    softmax_scale: float | None,
    dropout_p: float,
    kernel: str,
    with_lse: bool,
    tuning: Tuning,
    scores: Scores,
) -> tuple[str, USPCall]:
    """:func:`plan_call` of a call like no earlier one."""
    check_tuning(tuning)
    layout, kv_layout = layouts
    texts = [check_tensors(q, k, v), check_layout(q, "queries", mesh, layout)]
    check_mask(mask, q, layout)
    texts.append(check_keys(q, k, mesh, layouts, mask))
    spec = check_scores(scores, dropout_p, q, one_sequence=layout == kv_layout)
    if scores.dropout_seed is None:
        refuse_dropout(dropout_p, mesh)
    split = head_split(q.shape[2], k.shape[2], mesh)
    scale = checked_scale(softmax_scale, q.shape[3])
    request = KernelRequest(
        q.device.type,
        q.dtype,
        q.shape[3],
        mask.band,
        documents=bool(mask.documents),
        value_dim=v.shape[3],
        scores=spec,
        deterministic=_is_deterministic(),
    )
    chosen = select_kernel(request, kernel)
    _tell(q, mesh, tuning, missing_libraries(request) if kernel == AUTO else None)
    cut = tuning.resolve(split, layout, q, mesh, mask, kv_layout.seq_len)
    # The mesh keeps the plan; a plan that kept the mesh would leave its groups to the end of all.
    held = cast(SequenceMesh, weakref.proxy(mesh))
    parts = head_traffic(split, held, layout, kv_layout, cut.chunks, cut.copies)
    texts.append(f"mask {mask}, scale {scale:.9g}, kernel {chosen.name}")
    sinks = scores.sinks
    learned = sinks is not None and sinks.requires_grad and torch.is_grad_enabled()
    texts.append(f"{spec}, {'no' if sinks is None else 'learned' if learned else 'fixed'} sinks")
    texts += [str(cut), "with lse" if with_lse else "without lse"]
    plan = partial(
        ring_schedule,
        layout,
        mask,
        mesh.ring_rank,
        chosen.caps.tiles,
        cut.gather,
        kv_layout=kv_layout,
        inner=cut.inner,
    )
    rings = tuple(
        RingCall(held, plan(place=place), chosen, scale, cut.copies) for place in cut.places
    )
    return ", ".join(texts), USPCall(parts, rings, with_lse, staging(parts, rings[0], q, v), spec)


def _tell(q: torch.Tensor, mesh: SequenceMesh, tuning: Tuning, missing: str | None) -> None:
    """Say what would make such calls faster, once."""
    texts = [fallback(q.device), missing]
    if q.is_cuda and mesh.sp_degree > 1 and mesh.no_copies and tuning.copies == "auto":
        texts.append(f"exchanges go by NCCL, not by copy engines: {mesh.no_copies}")
    for text in filter(None, texts):
        notice(text, rank=dist.get_rank() if dist.is_initialized() else 0)


def _is_deterministic() -> bool:
    """Whether torch is asked for the same bits every time, and not only to warn."""
    asked = torch.are_deterministic_algorithms_enabled()
    return asked and not torch.is_deterministic_algorithms_warn_only_enabled()


def exchange(
    exchange: HeadExchange, to_heads: bool, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Differentiable head exchange; with one Ulysses rank the tensors themselves."""
    if exchange.mesh.ulysses_degree == 1:
        return tensors
    exchanged: tuple[torch.Tensor, ...] = SeqAllToAll.apply(exchange, to_heads, *tensors)
    return exchanged


@overload
def usp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    mask: MaskSpec,
    softmax_scale: float | None = ...,
    dropout_p: float = ...,
    kernel: str = ...,
    return_lse: Literal[False] = ...,
    tuning: Tuning = ...,
    scores: Scores = ...,
    kv_layout: TokenLayout | None = ...,
) -> torch.Tensor: ...


@overload
def usp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    mask: MaskSpec,
    softmax_scale: float | None = ...,
    dropout_p: float = ...,
    kernel: str = ...,
    return_lse: Literal[True],
    tuning: Tuning = ...,
    scores: Scores = ...,
    kv_layout: TokenLayout | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@torch.compiler.disable
def usp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    mask: MaskSpec,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    kernel: str = AUTO,
    return_lse: bool = False,
    tuning: Tuning = AUTO_TUNING,
    scores: Scores = NO_SCORES,
    kv_layout: TokenLayout | None = None,
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
        layout: which tokens each rank holds; ``mesh.layout(kind, seq_len)`` makes one that fits.
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
    are taken.

    Raises:
        LayoutError, ConfigError, UnsupportedAttentionError: this call cannot be served.
        MeshError: the ranks disagree about the call.

    Every rank raises in all of these cases, before anything moves. On GPUs a rank that departs
    from a call on which all agreed before is reported when the next call or the backward pass
    begins (see ``Agreement``).

    Source: USP, arXiv 2405.07719, algorithm 1.
    """

    options = layout, mask, softmax_scale, dropout_p, kernel, return_lse, tuning, kv_layout

    def compute(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv, learned = inputs[:3], replace(scores, sinks=inputs[3]) if inputs[3:] else scores
        call = agreed(
            mesh,
            lambda: plan_call(
                *qkv,
                mesh=mesh,
                layout=layout,
                mask=mask,
                softmax_scale=softmax_scale,
                dropout_p=dropout_p,
                kernel=kernel,
                with_lse=return_lse,
                tuning=tuning,
                scores=learned,
                kv_layout=kv_layout,
            ),
            q,
        )
        out, lse = UnifiedAttention.apply(mesh, call, learned, *inputs)
        return (out, lse) if return_lse else (out,)

    # What is no Scores is refused with the rest, on every rank.
    known = scores if isinstance(scores, Scores) else NO_SCORES
    inputs = (q, k, v) if known.sinks is None else (q, k, v, known.sinks)
    outputs = kept(compute, inputs, (mesh, *options, known.values))
    return (outputs[0], outputs[1]) if return_lse else outputs[0]
