"""The forward loop and the backward loop of ring attention: the only two in the package.

Both walk a printed plan of integers and know no layout, mask or library by name. While a rank
computes with one block of keys and values, the next one comes straight from its owner; gradients
go straight home and are summed there in fp32. Two block buffers, the gradients that leave and one
buffer for those that come serve any number of steps.

Online softmax over blocks as in Ring Attention (arXiv 2310.01889); backward from the final
log-sum-exp, which makes every block independent (FlashAttention-2, arXiv 2307.08691).

Letters of the shapes: B batch, S query tokens, T tokens of this rank's keys and values, N tokens of
a block, H query heads, G key/value heads, D head dim of queries and keys, E of values and outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from ds_usp.attention.scores import PartScores
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.dense import dense_copy
from ds_usp.geometry.schedule import Piece, RingSchedule, RingStep
from ds_usp.kernels.api import AttentionKernel
from ds_usp.kernels.merge import GradientSum, OutputSum

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
    the one before it: it comes while the caller computes.

    Shapes:
        k ``[B, T, G, D]``, v ``[B, T, G, E]``, this rank's own.
    """

    def __init__(
        self, call: RingCall, steps: Sequence[RingStep], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self._steps, self._own, self._rank = steps, (k, v), call.schedule.ring_rank
        self._channel = call.mesh.channel("ring_kv", call.copies)
        travelling = [step for step in steps if not step.own]
        self._waiting = enumerate(travelling)
        sizes = (max((step.columns for step in travelling[i::2]), default=0) for i in range(2))
        self._buffers = [k.new_empty(_packed_shape(k, v, size)) for size in sizes]
        self._packed = self._packed_own() if travelling else k[:0]
        self._coming = k[:0]
        self._post()

    @property
    def value_dim(self) -> int:
        """Head dim of the values."""
        return self._own[1].shape[3]

    def close(self) -> None:
        """After an error: nothing may stay under way, or the next call would take it."""
        self._channel.close()

    def __iter__(self) -> Iterator[tuple[RingStep, torch.Tensor, torch.Tensor]]:
        for step in self._steps:
            if step.own:
                yield step, *self._own
                continue
            self._channel.take()
            block = self._coming
            self._post()
            yield step, *_unpacked(block, *self._own)

    def _packed_own(self) -> torch.Tensor:
        """This rank's keys and values, for all that take of them."""
        k, v = self._own
        packed = self._channel.room(_packed_shape(k, v, k.shape[1]), k, k.dtype)
        for place, x in zip(_unpacked(packed, k, v), (k, v), strict=True):
            dense_copy(place, x)
        return packed

    def _post(self) -> None:
        """Let the next block come, if there is one, into the buffer that is not in use."""
        index, step = next(self._waiting, (0, None))
        if step is None:
            return
        self._coming = self._buffers[index % 2][: step.columns]
        token = self._packed[:1].numel()
        arriving = []
        for piece, place in _split(self._coming, step.takes):
            if piece.rank == self._rank:
                place.copy_(self._packed)
            else:
                arriving.append((piece.rank, place, piece.start * token, 0))
        self._channel.post(
            [(piece.rank, self._packed[piece.start : piece.stop]) for piece in step.gives],
            arriving,
        )


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

    Shapes:
        q ``[B, S, H, D]``, k ``[B, T, G, D]``, v ``[B, T, G, E]``.
    """

    def __init__(self, call: RingCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._own, self._rank = (k, v), call.schedule.ring_rank
        self._sums = GradientSum(q), GradientSum(k), GradientSum(v)
        self._channel = call.mesh.channel("ring_dkv", call.copies)
        wide = torch.promote_types(k.dtype, torch.float32)
        self._dtype = wide if call.kernel.caps.wide_gradients else k.dtype
        # One buffer for what comes; what comes in so few steps is kept, and summed in one go.
        self._keeps = sum(not step.own for step in call.schedule.backward_steps) <= 2
        self._buffer = self._room(0 if self._keeps else call.schedule.most_given)
        self._leaving = k[:0]
        self._coming: list[tuple[Piece, torch.Tensor]] = []

    def of_step(
        self, step: RingStep, k_block: torch.Tensor, v_block: torch.Tensor
    ) -> tuple[GradientSum, GradientSum, GradientSum]:
        """Where a step's gradients are summed."""
        if step.own:
            return self._sums
        return self._sums[0], GradientSum(k_block), GradientSum(v_block)

    def send(self, step: RingStep, gradients: Sequence[GradientSum]) -> None:
        """Send a step's gradients to the owners of its keys and expect one's own from their
        users."""
        self._settle()
        if self._keeps:
            self._buffer = self._room(step.given)
        takes = [piece for piece in step.takes if piece.rank != self._rank]
        away = sum(piece.length for piece in takes)
        shape = (away, *self._buffer.shape[1:])
        self._leaving = self._channel.room(shape, self._buffer, self._dtype)
        places = _unpacked(self._leaving, *self._own)
        for total, place, own in zip(gradients, places, self._sums[1:], strict=True):
            total.write(place)
            if away < step.columns:  # this rank's own keys come last
                total.hand_over(away, own)
        token = self._buffer.shape[1:].numel()
        self._coming = _split(self._buffer[: step.given], step.gives)
        self._channel.post(
            [(piece.rank, part) for piece, part in _split(self._leaving, takes)],
            [
                (piece.rank, part, at * token, 0)
                for (piece, part), at in zip(self._coming, step.given_at, strict=True)
            ],
        )

    def _room(self, tokens: int) -> torch.Tensor:
        k, v = self._own
        return k.new_empty(_packed_shape(k, v, tokens), dtype=self._dtype)

    def gather(self) -> None:
        """Take what is still to come now, if its buffer or the sums so far cannot wait."""
        if not self._keeps:
            self._settle()

    def result(self) -> Grads:
        """``dq``, ``dk``, ``dv`` in the dtype and shape of ``q``, ``k`` and ``v``."""
        self._settle()
        dq, dk, dv = (total.result() for total in self._sums)
        return dq, dk, dv

    def close(self) -> None:
        """After an error: nothing may stay under way, or the next call would take it."""
        self._channel.close()

    def _settle(self) -> None:
        """Add what has come."""
        if not self._channel.busy:
            return
        self._channel.take()
        coming, self._coming = self._coming, []
        for piece, part in coming:
            for total, each in zip(self._sums[1:], _unpacked(part, *self._own), strict=True):
                span = [(piece.start, piece.stop)]
                total.add(each, span, borrowed=not self._keeps, held=self._keeps)


# Keys and values travel as one tensor [N, B, G D + G E], tokens first, so that any run of tokens is
# one dense message.


def _packed_shape(k: torch.Tensor, v: torch.Tensor, tokens: int) -> tuple[int, int, int]:
    """Of so many tokens like keys ``[B, ., G, D]`` and values ``[B, ., G, E]``."""
    return tokens, k.shape[0], k.shape[2:].numel() + v.shape[2:].numel()


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
