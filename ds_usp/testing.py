"""Dense attention in fp64, from positions: the oracle of the tests and of ``ds-usp verify``.

It imports nothing from ds_usp, so that no mistake can be on both sides. Each rank computes for
itself; :func:`attention_in_blocks` alone communicates, where it has several ranks.

Letters of the shapes: B batch, S query tokens, T key tokens, H query heads, G KV heads, D head dim
of queries and keys, E of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Positions = Sequence[int] | torch.Tensor


def causal(q_positions: Positions, k_positions: Positions) -> torch.Tensor:
    """Return which keys each query may see, itself and all before it: bool ``[S, T]``."""
    return window(q_positions, k_positions, None, 0)


def full(q_positions: Positions, k_positions: Positions) -> torch.Tensor:
    """All True, bool ``[S, T]``."""
    return window(q_positions, k_positions, None, None)


def window(
    q_positions: Positions, k_positions: Positions, left: int | None, right: int | None
) -> torch.Tensor:
    """Keys from ``left`` before to ``right`` after the query, None is no bound: bool ``[S, T]``."""
    distance = _tensor(k_positions)[None, :] - _tensor(q_positions)[:, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        allowed &= distance >= -left
    if right is not None:
        allowed &= distance <= right
    return allowed


def same_document(
    q_positions: Positions, k_positions: Positions, lengths: Sequence[int]
) -> torch.Tensor:
    """Whether a query and a key are in the same of the documents of these lengths, which follow
    each other from position 0: bool ``[S, T]``."""
    q_rows, k_rows = _tensor(q_positions), _tensor(k_positions)
    counts = torch.tensor(lengths, device=q_rows.device)
    owner = torch.arange(len(lengths), device=q_rows.device).repeat_interleave(counts)
    return owner[q_rows][:, None] == owner[k_rows][None, :]


def same_branch(
    q_positions: Positions, k_positions: Positions, segments: Sequence[tuple[int, int, int | None]]
) -> torch.Tensor:
    """Whether a key's segment (start, end, parent) is the query's own, its parent's, and so on:
    bool ``[S, T]``."""
    lengths = [end - start for start, end, _ in segments]
    branches = torch.eye(len(segments), dtype=torch.bool)
    for index, (_, _, parent) in enumerate(segments):
        if parent is not None:
            branches[index] |= branches[parent]
    q_rows, k_rows = _tensor(q_positions), _tensor(k_positions)
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return branches.to(q_rows.device)[owner[q_rows.cpu()]][:, owner[k_rows.cpu()]]


def _tensor(positions: Positions) -> torch.Tensor:
    return positions if isinstance(positions, torch.Tensor) else torch.tensor(list(positions))


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with a plain softmax in fp64; gradients come from autograd.

    Args:
        q, k, v: ``[B, S, H, D]``, ``[B, T, G, D]``, ``[B, T, G, E]`` with G dividing H; query head
            i uses KV head ``i // (H // G)``.
        allowed: ``[S, T]`` or ``[B, S, T]``.
        scale: of the scores; None: ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: ``[H]``, logits of a key without value.

    Returns:
        ``out [B, S, H, E]`` and ``lse [B, H, S]`` (natural log).

    Raises:
        ValueError: G does not divide H, or a query may see no key and no sink.
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
    allowed = allowed if allowed.ndim == 2 else allowed[:, None]
    scores = scores.masked_fill(~allowed, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        lse = torch.logsumexp(torch.cat([scores, column], dim=-1), dim=-1)
    shares = torch.exp(scores - lse[..., None])
    return torch.einsum("bhst,bthd->bshd", shares, v), lse


@dataclass(frozen=True)
class Tensors:
    """An attention call of whole tensors, with the gradient of its result.

    Args:
        q, k, v, dout: ``[B, S, H, D]``, ``[B, S, G, D]``, ``[B, S, G, E]``, ``[B, S, H, E]``.
        sinks: ``[H]``, logits of a key without value.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    sinks: torch.Tensor | None = None


def attention_in_blocks(
    tensors: Tensors,
    allowed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    backward: bool = True,
    block_elements: int = 1 << 22,
    rank: int = 0,
    world: int = 1,
) -> dict[str, torch.Tensor]:
    """:func:`dense_attention` and, from ``dout``, its gradients, in blocks of query rows and of the
    heads of a KV head: memory grows with the sequence, not with its square.

    Collective over the default group where ``world`` is more than 1.

    Args:
        allowed: the mask of the query rows and keys at two vectors of positions, as
            :func:`dense_attention` takes it.
        block_elements: scores of a block.
        rank, world: this process among those that divide the blocks.

    Returns:
        out, lse and, with ``backward``, dq, dk, dv, and dsinks where there are sinks; all in fp64.
    """
    q, k, v = tensors.q, tensors.k, tensors.v
    batch, length, heads, _ = q.shape
    group_size = heads // k.shape[2]
    shapes: dict[str, Sequence[int]] = {"out": tensors.dout.shape, "lse": (batch, heads, length)}
    if backward:
        shapes |= {"dq": q.shape, "dk": k.shape, "dv": v.shape}
        shapes |= {} if tensors.sinks is None else {"dsinks": (heads,)}
    results = {
        name: torch.zeros(tuple(shape), dtype=torch.float64, device=q.device)
        for name, shape in shapes.items()
    }
    step = max(1, min(length, block_elements // (batch * group_size * length)))
    blocks = [(group, start) for group in range(k.shape[2]) for start in range(0, length, step)]
    positions = torch.arange(length, device=q.device)
    for group, start in blocks[rank::world]:
        rows = slice(start, start + step)
        q_heads = slice(group * group_size, (group + 1) * group_size)
        sinks = None if tensors.sinks is None else tensors.sinks[q_heads]
        inputs = [
            x.detach().double().requires_grad_(backward)
            for x in (q[:, rows, q_heads], k[:, :, group, None], v[:, :, group, None], sinks)
            if x is not None
        ]
        out, lse = dense_attention(
            inputs[0],
            inputs[1],
            inputs[2],
            allowed(positions[rows], positions),
            scale,
            softcap=softcap,
            sinks=None if sinks is None else inputs[3],
        )
        results["out"][:, rows, q_heads] = out.detach()
        results["lse"][:, q_heads, rows] = lse.detach()
        if backward:
            dq, dk, dv, *dsinks = torch.autograd.grad(
                out, inputs, tensors.dout[:, rows, q_heads].double()
            )
            results["dq"][:, rows, q_heads] = dq
            results["dk"][:, :, group] += dk[:, :, 0]
            results["dv"][:, :, group] += dv[:, :, 0]
            for gradient in dsinks:
                results["dsinks"][q_heads] += gradient
    if world > 1:
        for result in results.values():
            dist.all_reduce(result)
    return results


def relative_error(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    """``norm(a - b) / max(norm(b), least)`` in fp64; b is the reference. Infinite for NaN, which
    ``max`` would drop.

    Raises:
        ValueError: the shapes differ (nothing is broadcast).
    """
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} against {tuple(b.shape)}")
    b = b.detach().double()
    a = a.detach().double().to(b.device)
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


def expected_positions(
    kind: str, length: int, ulysses: int, ring: int, order: str
) -> list[torch.Tensor] | None:
    """The global positions that each rank holds under a documented layout, in storage order; None
    for a layout that has no closed form (``balanced``). Where the length does not divide, the first
    parts get one token more."""
    tokens, ranks = torch.arange(length), ulysses * ring
    if kind == "context_parallel":  # megatron-core: chunks r and 2 * ranks - 1 - r of 2 * ranks
        chunks = torch.tensor_split(tokens, 2 * ranks)
        return [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]
    if kind == "contiguous":  # the caller's order, whatever the axes
        return list(torch.tensor_split(tokens, ranks))
    if kind == "zigzag":
        chunks = torch.tensor_split(tokens, 2 * ring)
        ring_tokens = [torch.cat([chunks[r], chunks[2 * ring - 1 - r]]) for r in range(ring)]
    elif kind == "striped":
        ring_tokens = [tokens[r::ring] for r in range(ring)]
    else:
        return None
    shards = [torch.tensor_split(x, ulysses) for x in ring_tokens]
    if order == "ulysses-ring":  # Ulysses ranks are neighbours
        return [shard for ring_shards in shards for shard in ring_shards]
    return [shards[r][u] for u in range(ulysses) for r in range(ring)]
