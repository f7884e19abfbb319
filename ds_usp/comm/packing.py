"""What leaves goes into a room, each rank's piece behind the one before, and this rank's own piece
straight to where it belongs: one read and one write of each number.

Letters of the shapes: P ranks, s tokens of a rank, B batch, h heads of a rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ds_usp.comm.channel import HeadShapes, split_features
from ds_usp.strided_copy import strided_copy
from ds_usp.triton_launch import load_triton_module


class DeferredSum(Protocol):
    """A tensor ``[B, tokens, h, D]`` that is still to be summed."""

    def as_tensor_if_single(self) -> torch.Tensor | None:
        """The sum, where it is a tensor already."""

    def write(self, place: torch.Tensor, first: int = 0) -> None:
        """Write its tokens from ``first`` on that ``place`` ``[B, ., h, D]`` has room for."""

    def result(self) -> torch.Tensor:
        """All of it."""


class SendTensor(NamedTuple):
    """One tensor, cut into the ranks' pieces.

    Shapes:
        pieces ``[P, s, B, h, D]``, a view, or the sum ``[B, P s, h, D]`` of them.
        own ``[s, B, h, D]``: where this rank's piece goes.
    """

    per_rank: torch.Tensor | DeferredSum
    local_out: torch.Tensor


def pack_for_send(
    staging: torch.Tensor,
    rank: int,
    shapes: HeadShapes,
    tensors: Sequence[SendTensor],
    *,
    already_packed: bool = False,
) -> None:
    """Pack every tensor's pieces into the room, but this rank's own.

    Args:
        room: ``[P, s, B, features]``, dense; a token's heads of all tensors are neighbours.
        mine: this rank among them; what its piece of the room holds afterwards is not said.
        shapes: heads and head dim of each tensor.
        packed: they are in the room already: this rank's own go to where they belong.
    """
    if already_packed:
        for per_rank, local_out in tensors:
            _write(local_out.unsqueeze(0), per_rank, rank)
        return
    triton = load_triton_module("ds_usp.comm.packing_triton") if staging.is_cuda else None
    if triton is not None and triton.pack_for_send_fused(staging, rank, tensors):
        return
    for place, (per_rank, local_out) in zip(split_features(staging, shapes), tensors, strict=True):
        for start, stop in ((0, rank), (rank + 1, len(place))):
            if start < stop:
                _write(place[start:stop], per_rank, start)
        _write(local_out.unsqueeze(0), per_rank, rank)


def _write(places: torch.Tensor, per_rank: torch.Tensor | DeferredSum, first: int) -> None:
    """Write the pieces from the first on to as many places ``[., s, B, h, D]``."""
    if isinstance(per_rank, torch.Tensor):
        strided_copy(places, per_rank[first : first + len(places)])
        return
    # One piece, or several of the room, which lie one after the other.
    count, tokens, batch, *head = places.shape
    _, token, sample, *feature = places.stride()
    run = places.as_strided((batch, count * tokens, *head), (sample, token, *feature))
    per_rank.write(run, first * tokens)


def view_by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Each rank's tokens of ``[B, P s, h, D]``: ``[P, s, B, h, D]``, a view."""
    return x.unflatten(1, (ranks, -1)).permute(1, 2, 0, 3, 4)
