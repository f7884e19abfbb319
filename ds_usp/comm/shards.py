"""The whole tensor from the ranks' shards, of different lengths: the one gather of the library.

Ranks that gather must hold the shards of one layout, with the same other dims. How they find out
depends on what is at hand: over a mesh its consistency checker compares them on the CPUs, which do
not wait for a GPU; over a mere process group a few bytes of each are gathered first.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch
import torch.distributed as dist

from ds_usp.comm.consistency import ConsistencyChecker
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.errors import LayoutError
from ds_usp.geometry.layout import TokenLayout

_SHARD = struct.Struct("qqI")  # tokens, whether it requires grad, a checksum of the rest
_Buffers = tuple[torch.Tensor, list[torch.Tensor]]
_GRADIENT = (
    "the shard of rank {} has a gradient, which does not go back through a gather: give "
    "local.detach()"
)


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
        MeshError: another rank does, or the shards differ in more than their tokens.
    """
    error: Exception | None = None
    signature, buffers = "", None
    try:
        if group.size() != layout.degree:
            raise LayoutError(f"the mesh has {group.size()} ranks, {layout} is for {layout.degree}")
        rank = group.rank()
        dim = layout.check_dim(local, dim, layout.length(rank), f"the shard of rank {rank}")
        if local.requires_grad:
            raise LayoutError(_GRADIENT.format(rank))
        shape = *local.shape[:dim], "...", *local.shape[dim + 1 :]
        signature = f"a gather over {layout!r}, dim {dim} of {shape}, {local.dtype}"
        # Before the comparison: a rank that had no memory after it would leave the others waiting.
        buffers = _gather_buffers(layout, local, dim)
    except (LayoutError, RuntimeError) as refused:
        error = refused
    consistency.check_now(signature, error)
    return layout.gather(all_gather_shards(layout, local, dim, group, buffers), dim)


def shards_of_group(layout: TokenLayout, local: Any, dim: int, group: Any) -> list[torch.Tensor]:
    """The shard of every rank of a group, in rank order, on every rank; collective over it.

    Shapes:
        local: ``layout.length(rank)`` along ``dim``.

    Raises:
        LayoutError: no process group, or one of other ranks; on every rank, if one of them holds
            something else than its shard, or one that has a gradient.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise LayoutError(
            f"group={group!r} must be a process group: mesh.sp_group of a SequenceMesh, "
            'get_group("sp") of a DeviceMesh'
        )
    if group.size() != layout.degree:
        raise LayoutError(
            f"the group has {group.size()} ranks, {layout} is for {layout.degree}; give the "
            "sequence-parallel group"
        )
    if not isinstance(local, torch.Tensor):
        raise LayoutError(f"{local!r} is no tensor: with group= give this rank's own shard")
    dim_exists = -local.ndim <= dim < local.ndim
    dim = dim % local.ndim if dim_exists else dim
    rest = f"{local.dtype} {(*local.shape[:dim], ..., *local.shape[dim + 1 :])} {dim} {layout!r}"
    length = local.shape[dim] if dim_exists else -1
    packed = _SHARD.pack(length, local.requires_grad, zlib.crc32(rest.encode()))
    held = [_SHARD.unpack(data) for data in all_gather_bytes(packed, group)]
    for rank, (tokens, requires_grad, _) in enumerate(held):
        if tokens != layout.length(rank):
            raise LayoutError(
                f"rank {rank} holds {'no dim' if tokens < 0 else tokens} along dim {dim}, {layout} "
                f"gives it {layout.length(rank)} tokens"
            )
        if requires_grad:
            raise LayoutError(_GRADIENT.format(rank))
    if len({checksum for *_, checksum in held}) > 1:
        raise LayoutError(
            f"the ranks' shards differ in more than their tokens, or are of other layouts; rank "
            f"{group.rank()} holds {list(local.shape)} of {local.dtype}, dim {dim}, {layout}"
        )
    return all_gather_shards(layout, local, dim, group)


def all_gather_shards(
    layout: TokenLayout,
    local: torch.Tensor,
    dim: int,
    group: dist.ProcessGroup,
    buffers: _Buffers | None = None,
) -> list[torch.Tensor]:
    """Every rank's shard, where the ranks know that each holds its own; ``dim`` from the front."""
    sent, gathered = buffers or _gather_buffers(layout, local, dim)
    dist.all_gather(gathered, sent, group=group)
    return [
        shard.view(local.dtype).narrow(dim, 0, layout.length(rank))
        for rank, shard in enumerate(gathered)
    ]


def _gather_buffers(layout: TokenLayout, local: torch.Tensor, dim: int) -> _Buffers:
    """What an all-gather of shards sends, and where it receives."""
    # All-gathers take equal sizes: shorter shards are padded by the token or two that they lack.
    longest = max(layout.length(rank) for rank in range(layout.degree))
    padded = local.new_zeros((*local.shape[:dim], longest, *local.shape[dim + 1 :]))
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    sent = padded.view(torch.uint8) if local.dtype == torch.bool else padded  # as all backends can
    return sent, [torch.empty_like(sent) for _ in range(layout.degree)]
