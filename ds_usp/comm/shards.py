"""The whole tensor from the ranks' shards, of different lengths: the one gather of the library.

Ranks that gather must hold the shards of one layout, with the same other dims: the mesh's
consistency checker compares them on the CPUs, which do not wait for a GPU. Callers are
``SequenceMesh.gather`` and, of :func:`all_gather_shards`, the branches of diffusers' models.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_usp.comm.consistency import ConsistencyChecker
from ds_usp.errors import LayoutError
from ds_usp.geometry.layout import TokenLayout

_Buffers = tuple[torch.Tensor, list[torch.Tensor]]


def gather_shards(
    local: torch.Tensor,
    layout: TokenLayout,
    dim: int,
    group: dist.ProcessGroup,
    consistency: ConsistencyChecker,
) -> torch.Tensor:
    """The whole tensor, on every rank. Collective over the group.

    Shapes:
        local: ``layout.length(rank)`` along ``dim``; the result has ``layout.seq_len`` there.

    Raises:
        LayoutError: this rank holds something else than its shard, or one with a gradient.
        MeshError: another rank holds something else, or shards differ in more than their tokens.
    """
    error: Exception | None = None
    signature, buffers = "", None
    try:
        if group.size() != layout.degree:
            raise LayoutError(f"the mesh has {group.size()} ranks, {layout} is for {layout.degree}")
        rank = group.rank()
        dim = layout.check_dim(local, dim, layout.length(rank), f"the shard of rank {rank}")
        if local.requires_grad:
            raise LayoutError(
                f"the shard of rank {rank} has a gradient, which does not go back through a "
                "gather: give local.detach()"
            )
        shape = *local.shape[:dim], "...", *local.shape[dim + 1 :]
        signature = f"a gather over {layout!r}, dim {dim} of {shape}, {local.dtype}"
        # Before the comparison: a rank that had no memory after it would leave the others waiting.
        buffers = _gather_buffers(layout, local, dim)
    except (LayoutError, RuntimeError) as refused:
        error = refused
    consistency.check_now(signature, error)
    return layout.gather(all_gather_shards(layout, local, dim, group, buffers), dim)


def all_gather_shards(
    layout: TokenLayout,
    local: torch.Tensor,
    dim: int,
    group: dist.ProcessGroup,
    buffers: _Buffers | None = None,
) -> list[torch.Tensor]:
    """Every rank's shard, in the group's order. Collective, and compares nothing: the ranks must
    know that each holds its own. ``dim`` from the front; ``buffers`` of :func:`_gather_buffers`."""
    sent, gathered = buffers or _gather_buffers(layout, local, dim)
    dist.all_gather(gathered, sent, group=group)
    return [
        shard.view(local.dtype).narrow(dim, 0, layout.length(rank))
        for rank, shard in enumerate(gathered)
    ]


def _gather_buffers(layout: TokenLayout, local: torch.Tensor, dim: int) -> _Buffers:
    """Return what an all-gather of shards sends, a padded copy of ``local``, and receives into."""
    # All-gathers take equal sizes: shorter shards are padded by the token or two that they lack.
    longest = max(layout.length(rank) for rank in range(layout.degree))
    padded = local.new_zeros((*local.shape[:dim], longest, *local.shape[dim + 1 :]))
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    sent = padded.view(torch.uint8) if local.dtype == torch.bool else padded  # as all backends can
    return sent, [torch.empty_like(sent) for _ in range(layout.degree)]
