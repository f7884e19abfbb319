"""Exchanges inside a node by the GPUs' copy engines: at the speed of the links, on no SM.

Each rank packs what it sends into a slot of symmetric memory and sets a flag at each reader; the
readers copy it from there (peer reads) and set a flag at the owner. Flags are int32 words in
symmetric memory, which streams set, wait for and clear (cuStreamBatchMemOp), so no kernel spins
while a rank is late. For slot ``s``:

=======================  =========  ==============================  ============================
flag (initial value)     memory of  set to 1 by                     waited for by
=======================  =========  ==============================  ============================
``ready[s][owner]`` (0)  reader     owner: slot s is packed for     reader: before it pulls the
                                    this reader                     owner's slot s; then clears it
``free[s][reader]`` (1)  owner      reader: has pulled slot s       owner: before it packs slot s
                                                                    again; clears it as it
                                                                    publishes to that reader
=======================  =========  ==============================  ============================

========================================  =====  =======  =====================================
state of slot s between owner and reader  free   ready    next
========================================  =====  =======  =====================================
idle                                      1      0        owner packs (:meth:`acquire_slot`)
published                                 0      1        reader clears ready and pulls
being pulled                              0      0        reader sets free: idle
========================================  =====  =======  =====================================

A flag that was waited for is cleared before it can be set again, so exchanges have no sequence
number and a CUDA graph of them can be launched again and again. NVLink multicast is never used:
``AttentionPlan.reserve_staging`` disables it around ``SequenceMesh.reserve``, which makes an engine
for each kind of traffic. In each forward and backward pass its channels acquire slots, post, wait.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from importlib import import_module
from threading import Thread
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ds_usp.comm.channel import (
    NO_RANGE,
    Channel,
    CommLedger,
    RecvSpec,
    SendSlice,
    StagingBuffer,
    exchange_range,
    profiler_enabled,
)
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.errors import MeshError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.pipeline_schedule import pipeline_schedule, staging_slots
from ds_usp.geometry.ring_schedule import ring_schedule

# Calls of the CUDA driver API that torch lacks, by NVIDIA's cuda-bindings: signal flags that
# streams set and wait for, and copies between addresses.


_MIN_VERSION = 11070  # CUDA 11.7, the first with cuStreamBatchMemOp_v2
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MAX_BATCH = 255


@lru_cache(maxsize=1)
def driver() -> Any:
    """NVIDIA's ``cuda.bindings.driver``, on which newer CUDA builds of torch depend.

    Raises:
        ImportError: it is not installed.
        RuntimeError: there is no NVIDIA driver, or one older than CUDA 11.7.
    """
    try:
        module = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ImportError("cuda-bindings is missing (pip install cuda-bindings)") from error
    status, version = module.cuDriverGetVersion()
    if status:
        raise RuntimeError(f"the NVIDIA driver cannot be used: error {int(status)}")
    if version < _MIN_VERSION:
        release = f"CUDA {version // 1000}.{version % 1000 // 10}"
        raise RuntimeError(f"the NVIDIA driver is of {release}; copy engines need CUDA 11.7")
    return module


@lru_cache(maxsize=1)
def _device_memory() -> Any:
    return driver().CUmemorytype.CU_MEMORYTYPE_DEVICE


class FlagOp(NamedTuple):
    """A stream operation on a 32-bit flag: write it, after all earlier writes are visible, or wait.

    Attributes:
        address: where the flag is, on this GPU or a peer's.
        is_wait: wait until the flag is at least ``value``; else write ``value``.
    """

    address: int
    value: int
    is_wait: bool = False


class FlagOpBatch:
    """Flag operations in this order as one driver call, whose arguments are prepared once."""

    def __init__(self, ops: Sequence[FlagOp]) -> None:
        if len(ops) > _MAX_BATCH:
            raise MeshError(
                f"{len(ops)} flag operations in one call, but the driver takes {_MAX_BATCH}"
            )
        self._ops = ops

    def enqueue(self, stream: int) -> None:
        if self._ops:
            _call(driver().cuStreamBatchMemOp, stream, len(self._ops), self._params, 0)

    @cached_property
    def _params(self) -> list[Any]:
        kinds = driver().CUstreamBatchMemOpType
        params = [driver().CUstreamBatchMemOpParams() for _ in self._ops]
        for param, op in zip(params, self._ops, strict=True):
            fields = param.waitValue if op.is_wait else param.writeValue
            kind = "WAIT" if op.is_wait else "WRITE"
            fields.operation = getattr(kinds, f"CU_STREAM_MEM_OP_{kind}_VALUE_32")
            fields.address, fields.value = op.address, driver().cuuint32_t(op.value)
            fields.flags = 0  # CU_STREAM_WAIT_VALUE_GEQ; of a write: after a memory barrier
        return params


def graph_capture_id(stream: torch.cuda.Stream) -> int:
    """The id of the CUDA graph that captures the current stream; 0 if none does."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    _, _status, capture_id, *_ = _call(driver().cuStreamGetCaptureInfo, stream.cuda_stream)
    return int(capture_id)


def copy_async(stream: int, dst: int, src: int, size: int) -> None:
    """Copy ``size`` bytes between device addresses. An integer ``stream`` is a raw handle."""
    _call(driver().cuMemcpyDtoDAsync, dst, src, size, stream)


def copy_2d_async(
    stream: int, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int
) -> None:
    """Copy ``rows`` of ``width`` bytes, a pitch in bytes apart."""
    copy = driver().CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = _device_memory()
    copy.srcDevice, copy.srcPitch = src, src_pitch
    copy.dstDevice, copy.dstPitch = dst, dst_pitch
    copy.WidthInBytes, copy.Height = width, rows
    _call(driver().cuMemcpy2DAsync, copy, stream)


def _call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
    """Call a driver function and check its error code; returns (code, results...)."""
    results = function(*arguments)
    if results[0]:
        # The runtime binds a context at a thread's first call of it; autograd's threads are new.
        if results[0] == _NO_CONTEXT:
            _bind(torch.cuda.current_device())
            results = function(*arguments)
        if results[0]:
            error = int(results[0])
            raise MeshError(f"the CUDA driver refused {function.__name__}: error {error}")
    return results


def _bind(device: int) -> None:
    """Make the device's primary context, which the runtime uses, this thread's: also during the
    capture of a CUDA graph, when streams may not be queried."""
    error, context = driver().cuDevicePrimaryCtxRetain(device)
    error = error or driver().cuCtxSetCurrent(context)[0]
    if error:
        raise MeshError(f"the CUDA driver gives no context for GPU {device}: error {int(error)}")


# Symmetric memory: torch's (torch.distributed._symmetric_memory), which the GPUs of a node map
# from each other.


class PeerMappedTensor:
    """This rank's tensor of :func:`alloc_symmetric`, and the addresses of the other ranks' (of the
    same shape and dtype). Collective over the group when it is made."""

    def __init__(self, local: torch.Tensor, group: dist.ProcessGroup) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.local = local
        self._handle: Any = symmetric_memory.rendezvous(local, group)
        shape = list(local.shape)
        self._all = [
            self._handle.get_buffer(rank, shape, local.dtype) for rank in range(group.size())
        ]
        self._addresses = [x.data_ptr() for x in self._all]
        self._itemsize = local.element_size()

    def address(self, rank: int, index: int) -> int:
        """The address in this process of element ``index`` of a rank's tensor."""
        return self._addresses[rank] + index * self._itemsize


def alloc_symmetric(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> torch.Tensor:
    """An uninitialized tensor in memory that :class:`PeerMappedTensor` can share; collective, with
    one shape and dtype on all ranks, which get a tensor each or none.

    Raises:
        MeshError: on every rank, if one is out of memory.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    tensor, reason = None, ""
    for may_retry in (True, False):
        try:
            tensor = symmetric_memory.empty(shape, dtype=dtype, device=device)
            break
        except RuntimeError as error:  # out of memory, of which torch's allocator may cache some
            reason = str(error).splitlines()[0]
            if may_retry:
                torch.cuda.empty_cache()
    failed = torch.tensor(float(tensor is None), device=device)
    dist.all_reduce(failed, group=group)
    if tensor is None or failed.item():
        raise MeshError(f"a rank cannot allocate symmetric memory of {shape} {dtype} {reason}")
    return tensor


def copy_engine_unavailable_reason(group: dist.ProcessGroup, nodes: Sequence[bytes]) -> str | None:
    """Why the ranks of a group cannot copy from each other's GPUs; None if they can. ``nodes``: the
    node of each rank (:func:`ds_usp.comm.process_groups.node_ids`). Collective over the group."""
    gpu = torch.device("cuda")
    if gpu not in group._device_types or group._get_backend(gpu).name() != "nccl":
        return "the ranks do not exchange on GPUs"
    reason = peer_copy_unavailable_reason(group.size())
    gpu_index = torch.cuda.current_device().to_bytes(4, "big")
    rank_bytes = all_gather_bytes(bytes([reason is None]) + gpu_index, group)
    if reason is not None:
        return reason
    can, gpus = {data[:1] for data in rank_bytes}, {data[1:] for data in rank_bytes}
    if len(set(nodes)) > 1 or len(can) > 1:
        return "the ranks are on several nodes, or one of them cannot"
    if len(gpus) < group.size():
        return "each process sees its own GPU only, or several share one"
    return None


def peer_copy_unavailable_reason(ranks: int) -> str | None:
    """Why this process's GPU cannot copy from those of ``ranks`` processes of this node, each with
    a GPU of its own; None if it can."""
    if torch.cuda.device_count() < 1 or torch.version.cuda is None:
        return "no NVIDIA GPU"
    if torch.cuda.device_count() < ranks:
        return f"this process sees {torch.cuda.device_count()} GPUs, the group has {ranks}"
    try:
        import_module("torch.distributed._symmetric_memory")
        driver()
    except (ImportError, OSError, RuntimeError) as error:
        return f"symmetric memory cannot be used: {error}"
    device = torch.cuda.current_device()
    peers = (peer for peer in range(torch.cuda.device_count()) if peer != device)
    if not all(torch.cuda.can_device_access_peer(device, peer) for peer in peers):
        return "the GPUs of this node do not reach each other's memory"
    return None


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream`` of a device with an index, in a fraction of its CPU time."""
    return _stream(*torch._C._cuda_getCurrentStream(device.index))


@lru_cache(maxsize=256)
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    """The object of a stream, made once, as making it costs CPU time."""
    return torch.cuda.Stream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


_ALIGN = 512  # bytes, of a slot's size
_MAX_CACHED = 256  # buffers and flag batches of a slot: lengths and readers differ between calls


@cache
def num_slots(kind: str, *, ring: bool) -> int:
    """Slots for one kind of traffic, so that no rank waits for a free one (:func:`staging_slots`);
    with ``ring`` there is ring traffic beside the head exchanges."""
    layout, mask = TokenLayout("contiguous", 4, 1, 2 if ring else 1), MaskSpec.full()
    chunks = [ring_schedule(layout, mask, 0, position="local_first")] * 5
    plan = partial(pipeline_schedule, chunks, ulysses=True)
    backward = partial(plan, backward=True, stage_return=not ring)
    passes = plan(backward=False), backward(from_shards=False), backward(from_shards=True)
    return max(staging_slots(schedule, kind) for schedule in passes)


class _FlagBatches(NamedTuple):
    """The flag operations of one exchange, by step."""

    publish: FlagOpBatch
    await_ready: FlagOpBatch
    set_free: FlagOpBatch


@dataclass
class Slot:
    """A staging area in this rank's symmetric memory.

    Attributes:
        index: its number in the memory.
        start: its first byte.
        wait_free: waits until no reader needs its contents.
        generation: how often it was acquired.
        published: readers were signalled that its present contents are packed.
        done_events: end of its last exchange outside of CUDA graphs (0), and in the graph that is
            being captured, by the graph's number.
        done_on: a stream behind the first of these events, once nobody else waits for it.
        buffers: views of it that were made, by their sizes and dtype.
        flag_batches: flag operations of its exchanges, by who reads what.
    """

    index: int
    start: int
    wait_free: FlagOpBatch
    generation: int = 0
    published: bool = False
    done_events: dict[int, torch.cuda.Event] = field(default_factory=dict)
    done_on: torch.cuda.Stream | None = None
    buffers: dict[tuple[Sequence[int], torch.dtype], StagingBuffer] = field(default_factory=dict)
    flag_batches: dict[tuple[tuple[int, ...], ...], _FlagBatches] = field(default_factory=dict)


class CopyEngine:
    """Symmetric memory and flags of one group, and the stream that pulls.

    All ranks of the group make it, and the same exchanges in the same order, in the same slots.

    Args:
        group: the ranks; all GPUs of one node that reach each other's memory.
        device: this rank's GPU.
        slots: staging areas, used in rotation.

    Attributes:
        rank: this one in the group.
        exchanges: how many were started; those of a CUDA graph count when it is captured.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slots: int) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._group, self._device = group, torch.device(device.type, index)
        self.rank, self._world = group.rank(), group.size()
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._abort_stream = torch.cuda.Stream(self._device, priority=-1)  # never captured
        self._current: torch.cuda.Stream | None = None  # that packed last
        self._packed_event = torch.cuda.Event()
        flags = alloc_symmetric((2, slots, self._world), torch.int32, device, group)
        flags[0], flags[1] = 0, 1  # ready[slot][owner], free[slot][reader]
        torch.cuda.synchronize(device)
        self._flags = PeerMappedTensor(flags, group)
        dist.barrier(group)
        self.exchanges = 0
        self._memory: PeerMappedTensor | None = None
        self._captured: list[PeerMappedTensor] = []  # whose addresses are in CUDA graphs
        self._num_slots = slots
        self._reset(0)

    def _reset(self, size: int) -> None:
        """Make all slots idle, of ``size`` bytes each; 0: without memory."""
        indices = range(self._num_slots if size else 0)
        self._slots = [Slot(i, i * size, self._wait_all_free(i)) for i in indices]
        self._next, self._posted = 0, False

    def _wait_all_free(self, slot: int) -> FlagOpBatch:
        """Wait until every peer has pulled what this rank's slot held."""
        peers = [rank for rank in range(self._world) if rank != self.rank]
        return FlagOpBatch(
            [FlagOp(self._free_flag(self.rank, slot, peer), 1, True) for peer in peers]
        )

    def _ready_flag(self, reader: int, slot: int, owner: int) -> int:
        """Address of ``ready[slot][owner]`` in a reader's memory."""
        return self._flags.address(reader, slot * self._world + owner)

    def _free_flag(self, owner: int, slot: int, reader: int) -> int:
        """Address of ``free[slot][reader]`` in an owner's memory."""
        return self._flags.address(owner, (self._num_slots + slot) * self._world + reader)

    def abort_waits(self) -> bool:
        """Set all of this rank's flags, so that its streams stop waiting: after an error, when no
        peer will set them. Returns whether a stream was still busy: then it is to be called again,
        for streams clear a flag that they waited for, and the next exchange waits anew."""
        # What the streams then pull is garbage, and the flags are inconsistent, which does no harm:
        # every later call over the mesh raises.
        streams = self._stream, self._current
        try:
            if all(stream is None or stream.query() for stream in streams):
                return False
        except RuntimeError:  # it is being captured and cannot be queried: taken as busy
            pass
        with torch.cuda.stream(self._abort_stream):
            self._flags.local.fill_(1)
        return True

    def note_replay(self) -> None:
        """The current stream launches a CUDA graph, whose waits :meth:`abort_waits` may end."""
        self._current = current_stream(self._device)

    @property
    def captured(self) -> bool:
        """A CUDA graph holds addresses of the memory, which it must not outlive."""
        return bool(self._captured)

    @property
    def reserved_bytes(self) -> int:
        return sum([x.local.numel() for x in {self._memory, *self._captured} if x])

    def has_capacity(self, size: int) -> bool:
        """Whether every slot holds so many bytes; the same on every rank."""
        size = -(-size // _ALIGN) * _ALIGN
        return self._memory is not None and size * self._num_slots <= self._memory.local.numel()

    def reserve(self, size: int) -> None:
        """Grow every slot to so many bytes, the same on every rank. Collective where slots are
        smaller, which is rare: it waits for all exchanges in flight."""
        if self.has_capacity(size):
            return
        size = -(-size // _ALIGN) * _ALIGN
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)
        self._memory = None
        self._reset(0)  # drops all views of it
        local = alloc_symmetric((size * self._num_slots,), torch.uint8, self._device, self._group)
        self._memory = PeerMappedTensor(local, self._group)
        self._reset(size)
        dist.barrier(self._group)

    def acquire_slot(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[StagingBuffer, Slot]:
        """A buffer in the next slot, or in the same one until :meth:`publish_and_pull`, and the
        slot; the current stream waits until no reader needs the slot's former contents."""
        if self._memory is None:
            raise MeshError("the copy engine has no staging memory: reserve some first")
        if self._posted:  # else the last one was never published: an error came between
            self._next, self._posted = (self._next + 1) % self._num_slots, False
        slot, stream = self._slots[self._next], current_stream(self._device)
        self._current, graph = stream, graph_capture_id(stream)
        if graph and self._memory not in self._captured:
            self._captured.append(self._memory)
        # After the slot's last exchange, which clears the flags that wait_free asks for. Between a
        # graph and the work around its launch the stream keeps that order; an event could not.
        done = slot.done_events.get(graph)
        if done is not None and (graph or slot.done_on is not stream):
            stream.wait_event(done)
        slot.wait_free.enqueue(stream.cuda_stream)
        slot.generation, slot.published = slot.generation + 1, False
        key = tuple(shape), dtype
        buffer = slot.buffers.get(key)
        if buffer is None:
            size = torch.Size(shape).numel() * dtype.itemsize
            capacity = self._memory.local.numel() // self._num_slots
            if size > capacity:
                raise MeshError(f"{size} bytes to pack, but only {capacity} were reserved")
            if len(slot.buffers) >= _MAX_CACHED:
                slot.buffers.clear()
            with torch.inference_mode(False):  # else no later pass with gradients could write it
                flat = self._memory.local[slot.start : slot.start + size]
                buffer = slot.buffers[key] = StagingBuffer(flat.view(dtype).view(*shape))
        return buffer, slot

    def publish_and_pull(
        self,
        slot: Slot,
        readers: Sequence[int],
        recvs: Sequence[RecvSpec],
        itemsize: int,
        *,
        overlapped: bool = True,
    ) -> torch.cuda.Event | None:
        """Signal the readers that the slot is packed, and pull from the same slot of other ranks.
        What comes from this rank's own slot is copied first, without flags.

        Args:
            slot: that this rank has packed.
            readers: ranks that pull from it, each once: a flag is set once in an exchange.
            recvs: what is pulled.
            itemsize: bytes of an element.
            overlapped: in the engine's stream, beside the current one; else in the current one.

        Returns:
            The event after which all is received; None: the current stream has received it.
        """
        current = current_stream(self._device)
        stream = self._stream if overlapped else current
        if overlapped:
            self._packed_event.record(current)
            stream.wait_event(self._packed_event)
        local = [recv for recv in recvs if recv.rank == self.rank]
        remote = [recv for recv in recvs if recv.rank != self.rank] if local else recvs
        owners = tuple(dict.fromkeys([recv.rank for recv in remote]))
        flags = self._flag_batches_of(slot, tuple(readers), owners, local_first=bool(local))
        raw_stream = stream.cuda_stream
        flags.publish.enqueue(raw_stream)
        if local:  # copied while the other ranks pack
            self._pull_all(raw_stream, slot, local, itemsize)
            flags.await_ready.enqueue(raw_stream)
        self._pull_all(raw_stream, slot, remote, itemsize)
        graph = graph_capture_id(current)
        if graph:  # a capture ends only if all work of the stream is before an awaited event
            flags.set_free.enqueue(raw_stream)
        # One that was waited for is recorded again: to make and to destroy one costs the host.
        waited_for = slot.done_on is not None and not graph
        done = stream.record_event(slot.done_events.get(0) if waited_for else None)
        if not graph:
            flags.set_free.enqueue(raw_stream)
            slot.done_on = None if overlapped else current
        slot.published = self._posted = True
        if graph and graph not in slot.done_events:  # the capture of another graph is over
            slot.done_events = {key: slot.done_events[key] for key in slot.done_events if not key}
        slot.done_events[graph] = done
        self.exchanges += 1
        return done if overlapped else None

    def _flag_batches_of(
        self, slot: Slot, readers: tuple[int, ...], owners: tuple[int, ...], *, local_first: bool
    ) -> _FlagBatches:
        """The flag operations of an exchange. Contents may be published again: then their readers
        must have pulled them. ``local_first``: a copy comes before the wait for the owners."""
        key = readers, owners, (slot.published, local_first)
        batches = slot.flag_batches.get(key)
        if batches is None:
            if len(slot.flag_batches) >= _MAX_CACHED:
                slot.flag_batches.clear()
            rank, index = self.rank, slot.index
            free = [self._free_flag(rank, index, reader) for reader in readers]
            ready = [self._ready_flag(rank, index, owner) for owner in owners]
            publish = [FlagOp(flag, 1, is_wait=True) for flag in free if slot.published]
            publish += [FlagOp(flag, 0) for flag in free]
            publish += [FlagOp(self._ready_flag(reader, index, rank), 1) for reader in readers]
            await_ready = [FlagOp(flag, 1, is_wait=True) for flag in ready]
            await_ready += [FlagOp(flag, 0) for flag in ready]
            if not local_first:  # one driver call
                publish, await_ready = publish + await_ready, []
            set_free = [FlagOp(self._free_flag(owner, index, rank), 1) for owner in owners]
            batches = slot.flag_batches[key] = _FlagBatches(
                FlagOpBatch(publish), FlagOpBatch(await_ready), FlagOpBatch(set_free)
            )
        return batches

    def wait_for(self, done: torch.cuda.Event, slot: Slot) -> None:
        """Let the current stream wait for the last exchange of a slot."""
        stream = current_stream(self._device)
        stream.wait_event(done)
        if done is slot.done_events.get(0):
            slot.done_on = stream

    def _pull_all(self, stream: int, slot: Slot, recvs: Sequence[RecvSpec], itemsize: int) -> None:
        for recv in recvs:
            start = slot.start + recv.offset * itemsize  # the same byte on every rank
            self._pull(stream, recv, start, itemsize)

    def _pull(self, stream: int, recv: RecvSpec, start: int, itemsize: int) -> None:
        """Enqueue a copy from a rank's staging memory, from byte ``start`` on. The target is
        contiguous, or, with a stride between the source's rows, ``[rows, batch, heads, dim]`` with
        strides between rows and samples."""
        if self._memory is None:
            raise MeshError("the copy engine has no staging memory: reserve some first")
        source, out, _, row_stride, view = recv
        target, address = out.data_ptr(), self._memory.address(source, start)
        size, stride = (out.shape, out.stride()) if view is None else view[:2]
        if view is not None:
            target += view.offset * itemsize
        if not row_stride:
            copy_async(stream, target, address, math.prod(size) * itemsize)
            return
        (rows, batch, heads, dim), (target_row, target_sample, *_) = size, stride
        for sample in range(batch):
            copy_2d_async(
                stream,
                target + sample * target_sample * itemsize,
                target_row * itemsize,
                address + sample * (row_stride * itemsize // batch),
                row_stride * itemsize,
                heads * dim * itemsize,
                rows,
            )


# Channels over the copy engines of a mesh, and what is done with all of its engines at once.


_ABORT_TIMEOUT_S = 60.0  # for streams that wait for something else after an error


class CopyEngineChannel(Channel):
    """:class:`P2PChannel` by copy engines; received tensors need not be dense."""

    def __init__(self, engine: CopyEngine, ledger: CommLedger, kind: str) -> None:
        self._engine, self._ledger, self._kind = engine, ledger, kind
        self._slot: Slot | None = None
        self._generation = 0
        self._done: torch.cuda.Event | None = None
        self._recvs: Sequence[RecvSpec] = ()  # keeps their tensors alive
        self.in_flight = False

    def acquire_staging(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> StagingBuffer:
        buffer, self._slot = self._engine.acquire_slot(shape, dtype)
        self._generation = self._slot.generation
        return buffer

    def post(
        self,
        packed: torch.Tensor,
        sends: Sequence[SendSlice],
        recvs: Sequence[RecvSpec],
        *,
        overlapped: bool = True,
    ) -> None:
        if self.in_flight or self._slot is None:
            why = "before the last one was waited for" if self.in_flight else "without a buffer"
            raise MeshError(f"a {self._kind} exchange was posted {why}")
        if self._generation != self._slot.generation:
            raise MeshError(f"the buffer of a {self._kind} exchange was given to a later one")
        rank, itemsize = self._engine.rank, packed.element_size()
        if len(recvs) > 1:  # ranks do not all pull from one at a time; slices of one together
            recvs = sorted(recvs, key=lambda recv: (recv.rank <= rank, recv.rank))
        self._recvs = recvs
        readers: dict[int, None] = {}  # each once, in order
        rows = 0
        for peer, start, stop in sends:
            readers[peer] = None
            rows += stop - start
        sent_bytes = rows * packed.stride(0) * itemsize  # it is dense
        with exchange_range(self._kind, sent_bytes) if profiler_enabled() else NO_RANGE:
            self._done = self._engine.publish_and_pull(
                self._slot, list(readers), recvs, itemsize, overlapped=overlapped
            )
        self.in_flight = True
        if sends:
            self._ledger.add(self._kind, sent_bytes)

    def wait(self) -> None:
        if not self.in_flight:
            raise MeshError(f"no {self._kind} exchange was posted")
        if self._done is not None and self._slot is not None:
            self._engine.wait_for(self._done, self._slot)
        self._done, self._recvs, self.in_flight = None, (), False


class Engine(Protocol):
    """Moves exchanges of a mesh in place of NCCL: copy engines, or FlashInfer's kernel."""

    exchanges: int

    def note_replay(self) -> None: ...

    def abort_waits(self) -> bool: ...


def note_replay(engines: Mapping[str, Engine]) -> None:
    """The current stream launches a CUDA graph with exchanges of the copy engines of a mesh."""
    for engine in engines.values():
        engine.note_replay()


def abort_waits(engines: Mapping[str, Engine]) -> None:
    """End whatever this rank's streams wait for, from a thread: each exchange in flight waits anew
    when the one before it is done. A process that ends waits for the thread, a minute at most."""
    if engines:
        Thread(target=_abort_until_idle, args=(list(engines.values()),)).start()


def _abort_until_idle(engines: Sequence[Engine]) -> None:
    deadline = time.monotonic() + _ABORT_TIMEOUT_S
    with contextlib.suppress(RuntimeError):  # the GPU is lost
        while [engine for engine in engines if engine.abort_waits()]:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.001)
