"""Packing of tensors into a staging buffer, one slice for each rank; this rank's own slice goes
straight to its destination: one read and one write of each element.

Letters of the shapes: P ranks, s tokens of a rank, B batch, h heads of a rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from ds_usp.comm.channel import Channel, HeadShapes, StagingBuffer, split_features
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
    """One tensor, as slices for the ranks.

    Attributes:
        per_rank: ``[P, s, B, h, D]``, a view, or the sum ``[B, P s, h, D]`` of them.
        local_out: ``[s, B, h, D]``, the destination of this rank's own slice.
    """

    per_rank: torch.Tensor | DeferredSum
    local_out: torch.Tensor


class StridedView(NamedTuple):
    """A view of a tensor, counted in elements from its first one."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The view of ``x``."""
        return x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)


class SendViews(NamedTuple):
    """:class:`SendTensor` as views of the tensor and of the one that holds ``local_out``."""

    per_rank: StridedView
    local_out: StridedView


class PackPlan:
    """Packing of tensors that all are there, without sums, into a staging buffer.

    Args:
        shape: of the staging buffer ``[P, s, B, features]``.
        rank: this rank.
        views: of each tensor.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], rank: int, views: Sequence[SendViews]
    ) -> None:
        self.shape, self.rank, self.views = shape, rank, tuple(views)
        self.head_shapes = tuple([(x.size[3], x.size[4]) for x, _ in self.views])

    def pack(
        self, staging: torch.Tensor, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """Pack ``sources``, and write this rank's own slices to ``outs``."""
        if staging.is_cuda and self._fused is not None and self._fused(staging, sources, outs):
            return
        pairs = zip(self.views, sources, outs, strict=True)
        tensors = [SendTensor(a.of(source), b.of(out)) for (a, b), source, out in pairs]
        pack_for_send(staging, self.rank, self.head_shapes, tensors)

    @cached_property
    def _fused(self) -> Callable[..., bool] | None:
        """The same as one kernel, which returns False where it cannot be; None without Triton."""
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
    rank: int,
    shapes: HeadShapes,
    tensors: Sequence[SendTensor],
    *,
    already_packed: bool = False,
) -> None:
    """Pack the slices of every tensor for the other ranks, and write this rank's own to
    ``local_out``.

    Args:
        staging: ``[P, s, B, features]``, dense; a token's heads of all tensors are neighbours.
        rank: this rank; its slice of ``staging`` is undefined afterwards.
        shapes: heads and head dim of each tensor.
        already_packed: they are in ``staging``: only ``local_out`` is written.
    """
    if already_packed:
        for per_rank, local_out in tensors:
            _write(local_out.unsqueeze(0), per_rank, rank)
        return
    for outs, (per_rank, local_out) in zip(split_features(staging, shapes), tensors, strict=True):
        for start, stop in ((0, rank), (rank + 1, len(outs))):
            if start < stop:
                _write(outs[start:stop], per_rank, start)
        _write(local_out.unsqueeze(0), per_rank, rank)


def _write(outs: torch.Tensor, per_rank: torch.Tensor | DeferredSum, first: int) -> None:
    """Write the slices from rank ``first`` on to ``outs`` ``[., s, B, h, D]``."""
    if isinstance(per_rank, torch.Tensor):
        strided_copy(outs, per_rank[first : first + len(outs)])
        return
    # One slice, or several of the staging buffer, which lie one after the other.
    count, tokens, batch, *head = outs.shape
    _, token, sample, *feature = outs.stride()
    run = outs.as_strided((batch, count * tokens, *head), (sample, token, *feature))
    per_rank.write(run, first * tokens)


def view_by_rank(x: torch.Tensor | DeferredSum, ranks: int) -> torch.Tensor | DeferredSum:
    """Each rank's tokens of ``[B, P s, h, D]``: ``[P, s, B, h, D]``, a view; a sum as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.unflatten(1, (ranks, -1)).permute(1, 2, 0, 3, 4)
