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
from ds_usp.comm.packing import OwnTokens, PackPlan, SendViews
from ds_usp.geometry.token_slices import TokenSlices

Strided = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


class HeadRange(NamedTuple):
    """Of one tensor: rank 0's first head, heads of each rank, heads from one rank's to the next."""

    first: int
    num_heads: int
    stride: int


class BufferSizes(NamedTuple):
    """Of what is exchanged.

    Attributes:
        by_rank: the buffer ``[ranks, s, B, features]`` of a piece for or from each rank.
        in_order: the buffer ``[S, B, features]`` of the ring rank's tokens.
        shapes: heads and head dim of each tensor on one rank.
        pieces, shares: elements for each rank in these two, the second in the order of the ranks.
    """

    by_rank: tuple[int, int, int, int]
    in_order: tuple[int, int, int]
    shapes: HeadShapes
    pieces: list[int]
    shares: list[int]


class HeadsRecv(NamedTuple):
    """A slice of a peer that is received to heads: where it is in the peer's buffer and in the
    receive buffer, in elements."""

    peer: int
    offset: int
    view: StridedView


class SequenceRecv(NamedTuple):
    """A slice of heads of a peer that is received to the sequence: for the output of number
    ``out``; offset and row stride in the peer's buffer; the view of the output."""

    peer: int
    out: int
    offset: int
    row_stride: int
    view: StridedView


def strided(tensors: Sequence[torch.Tensor]) -> tuple[Strided, ...]:
    """Shape and strides of each tensor."""
    return tuple([(x.shape, x.stride()) for x in tensors])


@lru_cache(maxsize=4096)
def plan_to_heads(
    rank: int, slices: TokenSlices, heads: tuple[HeadRange, ...], *tensors: Strided
) -> tuple[BufferSizes, PackPlan, tuple[HeadsRecv, ...]]:
    """Sizes of the exchange of tensors ``[B, s, H, D]``, how they are packed and what is received;
    a rank's own tokens go to the receive buffer ``[S, B, features]``."""
    sizes = buffer_sizes(slices, heads, *[shape for shape, _ in tensors])
    tokens, batch, features = sizes.in_order
    row = batch * features
    views, offset = [], 0
    for head_range, (shape, stride), (num_heads, dim) in zip(
        heads, tensors, sizes.shapes, strict=True
    ):
        local_out = StridedView((tokens, batch, num_heads, dim), (row, features, dim, 1), offset)
        views.append(SendViews(heads_by_rank(slices.ranks, head_range, shape, stride), local_out))
        offset += num_heads * dim
    own = OwnTokens(rank, tuple([(x.row, x.row + x.length, x.start) for x in slices.of_rank[rank]]))
    recvs = []
    for peer in next_ranks(rank, slices.ranks):
        piece = rank * slices.lengths[peer]
        for x in slices.of_rank[peer]:
            view = StridedView((x.length * row,), (1,), x.start * row)
            recvs.append(HeadsRecv(peer, (piece + x.row) * row, view))
    return sizes, PackPlan(sizes.by_rank, own, views), tuple(recvs)


@lru_cache(maxsize=4096)
def plan_to_sequence(
    rank: int,
    slices: TokenSlices,
    heads: tuple[HeadRange, ...],
    tensors: tuple[Strided, ...],
    outs: tuple[Strided, ...],
) -> PackPlan:
    """How tensors ``[B, S, h, D]`` are packed; a rank's own tokens go to ``outs``
    ``[B, s, H, D]``."""
    sizes = buffer_sizes(slices, heads, *[shape for shape, _ in outs])
    views = []
    for head_range, (shape, stride), (out_shape, out_stride) in zip(
        heads, tensors, outs, strict=True
    ):
        batch, tokens, *head_shape = shape
        sample, token, *rest = stride
        size, by_rank = (1, tokens, batch, *head_shape), (0, token, sample, *rest)
        all_heads = heads_by_rank(slices.ranks, head_range, out_shape, out_stride)
        views.append(SendViews(StridedView(size, by_rank, 0), _heads_of(all_heads, rank)))
    return PackPlan((1, *sizes.in_order), own_in_order(slices, rank), views)


@lru_cache(maxsize=4096)
def recvs_to_sequence(
    rank: int, slices: TokenSlices, heads: tuple[HeadRange, ...], outs: tuple[Strided, ...]
) -> tuple[SequenceRecv, ...]:
    """What is received for the outputs ``[B, s, H, D]``: from every peer, the next rank first, its
    heads of this rank's slices."""
    sizes = buffer_sizes(slices, heads, *[shape for shape, _ in outs])
    _, batch, features = sizes.in_order
    row_stride = batch * features
    recvs = []
    for peer in next_ranks(rank, slices.ranks):
        first = 0
        for i, (num_heads, dim) in enumerate(sizes.shapes):
            (_, *size), stride, begin = _heads_of(
                heads_by_rank(slices.ranks, heads[i], *outs[i]), peer
            )
            for start, stop, row in slices.of_rank[rank]:
                view = StridedView((stop - start, *size), stride, begin + row * stride[0])
                recvs.append(SequenceRecv(peer, i, start * row_stride + first, row_stride, view))
            first += num_heads * dim
    return tuple(recvs)


@lru_cache(maxsize=4096)
def own_in_order(slices: TokenSlices, rank: int) -> OwnTokens:
    """A rank's own tokens among the ring rank's."""
    return OwnTokens(0, slices.of_rank[rank])


@lru_cache(maxsize=4096)
def buffer_sizes(
    slices: TokenSlices, heads: tuple[HeadRange, ...], *shapes: tuple[int, ...]
) -> BufferSizes:
    """Of the exchange of tensors of these shapes ``[B, s, H, D]``."""
    batch, tokens = shapes[0][:2]
    head_shapes = tuple(
        [(row.num_heads, shape[3]) for row, shape in zip(heads, shapes, strict=True)]
    )
    features = sum([num_heads * dim for num_heads, dim in head_shapes])
    row, lengths = batch * features, slices.lengths
    return BufferSizes(
        (slices.ranks, tokens, batch, features),
        (sum(lengths), batch, features),
        head_shapes,
        [tokens * row] * slices.ranks,
        [length * row for length in lengths],
    )


def next_ranks(rank: int, ranks: int) -> list[int]:
    """The other ranks, the next one first."""
    return [(rank + step) % ranks for step in range(1, ranks)]


def _heads_of(by_rank: StridedView, rank: int) -> StridedView:
    """One rank's ``[s, B, h, D]`` of :func:`heads_by_rank`."""
    return StridedView(
        by_rank.size[1:], by_rank.stride[1:], by_rank.offset + rank * by_rank.stride[0]
    )


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
