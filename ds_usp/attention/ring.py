"""The forward loop and the backward loop of ring attention: the only two in the package.

Both walk a printed plan of integers and know no layout, mask or library by name. While a rank
computes with one block of keys and values, the next one comes straight from who holds it; gradients
go straight back and are summed there in fp32. Two block buffers, the gradients that leave and one
buffer for those that come serve any number of steps.

A rank holds its own block and, in a double ring, one window after another what its node sees of a
block of another node. The same buffers again, over a communicator of their own, serve these.

Online softmax over blocks as in Ring Attention (arXiv 2310.01889); backward from the final
log-sum-exp, which makes every block independent (FlashAttention-2, arXiv 2307.08691).

Letters of the shapes: B batch, S query tokens, T tokens of this rank's keys and values, N tokens of
a block, H query heads, G key/value heads, D head dim of queries and keys, E of values and outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from ds_usp.attention.scores import PartScores
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.ring import Channel
from ds_usp.dense import dense_copy
from ds_usp.geometry.schedule import RingSchedule, RingStep
from ds_usp.geometry.windows import Piece, Window
from ds_usp.kernels.api import AttentionKernel
from ds_usp.kernels.merge import GradientSum, OutputSum

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Travel = RingStep | Window


@dataclass(frozen=True)
class RingCall:
    """Everything that a ring attention needs besides its tensors.

    Args:
        copies: exchanges go by copy engines.
    """

    mesh: SequenceMesh
    schedule: RingSchedule
    kernel: AttentionKernel
    scale: float
    copies: bool = False


class BlockWalk:
    """The keys and values of each step, in order.

    The first block that travels is asked for at once, each further one when the caller has taken
    the one before it: it comes while the caller computes. So does what crosses the network for the
    next window, while the caller is in the one before.

    Shapes:
        k ``[B, T, G, D]``, v ``[B, T, G, E]``, this rank's own.
    """

    def __init__(
        self, call: RingCall, steps: Sequence[RingStep], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self._steps, self._own, schedule = steps, (k, v), call.schedule
        near, far = call.mesh.channel("ring_kv", call.copies), call.mesh.channel("ring_kv_outer")
        travelling = [step for step in steps if not step.own]
        self._near = _Arrivals(near, travelling, schedule.ring_rank, k, v)
        self._far = _Arrivals(far, schedule.windows, schedule.ring_rank, k, v)
        packed = _packed(near, k, v) if travelling or schedule.windows else k[:0]
        self._window, self._held = 0, self._own
        self._far.begin(schedule.windows, packed)
        self._near.begin([step for step in travelling if not step.window], packed)

    @property
    def value_dim(self) -> int:
        """Head dim of the values."""
        return self._own[1].shape[3]

    def close(self) -> None:
        """After an error: nothing may stay under way, or the next call would take it."""
        self._near.close()
        self._far.close()

    def __iter__(self) -> Iterator[tuple[RingStep, torch.Tensor, torch.Tensor]]:
        for step in self._steps:
            if step.window != self._window:
                self._turn(step.window)
            if step.own:
                yield step, *self._held
                continue
            yield step, *_unpacked(self._near.take(), *self._own)

    def _turn(self, window: int) -> None:
        """Go on to another window, or back to the own block."""
        self._window, self._held = window, self._own
        if window:
            packed = self._far.take()
            self._held = _unpacked(packed, *self._own)
            mine = [step for step in self._steps if step.window == window and not step.own]
            self._near.begin(mine, packed)


class _Arrivals:
    """Keys and values that come one after the other. There are two buffers: while one is in use,
    the other one is filled.

    Args:
        travels: all that will come.
    """

    def __init__(
        self,
        channel: Channel,
        travels: Sequence[Travel],
        rank: int,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        self._channel, self._rank = channel, rank
        sizes = (max((each.columns for each in travels[i::2]), default=0) for i in range(2))
        self._buffers = [k.new_empty(_packed_shape(k, v, size)) for size in sizes]
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
        token = self._packed.shape[1:].numel()
        arriving = []
        for piece, place in _split(self._coming, travel.comes):
            if piece.rank == self._rank:
                place.copy_(self._packed[piece.start : piece.stop])
            else:
                arriving.append((piece.rank, place, piece.start * token, 0))
        leaving = [(piece.rank, self._packed[piece.start : piece.stop]) for piece in travel.gives]
        self._channel.post(leaving, arriving)


def ring_forward(
    call: RingCall, q: torch.Tensor, walk: BlockWalk, scores: PartScores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this ring rank's queries with the keys and values of the whole ring.

    Shapes:
        q ``[B, S, H, D]`` -> out ``[B, S, H, E]``, lse ``[B, H, S]``.
    """
    total = OutputSum(q, walk.value_dim)
    with closing(walk):
        for step, k_block, v_block in walk:
            kernel = scores.on(call.kernel, step)
            for each in step.calls:
                part, lse = kernel.forward(q, k_block, v_block, each, scale=call.scale)
                total.add(part, lse, each.q_span)
    return total.result()


def ring_backward(
    call: RingCall,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    walk: BlockWalk,
    scores: PartScores,
) -> RingGradients:
    """The gradients of a ring attention, the last of them still on their way home.

    A step's share of ``dk`` and ``dv`` travels in the dtype in which the kernel returns it.
    """
    with closing(walk):
        grads = RingGradients(call, q, k, v)
        try:
            for step, k_block, v_block in walk:
                sums = grads.of_step(step, k_block, v_block)
                kernel = scores.on(call.kernel, step)
                for each in step.calls:
                    parts = kernel.backward(
                        dout, q, k_block, v_block, out, lse, each, scale=call.scale
                    )
                    spans = each.q_span, each.k_span, each.k_span
                    for total, part, span in zip(sums, parts, spans, strict=True):
                        total.add(part, [span])
                if not step.own:
                    grads.send(step, sums[1:])
            grads.gather()
        except BaseException:
            grads.close()
            raise
    return grads


class RingGradients:
    """``dq``, ``dk`` and ``dv`` of one rank: what it computed, what it sends, what comes to it.

    The gradients of what a rank holds for its node are summed here, and sent home as one.

    Shapes:
        q ``[B, S, H, D]``, k ``[B, T, G, D]``, v ``[B, T, G, E]``.
    """

    def __init__(self, call: RingCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._sums = GradientSum(q), GradientSum(k), GradientSum(v)
        self._window, self._held = 0, self._sums[1:]
        wide = torch.promote_types(k.dtype, torch.float32)
        dtype = wide if call.kernel.caps.wide_gradients else k.dtype
        schedule, mesh = call.schedule, call.mesh
        self._windows = schedule.windows
        travelling = [step for step in schedule.backward_steps if not step.own]
        near, far = mesh.channel("ring_dkv", call.copies), mesh.channel("ring_dkv_outer")
        self._near = _WayHome(near, travelling, schedule.ring_rank, dtype, k, v)
        self._far = _WayHome(far, schedule.windows, schedule.ring_rank, dtype, k, v)

    def of_step(
        self, step: RingStep, k_block: torch.Tensor, v_block: torch.Tensor
    ) -> tuple[GradientSum, GradientSum, GradientSum]:
        """Where a step's gradients are summed."""
        if step.window != self._window:
            self._close_window()
            if step.window:  # its first step is of all that this rank holds
                self._window, self._held = step.window, (GradientSum(k_block), GradientSum(v_block))
        if step.own:
            return self._sums[0], *self._held
        return self._sums[0], GradientSum(k_block), GradientSum(v_block)

    def send(self, step: RingStep, gradients: Sequence[GradientSum]) -> None:
        """Send a step's gradients to those who hold its keys and expect those of what this rank
        holds from their users."""
        self._near.send(step, gradients, self._held)

    def gather(self) -> None:
        """Take what is still to come now, if its buffer or the sums so far cannot wait."""
        self._close_window()
        if not self._near.keeps:
            self._near.settle()

    def result(self) -> Grads:
        """``dq``, ``dk``, ``dv`` in the dtype and shape of ``q``, ``k`` and ``v``."""
        self._near.settle()
        self._far.settle()
        dq, dk, dv = (total.result() for total in self._sums)
        return dq, dk, dv

    def close(self) -> None:
        """After an error: nothing may stay under way, or the next call would take it."""
        self._near.close()
        self._far.close()

    def _close_window(self) -> None:
        """Send the sums of what this rank held for its node to their owner."""
        if self._window:
            self._near.settle()
            self._far.send(self._windows[self._window - 1], self._held, self._sums[1:])
            self._window, self._held = 0, self._sums[1:]


class _WayHome:
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
        self._buffer = self._room(0 if self.keeps else most)
        self._leaving = k[:0]
        self._coming: list[tuple[Piece, torch.Tensor]] = []
        self._sums: Sequence[GradientSum] = ()

    def send(
        self, travel: Travel, gradients: Sequence[GradientSum], sums: Sequence[GradientSum]
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
        shape = (away, *self._buffer.shape[1:])
        # Held by this object: a lane may wait for it where its memory's stream does not.
        self._leaving = self._channel.room(shape, self._buffer, self._dtype)
        places = _unpacked(self._leaving, *self._like)
        for total, place, own in zip(gradients, places, sums, strict=True):
            total.write(place)
            if away < travel.columns:  # this rank's own keys come last
                total.hand_over(away, own)
        token = self._buffer.shape[1:].numel()
        self._coming, self._sums = _split(self._buffer[: travel.given], travel.gives), sums
        self._channel.post(
            [(piece.rank, part) for piece, part in _split(self._leaving, comes)],
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
        for piece, part in coming:
            for total, each in zip(self._sums, _unpacked(part, *self._like), strict=True):
                span = [(piece.start, piece.stop)]
                total.add(each, span, borrowed=not self.keeps, held=self.keeps)

    def close(self) -> None:
        """Wait for what is under way."""
        self._channel.close()

    def _room(self, tokens: int) -> torch.Tensor:
        k, v = self._like
        return k.new_empty(_packed_shape(k, v, tokens), dtype=self._dtype)


# Keys and values travel as one tensor [N, B, G D + G E], tokens first, so that any run of tokens is
# one dense message.


def _packed_shape(k: torch.Tensor, v: torch.Tensor, tokens: int) -> tuple[int, int, int]:
    """Of so many tokens like keys ``[B, ., G, D]`` and values ``[B, ., G, E]``."""
    return tokens, k.shape[0], k.shape[2:].numel() + v.shape[2:].numel()


def _packed(channel: Channel, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A copy of keys ``[B, T, G, D]`` and values ``[B, T, G, E]``, for all that take of them."""
    packed = channel.room(_packed_shape(k, v, k.shape[1]), k, k.dtype)
    for place, x in zip(_unpacked(packed, k, v), (k, v), strict=True):
        dense_copy(place, x)
    return packed


def _unpacked(
    packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[B, N, G, D]`` and values ``[B, N, G, E]`` like these two, views."""
    turned = packed.transpose(0, 1)
    keys, values = turned.split([x.shape[2:].numel() for x in (k, v)], dim=2)
    front = turned.shape[:2]
    return keys.view(*front, *k.shape[2:]), values.view(*front, *v.shape[2:])


def _split(packed: torch.Tensor, pieces: Sequence[Piece]) -> list[tuple[Piece, torch.Tensor]]:
    """Each piece with its part of a tensor in which they lie one after the other."""
    parts = packed.split([piece.length for piece in pieces]) if pieces else ()
    return list(zip(pieces, parts, strict=True))
