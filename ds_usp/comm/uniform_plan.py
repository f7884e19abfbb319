"""What follows from the shapes and strides of the tensors of a uniform all-to-all: sizes, packing
and copies, computed once for all calls, because this is CPU time between kernels.

Letters of the shapes as in :mod:`ds_usp.comm.all_to_all`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ds_usp.comm.channel import HeadShapes, StridedView
from ds_usp.comm.packing import PackPlan, SendViews
from ds_usp.geometry.token_slices import TokenSlices

Strided = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


class HeadRange(NamedTuple):
    """Of one tensor: rank 0's first head, heads of each rank, heads from one rank's to the next."""

    first: int
    num_heads: int
    stride: int


class BufferSizes(NamedTuple):
    """Of what is exchanged ``[ranks, s, B, features]``.

    Attributes:
        shape: of the buffer.
        shapes: heads and head dim of each tensor on one rank.
        splits: elements for each rank.
    """

    shape: tuple[int, int, int, int]
    shapes: HeadShapes
    splits: list[int]


def strided(tensors: Sequence[torch.Tensor]) -> tuple[Strided, ...]:
    """Shape and strides of each tensor."""
    return tuple([(x.shape, x.stride()) for x in tensors])


@lru_cache(maxsize=4096)
def plan_to_heads(
    ranks: int,
    rank: int,
    slices: TokenSlices,
    heads: tuple[HeadRange, ...],
    *tensors: Strided,
) -> tuple[BufferSizes, PackPlan]:
    """Sizes of the exchange of tensors ``[B, s, H, D]``, and how they are packed; a rank's own
    slices are those of the receive buffer ``[P s, B, features]``."""
    sizes = buffer_sizes(ranks, heads, *[shape for shape, _ in tensors])
    _, tokens, batch, features = sizes.shape
    count, own = slices.per_rank, slices.of_rank[rank]
    length, row = tokens // count, batch * features
    views, offset = [], own[0] * length * row
    for head_range, (shape, stride), (num_heads, dim) in zip(
        heads, tensors, sizes.shapes, strict=True
    ):
        by_rank = heads_by_rank(ranks, head_range, shape, stride)
        piece, token, *rest = by_rank.stride
        size = count, length, batch, num_heads, dim
        local_stride = 0, (own[-1] - own[0]) * length * row, row, features, dim, 1
        views.append(
            SendViews(
                StridedView((ranks, *size), (piece, length * token, token, *rest), by_rank.offset),
                StridedView((1, *size), local_stride, offset),
            )
        )
        offset += num_heads * dim
    return sizes, PackPlan(sizes.shape, (rank,), views)


@lru_cache(maxsize=4096)
def plan_to_sequence(
    ranks: int,
    rank: int,
    slices: TokenSlices,
    heads: tuple[HeadRange, ...],
    tensors: tuple[Strided, ...],
    outs: tuple[Strided, ...],
) -> PackPlan:
    """How tensors ``[B, P s, h, D]`` are packed; a rank's own slices go to ``outs`` ``[B, s, H,
    D]``."""
    count = slices.per_rank
    *_, features = buffer_sizes(ranks, heads, *[shape for shape, _ in outs]).shape
    views = []
    for head_range, (shape, stride), (out_shape, out_stride) in zip(
        heads, tensors, outs, strict=True
    ):
        batch, tokens, *head_shape = shape
        sample, token, *rest = stride
        length = tokens // (ranks * count)
        by_rank = heads_by_rank(ranks, head_range, out_shape, out_stride)
        piece, out_token, *out_rest = by_rank.stride
        size = 1, length, batch, *head_shape
        views.append(
            SendViews(
                StridedView((ranks * count, *size), (length * token, 0, token, sample, *rest), 0),
                StridedView(
                    (count, *size),
                    (length * out_token, 0, out_token, *out_rest),
                    by_rank.offset + rank * piece,
                ),
            )
        )
    return PackPlan((ranks * count, length, batch, features), slices.of_rank[rank], views)


@lru_cache(maxsize=4096)
def recvs_to_sequence(
    ranks: int,
    rank: int,
    slices: TokenSlices,
    heads: tuple[HeadRange, ...],
    outs: tuple[Strided, ...],
) -> tuple[tuple[int, int, int, int, StridedView], ...]:
    """What is received for the outputs ``[B, s, H, D]``: from every peer, the next rank first, its
    heads of this rank's slices. Each entry: the peer, the number of the output, offset and row
    stride in the peer's buffer, the view of the output.
    """
    sizes = buffer_sizes(ranks, heads, *[shape for shape, _ in outs])
    _, tokens, batch, features = sizes.shape
    row_stride, length = batch * features, tokens // slices.per_rank
    recvs = []
    for peer in [(rank + step) % ranks for step in range(1, ranks)]:
        first = 0
        for i, (num_heads, dim) in enumerate(sizes.shapes):
            by_rank = heads_by_rank(ranks, heads[i], *outs[i])
            piece, token, *rest = by_rank.stride
            for k, number in enumerate(slices.of_rank[rank]):
                begin = by_rank.offset + peer * piece + k * length * token
                view = StridedView((length, batch, num_heads, dim), (token, *rest), begin)
                recvs.append((peer, i, number * length * row_stride + first, row_stride, view))
            first += num_heads * dim
    return tuple(recvs)


@lru_cache(maxsize=4096)
def buffer_sizes(ranks: int, heads: tuple[HeadRange, ...], *shapes: tuple[int, ...]) -> BufferSizes:
    """Of the exchange of tensors of these shapes ``[B, s, H, D]``."""
    batch, tokens = shapes[0][:2]
    head_shapes = tuple(
        [(row.num_heads, shape[3]) for row, shape in zip(heads, shapes, strict=True)]
    )
    features = sum([num_heads * dim for num_heads, dim in head_shapes])
    splits = [tokens * batch * features] * ranks
    return BufferSizes((ranks, tokens, batch, features), head_shapes, splits)


@lru_cache(maxsize=4096)
def heads_by_rank(
    ranks: int, heads: HeadRange, shape: tuple[int, ...], strides: tuple[int, ...]
) -> StridedView:
    """Each rank's heads of a tensor ``[B, s, H, D]``, seen as ``[ranks, s, B, h, D]``."""
    batch, tokens, _, dim = shape
    sample, token, head, feature = strides
    return StridedView(
        (ranks, tokens, batch, heads.num_heads, dim),
        (heads.stride * head, token, sample, head, feature),
        heads.first * head,
    )
