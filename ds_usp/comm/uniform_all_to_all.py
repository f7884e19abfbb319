"""All-to-all between heads and sequence where all ranks use equally many heads: one dense buffer,
packed by one kernel.

The ring rank's tokens are slices of any lengths, of each Ulysses rank one in most layouts and up to
two in ``context_parallel``, whose ranks hold one slice from the front and one from the back. What
is exchanged has tokens before samples, so that slices lie one after the other as the ring rank's
tokens do, and what is received needs no copy. A token's heads of all tensors (q, k, v) are
neighbours.

=============  ============================  ===================================================
exchange       staging buffer of a rank      another rank receives from it
=============  ============================  ===================================================
to heads       ``[ranks, s, B, features]``   its piece, each slice to that slice's place
to sequence    ``[S, B, features]``          the tokens of its slices
=============  ============================  ===================================================

``s`` differs between ranks, and so do the pieces' places in their buffers; all reserve memory for
the largest. ``HeadAllToAll`` alone uses this file. Its posts are collective over the Ulysses ranks;
the functions of shapes and strides communicate nothing.

Letters of the shapes as in :mod:`ds_usp.comm.all_to_all`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import attrgetter
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
    StridedView,
    split_features,
)
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.packing import (
    DeferredSum,
    OwnTokens,
    PackPlan,
    PreallocatedSend,
    SendTensor,
    SendViews,
    copy_or_sum_into,
    one_piece,
    pack_for_send,
)
from ds_usp.geometry.layout import TokenSlices
from ds_usp.lowlevel import strided_copy

# What follows from the shapes and strides of the tensors (sizes, packing, copies) is computed once
# for all calls: this is CPU time between kernels.
#
# The two buffers, Ulysses 2, rank 0 of tokens a b | c d (its own are a b), heads 0 to 3:
#
#     to heads, sent     [piece for rank 0: a b x heads 0 1] [piece for rank 1: a b x heads 2 3]
#     received                                               [a b c d x heads 0 1]
#     to sequence, sent  [a b c d x heads 0 1]
#     received           [from rank 0: a b x heads 0 1] [from rank 1: a b x heads 2 3]
#
# Sent "by rank" the pieces are cut out of the heads; received "in order" tokens follow each other
# as attention wants them. So what is received to heads is used where it lies. What is received to
# the sequence is written to the outputs' heads: by copy engines as they pull, else by a copy.
Strided = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


class HeadRange(NamedTuple):
    """The heads of one tensor: rank 0's first head, the heads of a rank, the step between ranks."""

    first: int
    num_heads: int
    stride: int


class BufferSizes(NamedTuple):
    """Sizes of one exchange.

    Attributes:
        by_rank: the buffer ``[ranks, s, B, features]`` of a piece for or from each rank.
        in_order: the buffer ``[S, B, features]`` of the ring rank's tokens.
        shapes: heads and head dim of each tensor on one rank.
        pieces, shares: elements of each rank's piece in ``by_rank``, of its tokens in ``in_order``.
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
    """Sizes of the exchange of tensors ``[B, s, H, D]``, how they are packed, and what copy engines
    pull; own tokens go to the receive buffer ``[S, B, features]``, the out of each tensor."""
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
    runs = tuple([(x.row, x.row + x.length, x.start) for x in slices.by_rank[rank]])
    recvs = []
    for peer in next_ranks(rank, slices.ranks):
        first_token = rank * slices.lengths[peer]  # of this rank's piece, in the peer's buffer
        for x in slices.by_rank[peer]:
            view = StridedView((x.length * row,), (1,), x.start * row)
            recvs.append(HeadsRecv(peer, (first_token + x.row) * row, view))
    return sizes, PackPlan(sizes.by_rank, OwnTokens(rank, runs), views), tuple(recvs)


@lru_cache(maxsize=4096)
def plan_to_sequence(
    rank: int,
    slices: TokenSlices,
    heads: tuple[HeadRange, ...],
    tensors: tuple[Strided, ...],
    outs: tuple[Strided, ...],
) -> PackPlan:
    """How tensors ``[B, S, h, D]`` are packed for copy engines.

    The buffer is one piece ``[1, S, B, features]``. A rank's own tokens are not packed: they are
    written to its heads of ``outs`` ``[B, s, H, D]``, and their place in the buffer is undefined.
    """
    sizes = buffer_sizes(slices, heads, *[shape for shape, _ in outs])
    views = []
    for head_range, (shape, stride), (out_shape, out_stride) in zip(
        heads, tensors, outs, strict=True
    ):
        batch, tokens, *head_shape = shape
        sample, token, *rest = stride
        piece = StridedView((1, tokens, batch, *head_shape), (0, token, sample, *rest), 0)
        all_heads = heads_by_rank(slices.ranks, head_range, out_shape, out_stride)
        views.append(SendViews(piece, _select_rank(all_heads, rank)))
    return PackPlan((1, *sizes.in_order), own_in_order(slices, rank), views)


@lru_cache(maxsize=4096)
def recvs_to_sequence(
    rank: int, slices: TokenSlices, heads: tuple[HeadRange, ...], outs: tuple[Strided, ...]
) -> tuple[SequenceRecv, ...]:
    """Return what is received for the outputs ``[B, s, H, D]``: from every peer, the next rank
    first, its heads of this rank's slices."""
    sizes = buffer_sizes(slices, heads, *[shape for shape, _ in outs])
    _, batch, features = sizes.in_order
    row_stride = batch * features
    recvs = []
    for peer in next_ranks(rank, slices.ranks):
        feature = 0  # the first one of the tensor in a token's row
        for i, (num_heads, dim) in enumerate(sizes.shapes):
            (_, *size), stride, begin = _select_rank(
                heads_by_rank(slices.ranks, heads[i], *outs[i]), peer
            )
            for start, stop, row in slices.by_rank[rank]:
                view = StridedView((stop - start, *size), stride, begin + row * stride[0])
                recvs.append(SequenceRecv(peer, i, start * row_stride + feature, row_stride, view))
            feature += num_heads * dim
    return tuple(recvs)


@lru_cache(maxsize=4096)
def own_in_order(slices: TokenSlices, rank: int) -> OwnTokens:
    """A rank's own tokens: of piece 0, the only one, runs ``start : stop`` in the ring rank's
    order, and the first row of each in the rank's output."""
    return OwnTokens(0, slices.by_rank[rank])


@lru_cache(maxsize=4096)
def buffer_sizes(
    slices: TokenSlices, heads: tuple[HeadRange, ...], *shapes: tuple[int, ...]
) -> BufferSizes:
    """Return the sizes of the buffers that exchange tensors of these shapes ``[B, s, H, D]``."""
    batch, tokens = shapes[0][:2]
    head_shapes = tuple(
        [(row.num_heads, shape[3]) for row, shape in zip(heads, shapes, strict=True)]
    )
    features = sum([num_heads * dim for num_heads, dim in head_shapes])
    row, lengths = batch * features, slices.lengths
    return BufferSizes(
        by_rank=(slices.ranks, tokens, batch, features),
        in_order=(sum(lengths), batch, features),
        shapes=head_shapes,
        pieces=[tokens * row] * slices.ranks,
        shares=[length * row for length in lengths],
    )


# With all ranks starting at rank 0, all of them would read from one GPU at once and share its link.
# Each starts with its neighbour: at any time every GPU is read by one other.
def next_ranks(rank: int, ranks: int) -> list[int]:
    """The other ranks, the next one first."""
    return [(rank + step) % ranks for step in range(1, ranks)]


def _select_rank(by_rank: StridedView, rank: int) -> StridedView:
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


# Posts an all-to-all: send buffer, receive buffer, elements for and from each rank.
PostAllToAll = Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], dist.Work]
_SHAPE = attrgetter("shape")


class UniformAllToAll:
    """The head exchanges of one chunk of heads, by the all-to-all that callers pass as ``post``.
    ``overlapped`` is for copy engines.

    Args:
        slices: of the ring rank's tokens, in rank order.
        ranges: for each tensor, the half-open head range that each Ulysses rank uses.
    """

    def __init__(
        self, mesh: SequenceMesh, slices: TokenSlices, ranges: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        self._mesh, self._slices = mesh, slices
        self._ranks, self._rank = mesh.ulysses_degree, mesh.ulysses_rank
        first_two = [(a, stop, b) for (a, stop), (b, _), *_ in ranges]  # the steps are equal
        self._heads = tuple([HeadRange(a, stop - a, b - a) for a, stop, b in first_two])
        self._geometry = self._rank, slices, self._heads

    def post_to_heads(
        self, tensors: Sequence[torch.Tensor], post: PostAllToAll, *, overlapped: bool = True
    ) -> PendingExchange:
        """``[B, s, H, D] -> [B, S, h, D]``, views of one tensor."""
        sizes, plan, _ = plan_to_heads(*self._geometry, *[(x.shape, x.stride()) for x in tensors])
        packed = tensors[0].new_empty(sizes.by_rank)
        views = split_features(packed, sizes.shapes)
        for view, x, ((size, stride, offset), _) in zip(views, tensors, plan.views, strict=True):
            strided_copy(view, x.as_strided(size, stride, x.storage_offset() + offset))
        received = packed.new_empty(sizes.in_order)
        unpack = partial(split_features, received, sizes.shapes, tokens_first=True)
        return PendingExchange(unpack, post(packed, received, sizes.pieces, sizes.shares))

    def preallocate_send(self, like: torch.Tensor, sizes: Sequence[torch.Size]) -> PreallocatedSend:
        """Acquire the staging buffer of :meth:`post_to_sequence` to outputs ``[B, s, H, D]`` of
        these sizes, in the dtype of ``like``."""
        exchanged = buffer_sizes(self._slices, self._heads, *sizes)
        staging = StagingBuffer(like.new_empty(exchanged.in_order))
        return PreallocatedSend(None, staging, staging.views(exchanged.shapes, tokens_first=True))

    def post_to_sequence(
        self,
        sources: Sequence[torch.Tensor | DeferredSum],
        outs: Sequence[torch.Tensor],
        post: PostAllToAll,
        prealloc: PreallocatedSend | None = None,
        *,
        overlapped: bool = True,
    ) -> PendingExchange:
        """``[B, S, h, D] -> [B, s, H, D]``; sources that are the views of ``prealloc`` are not
        packed again."""
        sizes = buffer_sizes(self._slices, self._heads, *map(_SHAPE, outs))
        source, is_one = sources[0], len(sources) == len(outs[0]) == 1
        # One tensor, one sample: [1, S, h, D] already has the buffer's order of bytes.
        if is_one and isinstance(source, torch.Tensor) and source.is_contiguous():
            packed = source
        else:
            order = sizes.in_order
            staging = prealloc.staging if prealloc else StagingBuffer(outs[0].new_empty(order))
            packed, views = staging.tensor, staging.views(sizes.shapes, tokens_first=True)
            for view, source in zip(views, sources, strict=True):
                copy_or_sum_into(view, source)  # torch copies no tensor to itself
        received = packed.new_empty(sizes.by_rank)
        unpack = partial(_write_received, self._by_rank(outs), received, sizes.shapes)
        return PendingExchange(unpack, post(packed, received, sizes.shares, sizes.pieces))

    def _by_rank(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each rank's heads of these ``[B, s, H, D]``: views ``[ranks, s, B, h, D]``."""
        views = []
        for x, heads in zip(tensors, self._heads, strict=True):
            size, stride, offset = heads_by_rank(self._ranks, heads, x.shape, x.stride())
            views.append(x.as_strided(size, stride, x.storage_offset() + offset))
        return views


class CopyEngineAllToAll(UniformAllToAll):
    """:class:`UniformAllToAll` by copy engines, of slices in any order; ``post`` is not called."""

    def __init__(
        self, mesh: SequenceMesh, slices: TokenSlices, ranges: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        super().__init__(mesh, slices, ranges)
        peers = next_ranks(self._rank, self._ranks)
        self._sends_to_heads = [SendSlice(peer, peer, peer + 1) for peer in peers]
        self._sends_to_sequence = [
            SendSlice(peer, start, stop)
            for peer in peers
            for start, stop, _ in slices.by_rank[peer]
        ]

    def post_to_heads(
        self, tensors: Sequence[torch.Tensor], post: PostAllToAll, *, overlapped: bool = True
    ) -> PendingExchange:
        sizes, plan, places = plan_to_heads(*self._geometry, *strided(tensors))
        received = tensors[0].new_empty(sizes.in_order)
        channel, staging = self._acquire_slot(received, sizes.by_rank)
        plan.pack(staging.tensor, tensors, (received,) * len(tensors))
        recvs = [RecvSpec(peer, received, offset, 0, view) for peer, offset, view in places]
        channel.post(staging.tensor, self._sends_to_heads, recvs, overlapped=overlapped)
        unpack = partial(split_features, received, sizes.shapes, tokens_first=True)
        return PendingExchange(unpack, channel)

    def preallocate_send(self, like: torch.Tensor, sizes: Sequence[torch.Size]) -> PreallocatedSend:
        exchanged = buffer_sizes(self._slices, self._heads, *sizes)
        channel, staging = self._acquire_slot(like, exchanged.in_order)
        views = staging.views(exchanged.shapes, tokens_first=True)
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
        sizes = buffer_sizes(self._slices, self._heads, *map(_SHAPE, outs))
        if prealloc is not None and prealloc.channel is not None:
            channel, staging = prealloc.channel, prealloc.staging
        else:
            channel, staging = self._acquire_slot(outs[0], sizes.in_order)
        tensors = [x if isinstance(x, torch.Tensor) else x.as_tensor_if_single() for x in sources]
        summed = [x for x in tensors if x is not None]
        of_outs = strided(outs)
        # A sum that is still partial results is summed into the buffer: written once, not twice.
        if len(summed) < len(tensors):
            own_outs = [x[self._rank] for x in self._by_rank(outs)]
            tensors_to_send = list(map(SendTensor, map(one_piece, sources), own_outs))
            own_tokens = own_in_order(self._slices, self._rank)
            pack_for_send(staging.tensor[None], own_tokens, sizes.shapes, tensors_to_send)
        else:
            written = prealloc is not None and prealloc.already_written(summed)
            plan = plan_to_sequence(*self._geometry, strided(summed), of_outs)
            plan.pack(staging.tensor, summed, outs, already_packed=written)
        recvs = [
            RecvSpec(peer, outs[i], offset, row_stride, view)
            for peer, i, offset, row_stride, view in recvs_to_sequence(*self._geometry, of_outs)
        ]
        channel.post(staging.tensor, self._sends_to_sequence, recvs, overlapped=overlapped)
        return PendingExchange(tuple, channel)

    def staging_bytes(self, tokens: int, batch: int, dims: Sequence[int], itemsize: int) -> int:
        """Staging memory of one exchange, in bytes; ``tokens``: of the largest rank."""
        features = sum([x.num_heads * dim for x, dim in zip(self._heads, dims, strict=True)])
        return self._ranks * tokens * batch * features * itemsize

    def _acquire_slot(
        self, like: torch.Tensor, shape: tuple[int, ...]
    ) -> tuple[Channel, StagingBuffer]:
        channel = self._mesh.channel("all_to_all", True)
        return channel, channel.acquire_staging(shape, like, like.dtype)


def _write_received(
    outs: Sequence[torch.Tensor], received: torch.Tensor, shapes: HeadShapes
) -> tuple[torch.Tensor, ...]:
    """Write what was received to each rank's heads of the outputs ``[ranks, s, B, h, D]``."""
    for out, view in zip(outs, split_features(received, shapes), strict=True):
        strided_copy(out, view)
    return ()
