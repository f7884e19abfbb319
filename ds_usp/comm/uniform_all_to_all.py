"""All-to-all between heads and sequence where every rank uses as many heads: one dense buffer,
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
the largest.

Letters of the shapes as in :mod:`ds_usp.comm.all_to_all`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

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
    PreallocatedSend,
    SendTensor,
    copy_or_sum_into,
    one_piece,
    pack_for_send,
)
from ds_usp.comm.uniform_plan import (
    HeadRange,
    buffer_sizes,
    heads_by_rank,
    next_ranks,
    own_in_order,
    plan_to_heads,
    plan_to_sequence,
    recvs_to_sequence,
    strided,
)
from ds_usp.geometry.token_slices import TokenSlices
from ds_usp.lowlevel import strided_copy

# Posts an all-to-all: send buffer, receive buffer, elements for and from each rank.
PostAllToAll = Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], dist.Work]
_SHAPE = attrgetter("shape")


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
                HeadRange(first, stop - first, second - first)
                for (first, stop), (second, _), *_ in ranges
            ]
        )
        self._slices = slices
        peers = next_ranks(self._rank, self._ranks)
        self._sends_to_heads = [SendSlice(peer, peer, peer + 1) for peer in peers]
        self._sends_to_sequence = [
            SendSlice(peer, start, stop)
            for peer in peers
            for start, stop, _ in slices.of_rank[peer]
        ]

    def post_to_heads(
        self, tensors: Sequence[torch.Tensor], post: PostAllToAll, *, overlapped: bool = True
    ) -> PendingExchange:
        """``[B, s, H, D] -> [B, S, h, D]``, views of one tensor."""
        of_tensors = [(x.shape, x.stride()) for x in tensors]
        sizes, plan, places = plan_to_heads(self._rank, self._slices, self._heads, *of_tensors)
        received = tensors[0].new_empty(sizes.in_order)
        unpack = partial(split_features, received, sizes.shapes, tokens_first=True)
        if not self._copies:
            packed = received.new_empty(sizes.by_rank)
            views = split_features(packed, sizes.shapes)
            for view, x, ((size, stride, offset), _) in zip(
                views, tensors, plan.views, strict=True
            ):
                strided_copy(view, x.as_strided(size, stride, x.storage_offset() + offset))
            return PendingExchange(unpack, post(packed, received, sizes.pieces, sizes.shares))
        channel, staging = self._acquire_slot(received, sizes.by_rank)
        plan.pack(staging.tensor, tensors, (received,) * len(tensors))
        recvs = [RecvSpec(peer, received, offset, 0, view) for peer, offset, view in places]
        channel.post(staging.tensor, self._sends_to_heads, recvs, overlapped=overlapped)
        return PendingExchange(unpack, channel)

    def preallocate_send(self, like: torch.Tensor, sizes: Sequence[torch.Size]) -> PreallocatedSend:
        """Acquire the staging buffer of :meth:`post_to_sequence`.

        Args:
            like: for dtype and device.
            sizes: of the outputs ``[B, s, H, D]``.
        """
        exchanged = buffer_sizes(self._slices, self._heads, *sizes)
        if self._copies:
            channel, staging = self._acquire_slot(like, exchanged.in_order)
        else:
            channel, staging = None, StagingBuffer(like.new_empty(exchanged.in_order))
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
        """``[B, S, h, D] -> [B, s, H, D]``. Over NCCL and gloo one dense tensor of one sample is
        sent without a copy; copy engines write to ``outs`` directly.

        Args:
            prealloc: the staging buffer, acquired before; sources that are its views are not
                packed again.
        """
        sizes = buffer_sizes(self._slices, self._heads, *map(_SHAPE, outs))
        if not self._copies:
            source = sources[0]
            is_dense = isinstance(source, torch.Tensor) and source.is_contiguous()
            batch = sizes.in_order[1]
            if isinstance(source, torch.Tensor) and is_dense and len(sources) == batch == 1:
                packed = source
            else:
                like = outs[0]
                staging = prealloc[1] if prealloc else StagingBuffer(like.new_empty(sizes.in_order))
                packed = staging.tensor
                views = staging.views(sizes.shapes, tokens_first=True)
                for view, source in zip(views, sources, strict=True):
                    copy_or_sum_into(view, source)
            received = packed.new_empty(sizes.by_rank)
            unpack = partial(_write_received, self._by_rank(outs), received, sizes.shapes)
            return PendingExchange(unpack, post(packed, received, sizes.shares, sizes.pieces))
        if prealloc is not None and prealloc.channel is not None:
            channel, staging = prealloc.channel, prealloc.staging
        else:
            channel, staging = self._acquire_slot(outs[0], sizes.in_order)
        tensors = [x if isinstance(x, torch.Tensor) else x.as_tensor_if_single() for x in sources]
        dense = [x for x in tensors if x is not None]
        where = self._rank, self._slices, self._heads
        out_strides = strided(outs)
        if len(dense) < len(tensors):
            own = [x[self._rank] for x in self._by_rank(outs)]
            tensors_to_send = list(map(SendTensor, map(one_piece, sources), own))
            own_tokens = own_in_order(self._slices, self._rank)
            pack_for_send(staging.tensor[None], own_tokens, sizes.shapes, tensors_to_send)
        else:
            written = prealloc is not None and prealloc.already_written(dense)
            plan = plan_to_sequence(*where, strided(dense), out_strides)
            plan.pack(staging.tensor, dense, outs, already_packed=written)
        recvs = [
            RecvSpec(peer, outs[i], offset, row_stride, view)
            for peer, i, offset, row_stride, view in recvs_to_sequence(*where, out_strides)
        ]
        channel.post(staging.tensor, self._sends_to_sequence, recvs, overlapped=overlapped)
        return PendingExchange(tuple, channel)

    def staging_bytes(self, tokens: int, batch: int, dims: Sequence[int], itemsize: int) -> int:
        """Staging memory of one copy-engine exchange, in bytes.

        Args:
            tokens, batch, dims, itemsize: tokens of the largest rank, samples, each tensor's head
                dim, bytes of an element.
        """
        if not self._copies:
            return 0
        heads = [row.num_heads for row in self._heads]
        features = sum([count * dim for count, dim in zip(heads, dims, strict=True)])
        return self._ranks * tokens * batch * features * itemsize

    def _acquire_slot(
        self, like: torch.Tensor, shape: tuple[int, ...]
    ) -> tuple[Channel, StagingBuffer]:
        """A channel over the copy engines, and a buffer in their memory."""
        channel = self._mesh.channel("all_to_all", self._copies)
        return channel, channel.acquire_staging(shape, like, like.dtype)

    def _by_rank(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each rank's heads of these ``[B, s, H, D]``: views ``[ranks, s, B, h, D]``."""
        views = []
        for x, heads in zip(tensors, self._heads, strict=True):
            size, stride, offset = heads_by_rank(self._ranks, heads, x.shape, x.stride())
            views.append(x.as_strided(size, stride, x.storage_offset() + offset))
        return views


def _write_received(
    outs: Sequence[torch.Tensor], received: torch.Tensor, shapes: HeadShapes
) -> tuple[torch.Tensor, ...]:
    """Write each rank's heads to the outputs ``[ranks, s, B, h, D]``; there is no other result."""
    for out, view in zip(outs, split_features(received, shapes), strict=True):
        strided_copy(out, view)
    return ()
