"""All-gather and reduce-scatter of equal shards, under the names that this torch has for them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# torch 2.13 warns of the names that older versions have.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_shards(
    full: Tensor, shard: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> dist.Work | None:
    """Write the ranks' shards ``[n/t, ...]`` to ``full [n, ...]``, in rank order. Collective.

    Returns:
        What waits for it, with ``async_op``.
    """
    work: dist.Work | None = _GATHER(full, shard, group=group, async_op=async_op)
    return work


def reduce_scatter_shards(
    shard: Tensor, full: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> dist.Work | None:
    """Write this rank's shard ``[n/t, ...]`` of the ranks' sum of ``full [n, ...]``. Collective.

    Returns:
        What waits for it, with ``async_op``.
    """
    work: dist.Work | None = _SCATTER(shard, full, group=group, async_op=async_op)
    return work
