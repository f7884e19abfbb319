"""Packing of tensors into a staging buffer, one slice for each rank; this rank's own slice goes
straight to its destination: one read and one write of each element.

The buffer is ``[R, K t, B, features]``: R pieces, each of which one rank pulls, of K slices of t
tokens. To heads there is one piece a rank, of all its slices; to the sequence one piece a slice, in
the order of the ring rank's tokens. A rank's own pieces are not packed.

Letters of the shapes: P ranks, s tokens of a rank, B batch, h heads of a rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from ds_usp.comm.channel import Channel, HeadShapes, StagingBuffer, StridedView, split_features
from ds_usp.strided_copy import strided_copy
from ds_usp.triton_launch import load_triton_module


class DeferredSum(Protocol):
    """A tensor ``[B, tokens, h, D]`` that is still to be summed."""

    def as_tensor_if_single(self) -> torch.Tensor | None:
        """The sum, if it is one tensor already."""

    def write(self, out: torch.Tensor, first: int = 0) -> None:
        """Write its tokens from ``first`` on to ``out`` ``[B, ., h, D]``, as many as fit."""

    def result(self) -> torch.Tensor:
        """The whole sum."""


class SendTensor(NamedTuple):
    """One tensor, as pieces for the ranks.

    Attributes:
        pieces: ``[R, K, t, B, h, D]``, a view, or, for K = 1, the sum ``[B, R t, h, D]`` of them.
        local_out: ``[L, K, t, B, h, D]``, the destination of this rank's own L pieces.
    """

    pieces: torch.Tensor | DeferredSum
    local_out: torch.Tensor


class SendViews(NamedTuple):
    """:class:`SendTensor` as views of the tensor and of the one that holds ``local_out``."""

    pieces: StridedView
    local_out: StridedView


class PackPlan:
    """Packing of tensors that all are there, without sums, into a staging buffer.

    Args:
        shape: of the staging buffer ``[R, K t, B, features]``.
        local: this rank's own pieces.
        views: of each tensor.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], local: tuple[int, ...], views: Sequence[SendViews]
    ) -> None:
        self.shape, self.local, self.views = shape, local, tuple(views)
        self.head_shapes = tuple([(x.size[4], x.size[5]) for x, _ in self.views])

    def pack(
        self,
        staging: torch.Tensor,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        *,
        already_packed: bool = False,
    ) -> None:
        """Pack ``sources``, and write this rank's own pieces to ``outs``.

        Args:
            already_packed: the sources are views of ``staging``: only ``outs`` are written.
        """
        if staging.is_cuda and self._fused is not None:
            fused = self._fused[already_packed]
            if fused(staging, sources, outs):
                return
        pairs = zip(self.views, sources, outs, strict=True)
        tensors = [SendTensor(a.of(source), b.of(out)) for (a, b), source, out in pairs]
        pack_for_send(staging, self.local, self.head_shapes, tensors, already_packed=already_packed)

    @cached_property
    def _fused(self) -> tuple[Callable[..., bool], Callable[..., bool]] | None:
        """The same as one kernel, which returns False where it cannot be, of all pieces and of this
        rank's own; None without Triton."""
        triton = load_triton_module("ds_usp.comm.packing_triton")
        return None if triton is None else triton.prepare(self)


class PreallocatedSend(NamedTuple):
    """A staging buffer acquired before its contents are computed: a kernel may write them there.

    Attributes:
        channel: of the buffer; None: it is not a copy engine's.
        staging: the buffer.
        views: of it, each tensor's ``[B, S, h, D]``.
    """

    channel: Channel | None
    staging: StagingBuffer
    views: tuple[torch.Tensor, ...]

    def already_written(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether all tensors are these views; None: a sum of several."""
        pairs = zip(tensors, self.views, strict=True)
        return all(x is not None and x.is_set_to(view) for x, view in pairs)


def copy_or_sum_into(out: torch.Tensor, source: torch.Tensor | DeferredSum) -> None:
    """Write a tensor or a sum to ``out``, which has its shape."""
    if isinstance(source, torch.Tensor):
        strided_copy(out, source)
    else:
        source.write(out)


def pack_for_send(
    staging: torch.Tensor,
    local: Sequence[int],
    shapes: HeadShapes,
    tensors: Sequence[SendTensor],
    *,
    already_packed: bool = False,
) -> None:
    """Pack the pieces of every tensor for the other ranks, and write this rank's own to
    ``local_out``.

    Args:
        staging: ``[R, K t, B, features]``, dense; a token's heads of all tensors are neighbours.
        local: this rank's own pieces, ascending; those of ``staging`` are undefined afterwards.
        shapes: heads and head dim of each tensor.
        already_packed: they are in ``staging``: only ``local_out`` is written.
    """
    if not already_packed:
        views = split_features(staging, shapes)
        for view, (pieces, local_out) in zip(views, tensors, strict=True):
            outs = view.unflatten(1, (local_out.shape[1], -1))
            for start, stop in pairwise((-1, *local, len(outs))):
                if start + 1 < stop:
                    _write(outs[start + 1 : stop], pieces, start + 1)
    for pieces, local_out in tensors:
        for out, piece in zip(local_out, local, strict=True):
            _write(out.unsqueeze(0), pieces, piece)


def _write(outs: torch.Tensor, pieces: torch.Tensor | DeferredSum, first: int) -> None:
    """Write the pieces from ``first`` on to ``outs`` ``[., K, t, B, h, D]``."""
    if isinstance(pieces, torch.Tensor):
        strided_copy(outs, pieces[first : first + len(outs)])
        return
    # One piece of one slice, or several of the staging buffer, which lie one after the other.
    count, _, tokens, batch, *head = outs.shape
    _, _, token, sample, *feature = outs.stride()
    run = outs.as_strided((batch, count * tokens, *head), (sample, token, *feature))
    pieces.write(run, first * tokens)


def pieces_in_order(x: torch.Tensor | DeferredSum, count: int) -> torch.Tensor | DeferredSum:
    """``[B, R t, h, D]`` as R pieces of one slice: ``[R, 1, t, B, h, D]``, a view; a sum as it
    is."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.unflatten(1, (count, 1, -1)).permute(1, 2, 3, 0, 4, 5)
