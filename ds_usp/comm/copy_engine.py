"""Exchange inside a host by the GPUs' copy engines: at the speed of the links, on no SM.

Each rank packs what it sends into symmetric memory and says so; whoever uses it pulls it over, and
says when it is done. Both are words in the other's memory that a stream writes and waits for
(cuStreamBatchMemOp, as many at once as can be: every call costs the host), so no kernel spins while
a rank is late. NVLink multicast is never used.

The memory is torch's (torch.distributed._symmetric_memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ds_usp.comm.driver import copy, copy_rows, driver, tell
from ds_usp.comm.lane import current_stream
from ds_usp.comm.ledger import CommLedger
from ds_usp.comm.ring import Arrivals, Parcels
from ds_usp.errors import MeshError

_SLOTS = 2  # one is filled while the other one is still being pulled from
_ALIGN = 512
_MOST_VIEWS = 256


@dataclass
class _Slot:
    """A part of this rank's symmetric memory: which, where, the last exchange that each rank pulled
    from it, and the tensors that were made of it before."""

    index: int
    start: int
    users: dict[int, int] = field(default_factory=dict)
    views: dict[tuple[Sequence[int], torch.dtype], torch.Tensor] = field(default_factory=dict)


class CopyEngine:
    """Symmetric memory over one group, with the words by which its ranks tell each other.

    All ranks of the group make the same exchanges in the same order.

    Args:
        group: the ranks; all GPUs of one host that reach each other's memory.
        device: this rank's GPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._group, self._device = group, torch.device(device.type, index)
        self.rank, self._world = group.rank(), group.size()
        self._stream = self._last = torch.cuda.Stream(device, priority=-1)
        # words[0, r]: the last exchange for which rank r has packed; words[1, r]: the last one
        # that it has pulled.
        words = _symmetric((2, self._world), torch.int32, device, group)
        words.zero_()
        torch.cuda.synchronize(device)
        self._words = _Shared(words, group)
        dist.barrier(group)
        self._memory: _Shared | None = None
        self._slots: list[_Slot] = []
        self._next = 0
        self._exchange = 0

    def let_go(self) -> None:
        """End every wait of this rank's streams: after an error, when nobody will write any more.
        What they then read is worth nothing."""
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._words.own.fill_(self._exchange + 2**30)

    def current_stream(self) -> torch.cuda.Stream:
        """Of this rank's GPU."""
        return current_stream(self._device)

    @property
    def reserved_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return 0 if self._memory is None else self._memory.own.numel()

    def has_room(self, size: int) -> bool:
        """Whether exchanges of up to ``size`` bytes a rank fit."""
        return -(-size // _ALIGN) * _ALIGN * _SLOTS <= self.reserved_bytes

    def reserve(self, size: int) -> None:
        """Make room for exchanges of up to ``size`` bytes a rank. Collective, rarely: it waits for
        all that is under way."""
        if self.has_room(size):
            return
        size = -(-size // _ALIGN) * _ALIGN
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)
        self._memory, self._slots = None, []  # with all views of it
        own = _symmetric((size * _SLOTS,), torch.uint8, self._device, self._group)
        self._memory = _Shared(own, self._group)
        self._slots = [_Slot(index, index * size) for index in range(_SLOTS)]
        dist.barrier(self._group)

    def pack(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, _Slot]:
        """Room in symmetric memory, dense; the current stream waits until all have pulled what was
        there before."""
        if self._memory is None:
            raise MeshError("the copy engine was asked for room before any was reserved")
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        stream = current_stream(self._device).cuda_stream
        word = self._words.address
        users = slot.users.items()
        tell(stream, [], [(word(self.rank, self._world + rank), n) for rank, n in users])
        slot.users.clear()
        key = tuple(shape), dtype
        if key not in slot.views:
            size = torch.Size(shape).numel() * dtype.itemsize
            most = self._memory.own.numel() // _SLOTS
            if size > most:
                raise MeshError(f"{size} bytes to pack, but only {most} were reserved")
            if len(slot.views) >= _MOST_VIEWS:  # lengths may differ from call to call
                slot.views.clear()
            with torch.inference_mode(False):  # else no later pass with gradients could write it
                flat = self._memory.own[slot.start : slot.start + size]
                slot.views[key] = flat.view(dtype).view(*shape)
        return slot.views[key], slot

    def start(
        self,
        slot: _Slot,
        users: Sequence[int],
        arriving: Sequence[tuple[int, int, int, torch.Tensor, int]],
        *,
        beside: bool = True,
    ) -> torch.cuda.Event | None:
        """Tell the users that their parts are packed, and pull one's own.

        Args:
            slot: where this rank has packed.
            users: ranks that pull from it.
            arriving: (rank, its slot, bytes from the slot's start, tensor to fill, bytes from row
                to row there or 0 if all lies together).
            beside: on a stream of its own; False: on the current one, in its order.

        Returns:
            When everything has come; None on the current stream.
        """
        current = current_stream(self._device)
        stream = self._stream if beside else current
        # Exchanges are announced in their order: a word says that all before it are packed too.
        for before in {current, self._last} - {stream}:
            stream.wait_stream(before)
        self._last = stream
        self._exchange += 1
        number, word = self._exchange, self._words.address
        slot.users.update(dict.fromkeys(users, number))
        sources = list(dict.fromkeys(source for source, *_ in arriving))
        raw = stream.cuda_stream
        packed = [(word(user, self.rank), number) for user in users]
        tell(raw, packed, [(word(self.rank, source), number) for source in sources])
        for source, index, offset, place, pitch in arriving:
            self._pull(raw, source, self._slots[index].start + offset, place, pitch)
        tell(raw, [(word(source, self._world + self.rank), number) for source in sources], [])
        return stream.record_event() if beside else None

    def _pull(self, stream: int, source: int, start: int, place: torch.Tensor, pitch: int) -> None:
        if self._memory is None:
            raise MeshError("the copy engine was asked for data before any room was reserved")
        size, theirs = place.element_size(), self._memory.address(source, start)
        if not pitch:
            copy(stream, place.data_ptr(), theirs, place.numel() * size)
            return
        rows, batch = place.shape[:2]
        width = place.shape[2:].numel() * size
        for sample in range(batch):
            copy_rows(
                stream,
                place.data_ptr() + sample * place.stride(1) * size,
                place.stride(0) * size,
                theirs + sample * (pitch // batch),
                pitch,
                width,
                rows,
            )


class CopyChannel:
    """What :class:`ds_usp.comm.ring.RingChannel` does, by copy engines.

    Args:
        engine: of the group.
        ledger: where bytes are counted.
        kind: under which name.
        beside: False: on the current stream, where who posts waits at once anyway.
    """

    def __init__(
        self, engine: CopyEngine, ledger: CommLedger, kind: str, *, beside: bool = True
    ) -> None:
        self._engine, self._ledger, self._kind, self._beside = engine, ledger, kind, beside
        self._slot: _Slot | None = None
        self._done: torch.cuda.Event | None = None
        self._places: list[torch.Tensor] = []
        self.busy = False

    def room(self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`ds_usp.comm.ring.RingChannel.room`."""
        packed, self._slot = self._engine.pack(shape, dtype)
        return packed

    def post(self, leaving: Parcels, arriving: Arrivals) -> None:
        """See :meth:`ds_usp.comm.ring.RingChannel.post`."""
        if torch.cuda.is_current_stream_capturing():
            raise MeshError(
                f"a {self._kind} exchange by copy engines cannot be captured in a CUDA graph, "
                "where its number would not change: capture forward and backward together, or "
                "use Tuning(copies=False)"
            )
        if self.busy or self._slot is None:
            why = "before the last one was taken" if self.busy else "without room"
            raise MeshError(f"a {self._kind} exchange was posted {why}")
        index, mine = self._slot.index, self._engine.rank  # the same slot on every rank
        pulls = [
            (source, index, at * x.element_size(), x, pitch * x.element_size())
            for source, x, at, pitch in arriving
        ]
        # Not all from the same rank at a time; those of one rank together.
        pulls.sort(key=lambda pull: (pull[0] <= mine, pull[0]))
        self._places = [x for _, x, _, _ in arriving]
        users = [to for to, _ in leaving]
        self._done = self._engine.start(self._slot, users, pulls, beside=self._beside)
        self.busy = True
        if leaving:
            self._ledger.add(self._kind, sum(x.numel() * x.element_size() for _, x in leaving))

    def take(self) -> None:
        """See :meth:`ds_usp.comm.ring.RingChannel.take`."""
        if not self.busy:
            raise MeshError(f"no {self._kind} exchange was posted")
        if self._done is not None:
            self._engine.current_stream().wait_event(self._done)
        self._done, self._places, self.busy = None, [], False

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
        self._addresses = [x.data_ptr() for x in self._all]

    def address(self, rank: int, index: int) -> int:
        """Where in this process's addresses an element of a rank's tensor is."""
        return self._addresses[rank] + index * self.own.element_size()


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
