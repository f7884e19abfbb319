"""The forward loop and the backward loop of ring attention: the only two in the package.

Both execute a printed schedule of integers and know no layout, mask or library by name. While a
rank computes with one KV block, the next one is received straight from its owner; KV gradients are
sent straight back and summed there in fp32. Two KV buffers, one staging buffer for gradients and
one receive buffer serve any number of steps.

In a double ring a rank is also a relay: in each outer step it holds what its node uses of a block
of another node. The same buffers, once more, over a communicator of their own, serve these.

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
    """An overlap hook that does nothing."""


def run_once(hook: Callable[[], None]) -> Callable[[], None]:
    """Call a hook; returns :func:`noop`, the hook for the next time."""
    hook()
    return noop


@dataclass(frozen=True)
class RingCall:
    """Ring attention of one head chunk, without its tensors.

    Args:
        use_copy_engines: blocks are copied by copy engines, else sent by NCCL/gloo P2P.
    """

    mesh: SequenceMesh
    schedule: RingSchedule
    kernel: AttentionKernel
    scale: float
    use_copy_engines: bool = False

    def writes_grads_in_place(self, dtype: torch.dtype) -> bool:
        """Whether backward is one kernel call that can write its gradients into the send buffer, in
        the dtype of the tensors. With a ring they are summed with those of other ranks first."""
        caps, schedule = self.kernel.caps, self.schedule
        if not caps.writes_grads_in_place or schedule.ring_degree > 1:
            return False
        calls = sum(len(step.calls) for step in schedule.backward_steps)
        return calls == 1 and caps.grad_dtype(dtype) == dtype


class KVStream:
    """Iterator over the steps of a ring with their keys and values, prefetching one block ahead.

    The first remote block is posted at once, each further one when the caller waits for the one
    before it, so that it is received while the caller computes. So is the relayed block of the next
    outer step, during the one before.

    Shapes:
        k ``[B, T, G, D]``, v ``[B, T, G, E]``: this rank's local KV.
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
        """After an error: wait for all in flight, or the next call would receive it."""
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
        """Make another outer step's relayed block the local one, or this rank's own (0)."""
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
        overlap_hook: called once, after the first kernel call (or the first step, if it has none).

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
    """The gradients of a ring attention; the last KV gradients may still be in flight.

    A step's gradients of remote KV are sent in the dtype in which the kernel returns them.

    Args:
        overlap_hook: see :func:`ring_forward`.
        grad_buffers: out buffers of ``dq``, ``dk`` and ``dv``, where one kernel call computes them
            (:meth:`RingCall.writes_grads_in_place`).
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
    """Sums ``dq``, ``dk`` and ``dv`` of one rank, sends remote KV gradients to their owners.

    A relay rank sums its node's gradients of the relayed block and sends the owner the sum.

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
        """The fp32 accumulators of a step's ``dq``, ``dk`` and ``dv``."""
        self._post_pending_outer_step()
        if step.outer_step != self._outer_step:
            self._finish_outer_step()
            if step.outer_step:  # its first step has all of the relayed block
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
        """Where the kernel is to write the gradients of a call: into the send buffer, for a step's
        first call if it has all KV tokens of the step. Those of other calls are added there."""
        all_columns = (
            kernel_call is step.calls[0]
            and kernel_call.tile
            and kernel_call.k_span == (0, step.num_kv_tokens)
        )
        if not (self._writes_in_place and all_columns):
            return None
        return self._grad_buffers if step.is_local else (None, *self._inner.staging_views(step))

    def post_step_grads(self, step: RingStep, gradients: Sequence[GradAccumulator]) -> None:
        """Send a step's KV gradients to the owners, and receive those that other ranks computed of
        this rank's (or its relayed) block in that step."""
        self._inner.send(step, gradients, self._relay_accumulators)

    def drain(self) -> None:
        """Finish the last outer step; wait for gradients that share one receive buffer."""
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
        """The accumulators of :meth:`result`, when all gradients have been received."""
        self._inner.wait_and_accumulate()
        self._outer.wait_and_accumulate()
        return self._accumulators

    def close(self) -> None:
        """After an error: wait for all in flight, or the next call would receive it."""
        self._inner.close()
        self._outer.close()

    def _finish_outer_step(self) -> None:
        """Go back to the local block. The outer step's last gradients may be in flight: they are
        received during the next outer step's first step, and the sum is sent after that."""
        if self._outer_step:
            self._pending_outer_step = (
                self._outer_steps[self._outer_step - 1],
                self._relay_accumulators,
            )
            self._outer_step, self._relay_accumulators = 0, self._accumulators[1:]

    def _post_pending_outer_step(self) -> None:
        """Send the gradients of a finished outer step, if there is one, to the block's owner."""
        if self._pending_outer_step is not None:
            self._inner.wait_and_accumulate()
            self._outer.send(*self._pending_outer_step, self._accumulators[1:])
            self._pending_outer_step = None
