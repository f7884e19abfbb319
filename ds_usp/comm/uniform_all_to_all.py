"""All-to-all between heads and sequence where every rank holds as many tokens and uses as many
heads: one dense buffer, packed by one kernel.

The ring rank's tokens are slices of equal length, K of each Ulysses rank: one in most layouts, two
in ``context_parallel``, whose ranks hold one slice from the front and one from the back. What is
exchanged has tokens before samples, so that slices lie one after the other as the ring rank's
tokens do, and what is received needs no copy. A token's heads of all tensors (q, k, v) are
neighbours.

=============  ===============================  ==================================================
exchange       staging buffer of a rank         another rank receives from it
=============  ===============================  ==================================================
to heads       ``[ranks, s, B, features]``      its piece, each slice to that slice's place
to sequence    ``[slices, t, B, features]``     its slices, which follow each other in its shard
=============  ===============================  ==================================================

Letters of the shapes as in :mod:`ds_usp.comm.all_to_all`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
    pieces_in_order,
)
from ds_usp.geometry.token_slices import TokenSlices
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
        slices: of the ring rank's tokens; in rank order without copy engines.
        ranges: for each tensor, the half-open head range that each Ulysses rank uses.
        copies: use copy engines, else the all-to-all that callers pass.
    """

    def __init__(
        self,
        mesh: SequenceMesh,
        slices: TokenSlices,
        ranges: Sequence[Sequence[tuple[int, int]]],
        copies: bool,
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
        self._slices, self._local = slices, slices.of_rank[self._rank]
        self._sends_to_heads = [SendSlice(peer, peer, peer + 1) for peer in self._peers]
        self._sends_to_sequence = [
            SendSlice(peer, number, number + 1)
            for peer in self._peers
            for number in slices.of_rank[peer]
        ]

    def post_to_heads(
        self, tensors: Sequence[torch.Tensor], post: PostAllToAll, *, overlapped: bool = True
    ) -> PendingExchange:
        """``[B, s, H, D] -> [B, S, h, D]``, views of one tensor."""
        strided = [(x.shape, x.stride()) for x in tensors]
        sizes, plan = _plan_to_heads(self._ranks, self._rank, self._slices, self._heads, *strided)
        ranks, tokens, *rest = sizes.shape
        received = tensors[0].new_empty((ranks * tokens, *rest))
        unpack = partial(split_features, received, sizes.shapes, tokens_first=True)
        if not self._copies:
            packed = received.new_empty(sizes.shape)
            views = split_features(packed, sizes.shapes)
            for view, x, ((size, stride, offset), _) in zip(
                views, tensors, plan.views, strict=True
            ):
                pieces = x.as_strided(size, stride, x.storage_offset() + offset)
                strided_copy(view.unsqueeze(1), pieces)
            return PendingExchange(unpack, post(packed, received, sizes.splits))
        channel, staging = self._acquire_slot(received, sizes.shape)
        plan.pack(staging.tensor, tensors, (received,) * len(tensors))
        count = self._slices.per_rank
        outs, offset = received.split(tokens // count), self._rank * sizes.splits[0]
        recvs = [
            RecvSpec(peer, outs[number], offset + k * (sizes.splits[0] // count))
            for peer in self._peers
            for k, number in enumerate(self._slices.of_rank[peer])
        ]
        channel.post(staging.tensor, self._sends_to_heads, recvs, overlapped=overlapped)
        return PendingExchange(unpack, channel)

    def preallocate_send(self, like: torch.Tensor, sizes: Sequence[torch.Size]) -> PreallocatedSend:
        """Acquire the staging buffer of :meth:`post_to_sequence`.

        Args:
            like: for dtype and device.
            sizes: of the outputs ``[B, s, H, D]``.
        """
        buffer_sizes = _buffer_sizes(self._ranks, self._heads, *sizes)
        shape = self._shape_to_sequence(buffer_sizes)
        if self._copies:
            channel, staging = self._acquire_slot(like, shape)
        else:
            channel, staging = None, StagingBuffer(like.new_empty(shape))
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
        batch = sizes.shape[2]
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
            channel, staging = self._acquire_slot(outs[0], self._shape_to_sequence(sizes))
        tensors = [x if isinstance(x, torch.Tensor) else x.as_tensor_if_single() for x in sources]
        dense = [x for x in tensors if x is not None]
        written = prealloc is not None and prealloc.already_written(tensors)
        if written or len(dense) < len(tensors):
            own = [_slices_of(x[self._rank], self._slices.per_rank) for x in outs_per_rank]
            count = self._ranks * self._slices.per_rank
            pieces = [pieces_in_order(x, count) for x in sources]
            pack_for_send(
                staging.tensor,
                self._local,
                sizes.shapes,
                list(map(SendTensor, pieces, own)),
                already_packed=written,
            )
        else:
            plan = _plan_to_sequence(
                self._ranks, self._rank, self._slices, self._heads, _strided(dense), _strided(outs)
            )
            plan.pack(staging.tensor, dense, outs)
        recvs = list(self._recvs_to_sequence(sizes, outs_per_rank))
        channel.post(staging.tensor, self._sends_to_sequence, recvs, overlapped=overlapped)
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

    def _recvs_to_sequence(
        self, sizes: _BufferSizes, outs: Sequence[torch.Tensor]
    ) -> Iterator[RecvSpec]:
        """From every peer its heads of this rank's slices.

        Args:
            outs: ``[ranks, s, B, h, D]``.
        """
        _, tokens, batch, features = sizes.shape
        row_stride, length = batch * features, tokens // self._slices.per_rank
        by_rank = [out.unbind(0) for out in outs]
        for peer in self._peers:
            first = 0
            for rank_outs, (heads, dim) in zip(by_rank, sizes.shapes, strict=True):
                for out, number in zip(rank_outs[peer].split(length), self._local, strict=True):
                    offset = number * length * row_stride + first
                    yield RecvSpec(peer, out, offset, row_stride)
                first += heads * dim

    def _shape_to_sequence(self, sizes: _BufferSizes) -> tuple[int, int, int, int]:
        """The staging buffer of :meth:`post_to_sequence`, of one slice after the other."""
        ranks, tokens, batch, features = sizes.shape
        count = self._slices.per_rank
        return ranks * count, tokens // count, batch, features

    def _acquire_slot(
        self, like: torch.Tensor, shape: tuple[int, int, int, int]
    ) -> tuple[Channel, StagingBuffer]:
        """A channel over the copy engines, and a buffer in their memory."""
        channel = self._mesh.channel("all_to_all", self._copies)
        return channel, channel.acquire_staging(shape, like, like.dtype)

    def _views_per_rank(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[_BufferSizes, list[torch.Tensor]]:
        """Sizes of the exchange of these ``[B, s, H, D]``, and each rank's heads of them
        ``[ranks, s, B, h, D]``, views."""
        shapes, views = [], []
        for x, heads in zip(tensors, self._heads, strict=True):
            shapes.append(x.shape)
            size, stride, offset = _heads_by_rank(self._ranks, heads, x.shape, x.stride())
            views.append(x.as_strided(size, stride, x.storage_offset() + offset))
        return _buffer_sizes(self._ranks, self._heads, *shapes), views


def _strided(tensors: Sequence[torch.Tensor]) -> tuple[_Strided, ...]:
    """Shape and strides of each tensor."""
    return tuple([(x.shape, x.stride()) for x in tensors])


def _slices_of(x: torch.Tensor, count: int) -> torch.Tensor:
    """The slices ``[count, 1, t, B, h, D]`` of a shard ``[s, B, h, D]``, a view."""
    return x.unflatten(0, (count, 1, -1))


@lru_cache(maxsize=4096)
def _plan_to_heads(
    ranks: int,
    rank: int,
    slices: TokenSlices,
    heads: tuple[_HeadRange, ...],
    *tensors: _Strided,
) -> tuple[_BufferSizes, PackPlan]:
    """Sizes of the exchange of tensors ``[B, s, H, D]``, and how they are packed; a rank's own
    slices are those of the receive buffer ``[P s, B, features]``."""
    sizes = _buffer_sizes(ranks, heads, *[shape for shape, _ in tensors])
    _, tokens, batch, features = sizes.shape
    count, own = slices.per_rank, slices.of_rank[rank]
    length, row = tokens // count, batch * features
    views, offset = [], own[0] * length * row
    for head_range, (shape, stride), (num_heads, dim) in zip(
        heads, tensors, sizes.shapes, strict=True
    ):
        by_rank = _heads_by_rank(ranks, head_range, shape, stride)
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
def _plan_to_sequence(
    ranks: int,
    rank: int,
    slices: TokenSlices,
    heads: tuple[_HeadRange, ...],
    tensors: tuple[_Strided, ...],
    outs: tuple[_Strided, ...],
) -> PackPlan:
    """How tensors ``[B, P s, h, D]`` are packed; a rank's own slices go to ``outs`` ``[B, s, H,
    D]``."""
    count = slices.per_rank
    *_, features = _buffer_sizes(ranks, heads, *[shape for shape, _ in outs]).shape
    views = []
    for head_range, (shape, stride), (out_shape, out_stride) in zip(
        heads, tensors, outs, strict=True
    ):
        batch, tokens, *head_shape = shape
        sample, token, *rest = stride
        length = tokens // (ranks * count)
        by_rank = _heads_by_rank(ranks, head_range, out_shape, out_stride)
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
