"""Dense attention in fp64, straight from positions: the reference of ``ds-usp verify``.

It imports nothing from ds_usp, so that no mistake can be on both sides. Rows are computed in
blocks, so memory grows with the sequence, not with its square; blocks are divided among the ranks.

Letters of the shapes: B batch, S tokens, H query heads, G key/value heads, D head dim of queries
and keys, E of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class AttentionParams:
    """Mask, scale and soft cap: key ``k`` is visible to query ``q`` of the same document if
    ``-left <= k - q <= right`` or ``k < prefix``.

    Args:
        left, right: bounds in tokens; None is open.
        prefix: tokens that every query sees.
        documents: lengths of the documents of each sample, or of all samples at once; empty: one.
        scale: factor of the scores; None: ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
    """

    left: int | None = None
    right: int | None = None
    prefix: int = 0
    documents: tuple[tuple[int, ...], ...] = ()
    scale: float | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Tensors:
    """Global tensors: q ``[B, S, H, D]``, k ``[B, S, G, D]``, v ``[B, S, G, E]``, dout
    ``[B, S, H, E]``; slopes (ALiBi's) and sinks ``[H]`` or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


def dense_attention(
    tensors: Tensors,
    params: AttentionParams,
    *,
    backward: bool = True,
    block_elements: int = 1 << 22,
    rank: int = 0,
    world: int = 1,
) -> dict[str, torch.Tensor]:
    """Attention and, from ``dout``, its gradients, all in fp64.

    Collective over the default group where ``world`` is more than 1.

    Args:
        block_elements: scores that are held at a time.
        rank, world: this process among those that divide the work.

    Returns:
        ``out [B, S, H, E]``, ``lse [B, H, S]`` (natural log, of scores and sinks), and with
        ``backward`` dq, dk, dv as the inputs are, and ``dsinks [H]`` where there are sinks.
    """
    q, k, v, dout = tensors.q, tensors.k, tensors.v, tensors.dout
    batch, length, heads, _ = q.shape
    kv_heads = k.shape[2]
    shapes: dict[str, Sequence[int]] = {"out": dout.shape, "lse": (batch, heads, length)}
    if backward:
        shapes |= {"dq": q.shape, "dk": k.shape, "dv": v.shape}
        shapes |= {} if tensors.sinks is None else {"dsinks": (heads,)}
    results = {
        name: torch.zeros(tuple(shape), dtype=torch.float64, device=q.device)
        for name, shape in shapes.items()
    }
    rows = max(1, min(length, block_elements // (batch * heads // kv_heads * length)))
    blocks = [(group, start) for group in range(kv_heads) for start in range(0, length, rows)]
    for group, start in blocks[rank::world]:
        _block(tensors, params, group, start, min(start + rows, length), results)
    if world > 1:
        for result in results.values():
            dist.all_reduce(result)
    return results


def _block(
    tensors: Tensors,
    params: AttentionParams,
    group: int,
    start: int,
    stop: int,
    results: dict[str, torch.Tensor],
) -> None:
    """Compute query rows ``start:stop`` of the heads that share key/value head ``group``, and write
    or add them to the results."""
    per_group = tensors.q.shape[2] // tensors.k.shape[2]
    heads = slice(group * per_group, (group + 1) * per_group)
    q = tensors.q[:, start:stop, heads].double()
    dout = tensors.dout[:, start:stop, heads].double()
    k, v = tensors.k[:, :, group].double(), tensors.v[:, :, group].double()
    scale = q.shape[-1] ** -0.5 if params.scale is None else params.scale
    scores = torch.einsum("brhd,btd->bhrt", q, k) * scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    capped = scores
    query = torch.arange(start, stop, device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)[None, :]
    if tensors.slopes is not None:
        slopes = tensors.slopes[heads].double()[:, None, None]
        scores = scores - slopes * (key - query).abs()
    visible = _visible(params, query, key)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    sinks = None if tensors.sinks is None else tensors.sinks[heads].double()[:, None]
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks)
    weights = torch.exp(scores - lse[..., None])
    out = torch.einsum("bhrt,bte->brhe", weights, v)
    results["out"][:, start:stop, heads] = out
    results["lse"][:, heads, start:stop] = lse
    if "dq" not in results:
        return
    # d softmax: weight * (d weight - rowsum(d out * out))
    delta = (dout * out).sum(-1).transpose(1, 2)
    dscores = weights * (torch.einsum("brhe,bte->bhrt", dout, v) - delta[..., None])
    if params.softcap is not None:
        dscores = dscores * (1 - (capped / params.softcap) ** 2)
    results["dq"][:, start:stop, heads] = torch.einsum("bhrt,btd->brhd", dscores, k) * scale
    results["dk"][:, :, group] += torch.einsum("bhrt,brhd->btd", dscores, q) * scale
    results["dv"][:, :, group] += torch.einsum("bhrt,brhe->bte", weights, dout)
    if sinks is not None:
        results["dsinks"][heads] -= (torch.exp(sinks - lse) * delta).sum((0, 2))


def _visible(params: AttentionParams, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Which keys the query rows see, bool ``[B or 1, rows, S]``."""
    distance = key - query
    visible = torch.ones_like(distance, dtype=torch.bool)
    if params.left is not None:
        visible &= distance >= -params.left
    if params.right is not None:
        visible &= distance <= params.right
    visible |= key < params.prefix
    if not params.documents:
        return visible[None]
    inside = [
        owner[query] == owner[key]
        for owner in (_owners(lengths, key.device) for lengths in params.documents)
    ]
    return visible & torch.stack(inside)


def _owners(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """The document of each token ``[S]``."""
    counts = torch.tensor(lengths, device=device)
    return torch.arange(len(lengths), device=device).repeat_interleave(counts)


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
        return [shard for of_ring_rank in shards for shard in of_ring_rank]
    return [shards[r][u] for u in range(ulysses) for r in range(ring)]
