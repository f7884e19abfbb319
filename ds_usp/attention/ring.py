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

from ds_usp.attention.score_mod import ChunkScoreMod
from ds_usp.attention.travel import (
    NULL_GRAD_RETURN,
    NULL_PREFETCHER,
    GradReturn,
    KVPrefetcher,
    pack_kv,
    unpack_kv,
)
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.geometry.double_ring import OuterStep
from ds_usp.geometry.kernel_calls import KernelCall
from ds_usp.geometry.ring_schedule import RingSchedule, RingStep
from ds_usp.kernels.api import AttentionKernel, BackwardInputs, GradBuffers
from ds_usp.kernels.merge import GradAccumulator, OutputAccumulator

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def noop() -> None:
    """Nothing is to be done in between."""


def run_once(hook: Callable[[], None]) -> Callable[[], None]:
    """Do a task; what is to be done next time."""
    hook()
    return noop


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
    use_copy_engines: bool = False

    def writes_grads_in_place(self, dtype: torch.dtype) -> bool:
        """Whether backward is one call of a kernel that writes its gradients where they are wanted,
        in the dtype of the tensors. Beside a ring they wait for others before they can leave."""
        caps, schedule = self.kernel.caps, self.schedule
        if not caps.writes_grads_in_place or schedule.ring_degree > 1:
            return False
        calls = sum(len(step.calls) for step in schedule.backward_steps)
        return calls == 1 and caps.grad_dtype(dtype) == dtype


class KVStream:
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
        self._steps, self._local_kv, schedule = steps, (k, v), call.schedule
        self._outer_step, self._current_local = 0, self._local_kv
        self._inner = self._outer = NULL_PREFETCHER
        remote_steps = [step for step in steps if not step.is_local]
        if not (remote_steps or schedule.outer_steps):
            return
        inner = call.mesh.channel("ring_kv", call.use_copy_engines)
        self._inner = KVPrefetcher(inner, remote_steps, k, v)
        packed = pack_kv(inner, k, v, schedule.packed_runs)
        if schedule.outer_steps:
            outer = call.mesh.channel("ring_kv_outer")
            self._outer = KVPrefetcher(outer, schedule.outer_steps, k, v)
            self._outer.start(schedule.outer_steps, packed)
        self._inner.start([step for step in remote_steps if not step.outer_step], packed)

    @property
    def value_dim(self) -> int:
        """Head dim of the values."""
        return self._local_kv[1].shape[3]

    def close(self) -> None:
        """After an error: nothing may stay under way, or the next call would take it."""
        self._inner.close()
        self._outer.close()

    def __iter__(self) -> Iterator[tuple[RingStep, torch.Tensor, torch.Tensor]]:
        for step in self._steps:
            if step.outer_step != self._outer_step:
                self._switch_outer_step(step.outer_step)
            if step.is_local:
                yield step, *self._current_local
                continue
            yield step, *unpack_kv(self._inner.wait_next(), *self._local_kv)

    def _switch_outer_step(self, outer_step: int) -> None:
        """Go on to another window, or back to the own block."""
        self._outer_step, self._current_local = outer_step, self._local_kv
        if outer_step:
            packed = self._outer.wait_next()
            self._current_local = unpack_kv(packed, *self._local_kv)
            remote_steps = [
                step for step in self._steps if step.outer_step == outer_step and not step.is_local
            ]
            self._inner.start(remote_steps, packed)


def ring_forward(
    ring_call: RingCall,
    q: torch.Tensor,
    kv_stream: KVStream,
    score_mod: ChunkScoreMod,
    overlap_hook: Callable[[], None] = noop,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this ring rank's queries with the keys and values of the whole ring.

    Args:
        between: what else is to be done when some of the first step is under way.

    Shapes:
        q ``[B, S, H, D]`` -> out ``[B, S, H, E]``, lse ``[B, H, S]``.
    """
    accumulator = OutputAccumulator(q, kv_stream.value_dim)
    with closing(kv_stream):
        for step, k_block, v_block in kv_stream:
            kernel = score_mod.bind(ring_call.kernel, step)
            for call in step.calls:
                out, lse = kernel.forward((q, k_block, v_block), call, scale=ring_call.scale)
                overlap_hook = run_once(overlap_hook)
                accumulator.add(out, lse, call.q_span)
            overlap_hook = run_once(overlap_hook)  # on every rank, also where it has no calls
    return accumulator.result()


def ring_backward(
    ring_call: RingCall,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kv_stream: KVStream,
    score_mod: ChunkScoreMod,
    overlap_hook: Callable[[], None] = noop,
    grad_buffers: Sequence[torch.Tensor] = (),
) -> RingGradReducer:
    """The gradients of a ring attention, the last of them still on their way home.

    A step's share of ``dk`` and ``dv`` travels in the dtype in which the kernel returns it.

    Args:
        between: what else is to be done when some of the first step is under way.
        home: where ``dq``, ``dk`` and ``dv`` are wanted, if one call makes them (``call.fills``).
    """
    with closing(kv_stream):
        grads = RingGradReducer(ring_call, q, k, v, grad_buffers)
        try:
            for step, k_block, v_block in kv_stream:
                accumulators = grads.accumulators_for(step, k_block, v_block)
                kernel = score_mod.bind(ring_call.kernel, step)
                for call in step.calls:
                    inputs = BackwardInputs(dout, q, k_block, v_block, out, lse)
                    partials = kernel.backward(
                        inputs,
                        call,
                        scale=ring_call.scale,
                        grad_buffers=grads.out_buffers_for(step, call),
                    )
                    overlap_hook = run_once(overlap_hook)
                    spans = call.q_span, call.k_span, call.k_span
                    for accumulator, grad, span in zip(accumulators, partials, spans, strict=True):
                        accumulator.add(grad, [span])
                overlap_hook = run_once(overlap_hook)
                if not step.is_local:
                    grads.post_step_grads(step, accumulators[1:])
            grads.drain()
        except BaseException:
            grads.close()
            raise
    return grads


class RingGradReducer:
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
        grad_buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        self._grad_buffers: GradBuffers | None = (
            (grad_buffers[0], grad_buffers[1], grad_buffers[2]) if grad_buffers else None
        )
        self._accumulators = GradAccumulator(q), GradAccumulator(k), GradAccumulator(v)
        self._outer_step, self._relay_accumulators = 0, self._accumulators[1:]
        dtype, self._writes_in_place = (
            call.kernel.caps.grad_dtype(k.dtype),
            call.kernel.caps.writes_grads_in_place,
        )
        schedule, mesh = call.schedule, call.mesh
        self._outer_steps = schedule.outer_steps
        self._pending_outer_step: (
            tuple[OuterStep, tuple[GradAccumulator, GradAccumulator]] | None
        ) = None
        remote_steps = [step for step in schedule.backward_steps if not step.is_local]
        self._inner = self._outer = NULL_GRAD_RETURN
        if remote_steps:
            inner = mesh.channel("ring_dkv", call.use_copy_engines)
            self._inner = GradReturn(inner, remote_steps, schedule.ring_rank, dtype, k, v)
        if schedule.outer_steps:
            outer = mesh.channel("ring_dkv_outer")
            self._outer = GradReturn(outer, schedule.outer_steps, schedule.ring_rank, dtype, k, v)

    def accumulators_for(
        self, step: RingStep, k_block: torch.Tensor, v_block: torch.Tensor
    ) -> tuple[GradAccumulator, GradAccumulator, GradAccumulator]:
        """Where a step's gradients are summed."""
        self._post_pending_outer_step()
        if step.outer_step != self._outer_step:
            self._finish_outer_step()
            if step.outer_step:  # its first step is of all that this rank holds
                self._outer_step, self._relay_accumulators = (
                    step.outer_step,
                    (GradAccumulator(k_block), GradAccumulator(v_block)),
                )
            else:
                self._post_pending_outer_step()
        if step.is_local:
            return self._accumulators[0], *self._relay_accumulators
        return self._accumulators[0], GradAccumulator(k_block), GradAccumulator(v_block)

    def out_buffers_for(self, step: RingStep, kernel_call: KernelCall) -> GradBuffers | None:
        """Where a kernel is to write the gradients of a call, if that is where they leave from: of
        a step's first call, if it has all of its columns. Those of others are added there."""
        all_columns = (
            kernel_call is step.calls[0]
            and kernel_call.tile
            and kernel_call.k_span == (0, step.num_kv_tokens)
        )
        if not (self._writes_in_place and all_columns):
            return None
        return self._grad_buffers if step.is_local else (None, *self._inner.staging_views(step))

    def post_step_grads(self, step: RingStep, gradients: Sequence[GradAccumulator]) -> None:
        """Send a step's gradients to those who hold its keys and expect those of what this rank
        holds from their users."""
        self._inner.send(step, gradients, self._relay_accumulators)

    def drain(self) -> None:
        """Take what is still to come now, if its buffer or the sums so far cannot wait."""
        self._post_pending_outer_step()
        self._finish_outer_step()
        self._post_pending_outer_step()
        if not self._inner.one_buffer_per_exchange:
            self._inner.wait_and_accumulate()

    def result(self) -> Grads:
        """``dq``, ``dk``, ``dv`` in the dtype and shape of ``q``, ``k`` and ``v``."""
        dq, dk, dv = (accumulator.result() for accumulator in self.accumulators())
        return dq, dk, dv

    def accumulators(self) -> tuple[GradAccumulator, GradAccumulator, GradAccumulator]:
        """The same, when all of it has come and before it is summed."""
        self._inner.wait_and_accumulate()
        self._outer.wait_and_accumulate()
        return self._accumulators

    def close(self) -> None:
        """After an error: nothing may stay under way, or the next call would take it."""
        self._inner.close()
        self._outer.close()

    def _finish_outer_step(self) -> None:
        """Go back to the own block. The last of the window's gradients may be under way to here:
        before another window they travel under its first step."""
        if self._outer_step:
            self._pending_outer_step = (
                self._outer_steps[self._outer_step - 1],
                self._relay_accumulators,
            )
            self._outer_step, self._relay_accumulators = 0, self._accumulators[1:]

    def _post_pending_outer_step(self) -> None:
        """Send the sums of a window that has ended, if one waits for it, to their owner."""
        if self._pending_outer_step is not None:
            self._inner.wait_and_accumulate()
            self._outer.send(*self._pending_outer_step, self._accumulators[1:])
            self._pending_outer_step = None
