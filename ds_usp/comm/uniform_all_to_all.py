"""All-to-all between heads and sequence where every rank holds as many tokens and uses as many
heads: one dense buffer, packed by one kernel.

What is exchanged is ``[ranks, s, B, features]``: tokens come before samples, so the ranks' slices
lie one after the other as the ring rank's tokens do, and what is received needs no copy. A token's
heads of all tensors (q, k, v) are neighbours.

Letters of the shapes as in :mod:`ds_usp.comm.all_to_all`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_usp.comm.channel import (
    Channel,
    HeadShapes,
    PendingExchange,
    RecvSpec,
    SendSlice,
    StagingBuffer,
    split_features,
)
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.packing import (
    DeferredSum,
    PackPlan,
    PreallocatedSend,
    SendTensor,
    SendViews,
    StridedView,
    copy_or_sum_into,
    pack_for_send,
    view_by_rank,
)
from ds_usp.strided_copy import strided_copy

# Posts an all-to-all: send buffer, receive buffer, elements for each rank.
PostAllToAll = Callable[[torch.Tensor, torch.Tensor, list[int]], dist.Work]
_Strided = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


class _HeadRange(NamedTuple):
    """Of one tensor: rank 0's first head, heads of each rank, heads from one rank's to the next."""

    first: int
    num_heads: int
    stride: int


class _BufferSizes(NamedTuple):
    """Of what is exchanged ``[ranks, s, B, features]``.

    Attributes:
        shape: of the buffer.
        shapes: heads and head dim of each tensor on one rank.
        splits: elements for each rank.
    """

    shape: tuple[int, int, int, int]
    shapes: HeadShapes
    splits: list[int]


class UniformAllToAll:
    """The head exchanges of one chunk of heads. What follows from shapes and strides is computed
    once for all calls: this is CPU time between kernels.

    Args:
        mesh: the ranks.
        ranges: for each tensor, the half-open head range that each Ulysses rank uses.
        copies: use copy engines, else the all-to-all that callers pass.
    """

    def __init__(
        self, mesh: SequenceMesh, ranges: Sequence[Sequence[tuple[int, int]]], copies: bool
    ) -> None:
        self._mesh, self._copies = mesh, copies
        self._ranks, self._rank = mesh.ulysses_degree, mesh.ulysses_rank
        self._heads = tuple(
            [
                _HeadRange(first, stop - first, second - first)
                for (first, stop), (second, _), *_ in ranges
            ]
        )
        steps = range(1, self._ranks)  # the next rank first
        self._peers = [(self._rank + step) % self._ranks for step in steps]
        self._sends = [SendSlice(peer, peer, peer + 1) for peer in self._peers]

    def post_to_heads(
        self, tensors: Sequence[torch.Tensor], post: PostAllToAll, *, overlapped: bool = True
    ) -> PendingExchange:
        """``[B, s, H, D] -> [B, S, h, D]``, views of one tensor."""
        sizes, plan = _plan_to_heads(
            self._ranks, self._rank, self._heads, *[(x.shape, x.stride()) for x in tensors]
        )
        ranks, tokens, *rest = sizes.shape
        received = tensors[0].new_empty((ranks * tokens, *rest))
        unpack = partial(split_features, received, sizes.shapes, tokens_first=True)
        if not self._copies:
            packed = received.new_empty(sizes.shape)
            views = split_features(packed, sizes.shapes)
            for view, x, (per_rank, _) in zip(views, tensors, plan.views, strict=True):
                strided_copy(view, per_rank.of(x))
            return PendingExchange(unpack, post(packed, received, sizes.splits))
        channel, staging = self._acquire_slot(received, sizes)
        plan.pack(staging.tensor, tensors, (received,) * len(tensors))
        outs, offset = received.split(tokens), self._rank * sizes.splits[0]
        recvs = [RecvSpec(peer, outs[peer], offset, 0) for peer in self._peers]
        channel.post(staging.tensor, self._sends, recvs, overlapped=overlapped)
        return PendingExchange(unpack, channel)

    def preallocate_send(self, like: torch.Tensor, sizes: Sequence[torch.Size]) -> PreallocatedSend:
        """Acquire the staging buffer of :meth:`post_to_sequence`.

        Args:
            like: for dtype and device.
            sizes: of the outputs ``[B, s, H, D]``.
        """
        buffer_sizes = _buffer_sizes(self._ranks, self._heads, *sizes)
        if self._copies:
            channel, staging = self._acquire_slot(like, buffer_sizes)
        else:
            channel, staging = None, StagingBuffer(like.new_empty(buffer_sizes.shape))
        views = staging.views(buffer_sizes.shapes, tokens_first=True)
        return PreallocatedSend(channel, staging, views)

    def post_to_sequence(
        self,
        sources: Sequence[torch.Tensor | DeferredSum],
        outs: Sequence[torch.Tensor],
        post: PostAllToAll,
        prealloc: PreallocatedSend | None = None,
        *,
        overlapped: bool = True,
    ) -> PendingExchange:
        """``[B, S, h, D] -> [B, s, H, D]``. Over NCCL and gloo one dense tensor of one sample is
        sent without a copy; copy engines write to ``outs`` directly.

        Args:
            prealloc: the staging buffer, acquired before; sources that are its views are not
                packed again.
        """
        sizes, outs_per_rank = self._views_per_rank(outs)
        _, tokens, batch, features = sizes.shape
        if not self._copies:
            source = sources[0]
            is_dense = isinstance(source, torch.Tensor) and source.is_contiguous()
            if isinstance(source, torch.Tensor) and is_dense and len(sources) == batch == 1:
                packed = source
            else:
                staging = prealloc[1] if prealloc else StagingBuffer(outs[0].new_empty(sizes.shape))
                packed = staging.tensor
                views = staging.views(sizes.shapes, tokens_first=True)
                for view, source in zip(views, sources, strict=True):
                    copy_or_sum_into(view, source)
            received = packed.new_empty(sizes.shape)
            unpack = partial(_write_received, outs_per_rank, received, sizes.shapes)
            return PendingExchange(unpack, post(packed, received, sizes.splits))
        if prealloc is not None and prealloc.channel is not None:
            channel, staging = prealloc.channel, prealloc.staging
        else:
            channel, staging = self._acquire_slot(outs[0], sizes)
        tensors = [x if isinstance(x, torch.Tensor) else x.as_tensor_if_single() for x in sources]
        per_rank_outs = [x.unbind(0) for x in outs_per_rank]
        dense = [x for x in tensors if x is not None]
        written = prealloc is not None and prealloc.already_written(tensors)
        if written or len(dense) < len(tensors):
            pairs = zip(sources, per_rank_outs, strict=True)
            pack_for_send(
                staging.tensor,
                self._rank,
                sizes.shapes,
                [SendTensor(view_by_rank(x, self._ranks), out[self._rank]) for x, out in pairs],
                already_packed=written,
            )
        else:
            inputs, outputs = (tuple([(x.shape, x.stride()) for x in xs]) for xs in (dense, outs))
            plan = _plan_to_sequence(self._ranks, self._rank, self._heads, inputs, outputs)
            plan.pack(staging.tensor, dense, outs)
        row_stride = batch * features
        offset = self._rank * tokens * row_stride
        recvs_per_tensor = []
        for rank_outs, (heads, dim) in zip(per_rank_outs, sizes.shapes, strict=True):
            recvs_per_tensor.append(
                [RecvSpec(peer, rank_outs[peer], offset, row_stride) for peer in self._peers]
            )
            offset += heads * dim
        recvs = [recv for of_peer in zip(*recvs_per_tensor, strict=True) for recv in of_peer]
        channel.post(staging.tensor, self._sends, recvs, overlapped=overlapped)
        return PendingExchange(tuple, channel)

    def staging_bytes(self, tokens: int, batch: int, dims: Sequence[int], itemsize: int) -> int:
        """Staging memory of one copy-engine exchange, in bytes.

        Args:
            tokens, batch, dims, itemsize: tokens of a rank, samples, each tensor's head dim, bytes
                of an element.
        """
        if not self._copies:
            return 0
        shapes = [(batch, tokens, 0, dim) for dim in dims]  # whatever heads there are besides
        return math.prod(_buffer_sizes(self._ranks, self._heads, *shapes).shape) * itemsize

    def _acquire_slot(
        self, like: torch.Tensor, sizes: _BufferSizes
    ) -> tuple[Channel, StagingBuffer]:
        """A channel over the copy engines, and a buffer in their memory."""
        channel = self._mesh.channel("all_to_all", self._copies)
        return channel, channel.acquire_staging(sizes.shape, like, like.dtype)

    def _views_per_rank(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[_BufferSizes, list[torch.Tensor]]:
        """Sizes of the exchange of these ``[B, s, H, D]``, and each rank's heads of them
        ``[ranks, s, B, h, D]``, views."""
        shapes, views = [], []
        for x, heads in zip(tensors, self._heads, strict=True):
            shapes.append(x.shape)
            views.append(_heads_by_rank(self._ranks, heads, x.shape, x.stride()).of(x))
        return _buffer_sizes(self._ranks, self._heads, *shapes), views


@lru_cache(maxsize=4096)
def _plan_to_heads(
    ranks: int, rank: int, heads: tuple[_HeadRange, ...], *tensors: _Strided
) -> tuple[_BufferSizes, PackPlan]:
    """Sizes of the exchange of tensors ``[B, s, H, D]``, and how they are packed; a rank's own
    slices are those of the receive buffer ``[P s, B, features]``.

    Args:
        tensors: shape and strides of each.
    """
    sizes = _buffer_sizes(ranks, heads, *[shape for shape, _ in tensors])
    _, tokens, batch, features = sizes.shape
    views, offset = [], rank * sizes.splits[0]
    for head_range, (shape, stride), (num_heads, dim) in zip(
        heads, tensors, sizes.shapes, strict=True
    ):
        size = tokens, batch, num_heads, dim
        local_out = StridedView(size, (batch * features, features, dim, 1), offset)
        views.append(SendViews(_heads_by_rank(ranks, head_range, shape, stride), local_out))
        offset += num_heads * dim
    return sizes, PackPlan(sizes.shape, rank, views)


@lru_cache(maxsize=4096)
def _plan_to_sequence(
    ranks: int,
    rank: int,
    heads: tuple[_HeadRange, ...],
    tensors: tuple[_Strided, ...],
    outs: tuple[_Strided, ...],
) -> PackPlan:
    """How tensors ``[B, P s, h, D]`` are packed; a rank's own slices go to ``outs`` ``[B, s, H,
    D]``.

    Args:
        tensors, outs: shape and strides of each.
    """
    views = []
    for head_range, (shape, stride), (out_shape, out_stride) in zip(
        heads, tensors, outs, strict=True
    ):
        batch, tokens, num_heads, dim = shape
        sample, token, *features = stride
        size = ranks, tokens // ranks, batch, num_heads, dim
        per_rank = StridedView(size, (tokens // ranks * token, token, sample, *features), 0)
        by_rank = _heads_by_rank(ranks, head_range, out_shape, out_stride)
        offset = by_rank.offset + rank * by_rank.stride[0]
        views.append(SendViews(per_rank, StridedView(by_rank.size[1:], by_rank.stride[1:], offset)))
    sizes = _buffer_sizes(ranks, heads, *[shape for shape, _ in outs])
    return PackPlan(sizes.shape, rank, views)


@lru_cache(maxsize=4096)
def _buffer_sizes(
    ranks: int, heads: tuple[_HeadRange, ...], *shapes: tuple[int, ...]
) -> _BufferSizes:
    """Of the exchange of tensors of these shapes ``[B, s, H, D]``."""
    batch, tokens = shapes[0][:2]
    head_shapes = tuple(
        [(row.num_heads, shape[3]) for row, shape in zip(heads, shapes, strict=True)]
    )
    features = sum([num_heads * dim for num_heads, dim in head_shapes])
    splits = [tokens * batch * features] * ranks
    return _BufferSizes((ranks, tokens, batch, features), head_shapes, splits)


@lru_cache(maxsize=4096)
def _heads_by_rank(
    ranks: int, heads: _HeadRange, shape: tuple[int, ...], strides: tuple[int, ...]
) -> StridedView:
    """Each rank's heads of a tensor ``[B, s, H, D]``, seen as ``[ranks, s, B, h, D]``."""
    batch, tokens, _, dim = shape
    sample, token, head, feature = strides
    return StridedView(
        (ranks, tokens, batch, heads.num_heads, dim),
        (heads.stride * head, token, sample, head, feature),
        heads.first * head,
    )


def _write_received(
    outs: Sequence[torch.Tensor], received: torch.Tensor, shapes: HeadShapes
) -> tuple[torch.Tensor, ...]:
    """Write each rank's heads to the outputs ``[ranks, s, B, h, D]``; there is no other result."""
    for out, view in zip(outs, split_features(received, shapes), strict=True):
        strided_copy(out, view)
    return ()
