"""Dense attention in fp64, straight from positions: the truth that everything is compared with.

It imports nothing from ds_usp, so that no mistake can be on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with a plain softmax in fp64; gradients come from autograd.

    Shapes: q [b, s, h, d], k and v [b, t, g, d] with g dividing h, allowed [s, t] or
        [b, s, t]; returns out [b, s, h, d] and lse [b, h, s] (natural log). Query head i uses kv
        head i // (h // g).
    Raises: ValueError where g does not divide h, or where a query may see no key.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} kv heads do not divide {heads} query heads")
    if not bool(allowed.any(dim=-1).all()):
        raise ValueError("a query that may see no key has no softmax")
    if scale is None:
        scale = q.shape[3] ** -0.5
    q, k, v = q.double(), k.double(), v.double()
    k = k.repeat_interleave(heads // kv_heads, dim=2)
    v = v.repeat_interleave(heads // kv_heads, dim=2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    allowed = allowed if allowed.ndim == 2 else allowed[:, None]
    scores = scores.masked_fill(~allowed, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    return torch.einsum("bhst,bthd->bshd", torch.exp(scores - lse[..., None]), v), lse


def relative_error(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    """Return norm(a - b) / max(norm(b), least) in fp64; b is the truth.

    Raises: ValueError where the shapes differ (nothing is broadcast).
    """
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} against {tuple(b.shape)}")
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    difference, norm = torch.linalg.vector_norm(a - b), torch.linalg.vector_norm(b).clamp(min=least)
    if float(norm) == 0.0:
        return 0.0 if float(difference) == 0.0 else float("inf")
    return float(difference / norm)
