"""The functional form: exchange heads, walk the ring, exchange back. Differentiable."""

from __future__ import annotations

import weakref
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist

from ds_usp.attention.pipeline import Kept, USPCall, attend, attend_backward, staging
from ds_usp.attention.request import (
    agreed,
    check_layout,
    check_self_attention,
    check_tensors,
    checked_scale,
    head_split,
    head_traffic,
    refuse_dropout,
)
from ds_usp.attention.ring import RingCall
from ds_usp.attention.tuning import AUTO_TUNING, Tuning, check_tuning
from ds_usp.comm.all_to_all import HeadExchange
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.schedule import ring_schedule
from ds_usp.kernels.api import KernelRequest
from ds_usp.kernels.merge import fallback
from ds_usp.kernels.registry import AUTO, missing_libraries, select_kernel
from ds_usp.memory.keep import kept
from ds_usp.notices import notice

# Lengths may differ from call to call.
_MOST_PLANS = 1024


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
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :func:`ds_usp.attention.pipeline.attend` for the shapes."""
        out, lse, kept = attend(call, q, k, v, keep=any(ctx.needs_input_grad))
        ctx.mesh, ctx.call = mesh, call
        ctx.shapes = q.shape, k.shape, v.shape
        if call.stays:  # a part's tensors are views of these
            ctx.save_for_backward(q, k, v, out, *(part.lse for part in kept))
        else:
            ctx.save_for_backward(*(x for part in kept for x in part))
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
        saved = ctx.saved_tensors
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
            dout = saved[0].new_zeros(ctx.shapes[0])
        return None, None, *attend_backward(call, dout.contiguous(), ctx.shapes, kept)


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
) -> tuple[str, USPCall]:
    """Check this rank's part of a call; see :func:`usp_attention`. A call like an earlier one is
    not checked again.

    Returns:
        A description, which must be the same on every rank, and the plan.
    """
    sizes = tuple((x.shape, x.dtype, x.device, x.requires_grad) for x in (q, k, v))
    options = layout, mask, softmax_scale, dropout_p, kernel, with_lse, tuning
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    key = sizes, torch.is_grad_enabled(), capturing, type(softmax_scale), options
    try:
        found: tuple[str, USPCall] | None = mesh.plans.get(key)
    except TypeError:  # an argument that cannot be hashed cannot be right; the checks say which
        found = None
    if found is not None:
        return found
    if not isinstance(mask, MaskSpec):
        raise ConfigError(
            f"mask={mask!r} must be a MaskSpec: MaskSpec.causal(), .full(), .window()"
        )
    check_tuning(tuning)
    texts = [check_tensors(q, k, v)]
    check_self_attention(q, k, v)
    texts.append(check_layout(q, "queries", mesh, layout))
    refuse_dropout(dropout_p, mesh)
    split = head_split(q.shape[2], k.shape[2], mesh)
    scale = checked_scale(softmax_scale, q.shape[3])
    request = KernelRequest(q.device.type, q.dtype, q.shape[3], mask)
    chosen = select_kernel(request, kernel)
    missing = [fallback(q.device), missing_libraries(request) if kernel == AUTO else None]
    if q.is_cuda and mesh.sp_degree > 1 and mesh.no_copies and tuning.copies == "auto":
        missing.append(f"exchanges go by NCCL, not by copy engines: {mesh.no_copies}")
    for text in filter(None, missing):
        notice(text, rank=dist.get_rank() if dist.is_initialized() else 0)
    cut = tuning.resolve(split, layout, q, mesh)
    schedule = ring_schedule(
        layout, mask, mesh.ring_rank, chosen.caps.tiles, cut.gather, alone=cut.chunks == 1
    )
    # The mesh keeps the plan; a plan that kept the mesh would leave its groups to the end of all.
    held = cast(SequenceMesh, weakref.proxy(mesh))
    parts = head_traffic(split, held, layout, layout, cut.chunks, cut.copies)
    texts.append(f"mask {mask}, scale {scale:.9g}, kernel {chosen.name}")
    texts.append(str(cut))
    texts.append("with lse" if with_lse else "without lse")
    ring = RingCall(held, schedule, chosen, scale, cut.copies)
    call = USPCall(parts, ring, with_lse, staging(parts, ring, q))
    if len(mesh.plans) >= _MOST_PLANS:
        mesh.plans.clear()
    mesh.plans[key] = planned = ", ".join(texts), call
    return planned


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over a sequence that is spread over the ranks of a mesh.

    Collective over the mesh: all its ranks make the same call with their own tokens.

    Shapes:
        q ``[b, s_local, h, d]``, k and v ``[b, s_local, h_kv, d]`` -> ``[b, s_local, h, d]``;
        with ``return_lse`` also the log-sum-exp of the scaled scores ``[b, h, s_local]`` in fp32
        (fp64 for fp64), which carries no gradient.

    Args:
        mesh: the process groups.
        layout: which tokens each rank holds; ``mesh.layout(kind, seq_len)`` makes one that fits.
        mask: who sees whom, in global positions.
        softmax_scale: factor of the scores; None is ``d ** -0.5``.
        dropout_p: must be 0 here: no kernel draws the same mask in every split.
        kernel: ``"auto"`` or the name of a row of ``ds_usp.kernels.registry.KERNELS``.
        return_lse: also return the log-sum-exp.
        tuning: how the work is cut, where the default is not the fastest.

    Raises:
        LayoutError, ConfigError, UnsupportedAttentionError: this call cannot be served.
        MeshError: the ranks disagree about the call.

    Every rank raises in all of these cases, before anything moves. On GPUs a rank that departs
    from a call on which all agreed before is reported when the next call or the backward pass
    begins (see ``Agreement``).

    Source: USP, arXiv 2405.07719, algorithm 1.
    """

    options = layout, mask, softmax_scale, dropout_p, kernel, return_lse, tuning

    def compute(*qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
            ),
            qkv[0],
        )
        out, lse = UnifiedAttention.apply(mesh, call, *qkv)
        return (out, lse) if return_lse else (out,)

    outputs = kept(compute, (q, k, v), (mesh, *options))
    return (outputs[0], outputs[1]) if return_lse else outputs[0]
