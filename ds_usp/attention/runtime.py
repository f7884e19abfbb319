"""Executes the schedule of an attention call: one loop over instructions, forward and backward.

What is posted, computed and waited for in which order is decided in
``ds_usp.geometry.pipeline_schedule``; each instruction is one method of a pass. Kernels and packing
run on the current stream; copy engines or NCCL run beside it. No layout, mask or kernel library is
known by name.

Letters of the shapes here and in the two passes: b batch, s tokens of this rank, S tokens of its
ring rank, h query heads, g key/value heads, of all ranks (in the arguments) or of one chunk on one
rank; d head dim, e that of values and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

import torch

from ds_usp.attention.kv_exchange import KV, KVExchange, pack_kv
from ds_usp.attention.plan import AttentionPlan
from ds_usp.attention.score_mod import ChunkScoreMod, Scores
from ds_usp.comm.channel import Channel, PendingExchange
from ds_usp.geometry.pipeline_schedule import Op, Operation, Schedule
from ds_usp.kernels.api import AttentionKernel
from ds_usp.kernels.score_mod import PLAIN

Handler = Callable[[Any, Any, int, int], None]
NO_KV: KV = (torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0, 0))
DONE = PendingExchange(tuple)


class ChunkState:
    """State of one head chunk in a pass.

    Attributes:
        exchange: its all-to-all in flight, later its return.
        channels: of its ring exchanges, which may be in flight.
        step: number of the ring step that is computed.
        kernel: with the score modifiers of that step.
        kv: keys and values of that step.
        local_kv, received_kv, relayed_kv: this rank's, those of other ranks, those that it relays
            in an outer step.
        packed, relayed: what other ranks receive: of the local KV, and in the outer step.
        kv_exchange, outer_kv_exchange: None until the first is posted, and at the end.
    """

    def __init__(self, plan: AttentionPlan, index: int, *, backward: bool = False) -> None:
        ring, self.index = plan.ring_calls[index], index
        self.exchanges, self.ring = plan.chunks[index], ring
        self.steps = ring.schedule.backward_steps if backward else ring.schedule.steps
        self.transfers = ring.backward_transfers if backward else ring.forward_transfers
        self.kernel: AttentionKernel = ring.kernel
        self.channels: list[Channel] = []

    exchange: PendingExchange = DONE
    step: int = -1
    score_mod: ChunkScoreMod | None = None
    kv: KV = NO_KV
    local_kv: KV = NO_KV
    received_kv: KV = NO_KV
    relayed_kv: KV = NO_KV
    packed: torch.Tensor = NO_KV[0]
    relayed: torch.Tensor = NO_KV[0]
    kv_exchange: KVExchange | None = None
    outer_kv_exchange: KVExchange | None = None

    def free_kv(self) -> None:
        """Drop keys and values, the receive buffers, and the score modifiers' positions."""
        self.kernel = self.ring.kernel
        self.kv_exchange = self.outer_kv_exchange = None
        self.kv = self.local_kv = self.received_kv = self.relayed_kv = NO_KV
        self.packed = self.relayed = NO_KV[0]

    def open_kv(self) -> KVExchange:
        """Pack the local keys and values, and allocate receive buffers, once."""
        if self.kv_exchange is None:
            ring, (k, v) = self.ring, self.local_kv
            channel = self.open_channel("ring_kv")
            self.kv_exchange = KVExchange(channel, self.transfers, k, v)
            self.packed = self.relayed = pack_kv(channel, k, v, ring.schedule.packed_runs)
        return self.kv_exchange

    def open_outer_kv(self) -> KVExchange:
        """The same for the exchanges across nodes."""
        if self.outer_kv_exchange is None:
            self.open_kv()
            channel, transfers = self.open_channel("ring_kv_outer"), self.ring.outer_transfers
            self.outer_kv_exchange = KVExchange(channel, transfers, *self.local_kv)
        return self.outer_kv_exchange

    def open_channel(self, kind: str) -> Channel:
        """A channel for one kind of ring exchange."""
        channel = self.ring.mesh.channel(kind, self.ring.use_copy_engines)
        self.channels.append(channel)
        return channel


ChunkT = TypeVar("ChunkT", bound=ChunkState)


class Pass(Generic[ChunkT]):
    """What both passes have in common: the loop, and the exchanges of keys and values.

    Methods of instructions take the chunk's state and the two numbers of the instruction.

    Args:
        chunks: their states.
        like: a tensor of the call, for batch and device.
        exposed: posts that overlap nothing.
    """

    handlers: ClassVar[Mapping[Operation, Handler]]

    def __init__(
        self,
        plan: AttentionPlan,
        scores: Scores,
        chunks: Sequence[ChunkT],
        like: torch.Tensor,
        exposed: AbstractSet[tuple[Operation, int, int, int]],
    ) -> None:
        # Before any allocation: one that fails leaves an aborted pass, which other ranks hear of.
        if plan.needs_resources:
            plan.reserve_resources(like.device)
        self.plan, self.scores, self._like = plan, scores, like
        self._chunks, self._binds_scores = chunks, plan.score_mod != PLAIN
        self.exposed = exposed

    def execute(self, schedule: Schedule) -> None:
        """Execute the schedule of this pass. After an error all in flight is waited for, or the
        next call would receive it."""
        handlers, chunks = self.handlers, self._chunks
        try:
            for op, chunk, number, call in schedule:
                handlers[op](self, chunks[chunk], number, call)
        except BaseException:
            with ExitStack() as stack:  # all of it, whatever fails
                for state in chunks:
                    stack.callback(state.exchange.drain)
                    for channel in state.channels:
                        stack.callback(channel.drain)
            raise
        if self.plan.needs_resources:
            self.plan.mark_pass_done()

    def begin_step(self, chunk: ChunkT, index: int) -> None:
        """Before the first kernel call of a ring step: its keys and values, and its kernel."""
        step, chunk.step = chunk.steps[index], index
        if not step.is_local:
            chunk.kv = chunk.received_kv
        else:
            chunk.kv = chunk.relayed_kv if step.outer_step else chunk.local_kv
        if self._binds_scores:
            chunk.kernel = self.score_mod_of(chunk).bind(chunk.ring.kernel, step)

    def score_mod_of(self, chunk: ChunkT) -> ChunkScoreMod:
        """The chunk's score modifiers."""
        if chunk.score_mod is None:
            scores = self.scores
            chunk.score_mod = self.plan.score_mod_for_chunk(chunk.index, scores, self._like)
        return chunk.score_mod

    def post_kv(self, chunk: ChunkT, number: int, _: int) -> None:
        """Post a KV exchange of the ring."""
        overlapped = (Op.KV_POST, chunk.index, number, 0) not in self.exposed
        chunk.open_kv().post(number, chunk.relayed, overlapped=overlapped)

    def wait_kv(self, chunk: ChunkT, number: int, _: int) -> None:
        """Wait for it."""
        _block, chunk.received_kv = chunk.open_kv().wait(number)

    def post_outer_kv(self, chunk: ChunkT, number: int, _: int) -> None:
        """Post a KV exchange across nodes."""
        chunk.open_outer_kv().post(number, chunk.packed, overlapped=True)

    def wait_outer_kv(self, chunk: ChunkT, number: int, _: int) -> None:
        """Wait for it; the block is relayed in the next outer step."""
        chunk.relayed, chunk.relayed_kv = chunk.open_outer_kv().wait(number)

    def wait_return(self, chunk: ChunkT, _: int, __: int) -> None:
        """Wait for the return of a chunk."""
        chunk.exchange.wait()
        chunk.exchange = DONE


KV_HANDLERS: Mapping[Operation, Handler] = MappingProxyType(
    {
        Op.KV_POST: Pass.post_kv,
        Op.KV_WAIT: Pass.wait_kv,
        Op.OUTER_KV_POST: Pass.post_outer_kv,
        Op.OUTER_KV_WAIT: Pass.wait_outer_kv,
        Op.RETURN_WAIT: Pass.wait_return,
        Op.LSE_WAIT: Pass.wait_return,
    }
)
