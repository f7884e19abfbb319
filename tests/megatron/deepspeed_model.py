"""A model as users of DeepSpeed-Ulysses write it; nothing in here knows of ds_usp."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention

HIDDEN, HEADS, KV_HEADS = 32, 8, 4


class CausalAttention(torch.nn.Module):
    """Attention of ``[b, s, h, d]`` on one device."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        hidden = torch.ones(q.shape[2], k.shape[2]).triu(1).bool()
        scores = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(hidden, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).contiguous()


class Model(torch.nn.Module):
    """One attention layer between two projections."""

    def __init__(self, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        width = HIDDEN // HEADS
        self.heads = (HEADS, KV_HEADS, KV_HEADS)
        self.into = torch.nn.Linear(HIDDEN, width * sum(self.heads))
        self.attention = attention
        self.out = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: ``[b, s_local, hidden]`` in and out."""
        heads = self.into(x).unflatten(2, (sum(self.heads), -1))
        q, k, v = heads.split(self.heads, dim=2)
        return self.out(self.attention(q, k, v, 0).flatten(2))


def distributed_model(group: dist.ProcessGroup) -> Model:
    """The model over the ranks of a sequence-parallel group."""
    return Model(DistributedAttention(CausalAttention(), group, scatter_idx=2, gather_idx=1))
