"""The full tensor from the shards of a mesh's ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_usp.comm.consistency import ConsistencyChecker
from ds_usp.errors import LayoutError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.shards import all_gather_shards


def gather_shards(
    local: torch.Tensor,
    layout: TokenLayout,
    dim: int,
    group: dist.ProcessGroup,
    consistency: ConsistencyChecker,
) -> torch.Tensor:
    """The full tensor, on every rank. Collective over the group, whose ranks the checker compares
    on their CPUs, which do not wait for a GPU.

    Shapes:
        local: ``layout.length(rank)`` along ``dim``; the result has ``layout.seq_len`` there.

    Raises:
        LayoutError: this rank holds something else than its shard, or one with a gradient.
        MeshError: another rank does, or the shards differ in more than their tokens.
    """
    error: Exception | None = None
    signature = ""
    try:
        dim, signature = _check(local, layout, dim, group)
    except LayoutError as refused:
        error = refused
    consistency.check_now(signature, error)
    return layout.gather(all_gather_shards(layout, local, dim, group), dim)


def _check(
    local: torch.Tensor, layout: TokenLayout, dim: int, group: dist.ProcessGroup
) -> tuple[int, str]:
    """``dim`` counted from the front, and what must be the same on every rank."""
    if group.size() != layout.degree:
        raise LayoutError(f"the mesh has {group.size()} ranks, {layout} is for {layout.degree}")
    rank = group.rank()
    dim = layout.check_dim(local, dim, layout.length(rank), f"the shard of rank {rank}")
    if local.requires_grad:
        raise LayoutError(
            f"the shard of rank {rank} has a gradient, which does not go back through a gather: "
            "give local.detach()"
        )
    shape = *local.shape[:dim], "...", *local.shape[dim + 1 :]
    return dim, f"a gather over {layout!r}, dim {dim} of {shape}, {local.dtype}"
