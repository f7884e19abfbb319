"""All-to-all between heads and sequence where every rank holds as many tokens and uses as many
heads: one dense buffer, packed by one kernel.

What is exchanged is ``[ranks, s, B, features]``: tokens come before samples, so the ranks' slices
lie one after the other as the ring rank's tokens do, and what is received needs no copy. A token's
heads of all tensors (q, k, v) are neighbours.

Letters of the shapes as in :mod:`ds_usp.comm.all_to_all`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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
    PreallocatedSend,
    SendTensor,
    copy_or_sum_into,
    pack_for_send,
    view_by_rank,
)
from ds_usp.strided_copy import strided_copy

# Posts an all-to-all: send buffer, receive buffer, elements for each rank.
PostAllToAll = Callable[[torch.Tensor, torch.Tensor, list[int]], dist.Work]


class _HeadRange(NamedTuple):
    """Of one tensor: rank 0's first head, heads of each rank, heads from one rank's to the next."""

    first: int
    num_heads: int
    stride: int


class UniformAllToAll:
    """The head exchanges of one chunk of heads. Numbers that calls share are computed once: this
    is CPU time between kernels.

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
        self._heads = [
            _HeadRange(first, stop - first, second - first)
            for (first, stop), (second, _), *_ in ranges
        ]
        steps = range(1, self._ranks)  # the next rank first
        self._peers = [(self._rank + step) % self._ranks for step in steps]
        self._sends = [SendSlice(peer, peer, peer + 1) for peer in self._peers]

    def post_to_heads(self, tensors: Sequence[torch.Tensor], post: PostAllToAll) -> PendingExchange:
        """``[B, s, H, D] -> [B, S, h, D]``, views of one tensor."""
        batch, tokens = tensors[0].shape[:2]
        shapes = self._head_shapes(tensors)
        size = self._buffer_shape(tokens, batch, shapes)
        recv_buffer = tensors[0].new_empty(size)
        per_rank = map(self._view_per_rank, tensors, self._heads)

        def unpack() -> tuple[torch.Tensor, ...]:
            received = recv_buffer.view(self._ranks * tokens, *size[2:])
            return split_features(received, shapes, tokens_first=True)

        channel, staging = self._acquire_staging(recv_buffer, size)
        if not self._copies:
            packed = _pack(staging.views(shapes), per_rank, staging)
            return PendingExchange(unpack, post(packed, recv_buffer, self._split_sizes(packed)))
        offset = self._rank * (recv_buffer.numel() // self._ranks)
        outs = recv_buffer.unbind(0)
        local_outs = split_features(outs[self._rank], shapes)
        pack_for_send(
            staging.tensor, self._rank, shapes, list(map(SendTensor, per_rank, local_outs))
        )
        recvs = [RecvSpec(peer, outs[peer], offset, 0) for peer in self._peers]
        channel.post(staging.tensor, self._sends, recvs)
        return PendingExchange(unpack, channel)

    def preallocate_send(self, like: torch.Tensor, sizes: Sequence[torch.Size]) -> PreallocatedSend:
        """Acquire the staging buffer of :meth:`post_to_sequence`.

        Args:
            like: for dtype and device.
            sizes: of the outputs ``[B, s, H, D]``.
        """
        pairs = zip(self._heads, sizes, strict=True)
        shapes = tuple([(heads.num_heads, size[3]) for heads, size in pairs])
        batch, tokens = sizes[0][:2]
        channel, staging = self._acquire_staging(like, self._buffer_shape(tokens, batch, shapes))
        return PreallocatedSend(channel, staging, staging.views(shapes, tokens_first=True))

    def post_to_sequence(
        self,
        sources: Sequence[torch.Tensor | DeferredSum],
        outs: Sequence[torch.Tensor],
        post: PostAllToAll,
        prealloc: PreallocatedSend | None = None,
    ) -> PendingExchange:
        """``[B, S, h, D] -> [B, s, H, D]``. Over NCCL and gloo one dense tensor of one sample is
        sent without a copy; copy engines write to ``outs`` directly.

        Args:
            prealloc: the staging buffer, acquired before; sources that are its views are not
                packed again.
        """
        batch, tokens = outs[0].shape[:2]
        shapes = self._head_shapes(outs)
        size = self._buffer_shape(tokens, batch, shapes)
        outs_per_rank = list(map(self._view_per_rank, outs, self._heads))
        if not self._copies:
            packed = self._as_send_buffer(sources[0], size) if len(sources) == batch == 1 else None
            if packed is None:
                staging = prealloc[1] if prealloc else self._acquire_staging(outs[0], size)[1]
                packed = _pack(staging.views(shapes, tokens_first=True), sources, staging)
            recv_buffer = torch.empty_like(packed)

            def unpack() -> tuple[torch.Tensor, ...]:
                received = split_features(recv_buffer, shapes)
                for out, view in zip(outs_per_rank, received, strict=True):
                    strided_copy(out, view)
                return ()

            return PendingExchange(unpack, post(packed, recv_buffer, self._split_sizes(packed)))
        channel, staging = prealloc[:2] if prealloc else self._acquire_staging(outs[0], size)
        row_stride = size[2] * size[3]
        offset = self._rank * tokens * row_stride
        send_tensors, recvs_per_tensor = [], []
        for source, out, (heads, dim) in zip(sources, outs_per_rank, shapes, strict=True):
            rank_outs = out.unbind(0)
            per_rank = source
            if isinstance(source, torch.Tensor):
                per_rank = view_by_rank(source, self._ranks)
            send_tensors.append(SendTensor(per_rank, rank_outs[self._rank]))
            recvs_per_tensor.append(
                [RecvSpec(peer, rank_outs[peer], offset, row_stride) for peer in self._peers]
            )
            offset += heads * dim
        already_packed = prealloc is not None and prealloc.already_written(sources)
        pack_for_send(
            staging.tensor, self._rank, shapes, send_tensors, already_packed=already_packed
        )
        recvs = [recv for of_peer in zip(*recvs_per_tensor, strict=True) for recv in of_peer]
        channel.post(staging.tensor, self._sends, recvs)
        return PendingExchange(tuple, channel)

    def staging_bytes(self, tokens: int, batch: int, dims: Sequence[int], itemsize: int) -> int:
        """Staging memory of one copy-engine exchange, in bytes.

        Args:
            tokens, batch, dims, itemsize: tokens of a rank, samples, each tensor's head dim, bytes
                of an element.
        """
        pairs = zip(self._heads, dims, strict=True)
        shapes = tuple((heads.num_heads, dim) for heads, dim in pairs)
        return (
            math.prod(self._buffer_shape(tokens, batch, shapes)) * itemsize if self._copies else 0
        )

    def _acquire_staging(
        self, like: torch.Tensor, size: tuple[int, ...]
    ) -> tuple[Channel, StagingBuffer]:
        """The all-to-all's channel, and its staging buffer of this shape and ``like``'s dtype."""
        channel = self._mesh.channel("all_to_all", self._copies)
        return channel, channel.acquire_staging(size, like, like.dtype)

    @staticmethod
    def _as_send_buffer(
        source: torch.Tensor | DeferredSum, size: tuple[int, ...]
    ) -> torch.Tensor | None:
        """The source as what is sent, if it is dense; else None."""
        if isinstance(source, torch.Tensor) and source.is_contiguous():
            return source.view(size)
        return None

    def _head_shapes(self, tensors: Sequence[torch.Tensor]) -> HeadShapes:
        """Heads and head dim of each tensor on one rank."""
        pairs = zip(self._heads, tensors, strict=True)
        return tuple([(heads.num_heads, x.shape[3]) for heads, x in pairs])

    def _buffer_shape(
        self, tokens: int, batch: int, shapes: HeadShapes
    ) -> tuple[int, int, int, int]:
        """Of what is exchanged."""
        return self._ranks, tokens, batch, sum([heads * dim for heads, dim in shapes])

    def _split_sizes(self, x: torch.Tensor) -> list[int]:
        return [x.numel() // self._ranks] * self._ranks

    def _view_per_rank(self, x: torch.Tensor, heads: _HeadRange) -> torch.Tensor:
        """Each rank's heads of ``[B, s, H, D]``: ``[ranks, s, B, h, D]``, a view."""
        batch, tokens, _, dim = x.shape
        sample, token, head, feature = x.stride()
        return x.as_strided(
            (self._ranks, tokens, batch, heads.num_heads, dim),
            (heads.stride * head, token, sample, head, feature),
            x.storage_offset() + heads.first * head,
        )


def _pack(
    views: Sequence[torch.Tensor],
    sources: Iterable[torch.Tensor | DeferredSum],
    staging: StagingBuffer,
) -> torch.Tensor:
    """The staging buffer's tensor, with these sources written to its views."""
    for view, source in zip(views, sources, strict=True):
        copy_or_sum_into(view, source)
    return staging.tensor
