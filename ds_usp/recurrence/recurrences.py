"""The recurrences of known layers, each by the layer's own kernel, which is passed in; what is
asked of it stands above each. The layers of transformers and Megatron call them in each forward
pass, on every rank. ``mesh``, ``layout``, ``documents``: as of :func:`affine_scan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.state_chains import Piece
from ds_usp.recurrence import kernels
from ds_usp.recurrence.scan import (
    PieceMap,
    PieceMaps,
    Recurrence,
    affine_scan,
    no_autocast,
    state_dtype,
)

Kernel = Callable[..., Any]

# `run` below gets the tensors of `affine_scan`, of a piece where it takes one, and returns outputs
# without an incoming state, B, A and the response R to one (`PieceMap`, `PieceMaps` of scan.py).


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
    implementation = kernels.implementation_of(kernel)
    if kernels.takes_states(implementation, query):
        return kernels.delta_rule(
            implementation, query, key, value, g, beta,
            mesh=mesh, layout=layout, documents=documents, **options,
        )  # fmt: skip
    heads, dk, dv = value.shape[2], key.shape[3], value.shape[3]
    is_torch = not kernels.library_of(implementation)

    def run(part: list[torch.Tensor], piece: Piece) -> PieceMap:
        q, k, v, decay, b = part
        state_of = {"g": decay, "beta": b, "output_final_state": piece.exports, **options}
        if not piece.imports:
            return PieceMap(*kernel(q, k, v, initial_state=None, **state_of))
        # In fp32 where the output is a sum, which is rounded once then, as on one device.
        q, k, v = (y.to(state_dtype(y)) for y in (q, k, v)) if is_torch else (q, k, v)
        eye = torch.eye(dk, dtype=state_dtype(v), device=v.device).expand(len(v), heads, dk, dk)
        begin = torch.cat([eye.new_zeros(len(v), heads, dk, dv), eye], dim=-1)
        wide = torch.cat([v, v.new_zeros(*v.shape[:-1], dk)], dim=-1)
        out, last = kernel(q, k, wide, initial_state=begin, **state_of)
        out, reads = out.split([dv, dk], dim=-1)
        state, transition = last.split([dv, dk], dim=-1) if piece.exports else (None, None)
        return PieceMap(
            out, state, transition, lambda s: torch.einsum("blhk,bhkv->blhv", reads.to(s.dtype), s)
        )

    recurrence = Recurrence(run, (heads, dk, dv), (heads, dk, dk), matrix=True, piecewise=True)
    out = affine_scan(
        recurrence, (query, key, value, g, beta),
        mesh=mesh, layout=layout, documents=documents, dims=(1,) * 5, out_dim=1,
    )  # fmt: skip
    return out.to(value.dtype)


# Mamba-2: a decay for each head. What a piece adds to a state is a sum over its tokens, so states
# are known before the kernel runs, once, from them. It needs initial_states and their gradient.
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
        kernel: ``kernel(x, dt, A, B, C, dt_bias=, dt_softplus=, dt_limit=, initial_states=,
            **options) -> out``, states ``[b, h, p, n]``.
    """
    heads, p, n = x.shape[2], x.shape[3], B.shape[3]
    options |= {"dt_softplus": dt_softplus, "dt_limit": dt_limit}
    implementation = kernels.implementation_of(kernel)
    is_mamba_ssm = kernels.library_of(implementation) == "mamba_ssm"
    if is_mamba_ssm:
        kernel = implementation  # it takes seq_idx: documents in one call

    def run(tensors: list[torch.Tensor], pieces: Sequence[Piece]) -> PieceMaps:
        x, dt, B, C, A, *bias = tensors
        dt_bias = bias[0] if bias else None
        lengths = [piece.length for piece in pieces]
        states: list[torch.Tensor | None] = [None] * len(pieces)
        transitions: list[torch.Tensor | None] = [None] * len(pieces)
        parts = [t.split(lengths, 1) for t in (x, dt, B)]
        for number, (piece, x_part, dt_part, B_part) in enumerate(zip(pieces, *parts, strict=True)):
            if piece.exports:
                # Rounded as the kernel rounds it: mamba_ssm's computes steps in fp32.
                step = dt_part.to(state_dtype(dt)) if is_mamba_ssm else dt_part
                step = step if dt_bias is None else step + dt_bias.to(step.dtype)
                step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
                step = step.to(state_dtype(step))
                with no_autocast(x.device):
                    change = step * A  # logarithm of a token's decay [b, t, h]
                    weight = step * _after(change, 1).exp()
                    states[number] = _state_of(x_part, weight, B_part)
                    transitions[number] = change.sum(1).exp() if piece.imports else None

        def finish(incoming: Sequence[torch.Tensor | None]) -> torch.Tensor:
            outs = []
            calls = _calls(pieces, together=is_mamba_ssm)
            tokens = [sum(lengths[a:b]) for a, b in calls]
            split = zip(*(t.split(tokens, 1) for t in (x, dt, B, C)), strict=True)
            for (first, stop), (x_, dt_, B_, C_) in zip(calls, split, strict=True):
                arguments = {"initial_states": incoming[first], "dt_bias": dt_bias, **options}
                if stop - first > 1:
                    documents = tuple(lengths[first:stop])
                    arguments["seq_idx"] = kernels.numbers_of(documents, len(x_), x_.device)
                outs.append(kernel(x_, dt_, A, B_, C_, **arguments))
            return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

        return PieceMaps(states, transitions, finish)

    parameters = (A,) if dt_bias is None else (A, dt_bias)
    return affine_scan(
        Recurrence(run, (heads, p, n), (heads,)),
        (x, dt, B, C, *parameters),
        mesh=mesh,
        layout=layout,
        documents=documents,
        dims=(1, 1, 1, 1, *(None for _ in parameters)),
        out_dim=1,
    )


def _after(changes: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums of what comes after each token. From the end: differences of sums from the begin would
    leave the rounding of thousands of tokens to the last ones, which decay least."""
    return changes.flip(dim).cumsum(dim).flip(dim) - changes


def _calls(pieces: Sequence[Piece], together: bool) -> list[tuple[int, int]]:
    """Pieces of one call of a kernel, as half-open ranges: one; or ``together`` also the documents
    behind it that begin here, for a kernel that keeps them apart and takes one state."""
    begins = [n for n, piece in enumerate(pieces) if not (together and n and not piece.imports)]
    return list(pairwise([*begins, len(pieces)]))


def _state_of(x: torch.Tensor, weight: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """The weighted sum of ``x B^T`` over tokens, ``[b, h, p, n]``; with autocast off.

    Shapes: x ``[b, t, h, p]``, weight ``[b, t, h]``, B ``[b, t, groups, n]``.
    """
    # In the weights' dtype: a product in bf16 would round the state, and its gradients, as much as
    # the kernel rounds outputs: gradients of A were 1.58 x as far from fp64 as on one device.
    weighted = (x.to(weight.dtype) * weight[..., None]).unflatten(2, (B.shape[2], -1))
    return torch.einsum("blgqp,blgn->bgqpn", weighted, B.to(weight.dtype)).flatten(1, 2)


# Mamba-1: a decay for each element of the state. The kernel needs return_last_state, with a
# gradient; mamba_ssm's, which has none, lets a state out, and in, as tokens.
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
    implementation = kernels.implementation_of(kernel)
    is_mamba_ssm = kernels.library_of(implementation) == "mamba_ssm"
    if is_mamba_ssm:
        kernel = implementation

    def run(part: list[torch.Tensor], piece: Piece) -> PieceMap:
        x, dt, B, C, A, *bias = part
        delta_bias = bias[0] if bias else None
        if is_mamba_ssm and (piece.imports or piece.exports):
            step = dt.to(state_dtype(dt))
            step = step if delta_bias is None else step + delta_bias[:, None]
            step = F.softplus(step) if delta_softplus else step
            inputs = [step, A, B.to(step.dtype), C.to(step.dtype)]
            scan = partial(_scan_of_tokens, kernel)
            out, state = scan(x.to(step.dtype), *inputs, D=options.get("D"), last=piece.exports)
            goes_on = piece.imports and piece.exports
            transition = (A * step.sum(-1)[..., None]).exp() if goes_on else None
            no_x = torch.zeros_like(step)
            return PieceMap(
                out.to(x.dtype), state, transition, lambda s: scan(no_x, *inputs, before=s)[0]
            )
        options_of = {"delta_bias": delta_bias, "delta_softplus": delta_softplus, **options}
        ran = kernel(x, dt, A, B, C, z=None, return_last_state=piece.exports, **options_of)
        out, state = ran if piece.exports else (ran, None)
        if not piece.imports:
            return PieceMap(out, state)
        step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        total = (F.softplus(step) if delta_softplus else step).cumsum(-1)  # [b, d, t]

        def respond(s: torch.Tensor) -> torch.Tensor:
            decay = (A[:, :, None] * total[:, :, None]).exp()
            return torch.einsum("bnl,bdnl,bdn->bdl", C.to(decay.dtype), decay, s.to(decay.dtype))

        transition = (A * total[:, :, -1:]).exp() if piece.exports else None
        return PieceMap(out, state, transition, respond)

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


# A step so short that states hardly decay; `_scan_of_tokens` makes up for the rest.
_SHORT = 2.0**-20


def _scan_of_tokens(
    kernel: Kernel,
    x: torch.Tensor,
    step: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
    last: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs and the ``last`` state of a scan, by a kernel that takes no state and has no gradient
    of the last one. Shapes as of :func:`mamba1`; states, ``before`` the tokens too, ``[b, d, n]``.

    Column i of a state comes in by a token that writes x into column i, and goes out by one that
    reads column i and takes no step. In fp32, in which all its inputs are.
    """
    n = A.shape[1]
    columns = torch.eye(n, dtype=B.dtype, device=B.device).expand(len(B), n, n)
    if before is not None:
        # Each of these tokens decays those before it by exp(A * _SHORT).
        later = torch.arange(n - 1, -1, -1, device=x.device)
        entering = before.to(x.dtype) * torch.exp(-A * _SHORT * later) / _SHORT
        x, step = (
            torch.cat([added, y], -1) for added, y in ((entering, x), (_SHORT + 0 * entering, step))
        )
        B, C = torch.cat([columns, B], -1), torch.cat([torch.zeros_like(columns), C], -1)
    if last:
        none = torch.zeros_like(columns)
        pause = x.new_zeros(*x.shape[:2], n)
        x, step = torch.cat([x, pause], -1), torch.cat([step, pause], -1)
        B, C = torch.cat([B, none], -1), torch.cat([C, columns], -1)
    out = kernel(x, step, A, B, C, D=D, z=None, delta_bias=None, delta_softplus=False)
    out = out if before is None else out[..., n:]
    return (out[..., :-n], out[..., -n:]) if last else (out, None)


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
        kernel: ``kernel(q, k, v) -> (out, state)`` without a state from before, ``[b, h, d, d]``;
            or fla's ``chunk_simple_gla``.
        slope: a state decays by ``exp(-slope)`` a token.
    """
    heads, d, rate = q.shape[1], q.shape[3], slope.reshape(-1, 1, 1)
    is_fla = kernels.library_of(kernel) == "fla"

    def run(part: list[torch.Tensor], piece: Piece) -> PieceMap:
        q, k, v = part
        out, state = kernel(q, k, v)
        if not piece.imports:
            return PieceMap(out, state if piece.exports else None)
        steps = torch.arange(1, piece.length + 1, device=q.device)[:, None]

        def respond(s: torch.Tensor) -> torch.Tensor:
            return (q.to(s.dtype) * torch.exp(-rate.to(s.dtype) * steps)) @ s

        if not piece.exports:
            return PieceMap(out, respond=respond)
        transition = torch.exp(-rate * piece.length).reshape(1, heads).expand(len(q), -1)
        return PieceMap(out, state, transition, respond)

    def run_all(tensors: list[torch.Tensor], pieces: Sequence[Piece]) -> PieceMaps:
        q, k, v = (x.transpose(1, 2) for x in tensors)  # [b, t, h, d]
        lengths = [piece.length for piece in pieces]
        states: list[torch.Tensor | None] = [None] * len(pieces)
        transitions: list[torch.Tensor | None] = [None] * len(pieces)
        decay = slope.reshape(heads).to(state_dtype(k))
        for n, (piece, keys, values) in enumerate(
            zip(pieces, k.split(lengths, 1), v.split(lengths, 1), strict=True)
        ):
            if piece.exports:
                after = torch.arange(piece.length - 1, -1, -1, device=k.device)
                weight = torch.exp(-decay * after[:, None]).expand(len(k), -1, -1)
                with no_autocast(k.device):
                    states[n] = _state_of(keys, weight, values)
                transitions[n] = torch.exp(-decay * piece.length).expand(len(k), -1)

        def finish(incoming: Sequence[torch.Tensor | None]) -> torch.Tensor:
            borders, host_borders = kernels.borders_of(tuple(lengths), len(q), q.device)
            any_state = next((x for x in incoming if x is not None), None)
            before = None
            if any_state is not None:  # [rows * pieces, ...], in the order of the borders
                zeros = torch.zeros_like(any_state)
                before = torch.stack([zeros if x is None else x for x in incoming], 1).flatten(0, 1)
            out, _ = kernel(
                *(x.flatten(0, 1)[None] for x in (q, k, v)), g_gamma=-decay, scale=1.0,
                initial_state=before, cu_seqlens=borders, cu_seqlens_cpu=host_borders,
            )  # fmt: skip
            return out[0].unflatten(0, (len(q), -1)).transpose(1, 2)

        return PieceMaps(states, transitions, finish)

    shapes = (heads, d, v.shape[3]), (heads,)
    return affine_scan(
        Recurrence(run_all, *shapes) if is_fla else Recurrence(run, *shapes, piecewise=True),
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

    Shapes: x, gate ``[b, t, c]``, reset ``[b or 1, t, 1]`` of bool -> ``[b, t, c]``.

    Args:
        kernel: ``kernel(x, gate, reset) -> (out, state)`` without a state from before, ``[b, c]``.
    """
    width = x.shape[-1]

    def run(part: list[torch.Tensor], piece: Piece) -> PieceMap:
        x, gate, begins = part
        out, state = kernel(x, gate, begins)
        state = state if piece.exports else None
        if not piece.imports:
            return PieceMap(out, state)
        decay = (gate * ~begins).cumprod(1)
        transition = decay[:, -1] if piece.exports else None
        return PieceMap(out, state, transition, lambda s: decay * s[:, None])

    return affine_scan(
        Recurrence(run, (width,), (width,), piecewise=True),
        (x, gate, reset.expand(*x.shape[:2], 1)),
        mesh=mesh, layout=layout, documents=documents, dims=(1,) * 3, out_dim=1,
    )  # fmt: skip
