"""Execution of an attention call's schedule: one loop over instructions, forward and backward.

``functional.py`` and ``custom_ops.py`` run one pass a call, and one in its backward pass, on every
rank and without autograd, right after its comparison among the ranks. The order is decided in
``ds_usp.geometry.pipeline_schedule``; each instruction is one method of a pass, which takes the
chunk's state and the instruction: posts communicate, and every rank makes them all in one order.
Kernels and packing run on the current stream; copy engines or NCCL run beside it.

Letters of the shapes: b batch, s tokens of this rank, S tokens of its ring rank, t and T those of
keys, h query heads, g key/value heads, of all ranks (in the arguments) or of one chunk on one rank;
d head dim, e that of values and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

import torch

from ds_usp.attention.kv_exchange import KV, KVExchange, KVGradExchange, KVGrads
from ds_usp.attention.plan import AttentionPlan, SavedChunk
from ds_usp.comm.channel import Channel, PendingExchange
from ds_usp.comm.packing import PreallocatedSend
from ds_usp.geometry.pipeline_schedule import Instr, Op, Schedule
from ds_usp.kernels.api import BackwardInputs, GradBuffers
from ds_usp.kernels.merge import GradAccumulator, OutputAccumulator
from ds_usp.kernels.sinks import apply_sinks, sink_gradient

Handler = Callable[[Any, Any, Instr], None]
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NO_KV: KV = (torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0, 0))  # not there yet, or freed
DONE = PendingExchange(tuple)  # nothing in flight


class ChunkState:
    """State of one head chunk in a pass, beside what the plan says of it."""

    def __init__(self, plan: AttentionPlan, index: int, *, backward: bool = False) -> None:
        ring, self.index = plan.ring_calls[index], index
        self.exchanges, self.ring = plan.chunks[index], ring
        self.steps = ring.schedule.backward_steps if backward else ring.schedule.steps
        self.transfers = ring.backward_transfers if backward else ring.forward_transfers
        self.channels: list[Channel] = []  # of its ring exchanges; drained after an error

    pending: PendingExchange = DONE  # its all-to-all in flight, later its return
    step: int = -1  # index of the ring step that is computed; -1 before the first
    kv: KV = NO_KV  # keys and values of that step: one of the next two
    local_kv: KV = NO_KV  # this rank's, all tokens of the chunk's heads
    received_kv: KV = NO_KV  # the block of the last KV_WAIT
    packed: torch.Tensor = NO_KV[0]  # the staging buffer with the local KV that ranks receive
    kv_exchange: KVExchange | None = None  # from the first KV_POST to the last kernel call

    def free_kv(self) -> None:
        """Drop keys and values, and the receive buffers: after the last kernel call."""
        self.kv_exchange = None
        self.kv = self.local_kv = self.received_kv = NO_KV
        self.packed = NO_KV[0]

    def open_kv(self) -> KVExchange:
        """Pack the local keys and values, and allocate receive buffers: for the first post, which
        comes before any wait."""
        ring, (k, v) = self.ring, self.local_kv
        channel = self.open_channel("ring_kv")
        self.kv_exchange = exchange = KVExchange(channel, self.transfers, k, v)
        self.packed = exchange.pack(k, v, ring.schedule.packed_runs)
        return exchange

    def open_channel(self, kind: str) -> Channel:
        channel = self.ring.mesh.channel(kind, self.ring.use_copy_engines)
        self.channels.append(channel)
        return channel


ChunkT = TypeVar("ChunkT", bound=ChunkState)


# Forward is an online softmax over KV blocks as in Ring Attention (arXiv 2310.01889). Backward
# starts from the final log-sum-exp, which makes every KV block independent (FlashAttention-2, arXiv
# 2307.08691).
#
# Which exchange is under which kernel, and why backward takes the last chunk first, is decided and
# explained in geometry/pipeline_schedule.py. No wait here waits on the CPU of a GPU's rank: it
# makes the current stream wait. The CPU runs ahead, so the order of the schedule is the order on
# the GPU, and a post stands where it must start.
#
# Note [what is freed when]
#
#   instruction             a chunk takes                   and lets go
#   A2A_POST                pending: what is sent
#   A2A_WAIT, SLICE_HEADS   local_kv, q, accumulator        pending
#                backward   dout, dq, dkv; if not yet here
#                           local_kv and saved
#   RETURN_STAGE            staging
#   KV_POST, the first      packed, kv_exchange
#   KV_WAIT                 received_kv
#   ATTN, a step's first    kv; backward step_grads
#   DKV_POST                grad_exchange, unless a kernel  step_grads
#                           wrote to its buffer before
#   END                     result                          q, accumulator, all of KV
#                backward                                   dout, saved, step_grads, all of KV
#   RETURN_POST, LSE_POST   pending                         result, at the last of the two
#                backward   pending                         dq, dkv, staging, grad_exchange
#   STORE                                                   as RETURN_POST
#   RETURN_WAIT, LSE_WAIT                                   pending
#
# All of KV: kv, local_kv, received_kv, packed, kv_exchange. q, k, v and dout are views of what was
# received, which lives on after the forward pass where it saves them.
# A buffer may go as soon as the current stream has read it (a result that was packed) or waited for
# the exchange that uses it: what is allocated in its place is written by later work of the same
# stream. So a chunk holds everything that is in flight for it, and drops it after the wait. dq, dk
# and dv of all heads are allocated at the first return, when the buffers of the first chunk are
# gone, not when the pass begins.


class Pass(Generic[ChunkT]):
    """The common part of both passes: the loop, and the exchanges of keys and values. One serves
    one call.

    Args:
        chunks: their states.
        sinks: of all query heads ``[h]``, if there are any.
        device: of the call's tensors.
        exposed: posts that overlap nothing: copy engines then pull in the current stream.

    Attributes:
        handlers: the method of each operation, which :meth:`execute` calls with the instruction's
            chunk. ``instr.number`` is an index in the chunk's ``steps`` (ATTN) or ``transfers``
            (KV and DKV).
    """

    handlers: ClassVar[Mapping[Op, Handler]]

    def __init__(
        self,
        plan: AttentionPlan,
        sinks: torch.Tensor | None,
        chunks: Sequence[ChunkT],
        device: torch.device,
        exposed: AbstractSet[Instr],
    ) -> None:
        if plan.staging_bytes:
            plan.reserve_staging(device)  # collective, where buffers must grow
        # Before any allocation: one that fails leaves an aborted pass, which is declared to all.
        plan.mesh.consistency.in_pass = True
        self.plan, self.sinks = plan, sinks
        self._chunks, self._exposed = chunks, exposed

    def execute(self, schedule: Schedule) -> None:
        """Run the pass's schedule; at an error wait for what is in flight, or the next call
        receives it."""
        handlers, chunks = self.handlers, self._chunks
        consistency, instr = self.plan.mesh.consistency, schedule[0]
        # Nothing is decided in this loop: what a test prints of a schedule is what a GPU executes.
        try:
            for instr in schedule:
                handlers[instr.op](self, chunks[instr.chunk], instr)
        except BaseException:
            before = schedule[: schedule.index(instr)]
            # Ranks go on only where all have posted as many exchanges when they left this pass.
            consistency.abort_pass(sum(x.op.is_post for x in before))
            with ExitStack() as stack:  # all of it, whatever fails
                for state in chunks:
                    stack.callback(state.pending.drain)
                    for channel in state.channels:
                        stack.callback(channel.drain)
            raise
        consistency.in_pass = False

    def begin_step(self, chunk: ChunkT, index: int) -> None:
        """Select the keys and values of a ring step, before its first kernel call; backward also
        without one, at its post."""
        chunk.step = index
        chunk.kv = chunk.local_kv if chunk.steps[index].is_local else chunk.received_kv

    def post_kv(self, chunk: ChunkT, instr: Instr) -> None:
        """Start the ring exchange of keys and values of one step."""
        overlapped = instr not in self._exposed
        exchange = chunk.kv_exchange or chunk.open_kv()
        exchange.post(instr.number, chunk.packed, overlapped=overlapped)

    def wait_kv(self, chunk: ChunkT, instr: Instr) -> None:
        """Wait for the keys and values of the next step that needs others' tokens."""
        chunk.received_kv = (chunk.kv_exchange or chunk.open_kv()).wait()

    def wait_return(self, chunk: ChunkT, instr: Instr) -> None:
        """Wait until the chunk's results are with their tokens, and drop what was sent."""
        chunk.pending.wait()
        chunk.pending = DONE


KV_HANDLERS: Mapping[Op, Handler] = MappingProxyType(
    {
        Op.KV_POST: Pass.post_kv,
        Op.KV_WAIT: Pass.wait_kv,
        Op.RETURN_WAIT: Pass.wait_return,
        Op.LSE_WAIT: Pass.wait_return,
    }
)


class ForwardChunk(ChunkState):
    """State of a chunk forward; ``result``: the output ``[b, S, h, e]`` and the log-sum-exp
    ``[b, h, S]``, when all kernel calls are done."""

    q: torch.Tensor
    accumulator: OutputAccumulator
    result: tuple[torch.Tensor, torch.Tensor]


class ForwardPass(Pass[ForwardChunk]):
    """The forward pass.

    Args:
        qkv: q ``[b, s, h, d]``, k ``[b, t, g, d]``, v ``[b, t, g, e]``.
        save: keep in :attr:`saved` what backward needs.

    Attributes:
        out: ``[b, s, h, e]``.
        lse: ``[b, h, s]`` if the plan returns it.
        saved: of each chunk, in order, for :meth:`AttentionPlan.pack_saved`.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        sinks: torch.Tensor | None,
        qkv: Sequence[torch.Tensor],
        *,
        save: bool,
    ) -> None:
        q, _, v = qkv
        chunks = list(map(partial(ForwardChunk, plan), range(len(plan.chunks))))
        super().__init__(plan, sinks, chunks, q.device, plan.forward_exposed)
        self._qkv, self._save = qkv, save
        self._group_kv: KV = NO_KV  # of the last chunk that has exchanged any
        self.saved: list[SavedChunk] = []
        self.lse: torch.Tensor | None = None
        if not plan.single_shot:  # else store() takes the kernel's tensors
            self.out = q.new_empty(*q.shape[:3], v.shape[3])
            if plan.return_lse:
                dtype = torch.promote_types(q.dtype, torch.float32)
                self._lse_out = q.new_empty(*q.shape[:3], 1, dtype=dtype)
                self.lse = self._lse_out.squeeze(-1).transpose(1, 2)

    def post_heads(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Start the all-to-all of q, and of k and v unless an earlier chunk has brought them."""
        exchange = chunk.exchanges.qkv
        overlapped = instr not in self._exposed
        tensors = self._qkv if chunk.exchanges.has_kv else self._qkv[:1]
        chunk.pending = exchange.post_to_heads(tensors, overlapped=overlapped)

    def wait_heads(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Wait for all tokens of the chunk's heads: ``q [b, S, h, d]``, and likewise k and v."""
        self._take_heads(chunk, chunk.pending.wait())
        chunk.pending = DONE

    def _take_heads(self, chunk: ForwardChunk, tensors: Sequence[torch.Tensor]) -> None:
        chunk.q, *kv = tensors
        if kv:
            self._group_kv = kv[0], kv[1]
        chunk.local_kv = self._group_kv
        chunk.accumulator = OutputAccumulator(chunk.q, chunk.local_kv[1].shape[3])

    def slice_heads(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Take the chunk's heads where there is one Ulysses rank: nothing is sent."""
        if self.plan.single_shot:
            self._take_heads(chunk, self._qkv)
            return
        self.post_heads(chunk, instr)
        self.wait_heads(chunk, instr)

    def attend(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Call the kernel for one tile of a ring step, and merge its output by log-sum-exp."""
        step = instr.number
        if chunk.step != step:
            self.begin_step(chunk, step)
        call = chunk.steps[step].calls[instr.call]
        out, lse = chunk.ring.kernel.forward((chunk.q, *chunk.kv), call, scale=chunk.ring.scale)
        chunk.accumulator.add(out, lse, (call.q_start, call.q_stop))

    def end(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Finish the chunk's output after its last kernel call; keep what backward needs."""
        k, v = chunk.local_kv
        chunk.free_kv()
        result = chunk.accumulator.result()
        if self.sinks is not None:
            result = apply_sinks(*result, self.sinks[chunk.exchanges.q_heads])
        if chunk.index + 1 == len(self.plan.chunks) or self.plan.chunks[chunk.index + 1].has_kv:
            self._group_kv = NO_KV  # no later chunk of the KV group
        if self._save:
            self.saved.append(SavedChunk(chunk.q, k, v, *result))
        chunk.result = result
        del chunk.q, chunk.accumulator

    def post_return(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Start the all-to-all that brings the output back to its tokens."""
        sources = chunk.result[:1]
        overlapped = instr not in self._exposed
        chunk.pending = chunk.exchanges.out.post_to_sequence(
            sources, (self.out,), overlapped=overlapped
        )
        if not self.plan.return_lse:  # else post_lse() follows
            del chunk.result

    def post_lse(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Start the all-to-all that brings the log-sum-exp back to its tokens."""
        _out, lse = chunk.result
        lse = lse.transpose(1, 2).unsqueeze(-1)
        chunk.pending = chunk.exchanges.out.post_to_sequence((lse,), (self._lse_out,))
        del chunk.result

    def store(self, chunk: ForwardChunk, instr: Instr) -> None:
        """Write the chunk's output and log-sum-exp to the results, with one Ulysses rank."""
        out, lse = chunk.result
        del chunk.result
        if self.plan.single_shot:
            self.out, self.lse = out, lse if self.plan.return_lse else None
            return
        chunk.exchanges.out.to_sequence((out,), (self.out,))
        if self.plan.return_lse:
            lse = lse.transpose(1, 2).unsqueeze(-1)
            chunk.exchanges.out.to_sequence((lse,), (self._lse_out,))

    handlers = dict(KV_HANDLERS) | {
        Op.A2A_POST: post_heads,
        Op.A2A_WAIT: wait_heads,
        Op.SLICE_HEADS: slice_heads,
        Op.ATTN: attend,
        Op.END: end,
        Op.RETURN_POST: post_return,
        Op.LSE_POST: post_lse,
        Op.STORE: store,
    }


class BackwardChunk(ChunkState):
    """State of a chunk backward."""

    saved: SavedChunk
    dout: torch.Tensor  # [b, S, h, e], of the chunk's heads
    dq: GradAccumulator
    dkv: KVGrads  # of the local KV, which chunks of a KV group share
    step_grads: tuple[GradAccumulator, ...] = ()  # dq, dk and dv of the ring step
    staging: PreallocatedSend | None = None  # of the return, if a kernel writes its gradients there
    grad_exchange: KVGradExchange | None = None

    def open_grads(self) -> KVGradExchange:
        """Open the exchange of the gradients of keys and values, before its first use."""
        k, v = self.saved.k, self.saved.v
        dtype = self.ring.kernel.caps.grad_dtype(k.dtype)
        channel = self.open_channel("ring_dkv")
        self.grad_exchange = KVGradExchange(channel, self.transfers, dtype, k, v, self.dkv)
        return self.grad_exchange


class BackwardPass(Pass[BackwardChunk]):
    """The backward pass.

    Args:
        dout: ``[b, s, h, e]``.
        shapes: of q, k and v, before the head exchange.
        saved: from :meth:`AttentionPlan.pack_saved`: shards if ``plan.saves_shards``, or chunks.

    Attributes:
        grads: ``dq [b, s, h, d]``, ``dk [b, t, g, d]``, ``dv [b, t, g, e]``.
        dsinks: this rank's summand of the gradient of sinks ``[h]``, where they require one.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        sinks: torch.Tensor | None,
        dout: torch.Tensor,
        shapes: Sequence[torch.Size],
        saved: Sequence[torch.Tensor],
    ) -> None:
        indices = range(len(plan.chunks))
        chunks = list(map(partial(BackwardChunk, plan, backward=True), indices))
        if plan.saves_shards:
            q, k, v, self._out, *self._lse = saved
            self._shards = q, k, v
        else:
            for chunk, saved_chunk in zip(chunks, plan.unpack_saved(saved), strict=True):
                chunk.saved, chunk.local_kv = saved_chunk, (saved_chunk.k, saved_chunk.v)
        super().__init__(plan, sinks, chunks, dout.device, plan.backward_exposed)
        self._dout, self._shapes = dout, shapes
        self._grads: Grads | None = None
        self._group_kv: KV = NO_KV  # of the last chunk that has exchanged any
        self._dkv: dict[int, KVGrads] = {}  # that chunks of one KV group share
        trained = sinks is not None and sinks.requires_grad
        self.dsinks = torch.zeros_like(sinks) if trained and sinks is not None else None

    @property
    def grads(self) -> Grads:
        """The gradients of q, k and v; they are allocated when the first chunk's are returned."""
        if self._grads is None:
            dq, dk, dv = (self._dout.new_empty(shape) for shape in self._shapes)
            self._grads = dq, dk, dv
        return self._grads

    def post_heads(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Start the all-to-all of dout, and of q, k, v and the output if shards were saved."""
        overlapped = instr not in self._exposed
        exchange, tensors = chunk.exchanges.out, [self._dout]
        if self.plan.saves_shards:
            exchange = chunk.exchanges.shards  # of q or of q, k and v; of out and dout
            qkv = self._shards[: len(exchange.ranges) - 2]
            tensors = [*qkv, self._out, self._dout]
        chunk.pending = exchange.post_to_heads(tensors, overlapped=overlapped)

    def wait_heads(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Wait for all tokens of the chunk's heads, and begin the sums of their gradients."""
        self._take_heads(chunk, chunk.pending.wait())
        chunk.pending = DONE

    def _take_heads(self, chunk: BackwardChunk, tensors: Sequence[torch.Tensor]) -> None:
        # `tensors`, with all tokens of the chunk's heads: of shards q, out and dout, and k and v
        # after q with a KV group's last chunk, which comes first here. Without saves_shards dout
        # alone: __init__ has set `saved` and `local_kv`. Gradients are summed in fp32 or better
        # (GradAccumulator), and return in the dtype of q, k and v. One more saved tensor passes
        # through all that makes or takes apart `saved` or `shards`: here, in plan.py, functional.py
        # and custom_ops.py (with what is said at its OpResults), through the ranges of
        # plan_head_exchanges, and the planner's formulas count it.
        *shards, chunk.dout = tensors
        if shards:
            q, *kv, out = shards
            if kv:
                self._group_kv = kv[0], kv[1]
            chunk.local_kv = self._group_kv
            chunk.saved = SavedChunk(q, *self._group_kv, out, self._lse[chunk.index])
        q, k, v, _out, _lse = chunk.saved
        chunk.dq = GradAccumulator(q)
        group = chunk.exchanges.kv_chunk
        if group not in self._dkv:
            self._dkv[group] = GradAccumulator(k), GradAccumulator(v)
        chunk.dkv = self._dkv[group]

    def slice_heads(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Take the chunk's heads where there is one Ulysses rank: nothing is sent."""
        if self.plan.single_shot:
            # With one Ulysses rank shards are saved in every plan.
            self._take_heads(chunk, (*self._shards, self._out, self._dout))
            return
        self.post_heads(chunk, instr)
        self.wait_heads(chunk, instr)

    def stage_return(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Allocate the send buffer of the return, which a kernel writes its gradients into."""
        chunk.staging = chunk.exchanges.qkv.preallocate_send(self._dout, self._shapes)

    def begin_step(self, chunk: BackwardChunk, index: int) -> None:
        """Select the keys and values of a ring step, and where its gradients are summed."""
        super().begin_step(chunk, index)
        step = chunk.steps[index]
        if step.is_local:
            chunk.step_grads = chunk.dq, *chunk.dkv
        else:
            k, v = chunk.kv
            chunk.step_grads = chunk.dq, GradAccumulator(k), GradAccumulator(v)

    def attend(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Call the kernel for one tile of a ring step, and add its dq, dk and dv to the sums."""
        step = instr.number
        if chunk.step != step:
            self.begin_step(chunk, step)
        call = chunk.steps[step].calls[instr.call]
        q, _, _, out, lse = chunk.saved
        grads = chunk.ring.kernel.backward(
            BackwardInputs(chunk.dout, q, *chunk.kv, out, lse),
            call,
            scale=chunk.ring.scale,
            grad_buffers=None if instr.call else self._grad_buffers(chunk),  # a step's first call
        )
        keys = [(call.k_start, call.k_stop)]
        dq, dk, dv = chunk.step_grads
        dq.add(grads[0], [(call.q_start, call.q_stop)])
        dk.add(grads[1], keys)
        dv.add(grads[2], keys)

    def _grad_buffers(self, chunk: BackwardChunk) -> GradBuffers | None:
        """Return the buffers for a step's first kernel call: what :meth:`post_dkv` sends, acquired
        here, if that has all KV tokens of the step. None, or None for dq: the kernel allocates."""
        # A copy engine's next slot depends on the posts before it alone (CopyEngine.acquire_slot),
        # and ring_dkv has none between a step's first call and its post_dkv: whether a rank takes
        # the slot here or there, all have the same. Gradients that lie in it are not copied: the
        # accumulator's write() knows the send buffer's memory, and adds those of later calls to it.
        step = chunk.steps[chunk.step]
        if step.is_local:
            if chunk.staging is None:
                return None
            dq, dk, dv = chunk.staging.views
            return dq, dk, dv
        if not chunk.ring.writes_block_in_place(step):
            return None
        number = [x.step for x in chunk.transfers].index(chunk.step)  # the exchange of this step
        exchange = chunk.grad_exchange or chunk.open_grads()
        return None, *exchange.staging_views(number)

    def post_dkv(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Start the return of a step's dk and dv to the ranks that own the keys and values."""
        # Every rank posts every exchange, also where the mask leaves this one no kernel call: its
        # partners wait for the message, which has zeros then.
        step = chunk.transfers[instr.number].step
        if chunk.step != step:  # this rank has no kernel calls in it
            self.begin_step(chunk, step)
        _dq, dk, dv = chunk.step_grads
        exchange = chunk.grad_exchange or chunk.open_grads()
        exchange.post(instr.number, (dk, dv), overlapped=instr not in self._exposed)
        chunk.step_grads = ()

    def wait_dkv(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Wait for others' dk and dv of this rank's tokens, and add them to its own."""
        (chunk.grad_exchange or chunk.open_grads()).wait()  # open: the post came before

    def end(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Free what the chunk's kernel calls have read; compute the gradient of its sinks."""
        if self.sinks is not None and self.dsinks is not None:
            (_q, _k, _v, out, lse), heads = chunk.saved, chunk.exchanges.q_heads
            self.dsinks[heads] = sink_gradient(chunk.dout, out, lse, self.sinks[heads])
        chunk.free_kv()
        if chunk.exchanges.has_kv:  # the first chunk of its KV group, which comes last here
            self._group_kv = NO_KV
        chunk.step_grads = ()
        del chunk.dout, chunk.saved

    def _take_grads(self, chunk: BackwardChunk) -> tuple[GradAccumulator, ...]:
        """Return dq, dk and dv of a chunk, and keep them no longer. dk and dv are complete with the
        first chunk of the KV group, which comes last and has ``has_kv``."""
        if chunk.exchanges.has_kv:
            del self._dkv[chunk.index]
        dkv = chunk.dkv
        del chunk.dkv
        return chunk.dq, *dkv

    def post_return(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Start the all-to-all that brings dq, dk and dv back to their tokens."""
        exchange, sources = chunk.exchanges.qkv, self._take_grads(chunk)
        count = len(exchange.ranges)  # without dk and dv, if the group has more chunks
        overlapped = instr not in self._exposed
        chunk.pending = exchange.post_to_sequence(
            sources[:count], self.grads[:count], chunk.staging, overlapped=overlapped
        )
        chunk.grad_exchange = chunk.staging = None
        del chunk.dq

    def store(self, chunk: BackwardChunk, instr: Instr) -> None:
        """Write the chunk's dq, dk and dv to the results, with one Ulysses rank."""
        sources = self._take_grads(chunk)
        if self.plan.single_shot:
            dq, dk, dv = sources
            self._grads = dq.result(), dk.result(), dv.result()
        else:
            chunk.exchanges.qkv.to_sequence(sources, self.grads)  # each chunk has whole KV groups
        chunk.grad_exchange = None
        del chunk.dq

    handlers = dict(KV_HANDLERS) | {
        Op.A2A_POST: post_heads,
        Op.A2A_WAIT: wait_heads,
        Op.SLICE_HEADS: slice_heads,
        Op.RETURN_STAGE: stage_return,
        Op.ATTN: attend,
        Op.DKV_POST: post_dkv,
        Op.DKV_WAIT: wait_dkv,
        Op.END: end,
        Op.RETURN_POST: post_return,
        Op.STORE: store,
    }
