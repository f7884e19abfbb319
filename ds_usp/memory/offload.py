"""Activations that wait for their backward pass in host memory.

What a layer saves is copied to the host while the next layer computes, and comes back one layer
before its backward pass; on the device are those of about three layers, however many there are. A
ratio says how much of it travels: what the link can carry while the device computes.

Others offer parts of that. torch's ``save_on_cpu`` copies where it saves and computes nothing
meanwhile. DeepSpeed's ``cpu_checkpointing`` moves the inputs of checkpoints, and fetches them when
they are asked for. TransformerEngine's ``cpu_offload`` counts layers, not bytes, and needs its
modules; megatron-core's fine-grained offloading (0.16) has neither a ratio nor dense MLPs, and runs
in megatron-core's schedules on GPUs alone. None works with DeepSpeed's pipeline and other hooks on
saved tensors. Use them where they fit; this one asks for layers that are called one by one.

Source: Kuaishou (Yuan et al., ATC 24), section 4.4, with a layer as its unit instead of a pipeline
chunk, so that it serves a plain engine too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from ds_usp.errors import ConfigError, RecomputeError
from ds_usp.memory.pinned_transfer import CopyEvent, HostDeviceCopier, PinnedAllocation
from ds_usp.memory.saved_tensor_hooks import saved_tensors, storage_id
from ds_usp.memory.views import StorageView

_MIN_BYTES = 1 << 16  # copies of less are all latency
_ALIGNMENT = 512  # of a tensor that is cut in two


@dataclass
class Counts:
    """Bytes: saved by layers whose turn to leave came, as far as backward needs them, gone to the
    host, and of these those that were asked for before anyone had fetched them, so that the device
    waited."""

    saved: int = 0
    offloaded: int = 0
    late: int = 0


class Offload:
    """Moves a share of what layers save to the host, and back in time.

    ``with offload.layer(number): hidden = layer(hidden)`` in the forward pass, for each layer.
    Micro batches may be in flight and go backward in any order: what is not back yet is fetched
    when it is asked for. Gradients are bitwise those without.

    The last layer before a backward pass stays: its turn comes at once. It leaves when another
    micro batch's forward pass comes first.

    Args:
        ratio: share of the saved bytes of layers that leave, from 0 to 1.
        device: where the layers compute.
        min_bytes: tensors of fewer bytes stay.
        copies: how bytes travel; for tests.

    Attributes:
        counts: how much was saved, and went.

    Raises:
        ConfigError: a ratio out of range.
    """

    def __init__(
        self,
        ratio: float,
        device: torch.device,
        *,
        min_bytes: int = _MIN_BYTES,
        copier: HostDeviceCopier | None = None,
    ) -> None:
        if not 0 <= ratio <= 1:
            raise ConfigError(f"offload ratio {ratio} must be between 0 and 1")
        self.ratio, self.min_bytes = ratio, min_bytes
        self.counts = Counts()
        self.copier = copier or HostDeviceCopier(device)
        self._passes: list[list[_Layer]] = []
        self._last: _Layer | None = None

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """Around the forward pass of one layer.

        Args:
            number: its place; where numbers begin anew another micro batch does.
        """
        if self.ratio == 0 or not torch.is_grad_enabled():
            yield
            return
        previous = self._last
        if previous is None or previous.number >= number:
            previous = None
            self._begin_pass()
        layer = _Layer(self, number, previous)
        self._passes[-1].append(layer)
        offloading, self._last = self._last, layer
        if offloading is not None:
            offloading.start_offload()
        try:
            with saved_tensors(layer.pack, layer.unpack):
                yield
        finally:
            layer.close()
            if offloading is not None:
                offloading.free_device_copies()

    @property
    def bytes_away(self) -> int:
        """Bytes that are on the host and nowhere else, now."""
        layers = (layer for layers in self._passes for layer in layers)
        return sum(item.host_bytes for layer in layers for item in layer.items if item.data is None)

    def _begin_pass(self) -> None:
        """Forget the micro batches that are done."""
        for layers in self._passes:
            for layer in layers:
                layer.drop_if_unused()
        self._passes = [layers for layers in self._passes if any(x.items for x in layers)]
        self._passes.append([])

    def _next_in_backward(self, layer: _Layer) -> _Layer | None:
        """Whose backward pass is expected after a layer's: the one before it, or, of the micro
        batches that wait, the oldest one's last."""
        if layer.previous is not None:
            return layer.previous
        last_layers = (layers[-1] for layers in self._passes if layers and layer not in layers)
        return next(
            (
                last_layer
                for last_layer in last_layers
                if not last_layer.backward_started and last_layer.items
            ),
            None,
        )


class _State(Enum):
    OPEN = "its forward pass runs"
    ON_DEVICE = "on the device"
    OFFLOADING = "on the device, copies to the host under way"
    ON_HOST = "on the host"
    PREFETCHING = "on the host, copies to the device under way"


class _Layer:
    """What one layer saved in one forward pass.

    What is saved refers to this, and this only weakly to what is saved: it goes with the graph.
    """

    def __init__(self, offload: Offload, number: int, previous: _Layer | None) -> None:
        self.number, self.previous = number, previous
        self.backward_started = False
        self._offload, self.copier = offload, offload.copier
        self._state = _State.OPEN
        self._copy_event: CopyEvent = None
        self._small_bytes = 0
        self._items: list[weakref.ref[_OffloadedStorage]] = []
        self._open: dict[
            int, _OffloadedStorage
        ] = {}  # by storage; they hold it, so no address comes twice
        self._small: dict[int, torch.UntypedStorage] = {}
        self._prefetched: list[torch.Tensor] = []

    @property
    def items(self) -> list[_OffloadedStorage]:
        """What is still needed."""
        return [item for ref in self._items if (item := ref()) is not None]

    def pack(self, tensor: torch.Tensor) -> _Saved | None:
        """Take a tensor that autograd saves; None: it stays as it is."""
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
        """The layer before may have saved it too: its output is this one's input."""
        stored = self.previous.items if self.previous is not None else []
        return next((x for x in stored if x.data is not None and storage_id(x.data) == key), None)

    def unpack(self, saved: _Saved) -> torch.Tensor:
        """Give back what was packed, from wherever it is."""
        layer = saved.item.layer
        if layer._state is not _State.OPEN:  # the forward pass may look at what it keeps
            layer.ensure_on_device()
        return saved.tensor()

    def close(self) -> None:
        """The forward pass is over."""
        self._open.clear()
        self._small.clear()
        self._state = _State.ON_DEVICE

    def start_offload(self) -> None:
        """Start the copies to the host."""
        items, counts = self.items, self._offload.counts
        if self._state is not _State.ON_DEVICE or self.backward_started or not items:
            return
        # What some nodes saved has gone with them: TorchScript's make many that nobody needs.
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
            counts.offloaded += offset
            allocation, self._copy_event = self.copier.to_host(slices)
            for item in offloaded:
                item.allocation = allocation
            self._state = _State.OFFLOADING

    def free_device_copies(self) -> None:
        """The copies have had a layer's time; take the memory, unless backward has come first."""
        if self._state is _State.OFFLOADING:
            self.copier.wait(self._copy_event)
            for item in self.items:
                item.drop()
            self._state = _State.ON_HOST

    def ensure_on_device(self) -> None:
        """Backward needs what was saved: be here, and let the next one come."""
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
        """Start the copies to the device."""
        if self._state is _State.ON_HOST:
            pairs = [pair for item in self.items for pair in item.begin_prefetch()]
            self._copy_event = self.copier.to_device(pairs)
            self._prefetched = [into for into, _ in pairs]  # even if the graph goes meanwhile
            self._state = _State.PREFETCHING

    def drop_if_unused(self) -> None:
        """Nothing of it is needed any more, though it may be on its way."""
        if self._state is _State.PREFETCHING and not self.items:
            self.copier.wait(self._copy_event)
            self._prefetched = []
            self._state = _State.ON_DEVICE


class _OffloadedStorage:
    """The memory of one or more saved tensors: on the device, on the host, or cut between both."""

    def __init__(self, layer: _Layer, tensor: torch.Tensor) -> None:
        self.layer = layer
        storage = tensor.untyped_storage()
        self.size = storage.nbytes()
        self.data: torch.Tensor | None = _storage_as_bytes(storage)
        self.host_bytes = self.host_offset = (
            0  # bytes that go to the host, and where they are in the parcel
        )
        self.allocation: PinnedAllocation | None = None
        self._device_remainder: torch.Tensor | None = None
        self._prefetch_buffer: torch.Tensor | None = None
        self._probe: torch.Tensor | None = tensor.detach()
        self._version = tensor._version

    def set_offload_bytes(self, budget: int) -> torch.Tensor | None:
        """The bytes that go, at most so many; None: none do."""
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
        """Give the memory back, after the copies."""
        if self.host_bytes:
            self.data = self._probe = None

    def begin_prefetch(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """New memory, and what is to be copied into its parts."""
        if self.allocation is None:
            return []
        self._prefetch_buffer = torch.empty(
            self.size, dtype=torch.uint8, device=self.layer.copier.device
        )
        slices = self.allocation.slices(self.host_offset, self.host_offset + self.host_bytes)
        slices += [self._device_remainder] if self._device_remainder is not None else []
        return list(zip(self._prefetch_buffer.split([len(x) for x in slices]), slices, strict=True))

    def finish_prefetch(self) -> None:
        """The copies have arrived."""
        if self._prefetch_buffer is not None:
            self.data, self._prefetch_buffer = self._prefetch_buffer, None
            self.allocation = self._device_remainder = None

    def check_version(self) -> None:
        """Raise if the memory was written to since it was saved."""
        if self._probe is not None and self._probe._version != self._version:
            raise RecomputeError(
                f"a tensor {list(self._probe.shape)} that backward needs was changed in place "
                f"(version {self._probe._version}, saved at {self._version})"
            )


class _Saved(NamedTuple):
    """A saved tensor: a view of an item's memory."""

    item: _OffloadedStorage
    dtype: torch.dtype
    view: StorageView

    def tensor(self) -> torch.Tensor:
        """The tensor; its memory must be here."""
        item = self.item
        item.check_version()
        if item.data is None:
            raise RecomputeError("a saved tensor was asked for while its memory is on the host")
        empty = torch.empty(0, dtype=self.dtype, device=item.data.device)
        return empty.set_(
            item.data.untyped_storage(), self.view.offset, self.view.size, self.view.stride
        )


def _is_offloadable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than a view of some bytes."""
    strided = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return strided and type(tensor) is torch.Tensor and tensor.untyped_storage().nbytes() > 0


def _storage_as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
