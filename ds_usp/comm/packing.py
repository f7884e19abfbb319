"""What leaves goes into a room, each rank's piece behind the one before, and this rank's own piece
straight to where it belongs: one read and one write of each number.

Letters of the shapes: P ranks, s tokens of a rank, B batch, h heads of a rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ds_usp.comm.channel import Shapes, cut_features
from ds_usp.strided_copy import dense_copy
from ds_usp.triton_launch import fused


class Sum(Protocol):
    """A tensor ``[B, tokens, h, D]`` that is still to be summed."""

    def whole(self) -> torch.Tensor | None:
        """The sum, where it is a tensor already."""

    def write(self, place: torch.Tensor, first: int = 0) -> None:
        """Write its tokens from ``first`` on that ``place`` ``[B, ., h, D]`` has room for."""

    def result(self) -> torch.Tensor:
        """All of it."""


class Outgoing(NamedTuple):
    """One tensor, cut into the ranks' pieces.

    Shapes:
        pieces ``[P, s, B, h, D]``, a view, or the sum ``[B, P s, h, D]`` of them.
        own ``[s, B, h, D]``: where this rank's piece goes.
    """

    pieces: torch.Tensor | Sum
    own: torch.Tensor


def hand_out(
    room: torch.Tensor,
    mine: int,
    shapes: Shapes,
    tensors: Sequence[Outgoing],
    *,
    packed: bool = False,
) -> None:
    """Pack every tensor's pieces into the room, but this rank's own.

    Args:
        room: ``[P, s, B, features]``, dense; a token's heads of all tensors are neighbours.
        mine: this rank among them; what its piece of the room holds afterwards is not said.
        shapes: heads and head dim of each tensor.
        packed: they are in the room already: this rank's own go to where they belong.
    """
    if packed:
        for pieces, own in tensors:
            _write(own.unsqueeze(0), pieces, mine)
        return
    triton = fused("ds_usp.comm.packing_triton") if room.is_cuda else None
    if triton is not None and triton.hand_out_fused(room, mine, tensors):
        return
    for place, (pieces, own) in zip(cut_features(room, shapes), tensors, strict=True):
        for start, stop in ((0, mine), (mine + 1, len(place))):
            if start < stop:
                _write(place[start:stop], pieces, start)
        _write(own.unsqueeze(0), pieces, mine)


def _write(places: torch.Tensor, pieces: torch.Tensor | Sum, first: int) -> None:
    """Write the pieces from the first on to as many places ``[., s, B, h, D]``."""
    if isinstance(pieces, torch.Tensor):
        dense_copy(places, pieces[first : first + len(places)])
        return
    # One piece, or several of the room, which lie one after the other.
    count, tokens, batch, *head = places.shape
    _, token, sample, *feature = places.stride()
    run = places.as_strided((batch, count * tokens, *head), (sample, token, *feature))
    pieces.write(run, first * tokens)


def by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Each rank's tokens of ``[B, P s, h, D]``: ``[P, s, B, h, D]``, a view."""
    return x.unflatten(1, (ranks, -1)).permute(1, 2, 0, 3, 4)
