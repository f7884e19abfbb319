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
    dim = _compare(layout, local, dim, group)
    longest = max(layout.length(rank) for rank in range(layout.degree))
    padded = local.new_zeros((*local.shape[:dim], longest, *local.shape[dim + 1 :]))
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    everyone = [padded.new_empty(padded.shape) for _ in range(layout.degree)]
    group.allgather([everyone], [padded]).wait()
    return [part.narrow(dim, 0, layout.length(rank)) for rank, part in enumerate(everyone)]


def _compare(layout: TokenLayout, local: Any, dim: int, group: Any) -> int:
    """Check that every rank holds its shard; ``dim``, counted from the front."""
    exists = -local.ndim <= dim < local.ndim
    dim = dim % local.ndim if exists else dim
    rest = f"{local.dtype} {(*local.shape[:dim], ..., *local.shape[dim + 1 :])} {dim} {layout!r}"
    length = local.shape[dim] if exists else -1
    note = [length, int(local.requires_grad), zlib.crc32(rest.encode())]
    mine = local.new_empty(0).detach().long().new_tensor(note)
    notes = [mine.new_empty(mine.shape) for _ in range(layout.degree)]
    group.allgather([notes], [mine]).wait()
    found = [each.tolist() for each in notes]
    for rank, (tokens, learns, _) in enumerate(found):
        if tokens != layout.length(rank):
            raise LayoutError(
                f"rank {rank} holds {'no dim' if tokens < 0 else tokens} along dim {dim}, {layout} "
                f"gives it {layout.length(rank)} tokens"
            )
        if learns:
            raise LayoutError(
                f"the shard of rank {rank} has a gradient, which does not go back through a "
                "gather: give local.detach()"
            )
    if len({check for *_, check in found}) > 1:
        raise LayoutError(
            f"the ranks' shards differ in more than their tokens, or are of other layouts; rank "
            f"{group.rank()} holds {list(local.shape)} of {local.dtype}, dim {dim}, {layout}"
        )
    return dim
