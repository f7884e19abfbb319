"""The functional form: exchange heads, walk the ring, exchange back. Differentiable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from ds_usp.attention.request import (
    HeadTraffic,
    agreed,
    check_layout,
    check_self_attention,
    check_tensors,
    checked_scale,
    refuse_dropout,
)
from ds_usp.attention.ring import RingCall, ring_backward, ring_forward
from ds_usp.comm.all_to_all import HeadExchange
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.schedule import ring_schedule
from ds_usp.kernels.api import KernelRequest
from ds_usp.kernels.registry import AUTO, select_kernel


class SeqAllToAll(torch.autograd.Function):
    """A head exchange and, backwards, its reverse."""

    @staticmethod
    def forward(
        ctx: Any, exchange: HeadExchange, to_heads: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """See :class:`HeadExchange` for the shapes."""
        ctx.exchange, ctx.to_heads = exchange, to_heads
        return exchange.to_heads(tensors) if to_heads else exchange.to_sequence(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gradients go the way back; those of a head with several users are summed."""
        ctx.exchange.mesh.agreement.settle()
        return None, None, *SeqAllToAll.apply(ctx.exchange, not ctx.to_heads, *grads)


class RingAttention(torch.autograd.Function):
    """Attention of one ring rank's queries with the whole ring's keys and values."""

    @staticmethod
    def forward(
        ctx: Any, call: RingCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`ring_forward` for the shapes."""
        out, lse = ring_forward(call, q, k, v)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # none is ever there for the log-sum-exp
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, _: None) -> tuple[Any, ...]:
        """See :func:`ring_backward`."""
        if torch.is_grad_enabled():  # create_graph=True; kernels have no second derivative
            raise UnsupportedAttentionError(
                "the gradient of attention was asked to be differentiable itself "
                "(create_graph=True), which no kernel here computes"
            )
        ctx.call.mesh.agreement.settle()
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        return None, *ring_backward(ctx.call, dout, q, k, v, out, lse)


@dataclass(frozen=True)
class USPCall:
    """Everything that one attention over a mesh needs besides its tensors."""

    traffic: HeadTraffic
    ring: RingCall
    with_lse: bool


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
) -> tuple[str, USPCall]:
    """Check this rank's part of a call; see :func:`usp_attention`.

    Returns:
        A description, which must be the same on every rank, and the plan.
    """
    if not isinstance(mask, MaskSpec):
        raise ConfigError(
            f"mask={mask!r} must be a MaskSpec: MaskSpec.causal(), .full(), .window()"
        )
    texts = [check_tensors(q, k, v)]
    check_self_attention(q, k, v)
    texts.append(check_layout(q, "queries", mesh, layout))
    refuse_dropout(dropout_p, mesh)
    traffic = HeadTraffic.plan(q, k, mesh, layout, layout)
    scale = checked_scale(softmax_scale, q.shape[3])
    chosen = select_kernel(KernelRequest(q.device.type, q.dtype, q.shape[3], mask), kernel)
    schedule = ring_schedule(layout, mask, mesh.ring_rank, chosen.caps.tiles)
    texts.append(f"mask {mask}, scale {scale:.9g}, kernel {chosen.name}")
    texts.append("with lse" if with_lse else "without lse")
    return ", ".join(texts), USPCall(traffic, RingCall(mesh, schedule, chosen, scale), with_lse)


def run_call(
    call: USPCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Out ``[b, s_local, h, d]`` of a call that all ranks agreed on, and lse if asked for."""
    q, k, v = exchange(call.traffic.qkv, True, q, k, v)
    out, lse = RingAttention.apply(call.ring, q, k, v)
    (out,) = exchange(call.traffic.out, False, out)
    if not call.with_lse:
        return out, None
    (lse,) = exchange(call.traffic.out, False, lse.transpose(1, 2).unsqueeze(-1))
    return out, lse.squeeze(-1).transpose(1, 2)


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
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

    Raises:
        LayoutError, ConfigError, UnsupportedAttentionError: this call cannot be served.
        MeshError: the ranks disagree about the call.

    Every rank raises in all of these cases, before anything moves. On GPUs a rank that departs
    from a call on which all agreed before is reported when the next call or the backward pass
    begins (see ``Agreement``).

    Source: USP, arXiv 2405.07719, algorithm 1.
    """

    call = agreed(
        mesh,
        lambda: plan_call(
            q,
            k,
            v,
            mesh=mesh,
            layout=layout,
            mask=mask,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
            kernel=kernel,
            with_lse=return_lse,
        ),
        q,
    )
    out, lse = run_call(call, q, k, v)
    return (out, lse) if return_lse else out
