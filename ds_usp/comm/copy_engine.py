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

from ds_usp.comm.channel import Arrivals, Parcels, Room
from ds_usp.comm.cuda_driver import WordJob, WordJobs, capture_of, copy, copy_rows
from ds_usp.comm.ledger import CommLedger
from ds_usp.comm.streams import current_stream
from ds_usp.comm.symmetric_memory import SharedTensor, symmetric
from ds_usp.errors import MeshError

# (rank, its slot, bytes from the slot's start, tensor to fill, bytes from row to row there or 0 if
# all lies together).
Pulls = Sequence[tuple[int, int, int, torch.Tensor, int]]
_ALIGN = 512
_MOST_KNOWN = 256  # rooms and words of a slot: lengths and who takes what differ from call to call


def slots_of(kind: str, *, ring: bool) -> int:
    """Parts of the memory for one kind of traffic, so that no rank waits to fill one: what is being
    filled, and what still goes. Without a ring, heads come and go home in turns, and room for those
    that go home is asked for before they are computed.

    Args:
        ring: keys and values travel beside the heads.
    """
    return 3 if kind == "all_to_all" and not ring else 2


class _Words(NamedTuple):
    """Of an exchange: that this rank has packed, that others have, and that their rooms may be
    packed again."""

    packed: WordJobs
    come: WordJobs
    pulled: WordJobs


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
    free: WordJobs
    turn: int = 0
    told: bool = False
    ends: dict[int, torch.cuda.Event] = field(default_factory=dict)
    rooms: dict[tuple[Sequence[int], torch.dtype], Room] = field(default_factory=dict)
    words: dict[tuple[tuple[int, ...], ...], _Words] = field(default_factory=dict)


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
        self._rescue = torch.cuda.Stream(self._device, priority=-1)  # of none that may capture
        self._current: torch.cuda.Stream | None = None  # that packed last
        self._packed = torch.cuda.Event()
        # words[0, slot, r]: rank r has packed its slot for this rank; words[1, slot, r]: rank r
        # needs nothing more of this rank's.
        words = symmetric((2, slots, self._world), torch.int32, device, group)
        words[0], words[1] = 0, 1
        torch.cuda.synchronize(device)
        self._words = SharedTensor(words, group)
        dist.barrier(group)
        self.exchanges = 0
        self._memory: SharedTensor | None = None
        self._captured: list[SharedTensor] = []  # memory whose addresses stand in CUDA graphs
        self._count = slots
        self._begin(0)

    def _begin(self, size: int) -> None:
        """Nothing is under way, and nothing is packed.

        Args:
            size: bytes of a slot; 0: there is no memory.
        """
        each = range(self._count if size else 0)
        self._slots = [_Slot(slot, slot * size, self._all_free(slot)) for slot in each]
        self._next, self._posted = 0, False

    def _all_free(self, slot: int) -> WordJobs:
        others = [rank for rank in range(self._world) if rank != self.rank]
        return WordJobs([WordJob(self._free(self.rank, slot, each), 1, True) for each in others])

    def _ready(self, rank: int, slot: int, source: int) -> int:
        """Where it is said to a rank that another has packed a slot for it."""
        return self._words.address(rank, slot * self._world + source)

    def _free(self, rank: int, slot: int, user: int) -> int:
        """Where it is said to a rank that another needs nothing more of a slot."""
        return self._words.address(rank, (self._count + slot) * self._world + user)

    def let_go(self) -> bool:
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
        with torch.cuda.stream(self._rescue):
            self._words.own.fill_(1)
        return True

    @property
    def reserved_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return sum([each.own.numel() for each in {self._memory, *self._captured} if each])

    @property
    def captured(self) -> bool:
        """A CUDA graph may hold exchanges of it."""
        return bool(self._captured)

    def has_room(self, size: int) -> bool:
        """Whether exchanges of up to ``size`` bytes a rank fit."""
        size = -(-size // _ALIGN) * _ALIGN
        return self._memory is not None and size * self._count <= self._memory.own.numel()

    def reserve(self, size: int) -> None:
        """Make room for exchanges of up to ``size`` bytes a rank. Collective, rarely: it waits for
        all that is under way."""
        if self.has_room(size):
            return
        size = -(-size // _ALIGN) * _ALIGN
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)
        self._memory = None
        self._begin(0)  # with all views of it
        own = symmetric((size * self._count,), torch.uint8, self._device, self._group)
        self._memory = SharedTensor(own, self._group)
        self._begin(size)
        dist.barrier(self._group)

    def pack(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Room, _Slot]:
        """Room in symmetric memory; the current stream waits until nobody needs what was there
        before."""
        if self._memory is None:
            raise MeshError("the copy engine was asked for room before any was reserved")
        if self._posted:  # else what was packed last was never told of: an error came between
            self._next, self._posted = (self._next + 1) % self._count, False
        slot, stream = self._slots[self._next], current_stream(self._device)
        self._current, graph = stream, capture_of(stream)
        if graph and self._memory not in self._captured:
            self._captured.append(self._memory)
        # Words of the last exchange have been put back then. Between a graph and what comes before
        # and after its launch the order of the stream says so; no event could be waited for.
        if (end := slot.ends.get(graph)) is not None:
            stream.wait_event(end)
        slot.free.enqueue(stream.cuda_stream)
        slot.turn, slot.told = slot.turn + 1, False
        key = tuple(shape), dtype
        room = slot.rooms.get(key)
        if room is None:
            size = torch.Size(shape).numel() * dtype.itemsize
            most = self._memory.own.numel() // self._count
            if size > most:
                raise MeshError(f"{size} bytes to pack, but only {most} were reserved")
            if len(slot.rooms) >= _MOST_KNOWN:
                slot.rooms.clear()
            with torch.inference_mode(False):  # else no later pass with gradients could write it
                flat = self._memory.own[slot.start : slot.start + size]
                room = slot.rooms[key] = Room(flat.view(dtype).view(*shape))
        return room, slot

    def start(
        self,
        slot: _Slot,
        users: Sequence[int],
        arriving: Pulls,
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
        self._packed.record(current)
        stream.wait_event(self._packed)
        sources = [each for each in dict.fromkeys([rank for rank, *_ in arriving]) if each != mine]
        own = [pull for pull in arriving if pull[0] == mine]
        words = self._words_of(slot, users, sources, apart=bool(own))
        raw = stream.cuda_stream
        words.packed.enqueue(raw)
        if own:  # there already: copied while the others pack
            self._pull_all(raw, own)
            words.come.enqueue(raw)
        self._pull_all(raw, [pull for pull in arriving if pull[0] != mine])
        graph = capture_of(current)
        if graph:  # all that it has given a stream must come to an end that it waits for
            words.pulled.enqueue(raw)
        end = stream.record_event()
        if not graph:
            words.pulled.enqueue(raw)
        slot.told = self._posted = True
        if graph and graph not in slot.ends:  # another graph's capture is over
            slot.ends = {each: slot.ends[each] for each in slot.ends if not each}
        slot.ends[graph] = end
        self.exchanges += 1
        return end

    def _words_of(
        self, slot: _Slot, users: Sequence[int], sources: Sequence[int], *, apart: bool
    ) -> _Words:
        """The words of an exchange. What is packed once may be told of again; who was told of it
        before must have pulled it.

        Args:
            apart: something is done before others' are waited for.
        """
        key = tuple(users), tuple(sources), (slot.told, apart)
        found = slot.words.get(key)
        if found is None:
            if len(slot.words) >= _MOST_KNOWN:
                slot.words.clear()
            mine, index = self.rank, slot.index
            free = [self._free(mine, index, user) for user in users]
            ready = [self._ready(mine, index, source) for source in sources]
            packed = [WordJob(word, 1, waits=True) for word in free if slot.told]
            packed += [WordJob(word, 0) for word in free]
            packed += [WordJob(self._ready(user, index, mine), 1) for user in users]
            come = [WordJob(word, 1, waits=True) for word in ready]
            come += [WordJob(word, 0) for word in ready]
            if not apart:
                packed, come = packed + come, []
            pulled = [WordJob(self._free(source, index, mine), 1) for source in sources]
            found = slot.words[key] = _Words(WordJobs(packed), WordJobs(come), WordJobs(pulled))
        return found

    def wait_for(self, end: torch.cuda.Event) -> None:
        """Let the current stream wait for an exchange."""
        current_stream(self._device).wait_event(end)

    def _pull_all(self, stream: int, pulls: Pulls) -> None:
        for source, index, offset, place, pitch in pulls:
            self._pull(stream, source, self._slots[index].start + offset, place, pitch)

    def _pull(self, stream: int, source: int, start: int, place: torch.Tensor, pitch: int) -> None:
        if self._memory is None:
            raise MeshError("the copy engine was asked for data before any room was reserved")
        size, theirs = place.element_size(), self._memory.address(source, start)
        if not pitch:
            copy(stream, place.data_ptr(), theirs, place.numel() * size)
            return
        rows, batch, heads, dim = place.shape
        next_row, next_sample = place.stride()[:2]
        for sample in range(batch):
            copy_rows(
                stream,
                place.data_ptr() + sample * next_sample * size,
                next_row * size,
                theirs + sample * (pitch // batch),
                pitch,
                heads * dim * size,
                rows,
            )


class CopyChannel:
    """What :class:`ds_usp.comm.channel.RingChannel` does, by copy engines.

    Args:
        engine: of the group.
        ledger: where bytes are counted.
        kind: under which name.
    """

    def __init__(self, engine: CopyEngine, ledger: CommLedger, kind: str) -> None:
        self._engine, self._ledger, self._kind = engine, ledger, kind
        self._slot: _Slot | None = None
        self._turn = 0
        self._done: torch.cuda.Event | None = None
        self._places: Arrivals = ()
        self.busy = False

    def room(self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype) -> Room:
        """See :meth:`ds_usp.comm.channel.RingChannel.room`."""
        packed, self._slot = self._engine.pack(shape, dtype)
        self._turn = self._slot.turn
        return packed

    def post(self, packed: torch.Tensor, leaving: Parcels, arriving: Arrivals) -> None:
        """See :meth:`ds_usp.comm.channel.RingChannel.post`."""
        if self.busy or self._slot is None:
            why = "before the last one was taken" if self.busy else "without room"
            raise MeshError(f"a {self._kind} exchange was posted {why}")
        if self._turn != self._slot.turn:
            raise MeshError(f"the room of a {self._kind} exchange was given to a later one")
        index, mine = self._slot.index, self._engine.rank  # the same slot on every rank
        size = packed.element_size()
        pulls = [
            (source, index, at * size, place, pitch * size) for source, place, at, pitch in arriving
        ]
        if len(pulls) > 1:  # not all from the same rank at a time; those of one rank together
            pulls.sort(key=lambda pull: (pull[0] <= mine, pull[0]))
        self._places = arriving
        users = list(dict.fromkeys([to for to, _, _ in leaving]))
        self._done = self._engine.start(self._slot, users, pulls)
        self.busy = True
        if leaving:
            row = packed.stride(0) * size  # it is dense
            self._ledger.add(self._kind, sum(stop - start for _, start, stop in leaving) * row)

    def take(self) -> None:
        """See :meth:`ds_usp.comm.channel.RingChannel.take`."""
        if not self.busy:
            raise MeshError(f"no {self._kind} exchange was posted")
        if self._done is not None:
            self._engine.wait_for(self._done)
        self._done, self._places, self.busy = None, (), False

    def close(self) -> None:
        """See :meth:`ds_usp.comm.channel.RingChannel.close`."""
        if self.busy:
            self.take()
