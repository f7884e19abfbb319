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

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from ds_usp.attention.score_mod import PartScores
from ds_usp.attention.travel import (
    NO_ARRIVALS,
    NO_WAY_HOME,
    Arrivals,
    WayHome,
    packed_copy,
    unpacked,
)
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.geometry.double_ring import Window
from ds_usp.geometry.kernel_calls import KernelCall
from ds_usp.geometry.ring_schedule import RingSchedule, RingStep
from ds_usp.kernels.api import AttentionKernel, BackwardInputs, GradBuffers
from ds_usp.kernels.merge import GradAccumulator, OutputAccumulator

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def nothing() -> None:
    """Nothing is to be done in between."""


def done(task: Callable[[], None]) -> Callable[[], None]:
    """Do a task; what is to be done next time."""
    task()
    return nothing


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

    def fills(self, dtype: torch.dtype) -> bool:
        """Whether backward is one call of a kernel that writes its gradients where they are wanted,
        in the dtype of the tensors. Beside a ring they wait for others before they can leave."""
        caps, schedule = self.kernel.caps, self.schedule
        if not caps.writes_grads_in_place or schedule.ring_degree > 1:
            return False
        calls = sum(len(step.calls) for step in schedule.backward_steps)
        return calls == 1 and caps.grad_dtype(dtype) == dtype


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
        self._window, self._held = 0, self._own
        self._near = self._far = NO_ARRIVALS
        travelling = [step for step in steps if not step.own]
        if not (travelling or schedule.windows):
            return
        near = call.mesh.channel("ring_kv", call.copies)
        self._near = Arrivals(near, travelling, k, v)
        packed = packed_copy(near, k, v, schedule.packed)
        if schedule.windows:
            far = call.mesh.channel("ring_kv_outer")
            self._far = Arrivals(far, schedule.windows, k, v)
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
            yield step, *unpacked(self._near.take(), *self._own)

    def _turn(self, window: int) -> None:
        """Go on to another window, or back to the own block."""
        self._window, self._held = window, self._own
        if window:
            packed = self._far.take()
            self._held = unpacked(packed, *self._own)
            mine = [step for step in self._steps if step.window == window and not step.own]
            self._near.begin(mine, packed)


def ring_forward(
    call: RingCall,
    q: torch.Tensor,
    walk: BlockWalk,
    scores: PartScores,
    between: Callable[[], None] = nothing,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this ring rank's queries with the keys and values of the whole ring.

    Args:
        between: what else is to be done when some of the first step is under way.

    Shapes:
        q ``[B, S, H, D]`` -> out ``[B, S, H, E]``, lse ``[B, H, S]``.
    """
    total = OutputAccumulator(q, walk.value_dim)
    with closing(walk):
        for step, k_block, v_block in walk:
            kernel = scores.on(call.kernel, step)
            for each in step.calls:
                part, lse = kernel.forward((q, k_block, v_block), each, scale=call.scale)
                between = done(between)
                total.add(part, lse, each.q_span)
            between = done(between)  # in the first step on every rank, whatever it computes
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
    between: Callable[[], None] = nothing,
    home: Sequence[torch.Tensor] = (),
) -> RingGradients:
    """The gradients of a ring attention, the last of them still on their way home.

    A step's share of ``dk`` and ``dv`` travels in the dtype in which the kernel returns it.

    Args:
        between: what else is to be done when some of the first step is under way.
        home: where ``dq``, ``dk`` and ``dv`` are wanted, if one call makes them (``call.fills``).
    """
    with closing(walk):
        grads = RingGradients(call, q, k, v, home)
        try:
            for step, k_block, v_block in walk:
                sums = grads.of_step(step, k_block, v_block)
                kernel = scores.on(call.kernel, step)
                for each in step.calls:
                    places = grads.places(step, each)
                    inputs = BackwardInputs(dout, q, k_block, v_block, out, lse)
                    parts = kernel.backward(inputs, each, scale=call.scale, grad_buffers=places)
                    between = done(between)
                    spans = each.q_span, each.k_span, each.k_span
                    for total, part, span in zip(sums, parts, spans, strict=True):
                        total.add(part, [span])
                between = done(between)
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

    def __init__(
        self,
        call: RingCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        home: Sequence[torch.Tensor] = (),
    ) -> None:
        self._home: GradBuffers | None = (home[0], home[1], home[2]) if home else None
        self._sums = GradAccumulator(q), GradAccumulator(k), GradAccumulator(v)
        self._window, self._held = 0, self._sums[1:]
        dtype, self._fills = (
            call.kernel.caps.grad_dtype(k.dtype),
            call.kernel.caps.writes_grads_in_place,
        )
        schedule, mesh = call.schedule, call.mesh
        self._windows = schedule.windows
        self._ended: tuple[Window, tuple[GradAccumulator, GradAccumulator]] | None = None
        travelling = [step for step in schedule.backward_steps if not step.own]
        self._near = self._far = NO_WAY_HOME
        if travelling:
            near = mesh.channel("ring_dkv", call.copies)
            self._near = WayHome(near, travelling, schedule.ring_rank, dtype, k, v)
        if schedule.windows:
            far = mesh.channel("ring_dkv_outer")
            self._far = WayHome(far, schedule.windows, schedule.ring_rank, dtype, k, v)

    def of_step(
        self, step: RingStep, k_block: torch.Tensor, v_block: torch.Tensor
    ) -> tuple[GradAccumulator, GradAccumulator, GradAccumulator]:
        """Where a step's gradients are summed."""
        self._send_sums()
        if step.window != self._window:
            self._end_window()
            if step.window:  # its first step is of all that this rank holds
                self._window, self._held = (
                    step.window,
                    (GradAccumulator(k_block), GradAccumulator(v_block)),
                )
            else:
                self._send_sums()
        if step.own:
            return self._sums[0], *self._held
        return self._sums[0], GradAccumulator(k_block), GradAccumulator(v_block)

    def places(self, step: RingStep, each: KernelCall) -> GradBuffers | None:
        """Where a kernel is to write the gradients of a call, if that is where they leave from: of
        a step's first call, if it has all of its columns. Those of others are added there."""
        whole = each is step.calls[0] and each.tile and each.k_span == (0, step.columns)
        if not (self._fills and whole):
            return None
        return self._home if step.own else (None, *self._near.places(step))

    def send(self, step: RingStep, gradients: Sequence[GradAccumulator]) -> None:
        """Send a step's gradients to those who hold its keys and expect those of what this rank
        holds from their users."""
        self._near.send(step, gradients, self._held)

    def gather(self) -> None:
        """Take what is still to come now, if its buffer or the sums so far cannot wait."""
        self._send_sums()
        self._end_window()
        self._send_sums()
        if not self._near.keeps:
            self._near.settle()

    def result(self) -> Grads:
        """``dq``, ``dk``, ``dv`` in the dtype and shape of ``q``, ``k`` and ``v``."""
        dq, dk, dv = (total.result() for total in self.sums())
        return dq, dk, dv

    def sums(self) -> tuple[GradAccumulator, GradAccumulator, GradAccumulator]:
        """The same, when all of it has come and before it is summed."""
        self._near.settle()
        self._far.settle()
        return self._sums

    def close(self) -> None:
        """After an error: nothing may stay under way, or the next call would take it."""
        self._near.close()
        self._far.close()

    def _end_window(self) -> None:
        """Go back to the own block. The last of the window's gradients may be under way to here:
        before another window they travel under its first step."""
        if self._window:
            self._ended = self._windows[self._window - 1], self._held
            self._window, self._held = 0, self._sums[1:]

    def _send_sums(self) -> None:
        """Send the sums of a window that has ended, if one waits for it, to their owner."""
        if self._ended is not None:
            self._near.settle()
            self._far.send(*self._ended, self._sums[1:])
            self._ended = None
