"""Heads for sequence and back where every rank holds as many tokens and uses as many heads.

What travels is ``[ranks, s, B, features]``: tokens come before samples, so the ranks' pieces lie
one after the other as the ring rank's tokens do, and what comes needs no copy. A token's heads of
every tensor (q, k, v) lie next to each other.

Letters of the shapes as in :mod:`ds_usp.comm.all_to_all`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_usp.comm.channel import Channel, HeadShapes, StagingBuffer, split_features
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.packing import DeferredSum, SendTensor, pack_for_send, view_by_rank
from ds_usp.strided_copy import strided_copy

Send = Callable[[torch.Tensor, torch.Tensor, list[int]], dist.Work]


class PendingExchange:
    """An exchange under way. This rank's own share is there already, or on the current stream.

    Args:
        land: makes what is returned of what has come.
        way: to wait for; None: it is there.
    """

    def __init__(
        self,
        unpack: Callable[[], tuple[torch.Tensor, ...]],
        work: Channel | dist.Work | None = None,
    ) -> None:
        self._unpack, self._work = unpack, work
        self._result: tuple[torch.Tensor, ...] | None = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        """What comes, every time; on GPUs the current stream waits for it, not the host."""
        self.drain()
        if self._result is None:
            self._result, self._unpack = self._unpack(), tuple  # frees the receive buffer
        return self._result

    def drain(self) -> None:
        """Wait for what is under way, and leave it: after an error, so that nothing is written
        where others will allocate."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def copy_or_sum_into(place: torch.Tensor, source: torch.Tensor | DeferredSum) -> None:
    """Write a tensor, or what is to be one, to a place of its shape."""
    if isinstance(source, torch.Tensor):
        strided_copy(place, source)
    else:
        source.write(place)


class PreallocatedSend(NamedTuple):
    """Room from which heads will leave for the sequence, asked for before there is anything to
    send: who makes it may write it there.

    Attributes:
        channel: that gave it.
        parts: of the room, each tensor's ``[B, S, h, D]``.
    """

    channel: Channel
    staging: StagingBuffer
    views: tuple[torch.Tensor, ...]

    def already_written(self, sources: Sequence[torch.Tensor | DeferredSum]) -> bool:
        """Whether all of these have been written there."""
        made = [x if isinstance(x, torch.Tensor) else x.as_tensor_if_single() for x in sources]
        pairs = zip(made, self.views, strict=True)
        return all(x is not None and x.is_set_to(part) for x, part in pairs)


class _HeadRange(NamedTuple):
    """Of one tensor: the first rank's first head, how many heads a rank has, and how far apart."""

    first: int
    num_heads: int
    stride: int


class UniformAllToAll:
    """The exchanges of some heads. Numbers that calls share are reckoned once: all of this is the
    host's time, between kernels that wait for it.

    Args:
        mesh: the ranks.
        ranges: for each tensor, the half-open head range that each Ulysses rank uses.
        copies: copy engines carry it, else ``send``, which exchanges ``[ranks, ...]`` of some sizes
            by messages.
    """

    def __init__(
        self, mesh: SequenceMesh, ranges: Sequence[Sequence[tuple[int, int]]], copies: bool
    ) -> None:
        self._mesh, self._copies = mesh, copies
        ranks, mine = mesh.ulysses_degree, mesh.ulysses_rank
        self._ranks, self._rank = ranks, mine
        self._heads = [
            _HeadRange(each[0][0], each[0][1] - each[0][0], each[1][0] - each[0][0])
            for each in ranges
        ]
        self._peers = [(mine + step) % ranks for step in range(1, ranks)]  # the next one first
        self._sends = [(rank, rank, rank + 1) for rank in self._peers]

    def post_to_heads(self, tensors: Sequence[torch.Tensor], send: Send) -> PendingExchange:
        """``[B, s, H, D] -> [B, S, h, D]``, views of one tensor."""
        batch, tokens = tensors[0].shape[:2]
        shapes = self._head_shapes(tensors)
        size = self._buffer_shape(tokens, batch, shapes)
        recv_buffer = tensors[0].new_empty(size)
        parts = map(self._view_per_rank, tensors, self._heads)

        def unpack() -> tuple[torch.Tensor, ...]:
            return split_features(
                recv_buffer.view(self._ranks * tokens, *size[2:]), shapes, tokens_first=True
            )

        channel, room = self._stage(recv_buffer, size)
        if not self._copies:
            sent = _pack(room, shapes, parts).tensor
            return PendingExchange(unpack, send(sent, recv_buffer, self._split_sizes(recv_buffer)))
        at = self._rank * (recv_buffer.numel() // self._ranks)
        pieces = recv_buffer.unbind(0)
        leaving = list(map(SendTensor, parts, split_features(pieces[self._rank], shapes)))
        pack_for_send(room.tensor, self._rank, shapes, leaving)
        channel.post(
            room.tensor, self._sends, [(rank, pieces[rank], at, 0) for rank in self._peers]
        )
        return PendingExchange(unpack, channel)

    def preallocate_send(self, like: torch.Tensor, sizes: Sequence[torch.Size]) -> PreallocatedSend:
        """Ask for the room of :meth:`send_to_sequence`.

        Args:
            like: for dtype and device.
            sizes: of the places ``[B, s, H, D]``.
        """
        shapes = tuple([(each.num_heads, x[3]) for each, x in zip(self._heads, sizes, strict=True)])
        batch, tokens = sizes[0][:2]
        channel, room = self._stage(like, self._buffer_shape(tokens, batch, shapes))
        return PreallocatedSend(channel, room, room.views(shapes, tokens_first=True))

    def post_to_sequence(
        self,
        sources: Sequence[torch.Tensor | DeferredSum],
        places: Sequence[torch.Tensor],
        send: Send,
        prealloc: PreallocatedSend | None = None,
    ) -> PendingExchange:
        """``[B, S, h, D] -> [B, s, H, D]``. By messages, what leaves needs no copy if it is one
        dense tensor of one sample; copy engines bring what comes to its place.

        Args:
            departure: room that was asked for; what is there already is not packed again.
        """
        like = places[0]
        batch, tokens = like.shape[:2]
        shapes = self._head_shapes(places)
        size = self._buffer_shape(tokens, batch, shapes)
        goals = [self._view_per_rank(x, each) for x, each in zip(places, self._heads, strict=True)]
        if not self._copies:
            sent = (
                self._as_dense_send_buffer(sources[0], size) if len(sources) == batch == 1 else None
            )
            if sent is None:
                room = prealloc.staging if prealloc else self._stage(like, size)[1]
                sent = _pack_sums(room, shapes, sources).tensor
            recv_buffer = torch.empty_like(sent)

            def unpack() -> tuple[torch.Tensor, ...]:
                for goal, part in zip(goals, split_features(recv_buffer, shapes), strict=True):
                    strided_copy(goal, part)
                return ()

            return PendingExchange(unpack, send(sent, recv_buffer, self._split_sizes(sent)))
        channel, room = prealloc[:2] if prealloc else self._stage(like, size)
        row = size[2] * size[3]
        at = self._rank * tokens * row
        pulls, leaving = [], []
        for source, goal, (heads, dim) in zip(sources, goals, shapes, strict=True):
            places = goal.unbind(0)
            pieces = (
                view_by_rank(source, self._ranks) if isinstance(source, torch.Tensor) else source
            )
            leaving.append(SendTensor(pieces, places[self._rank]))
            pulls.append([(rank, places[rank], at, row) for rank in self._peers])
            at += heads * dim
        packed = prealloc is not None and prealloc.already_written(sources)
        pack_for_send(room.tensor, self._rank, shapes, leaving, already_packed=packed)
        arriving = [pull for each in zip(*pulls, strict=True) for pull in each]
        channel.post(room.tensor, self._sends, arriving)
        return PendingExchange(tuple, channel)

    def _stage(self, like: torch.Tensor, size: tuple[int, ...]) -> tuple[Channel, StagingBuffer]:
        """To pack into what leaves, and the way for it."""
        channel = self._mesh.channel("all_to_all", self._copies)
        return channel, channel.acquire_staging(size, like, like.dtype)

    @staticmethod
    def _as_dense_send_buffer(
        source: torch.Tensor | DeferredSum, size: tuple[int, ...]
    ) -> torch.Tensor | None:
        """What travels, where it is that already."""
        if isinstance(source, torch.Tensor) and source.is_contiguous():
            return source.view(size)
        return None

    def staging_bytes(self, tokens: int, batch: int, dims: Sequence[int], item: int) -> int:
        """What a rank packs at most for one exchange that copy engines carry.

        Args:
            tokens, batch, dims, item: tokens of a rank, samples, each tensor's head dim, bytes of
                an element.
        """
        shapes = tuple((each.num_heads, dim) for each, dim in zip(self._heads, dims, strict=True))
        return math.prod(self._buffer_shape(tokens, batch, shapes)) * item if self._copies else 0

    def _head_shapes(self, tensors: Sequence[torch.Tensor]) -> HeadShapes:
        """Heads and head dim of each tensor on one rank."""
        pairs = zip(self._heads, tensors, strict=True)
        return tuple([(each.num_heads, x.shape[3]) for each, x in pairs])

    def _buffer_shape(
        self, tokens: int, batch: int, shapes: HeadShapes
    ) -> tuple[int, int, int, int]:
        """Of all that travels."""
        return self._ranks, tokens, batch, sum([heads * dim for heads, dim in shapes])

    def _split_sizes(self, x: torch.Tensor) -> list[int]:
        return [x.numel() // self._ranks] * self._ranks

    def _view_per_rank(self, x: torch.Tensor, heads: _HeadRange) -> torch.Tensor:
        """Each rank's heads of ``[B, s, H, D]``: ``[ranks, s, B, h, D]``, a view."""
        batch, tokens, _, dim = x.shape
        sample, token, head, one = x.stride()
        return x.as_strided(
            (self._ranks, tokens, batch, heads.num_heads, dim),
            (heads.stride * head, token, sample, head, one),
            x.storage_offset() + heads.first * head,
        )


def _pack_sums(
    room: StagingBuffer, shapes: HeadShapes, sources: Sequence[torch.Tensor | DeferredSum]
) -> StagingBuffer:
    """The room, with these ``[B, S, h, D]`` packed in it."""
    for place, source in zip(room.views(shapes, tokens_first=True), sources, strict=True):
        copy_or_sum_into(place, source)
    return room


def _pack(room: StagingBuffer, shapes: HeadShapes, parts: Iterable[torch.Tensor]) -> StagingBuffer:
    """The room, with these tensors packed in it."""
    for place, part in zip(room.views(shapes), parts, strict=True):
        strided_copy(place, part)
    return room
