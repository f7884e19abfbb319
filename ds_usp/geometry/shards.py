"""Shards of different lengths from the ranks of a process group.

The group and the tensors are torch's, of which this module knows the methods that it calls.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from ds_usp.errors import LayoutError

if TYPE_CHECKING:
    from ds_usp.geometry.layout import TokenLayout


def shards_of_group(layout: TokenLayout, local: Any, dim: int, group: Any) -> list[Any]:
    """The shard of every rank of a group, in rank order, on every rank; collective over it.

    Shapes:
        local: ``layout.length(rank)`` along ``dim``.

    Raises:
        LayoutError: no process group, or one of other ranks; on every rank, if one of them holds
            something else than its shard, or one that has a gradient.
    """
    if not hasattr(group, "allgather"):
        raise LayoutError(
            f"group={group!r} must be a process group: mesh.sp_group of a SequenceMesh, "
            'get_group("sp") of a DeviceMesh'
        )
    if group.size() != layout.degree:
        raise LayoutError(
            f"the group has {group.size()} ranks, {layout} is for {layout.degree}; give the "
            "sequence-parallel group"
        )
    if not hasattr(local, "new_empty"):
        raise LayoutError(f"{local!r} is no tensor: with group= give this rank's own shard")
    return all_gather_shards(layout, local, _compare(layout, local, dim, group), group)


def all_gather_shards(layout: TokenLayout, local: Any, dim: int, group: Any) -> list[Any]:
    """:func:`shards_of_group` where the ranks know that each holds its shard: the CPU does not wait
    for a GPU.

    Args:
        dim: counted from the front.
    """
    max_length = max(layout.length(rank) for rank in range(layout.degree))
    padded = local.new_zeros((*local.shape[:dim], max_length, *local.shape[dim + 1 :]))
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    shards = [padded.new_empty(padded.shape) for _ in range(layout.degree)]
    group.allgather([shards], [padded]).wait()
    return [shard.narrow(dim, 0, layout.length(rank)) for rank, shard in enumerate(shards)]


def _compare(layout: TokenLayout, local: Any, dim: int, group: Any) -> int:
    """Check that every rank holds its shard; ``dim``, counted from the front."""
    dim_exists = -local.ndim <= dim < local.ndim
    dim = dim % local.ndim if dim_exists else dim
    other_dims = (
        f"{local.dtype} {(*local.shape[:dim], ..., *local.shape[dim + 1 :])} {dim} {layout!r}"
    )
    length = local.shape[dim] if dim_exists else -1
    signature = [length, int(local.requires_grad), zlib.crc32(other_dims.encode())]
    local_signature = local.new_empty(0).detach().long().new_tensor(signature)
    signatures = [local_signature.new_empty(local_signature.shape) for _ in range(layout.degree)]
    group.allgather([signatures], [local_signature]).wait()
    rank_signatures = [each.tolist() for each in signatures]
    for rank, (tokens, requires_grad, _) in enumerate(rank_signatures):
        if tokens != layout.length(rank):
            raise LayoutError(
                f"rank {rank} holds {'no dim' if tokens < 0 else tokens} along dim {dim}, {layout} "
                f"gives it {layout.length(rank)} tokens"
            )
        if requires_grad:
            raise LayoutError(
                f"the shard of rank {rank} has a gradient, which does not go back through a "
                "gather: give local.detach()"
            )
    if len({checksum for *_, checksum in rank_signatures}) > 1:
        raise LayoutError(
            f"the ranks' shards differ in more than their tokens, or are of other layouts; rank "
            f"{group.rank()} holds {list(local.shape)} of {local.dtype}, dim {dim}, {layout}"
        )
    return dim
