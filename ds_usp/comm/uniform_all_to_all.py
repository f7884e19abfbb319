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

from ds_usp.comm.channel import Channel, Room, Shapes, cut_features
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.packing import Outgoing, Sum, by_rank, hand_out
from ds_usp.strided_copy import dense_copy

Send = Callable[[torch.Tensor, torch.Tensor, list[int]], dist.Work]


class Trip:
    """An exchange under way. This rank's own share is there already, or on the current stream.

    Args:
        land: makes what is returned of what has come.
        way: to wait for; None: it is there.
    """

    def __init__(
        self,
        land: Callable[[], tuple[torch.Tensor, ...]],
        way: Channel | dist.Work | None = None,
    ) -> None:
        self._land, self._way = land, way
        self._here: tuple[torch.Tensor, ...] | None = None

    def take(self) -> tuple[torch.Tensor, ...]:
        """What comes, every time; on GPUs the current stream waits for it, not the host."""
        self.close()
        if self._here is None:
            self._here, self._land = self._land(), tuple  # with it goes what came, if it was copied
        return self._here

    def close(self) -> None:
        """Wait for what is under way, and leave it: after an error, so that nothing is written
        where others will allocate."""
        way, self._way = self._way, None
        if isinstance(way, dist.Work):
            way.wait()
        elif way is not None:
            way.take()


def write(place: torch.Tensor, source: torch.Tensor | Sum) -> None:
    """Write a tensor, or what is to be one, to a place of its shape."""
    if isinstance(source, torch.Tensor):
        dense_copy(place, source)
    else:
        source.write(place)


class Departure(NamedTuple):
    """Room from which heads will leave for the sequence, asked for before there is anything to
    send: who makes it may write it there.

    Attributes:
        channel: that gave it.
        parts: of the room, each tensor's ``[B, S, h, D]``.
    """

    channel: Channel
    room: Room
    parts: tuple[torch.Tensor, ...]

    def holds(self, sources: Sequence[torch.Tensor | Sum]) -> bool:
        """Whether all of these have been written there."""
        made = [x if isinstance(x, torch.Tensor) else x.whole() for x in sources]
        pairs = zip(made, self.parts, strict=True)
        return all(x is not None and x.is_set_to(part) for x, part in pairs)


class _Heads(NamedTuple):
    """Of one tensor: the first rank's first head, how many heads a rank has, and how far apart."""

    first: int
    width: int
    apart: int


class EvenExchange:
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
        self._ranks, self._mine = ranks, mine
        self._heads = [
            _Heads(each[0][0], each[0][1] - each[0][0], each[1][0] - each[0][0]) for each in ranges
        ]
        self._others = [(mine + step) % ranks for step in range(1, ranks)]  # the next one first
        self._leaving = [(rank, rank, rank + 1) for rank in self._others]

    def send_to_heads(self, tensors: Sequence[torch.Tensor], send: Send) -> Trip:
        """``[B, s, H, D] -> [B, S, h, D]``, views of one tensor."""
        batch, tokens = tensors[0].shape[:2]
        shapes = self._shapes(tensors)
        size = self._size(tokens, batch, shapes)
        got = tensors[0].new_empty(size)
        parts = map(self._by_heads, tensors, self._heads)

        def land() -> tuple[torch.Tensor, ...]:
            return cut_features(got.view(self._ranks * tokens, *size[2:]), shapes, turned=True)

        channel, room = self._room(got, size)
        if not self._copies:
            sent = _filled(room, shapes, parts).whole
            return Trip(land, send(sent, got, self._sizes(got)))
        at = self._mine * (got.numel() // self._ranks)
        pieces = got.unbind(0)
        leaving = list(map(Outgoing, parts, cut_features(pieces[self._mine], shapes)))
        hand_out(room.whole, self._mine, shapes, leaving)
        channel.post(
            room.whole, self._leaving, [(rank, pieces[rank], at, 0) for rank in self._others]
        )
        return Trip(land, channel)

    def departure(self, like: torch.Tensor, sizes: Sequence[torch.Size]) -> Departure:
        """Ask for the room of :meth:`send_to_sequence`.

        Args:
            like: for dtype and device.
            sizes: of the places ``[B, s, H, D]``.
        """
        shapes = tuple([(each.width, x[3]) for each, x in zip(self._heads, sizes, strict=True)])
        batch, tokens = sizes[0][:2]
        channel, room = self._room(like, self._size(tokens, batch, shapes))
        return Departure(channel, room, room.parts(shapes, turned=True))

    def send_to_sequence(
        self,
        sources: Sequence[torch.Tensor | Sum],
        places: Sequence[torch.Tensor],
        send: Send,
        departure: Departure | None = None,
    ) -> Trip:
        """``[B, S, h, D] -> [B, s, H, D]``. By messages, what leaves needs no copy if it is one
        dense tensor of one sample; copy engines bring what comes to its place.

        Args:
            departure: room that was asked for; what is there already is not packed again.
        """
        like = places[0]
        batch, tokens = like.shape[:2]
        shapes = self._shapes(places)
        size = self._size(tokens, batch, shapes)
        goals = [self._by_heads(x, each) for x, each in zip(places, self._heads, strict=True)]
        if not self._copies:
            sent = self._dense(sources[0], size) if len(sources) == batch == 1 else None
            if sent is None:
                room = departure.room if departure else self._room(like, size)[1]
                sent = _summed(room, shapes, sources).whole
            got = torch.empty_like(sent)

            def land() -> tuple[torch.Tensor, ...]:
                for goal, part in zip(goals, cut_features(got, shapes), strict=True):
                    dense_copy(goal, part)
                return ()

            return Trip(land, send(sent, got, self._sizes(sent)))
        channel, room = departure[:2] if departure else self._room(like, size)
        row = size[2] * size[3]
        at = self._mine * tokens * row
        pulls, leaving = [], []
        for source, goal, (heads, dim) in zip(sources, goals, shapes, strict=True):
            places = goal.unbind(0)
            pieces = by_rank(source, self._ranks) if isinstance(source, torch.Tensor) else source
            leaving.append(Outgoing(pieces, places[self._mine]))
            pulls.append([(rank, places[rank], at, row) for rank in self._others])
            at += heads * dim
        packed = departure is not None and departure.holds(sources)
        hand_out(room.whole, self._mine, shapes, leaving, packed=packed)
        arriving = [pull for each in zip(*pulls, strict=True) for pull in each]
        channel.post(room.whole, self._leaving, arriving)
        return Trip(tuple, channel)

    def _room(self, like: torch.Tensor, size: tuple[int, ...]) -> tuple[Channel, Room]:
        """To pack into what leaves, and the way for it."""
        channel = self._mesh.channel("all_to_all", self._copies)
        return channel, channel.room(size, like, like.dtype)

    @staticmethod
    def _dense(source: torch.Tensor | Sum, size: tuple[int, ...]) -> torch.Tensor | None:
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
        shapes = tuple((each.width, dim) for each, dim in zip(self._heads, dims, strict=True))
        return math.prod(self._size(tokens, batch, shapes)) * item if self._copies else 0

    def _shapes(self, tensors: Sequence[torch.Tensor]) -> Shapes:
        """Heads and head dim of each tensor on one rank."""
        pairs = zip(self._heads, tensors, strict=True)
        return tuple([(each.width, x.shape[3]) for each, x in pairs])

    def _size(self, tokens: int, batch: int, shapes: Shapes) -> tuple[int, int, int, int]:
        """Of all that travels."""
        return self._ranks, tokens, batch, sum([heads * dim for heads, dim in shapes])

    def _sizes(self, x: torch.Tensor) -> list[int]:
        return [x.numel() // self._ranks] * self._ranks

    def _by_heads(self, x: torch.Tensor, heads: _Heads) -> torch.Tensor:
        """Each rank's heads of ``[B, s, H, D]``: ``[ranks, s, B, h, D]``, a view."""
        batch, tokens, _, dim = x.shape
        sample, token, head, one = x.stride()
        return x.as_strided(
            (self._ranks, tokens, batch, heads.width, dim),
            (heads.apart * head, token, sample, head, one),
            x.storage_offset() + heads.first * head,
        )


def _summed(room: Room, shapes: Shapes, sources: Sequence[torch.Tensor | Sum]) -> Room:
    """The room, with these ``[B, S, h, D]`` packed in it."""
    for place, source in zip(room.parts(shapes, turned=True), sources, strict=True):
        write(place, source)
    return room


def _filled(room: Room, shapes: Shapes, parts: Iterable[torch.Tensor]) -> Room:
    """The room, with these tensors packed in it."""
    for place, part in zip(room.parts(shapes), parts, strict=True):
        dense_copy(place, part)
    return room
