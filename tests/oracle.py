"""Dense attention in fp64, straight from positions: the reference that everything is compared with.

It imports nothing from ds_usp, so that no mistake can be on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch


def causal(q_positions: Sequence[int], k_positions: Sequence[int]) -> torch.Tensor:
    """Return bool [s, t]: which keys each query may see, itself and all before it."""
    return window(q_positions, k_positions, None, 0)


def full(q_positions: Sequence[int], k_positions: Sequence[int]) -> torch.Tensor:
    """Return bool [s, t], all True."""
    return window(q_positions, k_positions, None, None)


def window(
    q_positions: Sequence[int], k_positions: Sequence[int], left: int | None, right: int | None
) -> torch.Tensor:
    """Return bool [s, t]: keys from `left` before to `right` after the query; None is no bound."""
    distance = torch.tensor(list(k_positions))[None, :] - torch.tensor(list(q_positions))[:, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        allowed &= distance >= -left
    if right is not None:
        allowed &= distance <= right
    return allowed


def same_document(
    q_positions: Sequence[int], k_positions: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    """Return bool [s, t]: whether two tokens are in one of the documents of these lengths."""
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return owner[list(q_positions)][:, None] == owner[list(k_positions)][None, :]


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with a plain softmax in fp64; gradients come from autograd.

    Shapes: q [b, s, h, d], k [b, t, g, d], v [b, t, g, e] with g dividing h, allowed [s, t] or
        [b, s, t]; returns out [b, s, h, e] and lse [b, h, s] (natural log). Query head i uses kv
        head i // (h // g). `bias` [h, s, t] is added to the capped scores, `sinks` [h] are logits
        of a key without value, `weights` [b, h, s, t] multiply the softmax (dropout).
    Raises: ValueError where g does not divide h, or where a query may see no key and no sink.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} kv heads do not divide {heads} query heads")
    if sinks is None and not bool(allowed.any(dim=-1).all()):
        raise ValueError("a query that may see no key has no softmax")
    if scale is None:
        scale = q.shape[3] ** -0.5
    q, k, v = q.double(), k.double(), v.double()
    k = k.repeat_interleave(heads // kv_heads, dim=2)
    v = v.repeat_interleave(heads // kv_heads, dim=2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    allowed = allowed if allowed.ndim == 2 else allowed[:, None]
    scores = scores.masked_fill(~allowed, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        lse = torch.logsumexp(torch.cat([scores, column], dim=-1), dim=-1)
    shares = torch.exp(scores - lse[..., None])
    shares = shares if weights is None else shares * weights
    return torch.einsum("bhst,bthd->bshd", shares, v), lse


def alibi(slopes: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Return [h, s, s]: minus slope times distance."""
    token = torch.tensor(list(positions), dtype=torch.float64)
    return -slopes.double()[:, None, None] * (token[None, :] - token[:, None]).abs()


@lru_cache(maxsize=8)
def dropout(seed: int, size: tuple[int, int, int, int], dropout_p: float) -> torch.Tensor:
    """Return `size` [b, h, s, t]: 0 for a dropped weight, 1 / (1 - dropout_p) for the others.

    Bits of MurmurHash3's finalizer over seed, sample, head, query and key, in unsigned integers.
    """
    mask, limit = 2**64 - 1, round(dropout_p * 2**31)

    def mixed(x: int) -> int:
        x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & mask
        x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & mask
        return x ^ (x >> 33)

    def further(x: int, count: int) -> list[int]:
        return [mixed((x + 0x9E3779B97F4A7C15 * (n + 1)) & mask) for n in range(count)]

    kept = [
        [bits >> 33 >= limit for bits in further(row, size[3])]
        for sample in further(mixed(seed), size[0])
        for head in further(sample, size[1])
        for row in further(head, size[2])
    ]
    return torch.tensor(kept).view(size).double() / (1 - dropout_p)


def relative_error(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    """Return norm(a - b) / max(norm(b), least) in fp64; b is the reference. Infinite for NaN, which
    ``max`` would drop.

    Raises: ValueError where the shapes differ (nothing is broadcast).
    """
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} against {tuple(b.shape)}")
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    difference, norm = torch.linalg.vector_norm(a - b), torch.linalg.vector_norm(b).clamp(min=least)
    if float(norm) == 0.0:
        return 0.0 if float(difference) == 0.0 else float("inf")
    error = float(difference / norm)
    return float("inf") if math.isnan(error) else error


def rotated(
    x: torch.Tensor, positions: Iterable[int], dim: int, base: float, token_dim: int
) -> torch.Tensor:
    """Rotary embedding in fp64 as multiplication of complex numbers: features i and i + dim / 2.

    Shapes:
        x ``[b, s, h, D]`` or ``[s, b, h, D]``, by ``token_dim``; ``dim`` features are rotated.
    """
    angle = torch.outer(
        torch.tensor(list(positions), dtype=torch.float64),
        base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim),
    ).to(x.device)
    angle = angle[:, None, None] if token_dim == 0 else angle[:, None]
    pairs = torch.complex(*x[..., :dim].double().chunk(2, dim=-1))
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag, x[..., dim:].double()), dim=-1)
