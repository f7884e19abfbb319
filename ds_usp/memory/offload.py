"""Activation offload: saved tensors of layers wait for their backward pass in host memory.

What a layer saves is copied to the host while the next layer computes, and prefetched one layer
before its backward pass; on the device are those of about three layers, however many there are.

``LayerMemory.run`` of ``layers.py`` enters :meth:`Offload.layer` for each layer of a forward pass,
one :class:`Offload` a rank; all else runs from there, and in backward from autograd's hooks.
:class:`HostStorages` does the same to optimizer states, between two steps
(``training/host_states.py``). Nothing here communicates between ranks.

Source: Kuaishou (Yuan et al., ATC 24), section 4.4, with a layer as its unit, not a pipeline chunk.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from ds_usp.config import free_memory, is_first_on_node, num_ranks_on_node, single_hw_queue
from ds_usp.errors import ConfigError, RecomputeError, warn_once
from ds_usp.memory.saved_attention import StorageView, check_version, saved_tensors, storage_id

_MIN_BYTES = 1 << 16  # copies of less are all latency
_ALIGNMENT = 512  # of a tensor of which only a part is offloaded


@dataclass
class Counts:
    """Bytes: saved by layers when their offload was due, as far as backward needs them; offloaded
    of these; and of those the ones that backward needed before a prefetch, so that it stalled."""

    saved: int = 0
    offloaded: int = 0
    late: int = 0


class Offload:
    """Offloads a fraction of what layers save to the host, and prefetches it for backward.

    ``with offload.layer(number): hidden = layer(hidden)`` in the forward pass, for each layer.
    Micro batches may be in flight and run backward in any order: what was not prefetched is
    fetched when backward needs it. Gradients are bitwise those without offload.

    Args:
        ratio: fraction of the saved bytes of layers that is offloaded, from 0 to 1.
        device: where the layers compute.
        min_bytes: tensors of fewer bytes stay.
        copier: copies between device and host; for tests.
        layers: of a forward pass that save anything, on this rank; where it is given, host memory
            for all of them is asked for once two have run. Else each layer asks for its own.

    Attributes:
        counts: bytes saved and offloaded.

    Raises:
        ConfigError: a ratio out of range.
    """

    def __init__(
        self,
        ratio: float,
        device: torch.device | str,
        *,
        min_bytes: int = _MIN_BYTES,
        copier: HostDeviceCopier | None = None,
        layers: int = 0,
    ) -> None:
        if not 0 <= ratio <= 1:
            raise ConfigError(f"offload ratio {ratio} must be between 0 and 1")
        if ratio and torch.device(device).type == "cuda" and single_hw_queue():
            warn_once(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams of a GPU one queue: kernels wait "
                "behind copies to and from the host. Unset it, unless tensor parallelism needs it",
                rank=0 if is_first_on_node() else 1,
            )
        self.ratio, self.min_bytes, self.layers = ratio, min_bytes, layers
        self.counts = Counts()
        self.copier = copier or HostDeviceCopier(
            torch.device(device),
            advice=f"use an offload ratio below {ratio}, recompute more of a layer",
        )
        self._passes: list[list[_Layer]] = []
        self._last: _Layer | None = None

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """Wrap a layer's forward; a number not above the last one begins another micro batch."""
        if self.ratio == 0 or not torch.is_grad_enabled():
            yield
            return
        # Note [streams of the offload]
        #
        #   computing stream   layer 0 | layer 1 | layer 2 | layer 3 | backward 3 | backward 2
        #   to the host                | copy 0  | copy 1  | copy 2  |
        #   to the device                                            | fetch 2    | fetch 1
        #   freed                                ^ 0       ^ 1       ^ 2
        #
        # A layer's copies start when the next one's forward pass begins, since only then all that
        # it saves is known, and its device memory is freed when that one ends: an event orders
        # the copy before the free, the host waits for nothing. Backward of a layer starts the
        # fetch of the one before it. So the copies of one layer have the time of one layer, and
        # about three layers are on the device. Memory is allocated and freed on the computing
        # stream only: the caching allocator may give it to later kernels of that stream at once,
        # and both copy streams have been waited for by then.
        # The last layer before a backward pass stays on the device: it is needed at once. It is
        # offloaded if another micro batch's forward pass comes first.
        last = self._last
        same_pass = last is not None and last.number < number
        if not same_pass:
            self._begin_pass()
        layer = self._last = _Layer(self, number, last if same_pass else None)
        self._passes[-1].append(layer)
        if last is not None:
            last.start_offload()
        try:
            with saved_tensors(layer.pack, layer.unpack):
                yield
        finally:
            layer.close()
            if last is not None:
                last.free_device_copies()

    def nested(self) -> Offload:
        offload = Offload(
            self.ratio, self.copier.device, min_bytes=self.min_bytes, copier=self.copier
        )
        offload.counts = self.counts
        return offload

    @property
    def bytes_away(self) -> int:
        layers = (layer for layers in self._passes for layer in layers)
        return sum(item.host_bytes for layer in layers for item in layer.items if item.data is None)

    def _begin_pass(self) -> None:
        for layers in self._passes:
            for layer in layers:
                layer.drop_if_unused()
        self._passes = [layers for layers in self._passes if any(x.items for x in layers)]
        self._passes.append([])

    def _next_in_backward(self, layer: _Layer) -> _Layer | None:
        # The last layer before this one that has saved tensors, or the last layer of the oldest
        # micro batch whose backward has not begun.
        previous = layer.previous
        while previous is not None:
            if previous.items:
                return previous
            previous = previous.previous
        last_layers = (layers[-1] for layers in self._passes if layers and layer not in layers)
        waiting = (last for last in last_layers if not last.backward_started and last.items)
        return next(waiting, None)


class _State(Enum):
    """The places of a layer's saved tensors, in this order; after the last one ON_DEVICE again."""

    OPEN = "its forward pass runs"
    ON_DEVICE = "on the device"
    OFFLOADING = "on the device, copies to the host in flight"
    ON_HOST = "on the host"
    PREFETCHING = "on the host, copies to the device in flight"


class _Layer:
    """The saved tensors of one layer in one forward pass, by a pair of :func:`saved_tensors`."""

    # The graph refers to this through the saved tensors, and this only weakly to them.

    def __init__(self, offload: Offload, number: int, previous: _Layer | None) -> None:
        self.number, self.previous = number, previous
        self.backward_started = False
        self.num_offloaded = 0  # layers of this pass up to this one that offloaded something
        self._offload, self.copier = offload, offload.copier
        self._state = _State.OPEN
        self._copy_event: CopyEvent = None
        self._small_bytes = 0
        self._items: list[weakref.ref[_OffloadedStorage]] = []
        # By storage id; the references keep ids from being reused.
        self._open: dict[int, _OffloadedStorage] = {}
        self._small: dict[int, torch.UntypedStorage] = {}
        self._prefetched: list[torch.Tensor] = []

    @property
    def items(self) -> list[_OffloadedStorage]:
        """The storages that backward still needs."""
        return [item for ref in self._items if (item := ref()) is not None]

    def pack(self, tensor: torch.Tensor) -> _Saved | None:
        if tensor.device.type != self.copier.device.type or not _is_offloadable(tensor):
            return None
        storage = tensor.untyped_storage()
        key = storage_id(tensor)
        item = self._open.get(key) or self._shared(key)
        if item is None and key not in self._small:
            if storage.nbytes() < self._offload.min_bytes:
                self._small[key] = storage
                self._small_bytes += storage.nbytes()
            else:
                item = self._open[key] = _OffloadedStorage(self, tensor)
                self._items.append(weakref.ref(item))
        return None if item is None else _Saved(item, tensor.dtype, StorageView.from_tensor(tensor))

    def _shared(self, key: int) -> _OffloadedStorage | None:
        # The previous layer may have saved the storage too: its output is this one's input.
        items = self.previous.items if self.previous is not None else []
        return next((x for x in items if x.data is not None and storage_id(x.data) == key), None)

    def unpack(self, saved: _Saved) -> torch.Tensor:
        layer = saved.item.layer
        if layer._state is not _State.OPEN:  # the forward pass may read what it saves
            layer.ensure_on_device()
        return saved.tensor()

    def close(self) -> None:
        self._open.clear()
        self._small.clear()
        self._state = _State.ON_DEVICE

    def start_offload(self) -> None:
        """Start the copies to the host, when the next layer's forward pass begins."""
        items, counts = self.items, self._offload.counts
        self.num_offloaded = self.previous.num_offloaded if self.previous else 0
        if self._state is not _State.ON_DEVICE or self.backward_started or not items:
            return
        # The budget is cumulative over layers: what one layer could not give, as it had small
        # tensors only, the next ones give.
        # Of the storages that are still needed: TorchScript's nodes save many that nobody needs.
        counts.saved += self._small_bytes + sum(item.size for item in items)
        budget = round(self._offload.ratio * counts.saved) - counts.offloaded
        offloaded, slices, offset = [], [], 0
        for item in sorted(items, key=lambda item: -item.size):
            data = item.set_offload_bytes(budget - offset)
            if data is not None:
                item.host_offset = offset
                offloaded.append(item)
                slices.append(data)
                offset += len(data)
        if offloaded:
            self.num_offloaded += 1
            # The first layer may save what all share. The last one of a pass stays on the device.
            if self.num_offloaded == 2:
                self.copier.pool.reserve(offset, self._offload.layers - 2)
            counts.offloaded += offset
            allocation, self._copy_event = self.copier.to_host(slices)
            for item in offloaded:
                item.allocation = allocation
            self._state = _State.OFFLOADING

    def free_device_copies(self) -> None:
        if self._state is _State.OFFLOADING:
            self.copier.wait(self._copy_event)
            for item in self.items:
                item.drop()
            self._state = _State.ON_HOST

    def ensure_on_device(self) -> None:
        """Wait until all is on the device, for backward; at first prefetch the next layer's too."""
        if not self.backward_started:
            self.backward_started = True
            if self._state is _State.OFFLOADING:
                self._state = _State.ON_DEVICE  # nothing was dropped
            elif self._state is _State.ON_HOST:
                self._offload.counts.late += sum(item.host_bytes for item in self.items)
                self.prefetch()
            next_layer = self._offload._next_in_backward(self)
            if next_layer is not None:
                next_layer.prefetch()
        if self._state is _State.PREFETCHING:
            self.copier.wait(self._copy_event)
            for item in self.items:
                item.finish_prefetch()
            self._prefetched = []
            self._state = _State.ON_DEVICE

    def prefetch(self) -> None:
        if self._state is _State.ON_HOST:
            pairs = [pair for item in self.items for pair in item.begin_prefetch()]
            self._copy_event = self.copier.to_device(pairs)
            self._prefetched = [dst for dst, _ in pairs]  # alive even if the graph is freed
            self._state = _State.PREFETCHING

    def drop_if_unused(self) -> None:
        if self._state is _State.PREFETCHING and not self.items:
            self.copier.wait(self._copy_event)
            self._prefetched = []
            self._state = _State.ON_DEVICE


class _OffloadedStorage:
    """The storage of one or more saved tensors: on the device, on the host, or partly on both."""

    def __init__(self, layer: _Layer, tensor: torch.Tensor) -> None:
        self.layer = layer
        storage = tensor.untyped_storage()
        self.size = storage.nbytes()
        self.data: torch.Tensor | None = _storage_as_bytes(storage)
        self.host_bytes = self.host_offset = 0  # bytes on the host, offset in the allocation
        self.allocation: PinnedAllocation | None = None
        self._device_remainder: torch.Tensor | None = None
        self._prefetch_buffer: torch.Tensor | None = None
        self._probe: torch.Tensor | None = tensor.detach()  # shares the version counter
        self._version = tensor._version

    def set_offload_bytes(self, budget: int) -> torch.Tensor | None:
        """Decide how many bytes to offload, at most ``budget``, and return them, a view; None:
        none. What stays on the device is cloned, for :meth:`drop` to free the storage."""
        self.check_version()
        size = min(self.size, budget)
        if size < self.size:
            size -= size % _ALIGNMENT
        if size <= 0 or self.data is None:
            return None
        self.host_bytes = size
        self._device_remainder = self.data[size:].clone() if size < self.size else None
        return self.data[:size]

    def drop(self) -> None:
        if self.host_bytes:
            self.data = self._probe = None

    def begin_prefetch(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Allocate device memory; the pairs (destination, source) to copy."""
        if self.allocation is None:
            return []
        device = self.layer.copier.device
        self._prefetch_buffer = torch.empty(self.size, dtype=torch.uint8, device=device)
        sources = self.allocation.slices(self.host_offset, self.host_offset + self.host_bytes)
        sources += [self._device_remainder] if self._device_remainder is not None else []
        sizes = [len(x) for x in sources]
        return list(zip(self._prefetch_buffer.split(sizes), sources, strict=True))

    def finish_prefetch(self) -> None:
        if self._prefetch_buffer is not None:
            self.data, self._prefetch_buffer = self._prefetch_buffer, None
            self.allocation = self._device_remainder = None

    def check_version(self) -> None:
        if self._probe is not None:
            check_version(self._probe, self._version)


class _Saved(NamedTuple):
    """A saved tensor: a view of an offloaded storage."""

    item: _OffloadedStorage
    dtype: torch.dtype
    view: StorageView

    def tensor(self) -> torch.Tensor:
        item = self.item
        item.check_version()
        if item.data is None:
            raise RecomputeError("a saved tensor was unpacked while its storage is on the host")
        empty = torch.empty(0, dtype=self.dtype, device=item.data.device)
        view = self.view
        return empty.set_(item.data.untyped_storage(), view.offset, view.size, view.stride)


def _is_offloadable(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return strided and type(tensor) is torch.Tensor and tensor.untyped_storage().nbytes() > 0


def _storage_as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


class HostStorages:
    """Storages on a device, or in host memory: :meth:`send`, then :meth:`free`, :meth:`bring_back`.
    Between the last two the tensors must not be read: they have no memory.

    Args:
        device: where the tensors are when they are used.
        copier: copies between device and host; for tests.
    """

    def __init__(self, device: torch.device, *, copier: HostDeviceCopier | None = None) -> None:
        self._device = device
        self._copier = copier or HostDeviceCopier(device, advice="leave the states on the device")
        self._sent: _Sent | None = None
        self._is_freed = False

    @property
    def bytes_away(self) -> int:
        return sum(self._sent.sizes) if self._sent is not None and self._is_freed else 0

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Start the copies of the tensors' storages to the host, after all work queued so far;
        without effect if they were sent.

        Storages on another device, of less than 64 KiB, or whose memory is not torch's own (a
        mapped file, an array of NumPy) stay. What is written to them before :meth:`free` is sent
        again there, if torch counts it as a version of these tensors: not through ``.data``.
        """
        if self._sent is not None:
            return
        storages: dict[int, torch.UntypedStorage] = {}
        versions = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            is_here = tensor.device.type == self._device.type
            if is_here and storage.nbytes() >= _MIN_BYTES and storage.resizable():
                storages[storage_id(tensor)] = storage
                versions.append((tensor, tensor._version))
        chosen = list(storages.values())
        sizes = [storage.nbytes() for storage in chosen]
        if sizes:
            allocation, event = self._copier.to_host([_storage_as_bytes(x) for x in chosen])
            self._sent = _Sent(chosen, sizes, allocation, event, versions)

    def free(self) -> None:
        """Free the device memory of what was sent; the current stream waits for the copies."""
        if self._sent is None or self._is_freed:
            return
        sent = self._sent
        self._copier.wait(sent.event)
        if any(tensor._version != version for tensor, version in sent.versions):
            self._sent = None
            self.send([tensor for tensor, _ in sent.versions])
            self.free()
            return
        for storage in sent.storages:
            storage.resize_(0)
        self._is_freed = True

    def bring_back(self) -> None:
        """Copy everything back to the device; the current stream waits for the copies."""
        if self._sent is None:
            return
        sent = self._sent
        if not self._is_freed:  # what comes next may write to what is still being copied
            self._sent = None
            self._copier.wait(sent.event)
            return
        # The storages are emptied and filled, not replaced: optimizers, views and flat buffers of
        # ZeRO refer to them, as FSDP's parameters do to their own. All memory first: where there is
        # not enough, everything is still in host memory.
        for storage, size in zip(sent.storages, sent.sizes, strict=True):
            storage.resize_(size)
        self._sent, self._is_freed = None, False
        pairs, offset = [], 0
        for storage, size in zip(sent.storages, sent.sizes, strict=True):
            sources = sent.allocation.slices(offset, offset + size)
            parts = _storage_as_bytes(storage).split([len(source) for source in sources])
            pairs += list(zip(parts, sources, strict=True))
            offset += size
        # The host memory is reused by the next copies to the host, which start after these.
        self._copier.wait(self._copier.to_device(pairs))


class _Sent(NamedTuple):
    """Storages whose bytes are, or are being copied, in host memory, one after another.

    Attributes:
        storages, sizes: what was sent, and the bytes of each.
        allocation: the host memory; ``event``: the end of the copies.
        versions: the tensors that were sent, with their versions then.
    """

    storages: list[torch.UntypedStorage]
    sizes: list[int]
    allocation: PinnedAllocation
    event: CopyEvent
    versions: list[tuple[Tensor, int]]


_BLOCK_BYTES = 1 << 26  # a power of two: torch rounds pinned memory up to one

CopyEvent = torch.cuda.Event | None  # None: the copies are done


class PinnedBlockPool:
    """Host memory in blocks of one size, reused: to pin memory takes longer than to fill it.

    Args:
        advice: to users for whom host memory does not suffice.
    """

    def __init__(self, pinned: bool, block_bytes: int = _BLOCK_BYTES, advice: str = "") -> None:
        self.block_bytes = block_bytes
        self._pinned, self._advice = pinned, advice
        self._free: list[torch.Tensor] = []
        self.num_blocks = self._num_reserved = 0
        # Before any rank of this host has pinned some: one that reads later would count that twice.
        self._free_bytes_at_start = free_memory()

    def allocate(self, size: int) -> PinnedAllocation:
        """Blocks for ``size`` bytes, until the result is freed; ConfigError as :meth:`reserve`."""
        # Blocks of one size never fragment: any of them serves any layer, of any shape, and after
        # the first pass none is pinned any more.
        self.reserve(size)
        count = -(-size // self.block_bytes)
        blocks = [self._free.pop() if self._free else self._new() for _ in range(count)]
        allocation = PinnedAllocation(tuple(blocks), self.block_bytes)
        weakref.finalize(allocation, self._free.extend, blocks)
        return allocation

    def reserve(self, size: int, count: int = 1) -> None:
        """Check that the host has memory for ``count`` more allocations of ``size`` bytes that live
        at once, without pinning any. Else the kernel would end the process without a word.

        Raises:
            ConfigError: every rank of this host that needs as much would take more than is free.
        """
        new_blocks = count * -(-size // self.block_bytes) - len(self._free)
        if self.num_blocks + new_blocks <= self._num_reserved:
            return
        ranks, free_bytes = num_ranks_on_node(), free_memory()
        new_bytes, held_bytes = new_blocks * self.block_bytes, self.num_blocks * self.block_bytes
        fits_now = ranks * new_bytes <= free_bytes
        fitted_at_start = ranks * (held_bytes + new_bytes) <= self._free_bytes_at_start
        if not fits_now and (not fitted_at_start or new_bytes > free_bytes):
            needed, held_gib, free = new_bytes / 2**30, held_bytes / 2**30, free_bytes / 2**30
            raise ConfigError(
                f"offload needs {needed:.2f} GiB of host memory beside the {held_gib:.2f} GiB that "
                f"this rank holds: {ranks} ranks of this host {ranks * needed:.2f} GiB, of which "
                f"{free:.2f} GiB are free, by the machine and its container. To make it fit, "
                f"{self._advice}, or use more hosts. Where the machine has more than it shows, "
                "set USP_HOST_MEMORY_GIB"
            )
        self._num_reserved = self.num_blocks + new_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def _new(self) -> torch.Tensor:
        self.num_blocks += 1
        return torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._pinned)


class PinnedAllocation:
    """Blocks addressed as one run of bytes; they are free again when this is garbage."""

    def __init__(self, blocks: tuple[torch.Tensor, ...], block_bytes: int) -> None:
        self._blocks, self._size = blocks, block_bytes

    def slices(self, start: int, stop: int) -> list[torch.Tensor]:
        slices = []
        for index in range(start // self._size, -(-stop // self._size)):
            first = index * self._size
            block = self._blocks[index]
            slices.append(block[max(start - first, 0) : min(stop - first, self._size)])
        return slices


class HostDeviceCopier:
    """Asynchronous copies, each direction on its own stream; on a CPU synchronous."""

    def __init__(
        self, device: torch.device, block_bytes: int = _BLOCK_BYTES, *, advice: str = ""
    ) -> None:
        # Ordered by events alone: copies start after all work queued so far on the current stream,
        # and the caller keeps their sources and destinations alive until the current stream has
        # waited for them. So the caching allocator, which tracks the current stream only, is right.
        on_gpu = device.type == "cuda"
        self.pool = PinnedBlockPool(on_gpu, block_bytes, advice)
        self.device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else []

    def to_host(self, data: Sequence[torch.Tensor]) -> tuple[PinnedAllocation, CopyEvent]:
        """Copy runs of bytes (uint8, 1-D) to the host, concatenated. Neither may be freed before
        the current stream has waited for the event (None: done)."""
        allocation = self.pool.allocate(sum(map(len, data)))
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        offset = 0
        for x in data:
            slices = allocation.slices(offset, offset + len(x))
            pairs += zip(slices, x.split([len(block) for block in slices]), strict=True)
            offset += len(x)
        return allocation, self._run(0, pairs)

    def to_device(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyEvent:
        return self._run(1, pairs)

    def wait(self, event: CopyEvent) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _run(self, direction: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyEvent:
        """Copy pairs (destination, source) by stream 0, to the host, or 1; the event after it."""
        if not self._streams:
            for dst, src in pairs:
                dst.copy_(src)
            return None
        # One stream a direction: PCIe and NVLink-C2C carry both at once, and copies of one
        # direction share its bandwidth anyway.
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for dst, src in pairs:
                dst.copy_(src, non_blocking=True)
            return stream.record_event()
