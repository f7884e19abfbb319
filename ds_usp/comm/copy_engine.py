"""Exchange inside a host by the GPUs' copy engines: at the speed of the links, on no SM.

Each rank packs what it sends into symmetric memory and says so; whoever uses it pulls it over, and
says that it may be packed again. Both are words in the other's memory, 0 or 1, that a stream writes
and waits for (cuStreamBatchMemOp, as many as stand together at once: every call costs the host), so
no kernel spins while a rank is late. Words that were waited for are put back before they can be
said again, so an exchange has no number, and a CUDA graph that holds some can be launched again and
again. NVLink multicast is never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_usp.comm.channel import RecvSpecs, SendSlices, StagingBuffer
from ds_usp.comm.cuda_driver import FlagOp, FlagOpBatch, copy_2d_async, copy_async, graph_capture_id
from ds_usp.comm.ledger import CommLedger
from ds_usp.comm.streams import current_stream
from ds_usp.comm.symmetric_memory import PeerMappedTensor, alloc_symmetric
from ds_usp.errors import MeshError

# (rank, its slot, bytes from the slot's start, tensor to fill, bytes from row to row there or 0 if
# all lies together).
PullSpecs = Sequence[tuple[int, int, int, torch.Tensor, int]]
_ALIGN = 512
_MAX_CACHED = 256  # rooms and words of a slot: lengths and who takes what differ from call to call


def num_slots(kind: str, *, ring: bool) -> int:
    """Parts of the memory for one kind of traffic, so that no rank waits to fill one: what is being
    filled, and what still goes. Without a ring, heads come and go home in turns, and room for those
    that go home is asked for before they are computed.

    Args:
        ring: keys and values travel beside the heads.
    """
    return 3 if kind == "all_to_all" and not ring else 2


class _FlagBatches(NamedTuple):
    """Of an exchange: that this rank has packed, that others have, and that their rooms may be
    packed again."""

    publish: FlagOpBatch
    await_ready: FlagOpBatch
    set_free: FlagOpBatch


@dataclass
class _Slot:
    """A part of this rank's symmetric memory.

    Attributes:
        index, start: which, and where.
        free: nobody else needs what is there.
        turn: how often it was given away.
        told: somebody was told of what is there now.
        ends: of the last exchange of it among calls (0), and in the CUDA graph of this number.
        rooms, words: made before.
    """

    index: int
    start: int
    wait_free: FlagOpBatch
    generation: int = 0
    published: bool = False
    done_events: dict[int, torch.cuda.Event] = field(default_factory=dict)
    buffers: dict[tuple[Sequence[int], torch.dtype], StagingBuffer] = field(default_factory=dict)
    flag_batches: dict[tuple[tuple[int, ...], ...], _FlagBatches] = field(default_factory=dict)


class CopyEngine:
    """Symmetric memory over one group, with the words by which its ranks tell each other.

    All ranks of the group make the same exchanges in the same order, in the same slots.

    Args:
        group: the ranks; all GPUs of one host that reach each other's memory.
        device: this rank's GPU.
        slots: parts of the memory, filled in turns.

    Attributes:
        rank: this one in the group.
        exchanges: how many were begun; those of a CUDA graph count when it is captured.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slots: int) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._group, self._device = group, torch.device(device.type, index)
        self.rank, self._world = group.rank(), group.size()
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._abort_stream = torch.cuda.Stream(
            self._device, priority=-1
        )  # of none that may capture
        self._current: torch.cuda.Stream | None = None  # that packed last
        self._packed_event = torch.cuda.Event()
        # words[0, slot, r]: rank r has packed its slot for this rank; words[1, slot, r]: rank r
        # needs nothing more of this rank's.
        words = alloc_symmetric((2, slots, self._world), torch.int32, device, group)
        words[0], words[1] = 0, 1
        torch.cuda.synchronize(device)
        self._flags = PeerMappedTensor(words, group)
        dist.barrier(group)
        self.exchanges = 0
        self._memory: PeerMappedTensor | None = None
        self._captured: list[PeerMappedTensor] = []  # memory whose addresses stand in CUDA graphs
        self._num_slots = slots
        self._reset(0)

    def _reset(self, size: int) -> None:
        """Nothing is under way, and nothing is packed.

        Args:
            size: bytes of a slot; 0: there is no memory.
        """
        each = range(self._num_slots if size else 0)
        self._slots = [_Slot(slot, slot * size, self._wait_all_free(slot)) for slot in each]
        self._next, self._posted = 0, False

    def _wait_all_free(self, slot: int) -> FlagOpBatch:
        others = [rank for rank in range(self._world) if rank != self.rank]
        return FlagOpBatch(
            [FlagOp(self._free_flag(self.rank, slot, each), 1, True) for each in others]
        )

    def _ready_flag(self, rank: int, slot: int, source: int) -> int:
        """Where it is said to a rank that another has packed a slot for it."""
        return self._flags.address(rank, slot * self._world + source)

    def _free_flag(self, rank: int, slot: int, user: int) -> int:
        """Where it is said to a rank that another needs nothing more of a slot."""
        return self._flags.address(rank, (self._num_slots + slot) * self._world + user)

    def abort_waits(self) -> bool:
        """After an error, when nobody will write any more: end what this rank's streams wait for
        now. What they then read is worth nothing.

        Returns:
            Whether anything was still to be done.
        """
        streams = self._stream, self._current
        try:
            if all(stream is None or stream.query() for stream in streams):
                return False
        except RuntimeError:  # a graph captures it, and it cannot be asked
            pass
        with torch.cuda.stream(self._abort_stream):
            self._flags.local.fill_(1)
        return True

    @property
    def reserved_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return sum([each.local.numel() for each in {self._memory, *self._captured} if each])

    @property
    def captured(self) -> bool:
        """A CUDA graph may hold exchanges of it."""
        return bool(self._captured)

    def has_capacity(self, size: int) -> bool:
        """Whether exchanges of up to ``size`` bytes a rank fit."""
        size = -(-size // _ALIGN) * _ALIGN
        return self._memory is not None and size * self._num_slots <= self._memory.local.numel()

    def reserve(self, size: int) -> None:
        """Make room for exchanges of up to ``size`` bytes a rank. Collective, rarely: it waits for
        all that is under way."""
        if self.has_capacity(size):
            return
        size = -(-size // _ALIGN) * _ALIGN
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)
        self._memory = None
        self._reset(0)  # with all views of it
        own = alloc_symmetric((size * self._num_slots,), torch.uint8, self._device, self._group)
        self._memory = PeerMappedTensor(own, self._group)
        self._reset(size)
        dist.barrier(self._group)

    def acquire_slot(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[StagingBuffer, _Slot]:
        """Room in symmetric memory; the current stream waits until nobody needs what was there
        before."""
        if self._memory is None:
            raise MeshError("the copy engine was asked for room before any was reserved")
        if self._posted:  # else what was packed last was never told of: an error came between
            self._next, self._posted = (self._next + 1) % self._num_slots, False
        slot, stream = self._slots[self._next], current_stream(self._device)
        self._current, graph = stream, graph_capture_id(stream)
        if graph and self._memory not in self._captured:
            self._captured.append(self._memory)
        # Words of the last exchange have been put back then. Between a graph and what comes before
        # and after its launch the order of the stream says so; no event could be waited for.
        if (end := slot.done_events.get(graph)) is not None:
            stream.wait_event(end)
        slot.wait_free.enqueue(stream.cuda_stream)
        slot.generation, slot.published = slot.generation + 1, False
        key = tuple(shape), dtype
        room = slot.buffers.get(key)
        if room is None:
            size = torch.Size(shape).numel() * dtype.itemsize
            most = self._memory.local.numel() // self._num_slots
            if size > most:
                raise MeshError(f"{size} bytes to pack, but only {most} were reserved")
            if len(slot.buffers) >= _MAX_CACHED:
                slot.buffers.clear()
            with torch.inference_mode(False):  # else no later pass with gradients could write it
                flat = self._memory.local[slot.start : slot.start + size]
                room = slot.buffers[key] = StagingBuffer(flat.view(dtype).view(*shape))
        return room, slot

    def publish_and_pull(
        self,
        slot: _Slot,
        users: Sequence[int],
        arriving: PullSpecs,
    ) -> torch.cuda.Event:
        """Tell the users that their parts are packed, and pull one's own. What comes from this
        rank's own room is copied first, and nothing said.

        Args:
            slot: where this rank has packed.
            users: ranks that pull from it, each once: a word is said once in an exchange.
            arriving: what is pulled.

        Returns:
            When everything has come.
        """
        stream, current, mine = self._stream, current_stream(self._device), self.rank
        self._packed_event.record(current)
        stream.wait_event(self._packed_event)
        sources = [each for each in dict.fromkeys([rank for rank, *_ in arriving]) if each != mine]
        own = [pull for pull in arriving if pull[0] == mine]
        words = self._flag_batches_of(slot, users, sources, local_first=bool(own))
        raw = stream.cuda_stream
        words.publish.enqueue(raw)
        if own:  # there already: copied while the others pack
            self._pull_all(raw, own)
            words.await_ready.enqueue(raw)
        self._pull_all(raw, [pull for pull in arriving if pull[0] != mine])
        graph = graph_capture_id(current)
        if graph:  # all that it has given a stream must come to an end that it waits for
            words.set_free.enqueue(raw)
        end = stream.record_event()
        if not graph:
            words.set_free.enqueue(raw)
        slot.published = self._posted = True
        if graph and graph not in slot.done_events:  # another graph's capture is over
            slot.done_events = {
                each: slot.done_events[each] for each in slot.done_events if not each
            }
        slot.done_events[graph] = end
        self.exchanges += 1
        return end

    def _flag_batches_of(
        self, slot: _Slot, users: Sequence[int], sources: Sequence[int], *, local_first: bool
    ) -> _FlagBatches:
        """The words of an exchange. What is packed once may be told of again; who was told of it
        before must have pulled it.

        Args:
            apart: something is done before others' are waited for.
        """
        key = tuple(users), tuple(sources), (slot.published, local_first)
        found = slot.flag_batches.get(key)
        if found is None:
            if len(slot.flag_batches) >= _MAX_CACHED:
                slot.flag_batches.clear()
            mine, index = self.rank, slot.index
            free = [self._free_flag(mine, index, user) for user in users]
            ready = [self._ready_flag(mine, index, source) for source in sources]
            packed = [FlagOp(word, 1, is_wait=True) for word in free if slot.published]
            packed += [FlagOp(word, 0) for word in free]
            packed += [FlagOp(self._ready_flag(user, index, mine), 1) for user in users]
            come = [FlagOp(word, 1, is_wait=True) for word in ready]
            come += [FlagOp(word, 0) for word in ready]
            if not local_first:
                packed, come = packed + come, []
            pulled = [FlagOp(self._free_flag(source, index, mine), 1) for source in sources]
            found = slot.flag_batches[key] = _FlagBatches(
                FlagOpBatch(packed), FlagOpBatch(come), FlagOpBatch(pulled)
            )
        return found

    def wait_event_of(self, end: torch.cuda.Event) -> None:
        """Let the current stream wait for an exchange."""
        current_stream(self._device).wait_event(end)

    def _pull_all(self, stream: int, pulls: PullSpecs) -> None:
        for source, index, offset, place, pitch in pulls:
            self._pull(stream, source, self._slots[index].start + offset, place, pitch)

    def _pull(self, stream: int, source: int, start: int, place: torch.Tensor, pitch: int) -> None:
        if self._memory is None:
            raise MeshError("the copy engine was asked for data before any room was reserved")
        size, theirs = place.element_size(), self._memory.address(source, start)
        if not pitch:
            copy_async(stream, place.data_ptr(), theirs, place.numel() * size)
            return
        rows, batch, heads, dim = place.shape
        next_row, next_sample = place.stride()[:2]
        for sample in range(batch):
            copy_2d_async(
                stream,
                place.data_ptr() + sample * next_sample * size,
                next_row * size,
                theirs + sample * (pitch // batch),
                pitch,
                heads * dim * size,
                rows,
            )


class CopyEngineChannel:
    """What :class:`ds_usp.comm.channel.P2PChannel` does, by copy engines.

    Args:
        engine: of the group.
        ledger: where bytes are counted.
        kind: under which name.
    """

    def __init__(self, engine: CopyEngine, ledger: CommLedger, kind: str) -> None:
        self._engine, self._ledger, self._kind = engine, ledger, kind
        self._slot: _Slot | None = None
        self._generation = 0
        self._done: torch.cuda.Event | None = None
        self._places: RecvSpecs = ()
        self.in_flight = False

    def acquire_staging(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> StagingBuffer:
        """See :meth:`ds_usp.comm.channel.P2PChannel.acquire_staging`."""
        packed, self._slot = self._engine.acquire_slot(shape, dtype)
        self._generation = self._slot.generation
        return packed

    def post(self, packed: torch.Tensor, sends: SendSlices, arriving: RecvSpecs) -> None:
        """See :meth:`ds_usp.comm.channel.P2PChannel.post`."""
        if self.in_flight or self._slot is None:
            why = "before the last one was taken" if self.in_flight else "without room"
            raise MeshError(f"a {self._kind} exchange was posted {why}")
        if self._generation != self._slot.generation:
            raise MeshError(f"the room of a {self._kind} exchange was given to a later one")
        index, mine = self._slot.index, self._engine.rank  # the same slot on every rank
        size = packed.element_size()
        pulls = [
            (source, index, at * size, place, pitch * size) for source, place, at, pitch in arriving
        ]
        if len(pulls) > 1:  # not all from the same rank at a time; those of one rank together
            pulls.sort(key=lambda pull: (pull[0] <= mine, pull[0]))
        self._places = arriving
        users = list(dict.fromkeys([to for to, _, _ in sends]))
        self._done = self._engine.publish_and_pull(self._slot, users, pulls)
        self.in_flight = True
        if sends:
            row = packed.stride(0) * size  # it is dense
            self._ledger.add(self._kind, sum(stop - start for _, start, stop in sends) * row)

    def wait(self) -> None:
        """See :meth:`ds_usp.comm.channel.P2PChannel.wait`."""
        if not self.in_flight:
            raise MeshError(f"no {self._kind} exchange was posted")
        if self._done is not None:
            self._engine.wait_event_of(self._done)
        self._done, self._places, self.in_flight = None, (), False

    def drain(self) -> None:
        """See :meth:`ds_usp.comm.channel.P2PChannel.drain`."""
        if self.in_flight:
            self.wait()
