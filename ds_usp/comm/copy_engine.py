"""Exchange inside a host by the GPUs' copy engines: at the speed of the links, on no SM.

Each rank packs what it sends into symmetric memory and says so; whoever uses it pulls it over, and
says so when the next exchange begins. Both are words in the other's memory that a stream writes and
waits for (cuStreamBatchMemOp, all of an exchange at once: every call costs the host), so no kernel
spins while a rank is late. NVLink multicast is never used.

The memory is torch's (torch.distributed._symmetric_memory).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ds_usp.comm.driver import copy, copy_rows, driver, tell
from ds_usp.comm.ledger import CommLedger
from ds_usp.comm.ring import Arrivals, Parcels, Room
from ds_usp.comm.streams import current_stream
from ds_usp.errors import MeshError

# (rank, its slot, bytes from the slot's start, tensor to fill, bytes from row to row there or 0 if
# all lies together).
Pulls = Sequence[tuple[int, int, int, torch.Tensor, int]]
_ALIGN = 512
_MOST_ROOMS = 256


def slots_of(kind: str, *, ring: bool) -> int:
    """Parts of the memory for one kind of traffic, so that no rank waits to fill one: what is being
    filled, what still goes, and what has gone but nobody has said so yet. Keys and values of two
    parts of the heads are told of in turns. Without a ring, heads come and go home in turns, and
    room for those that go home is asked for before they are computed.

    Args:
        ring: keys and values travel beside the heads.
    """
    return 4 if kind == "all_to_all" and not ring else 3


@dataclass
class _Slot:
    """A part of this rank's symmetric memory: which, where, the last exchange of what is packed
    there, how often it was given away, and what was made of it before."""

    index: int
    start: int
    last: int = 0
    turn: int = 0
    rooms: dict[tuple[Sequence[int], torch.dtype], Room] = field(default_factory=dict)


class CopyEngine:
    """Symmetric memory over one group, with the words by which its ranks tell each other.

    All ranks of the group make the same exchanges in the same order.

    Args:
        group: the ranks; all GPUs of one host that reach each other's memory.
        device: this rank's GPU.
        slots: parts of the memory, filled in turns. Before one is filled again there must have
            been an exchange after its last one.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slots: int) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._group, self._device = group, torch.device(device.type, index)
        self.rank, self._world = group.rank(), group.size()
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        # words[0, r]: the last exchange for which rank r has packed; words[1, r]: the last one
        # that it has pulled.
        words = _symmetric((2, self._world), torch.int32, device, group)
        words.zero_()
        torch.cuda.synchronize(device)
        self._words = _Shared(words, group)
        dist.barrier(group)
        self._memory: _Shared | None = None
        self._exchange = 0
        self._count = slots
        self._begin([])

    def _begin(self, slots: list[_Slot]) -> None:
        """Nothing is under way, and nothing is packed."""
        self._slots = slots
        self._next, self._posted = 0, False
        # Exchanges and their ends. When one has ended, all have pulled what was told of before it.
        self._ends: deque[tuple[int, torch.cuda.Event]] = deque()
        self._users: Sequence[int] = ()
        self._sources: Sequence[int] = ()

    def let_go(self) -> None:
        """End every wait of this rank's streams: after an error, when nobody will write any more.
        What they then read is worth nothing."""
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._words.own.fill_(self._exchange + 2**30)

    @property
    def reserved_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return 0 if self._memory is None else self._memory.own.numel()

    def has_room(self, size: int) -> bool:
        """Whether exchanges of up to ``size`` bytes a rank fit."""
        return -(-size // _ALIGN) * _ALIGN * self._count <= self.reserved_bytes

    def reserve(self, size: int) -> None:
        """Make room for exchanges of up to ``size`` bytes a rank. Collective, rarely: it waits for
        all that is under way."""
        if self.has_room(size):
            return
        size = -(-size // _ALIGN) * _ALIGN
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)
        self._memory = None
        self._begin([])  # with all views of it
        own = _symmetric((size * self._count,), torch.uint8, self._device, self._group)
        self._memory = _Shared(own, self._group)
        self._begin([_Slot(index, index * size) for index in range(self._count)])
        dist.barrier(self._group)

    def pack(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Room, _Slot]:
        """Room in symmetric memory; the current stream waits until all have pulled what was there
        before, which they say in the exchange after it."""
        if self._memory is None:
            raise MeshError("the copy engine was asked for room before any was reserved")
        if self._posted:  # else what was packed last was never told of: an error came between
            self._next, self._posted = (self._next + 1) % self._count, False
        slot = self._slots[self._next]
        if slot.last:
            while self._ends and self._ends[0][0] <= slot.last:
                self._ends.popleft()
            if not self._ends:
                raise MeshError("nobody says any more when room of a copy engine has been read")
            current_stream(self._device).wait_event(self._ends[0][1])
        slot.turn += 1
        key = tuple(shape), dtype
        room = slot.rooms.get(key)
        if room is None:
            size = torch.Size(shape).numel() * dtype.itemsize
            most = self._memory.own.numel() // self._count
            if size > most:
                raise MeshError(f"{size} bytes to pack, but only {most} were reserved")
            if len(slot.rooms) >= _MOST_ROOMS:  # lengths may differ from call to call
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
        """Tell the users that their parts are packed, and pull one's own.

        A rank that says that it has packed for one exchange has pulled all of those before it. Who
        has pulled and packs nothing for the same rank now says it apart. What comes from this
        rank's own room is copied first, and nothing said.

        Args:
            slot: where this rank has packed.
            users: ranks that pull from it.
            arriving: what is pulled.

        Returns:
            When everything has come.
        """
        stream = self._stream
        stream.wait_stream(current_stream(self._device))
        self._exchange += 1
        number, word, mine = self._exchange, self._words.address, self.rank
        sources = [each for each in dict.fromkeys([rank for rank, *_ in arriving]) if each != mine]
        writes = [(word(user, mine), number) for user in users]
        writes += [
            (word(source, self._world + mine), number - 1)
            for source in self._sources
            if source not in users
        ]
        waits = [(word(mine, source), number) for source in sources]
        waits += [
            (word(mine, self._world + user), number - 1)
            for user in self._users
            if user not in sources
        ]
        self._users, self._sources = users, sources
        raw = stream.cuda_stream
        own = [pull for pull in arriving if pull[0] == mine]
        if own:  # there already: copied while the others pack
            tell(raw, writes, [])
            self._pull_all(raw, own)
            tell(raw, [], waits)
        else:
            tell(raw, writes, waits)
        self._pull_all(raw, [pull for pull in arriving if pull[0] != mine])
        end = stream.record_event()
        self._ends.append((number, end))
        slot.last, self._posted = number, True
        return end

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
    """What :class:`ds_usp.comm.ring.RingChannel` does, by copy engines.

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
        """See :meth:`ds_usp.comm.ring.RingChannel.room`."""
        if torch.cuda.is_current_stream_capturing():
            raise MeshError(
                f"a {self._kind} exchange by copy engines cannot be captured in a CUDA graph, "
                "where its number would not change: capture forward and backward together, or "
                "use Tuning(copies=False)"
            )
        packed, self._slot = self._engine.pack(shape, dtype)
        self._turn = self._slot.turn
        return packed

    def post(self, packed: torch.Tensor, leaving: Parcels, arriving: Arrivals) -> None:
        """See :meth:`ds_usp.comm.ring.RingChannel.post`."""
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
        users = [to for to, _, _ in leaving]
        self._done = self._engine.start(self._slot, users, pulls)
        self.busy = True
        if leaving:
            row = packed.stride(0) * size  # it is dense
            self._ledger.add(self._kind, sum(stop - start for _, start, stop in leaving) * row)

    def take(self) -> None:
        """See :meth:`ds_usp.comm.ring.RingChannel.take`."""
        if not self.busy:
            raise MeshError(f"no {self._kind} exchange was posted")
        if self._done is not None:
            self._engine.wait_for(self._done)
        self._done, self._places, self.busy = None, (), False

    def close(self) -> None:
        """See :meth:`ds_usp.comm.ring.RingChannel.close`."""
        if self.busy:
            self.take()


class _Shared:
    """A tensor of symmetric memory and those of the other ranks."""

    def __init__(self, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.own = own
        self._handle: Any = symmetric_memory.rendezvous(own, group)
        shape = list(own.shape)
        self._all = [
            self._handle.get_buffer(rank, shape, own.dtype) for rank in range(group.size())
        ]
        self._addresses, self._item = [x.data_ptr() for x in self._all], own.element_size()

    def address(self, rank: int, index: int) -> int:
        """Where in this process's addresses an element of a rank's tensor is."""
        return self._addresses[rank] + index * self._item


def why_not(group: dist.ProcessGroup) -> str | None:
    """Why this rank's GPU cannot copy from those of a group on its host; None if it can."""
    if torch.cuda.device_count() < 1 or torch.version.cuda is None:
        return "no NVIDIA GPU"
    if torch.cuda.device_count() < group.size():
        return f"this process sees {torch.cuda.device_count()} GPUs, the group has {group.size()}"
    try:
        import_module("torch.distributed._symmetric_memory")
        driver()
    except (ImportError, OSError, AttributeError) as error:
        return f"symmetric memory cannot be used: {error}"
    here = torch.cuda.current_device()
    others = (peer for peer in range(torch.cuda.device_count()) if peer != here)
    if not all(torch.cuda.can_device_access_peer(here, peer) for peer in others):
        return "the GPUs of this host do not reach each other's memory"
    return None


def _symmetric(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> torch.Tensor:
    """Memory that can be shared; collective, so that all ranks have some or none.

    Raises:
        MeshError: a rank has no room.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    found, reason = None, ""
    for last in (False, True):
        try:
            found = symmetric_memory.empty(shape, dtype=dtype, device=device)
            break
        except RuntimeError as error:  # out of memory, of which torch's own allocator may keep some
            reason = str(error).splitlines()[0]
            if not last:
                torch.cuda.empty_cache()
    failed = torch.tensor(float(found is None), device=device)
    dist.all_reduce(failed, group=group)
    if found is None or failed.item():
        raise MeshError(f"a rank has no room for symmetric memory of {shape} {dtype} {reason}")
    return found
