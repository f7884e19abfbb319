"""The recurrences of known layers, each by the layer's own kernel, which is passed in; what is
asked of it stands above each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.state_chains import Piece
from ds_usp.recurrence.scan import PieceMap, Recurrence, affine_scan

Kernel = Callable[..., Any]


def state_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of states and decays: fp32, fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# Delta rules: a matrix A. One run with the values [v | 0] and the state [0 | I] gives [o_0 | R] and
# [B | A], with o = o_0 + R S. The kernel needs initial_state, output_final_state, their gradients,
# and a value dim of d_v + d_k.
def delta_rule(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    documents: Any = (),
    **options: Any,
) -> torch.Tensor:
    """Gated delta rule and Kimi delta attention.

    Shapes: query, key ``[b, t, h, dk]``, value ``[b, t, h, dv]``, g ``[b, t, h]`` or ``[b, t, h,
    dk]``, beta ``[b, t, h]`` -> ``[b, t, h, dv]``.

    Args:
        kernel: ``kernel(q, k, v, g=, beta=, initial_state=, output_final_state=, **options) ->
            (out, final_state)``, states ``[b, h, dk, dv]``.
    """
    heads, dk, dv = value.shape[2], key.shape[3], value.shape[3]

    def run(part: list[torch.Tensor], piece: Piece) -> PieceMap:
        q, k, v, decay, b = part
        state_of = {"g": decay, "beta": b, "output_final_state": piece.exports, **options}
        if not piece.imports:
            return PieceMap(*kernel(q, k, v, initial_state=None, **state_of))
        eye = torch.eye(dk, dtype=state_dtype(v), device=v.device).expand(len(v), heads, dk, dk)
        begin = torch.cat([eye.new_zeros(len(v), heads, dk, dv), eye], dim=-1)
        wide = torch.cat([v, v.new_zeros(*v.shape[:-1], dk)], dim=-1)
        out, state = kernel(q, k, wide, initial_state=begin, **state_of)
        out, reads = out.split([dv, dk], dim=-1)
        into, across = state.split([dv, dk], dim=-1) if piece.exports else (None, None)
        return PieceMap(
            out, into, across, lambda s: torch.einsum("blhk,bhkv->blhv", reads.to(s.dtype), s)
        )

    recurrence = Recurrence(run, (heads, dk, dv), (heads, dk, dk), matrix=True, piecewise=True)
    return affine_scan(
        recurrence,
        (query, key, value, g, beta),
        mesh=mesh,
        layout=layout,
        documents=documents,
        dims=(1,) * 5,
        out_dim=1,
    )


# Mamba-2: a decay for each head. The kernel needs return_final_states and its gradient.
def mamba2(
    kernel: Kernel,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    documents: Any = (),
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> torch.Tensor:
    """Mamba-2's scan.

    Shapes: x ``[b, t, h, p]``, dt ``[b, t, h]``, A ``[h]``, B, C ``[b, t, groups, n]`` ->
    ``[b, t, h, p]``.

    Args:
        kernel: ``kernel(x, dt, A, B, C, dt_bias=, dt_softplus=, dt_limit=, return_final_states=,
            **options) -> out`` or ``(out, state)``, states ``[b, h, p, n]``.
    """
    heads, p, n = x.shape[2], x.shape[3], B.shape[3]
    options |= {"dt_softplus": dt_softplus, "dt_limit": dt_limit}

    def run(part: list[torch.Tensor], piece: Piece) -> PieceMap:
        x, dt, B, C, A, *bias = part
        dt_bias = bias[0] if bias else None
        ran = kernel(x, dt, A, B, C, dt_bias=dt_bias, return_final_states=piece.exports, **options)
        out, state = ran if piece.exports else (ran, None)
        if not piece.imports:
            return PieceMap(out, state)
        step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
        decay = (step.to(state_dtype(step)) * A).cumsum(1).exp()  # [b, t, h]

        def respond(s: torch.Tensor) -> torch.Tensor:
            by_group = s.reshape(len(s), C.shape[2], -1, n)
            read = torch.einsum("blgn,bgqn->blgq", C.to(s.dtype), by_group)
            return read.reshape(*decay.shape, p) * decay[..., None]

        return PieceMap(out, state, decay[:, -1] if piece.exports else None, respond)

    parameters = (A,) if dt_bias is None else (A, dt_bias)
    return affine_scan(
        Recurrence(run, (heads, p, n), (heads,), piecewise=True),
        (x, dt, B, C, *parameters),
        mesh=mesh,
        layout=layout,
        documents=documents,
        dims=(1, 1, 1, 1, *(None for _ in parameters)),
        out_dim=1,
    )


# Mamba-1: a decay for each element of the state. The kernel needs return_last_state, with a
# gradient.
def mamba1(
    kernel: Kernel,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    documents: Any = (),
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Mamba-1's selective scan.

    Shapes: x, dt, z ``[b, d, t]``, A ``[d, n]``, B, C ``[b, n, t]`` -> ``[b, d, t]``.

    Args:
        kernel: ``kernel(x, dt, A, B, C, z=None, delta_bias=, delta_softplus=, return_last_state=,
            **options) -> out`` or ``(out, state)``, states ``[b, d, n]``.
    """

    def run(part: list[torch.Tensor], piece: Piece) -> PieceMap:
        x, dt, B, C, A, *bias = part
        delta_bias = bias[0] if bias else None
        options_of = {"delta_bias": delta_bias, "delta_softplus": delta_softplus, **options}
        ran = kernel(x, dt, A, B, C, z=None, return_last_state=piece.exports, **options_of)
        out, state = ran if piece.exports else (ran, None)
        if not piece.imports:
            return PieceMap(out, state)
        step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        total = (F.softplus(step) if delta_softplus else step).cumsum(-1)  # [b, d, t]

        def respond(s: torch.Tensor) -> torch.Tensor:
            decay = (A[:, :, None] * total[:, :, None]).exp()
            return torch.einsum("bnl,bdnl,bdn->bdl", C, decay, s.to(C.dtype))

        across = (A * total[:, :, -1:]).exp() if piece.exports else None
        return PieceMap(out, state, across, respond)

    parameters = (A,) if delta_bias is None else (A, delta_bias)
    out = affine_scan(
        Recurrence(run, tuple(A.shape), tuple(A.shape), piecewise=True),
        (x, dt, B, C, *parameters),
        mesh=mesh,
        layout=layout,
        documents=documents,
        dims=(2, 2, 2, 2, *(None for _ in parameters)),
        out_dim=2,
    )
    return out if z is None else out * F.silu(z)


# Lightning attention: a constant decay for each head. The kernel computes one piece.
def lightning(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slope: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    documents: Any = (),
) -> torch.Tensor:
    """Linear attention with a constant decay for each head.

    Shapes: q, k, v ``[b, h, t, d]``, slope ``[h]`` -> ``[b, h, t, d]``.

    Args:
        kernel: ``kernel(q, k, v) -> (out, state)`` without a state from before, ``[b, h, d, d]``.
        slope: a state decays by ``exp(-slope)`` a token.
    """
    heads, d, rate = q.shape[1], q.shape[3], slope.reshape(-1, 1, 1)

    def run(part: list[torch.Tensor], piece: Piece) -> PieceMap:
        q, k, v = part
        out, state = kernel(q, k, v)
        if not piece.imports:
            return PieceMap(out, state if piece.exports else None)
        at = torch.arange(1, piece.length + 1, device=q.device)[:, None]
        if not piece.exports:
            return PieceMap(out, respond=lambda s: (q * torch.exp(-rate * at)) @ s)
        across = torch.exp(-rate * piece.length).reshape(1, heads).expand(len(q), -1)
        return PieceMap(out, state, across, lambda s: (q * torch.exp(-rate * at)) @ s)

    return affine_scan(
        Recurrence(run, (heads, d, v.shape[3]), (heads,), piecewise=True),
        (q, k, v),
        mesh=mesh,
        layout=layout,
        documents=documents,
        dims=(2,) * 3,
        out_dim=2,
    )


# RG-LRU: a decay for each channel, and a reset where a document begins.
def rg_lru(
    kernel: Kernel,
    x: torch.Tensor,
    gate: torch.Tensor,
    reset: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    documents: Any = (),
) -> torch.Tensor:
    """Real-gated linear recurrent unit.

    Shapes: x, gate ``[b, t, c]``, reset ``[b or 1, t, 1]`` -> ``[b, t, c]``.

    Args:
        kernel: ``kernel(x, gate, reset) -> (out, state)`` without a state from before, ``[b, c]``.
    """
    width = x.shape[-1]

    def run(part: list[torch.Tensor], piece: Piece) -> PieceMap:
        x, gate, first = part
        out, state = kernel(x, gate, first)
        if not piece.imports:
            return PieceMap(out, state if piece.exports else None)
        decay = (gate * ~first).cumprod(1)
        across = decay[:, -1] if piece.exports else None
        return PieceMap(out, state if piece.exports else None, across, lambda s: decay * s[:, None])

    return affine_scan(
        Recurrence(run, (width,), (width,), piecewise=True),
        (x, gate, reset.expand(*x.shape[:2], 1)),
        mesh=mesh,
        layout=layout,
        documents=documents,
        dims=(1,) * 3,
        out_dim=1,
    )
