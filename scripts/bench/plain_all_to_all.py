"""Heads exchanged for tokens by one torch.distributed.all_to_all_single between copies by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class AllToAll(torch.autograd.Function):
    """One Ulysses all-to-all over all ranks, and its inverse in backward.

    To heads: ``[b, s_local, h, d]`` to ``[b, s, h / world, d]``; else from there back. ``lengths``
    are the tokens of each rank.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lengths: Sequence[int], to_heads: bool) -> torch.Tensor:
        """See the class."""
        ctx.lengths, ctx.to_heads = lengths, to_heads
        return to_local_heads(x, lengths) if to_heads else to_local_tokens(x, lengths)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The inverse exchange."""
        inverse = to_local_tokens if ctx.to_heads else to_local_heads
        return inverse(grad, ctx.lengths), None, None


def to_local_heads(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """All tokens of this rank's heads."""
    sent = x.unflatten(2, (len(lengths), -1)).movedim(2, 0).contiguous()
    _, batch, _, heads, dim = sent.shape
    sizes = [batch * tokens * heads * dim for tokens in lengths]
    received = x.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent.view(-1), _unless_equal(sizes))
    if batch == 1:  # shards of one sequence follow each other in memory
        return received.view(1, sum(lengths), heads, dim)
    shards = zip(received.split(sizes), lengths, strict=True)
    return torch.cat([shard.view(batch, tokens, heads, dim) for shard, tokens in shards], dim=1)


def to_local_tokens(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """All heads of this rank's tokens."""
    batch, _, heads, dim = x.shape
    if batch == 1:
        sent = x.reshape(-1)
    else:
        sent = torch.cat([shard.reshape(-1) for shard in x.split(list(lengths), 1)])
    sizes = [batch * tokens * heads * dim for tokens in lengths]
    received = x.new_empty(len(lengths), batch, lengths[dist.get_rank()], heads, dim)
    dist.all_to_all_single(received.view(-1), sent, None, _unless_equal(sizes))
    return received.movedim(0, 2).flatten(2, 3)


def _unless_equal(sizes: list[int]) -> list[int] | None:
    """The argument of all_to_all_single, which has a shorter path for equal sizes."""
    return sizes if len(set(sizes)) > 1 else None
