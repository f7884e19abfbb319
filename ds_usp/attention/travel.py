"""Keys and values on their way to where they are used, and gradients on their way home.

Letters of the shapes: B batch, T tokens of this rank's keys and values, N tokens of a block, G
key/value heads, D head dim of keys, E of values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ds_usp.comm.channel import Channel, RingChannel, Room, cut_features
from ds_usp.comm.ledger import CommLedger
from ds_usp.geometry.double_ring import Piece, Window
from ds_usp.geometry.ring_schedule import RingStep
from ds_usp.geometry.visibility import Runs
from ds_usp.kernels.merge import GradAccumulator
from ds_usp.strided_copy import dense_copy

Travel = RingStep | Window


class Arrivals:
    """Keys and values that come one after the other. There are two buffers: while one is in use,
    the other one is filled.

    Args:
        travels: all that will come.
    """

    def __init__(
        self, channel: Channel, travels: Sequence[Travel], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self._channel = channel
        sizes = [max((each.columns for each in travels[i::2]), default=0) for i in range(2)]
        self._buffers = [k.new_empty(_packed_shape(k, v, size)) for size in sizes if travels]
        self._waiting: deque[Travel] = deque()
        self._packed = self._coming = k[:0]

    def begin(self, travels: Sequence[Travel], packed: torch.Tensor) -> None:
        """Let the first of these come; others take theirs of what is packed here."""
        self._waiting.extend(travels)
        self._packed = packed
        self._post()

    def take(self) -> torch.Tensor:
        """What was to come, when it is there; the next one is on its way then."""
        self._channel.take()
        block = self._coming
        self._post()
        return block

    def close(self) -> None:
        """Wait for what is under way."""
        self._channel.close()

    def _post(self) -> None:
        if not self._waiting:
            return
        travel = self._waiting.popleft()
        self._buffers.reverse()
        self._coming = self._buffers[1][: travel.columns]
        token = self._packed.stride(0)  # it is dense
        arriving = [
            (piece.rank, place, piece.start * token, 0)
            for piece, place in _split(self._coming, travel.comes)
        ]
        leaving = [(piece.rank, piece.start, piece.stop) for piece in travel.gives]
        self._channel.post(self._packed, leaving, arriving)


class WayHome:
    """Gradients of keys and values that travel to where they are summed, one exchange in flight.

    Attributes:
        keeps: what comes has a buffer each, and is summed in one go: so few are the exchanges.
            Else one buffer serves them all.
    """

    def __init__(
        self,
        channel: Channel,
        travels: Sequence[Travel],
        rank: int,
        dtype: torch.dtype,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        self._channel, self._rank, self._dtype, self._like = channel, rank, dtype, (k, v)
        self.keeps = len(travels) <= 2
        most = max((each.given for each in travels), default=0)
        self._buffer = self._room(0 if self.keeps else most) if travels else k[:0]
        self._coming: list[tuple[Piece, torch.Tensor]] = []
        self._sums: Sequence[GradAccumulator] = ()
        self._leaving: Room | None = None  # asked for already

    def places(self, travel: Travel) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the gradients of what came for a step, which they leave from: of all of its
        tokens, this rank's own last, which stay there until they are summed."""
        self._leaving = self._room_for(travel.columns)
        return self._parts_of(self._leaving)

    def send(
        self, travel: Travel, gradients: Sequence[GradAccumulator], sums: Sequence[GradAccumulator]
    ) -> None:
        """Send the gradients of what came for a step or a window, and expect those of what left.

        Args:
            sums: where those are added, and the gradients of what this rank holds itself.
        """
        self.settle()
        if self.keeps:
            self._buffer = self._room(travel.given)
        comes = [piece for piece in travel.comes if piece.rank != self._rank]
        away = sum(piece.length for piece in comes)
        room, self._leaving = self._leaving or self._room_for(away), None
        for total, place, own in zip(gradients, self._parts_of(room), sums, strict=True):
            total.write(place[:, :away])
            if away < travel.columns:  # this rank's own keys come last
                total.transfer_to(away, own)
        token = room.whole.stride(0)  # it is dense
        self._coming, self._sums = _split(self._buffer[: travel.given], travel.gives), sums
        self._channel.post(
            room.whole,
            _rows(comes),
            [
                (piece.rank, part, at * token, 0)
                for (piece, part), at in zip(self._coming, travel.given_at, strict=True)
            ],
        )

    def settle(self) -> None:
        """Add what has come, if anything is to come."""
        if not self._channel.busy:
            return
        self._channel.take()
        coming, self._coming = self._coming, []
        sums, self._sums = self._sums, ()  # a window's are not kept longer than it
        for piece, part in coming:
            for total, each in zip(sums, unpacked(part, *self._like), strict=True):
                span = [(piece.start, piece.stop)]
                total.add(each, span, sum_now=not self.keeps, defer=self.keeps)

    def close(self) -> None:
        """Wait for what is under way."""
        self._channel.close()

    def _room_for(self, tokens: int) -> Room:
        """To pack what leaves into."""
        shape = _packed_shape(*self._like, tokens)
        return self._channel.room(shape, self._buffer, self._dtype)

    def _parts_of(self, room: Room) -> tuple[torch.Tensor, torch.Tensor]:
        dk, dv = room.parts(_shapes(*self._like), turned=True)
        return dk, dv

    def _room(self, tokens: int) -> torch.Tensor:
        k, v = self._like
        return k.new_empty(_packed_shape(k, v, tokens), dtype=self._dtype)


_NOTHING = torch.empty(0, 0, 0, 0)
_NOWHERE = RingChannel(None, CommLedger(), "nothing")
# Of a ring of one, or for a rank that nothing comes to.
NO_ARRIVALS = Arrivals(_NOWHERE, (), _NOTHING, _NOTHING)
NO_WAY_HOME = WayHome(_NOWHERE, (), 0, torch.float32, _NOTHING, _NOTHING)

# Keys and values travel as one tensor [N, B, G D + G E], tokens first, so that any run of tokens is
# one dense message.


def _packed_shape(k: torch.Tensor, v: torch.Tensor, tokens: int) -> tuple[int, int, int]:
    """Of so many tokens like keys ``[B, ., G, D]`` and values ``[B, ., G, E]``."""
    return tokens, k.shape[0], k.shape[2:].numel() + v.shape[2:].numel()


def packed_copy(channel: Channel, k: torch.Tensor, v: torch.Tensor, runs: Runs) -> torch.Tensor:
    """A copy of keys ``[B, T, G, D]`` and values ``[B, T, G, E]``, for all that take of them.

    Args:
        runs: of tokens that anyone takes; the others are left out.
    """
    room = channel.room(_packed_shape(k, v, k.shape[1]), k, k.dtype)
    for place, x in zip(room.parts(_shapes(k, v), turned=True), (k, v), strict=True):
        for start, stop in runs:
            dense_copy(place[:, start:stop], x[:, start:stop])
    return room.whole


def unpacked(
    packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[B, N, G, D]`` and values ``[B, N, G, E]`` like these two, views."""
    keys, values = cut_features(packed, _shapes(k, v), turned=True)
    return keys, values


def _shapes(k: torch.Tensor, v: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads and head dim of keys and of values."""
    _, _, heads, dim = k.shape
    return (heads, dim), (heads, v.shape[3])


def _rows(pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Of tensors that lie one after the other: to whom each goes, its first row and the next's."""
    found, at = [], 0
    for piece in pieces:
        found.append((piece.rank, at, at + piece.length))
        at += piece.length
    return found


def _split(packed: torch.Tensor, pieces: Sequence[Piece]) -> list[tuple[Piece, torch.Tensor]]:
    """Each piece with its part of a tensor in which they lie one after the other."""
    if len(pieces) == 1:
        return [(pieces[0], packed)]
    parts = packed.split([piece.length for piece in pieces]) if pieces else ()
    return list(zip(pieces, parts, strict=True))
