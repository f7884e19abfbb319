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
from ds_usp.memory.pinned_transfer import Copies, Done, Parcel
from ds_usp.memory.saved_tensor_hooks import saved_tensors, storage_of
from ds_usp.memory.views import View

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
        copies: Copies | None = None,
    ) -> None:
        if not 0 <= ratio <= 1:
            raise ConfigError(f"offload ratio {ratio} must be between 0 and 1")
        self.ratio, self.min_bytes = ratio, min_bytes
        self.counts = Counts()
        self.copies = copies or Copies(device)
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
        before = self._last
        if before is None or before.number >= number:
            before = None
            self._begin_pass()
        now = _Layer(self, number, before)
        self._passes[-1].append(now)
        leaving, self._last = self._last, now
        if leaving is not None:
            leaving.leave()
        try:
            with saved_tensors(now.pack, now.unpack):
                yield
        finally:
            now.close()
            if leaving is not None:
                leaving.let_go()

    @property
    def bytes_away(self) -> int:
        """Bytes that are on the host and nowhere else, now."""
        layers = (layer for layers in self._passes for layer in layers)
        return sum(item.cut for layer in layers for item in layer.items if item.data is None)

    def _begin_pass(self) -> None:
        """Forget the micro batches that are done."""
        for layers in self._passes:
            for layer in layers:
                layer.give_up()
        self._passes = [layers for layers in self._passes if any(x.items for x in layers)]
        self._passes.append([])

    def _after(self, layer: _Layer) -> _Layer | None:
        """Whose backward pass is expected after a layer's: the one before it, or, of the micro
        batches that wait, the oldest one's last."""
        if layer.before is not None:
            return layer.before
        others = (layers[-1] for layers in self._passes if layers and layer not in layers)
        return next((last for last in others if not last.asked and last.items), None)


class _State(Enum):
    OPEN = "its forward pass runs"
    HERE = "on the device"
    LEAVING = "on the device, copies to the host under way"
    AWAY = "on the host"
    COMING = "on the host, copies to the device under way"


class _Layer:
    """What one layer saved in one forward pass.

    What is saved refers to this, and this only weakly to what is saved: it goes with the graph.
    """

    def __init__(self, offload: Offload, number: int, before: _Layer | None) -> None:
        self.number, self.before = number, before
        self.asked = False
        self._offload, self.copies = offload, offload.copies
        self._state = _State.OPEN
        self._done: Done = None
        self._small_bytes = 0
        self._items: list[weakref.ref[_Item]] = []
        self._open: dict[int, _Item] = {}  # by storage; they hold it, so no address comes twice
        self._small: dict[int, torch.UntypedStorage] = {}
        self._coming: list[torch.Tensor] = []

    @property
    def items(self) -> list[_Item]:
        """What is still needed."""
        return [item for ref in self._items if (item := ref()) is not None]

    def pack(self, tensor: torch.Tensor) -> _Saved | None:
        """Take a tensor that autograd saves; None: it stays as it is."""
        if tensor.device.type != self.copies.device.type or not _plain(tensor):
            return None
        storage = tensor.untyped_storage()
        key = storage_of(tensor)
        item = self._open.get(key) or self._shared(key)
        if item is None and key not in self._small:
            if storage.nbytes() < self._offload.min_bytes:
                self._small[key] = storage
                self._small_bytes += storage.nbytes()
            else:
                item = self._open[key] = _Item(self, tensor)
                self._items.append(weakref.ref(item))
        return None if item is None else _Saved(item, tensor.dtype, View.of(tensor))

    def _shared(self, key: int) -> _Item | None:
        """The layer before may have saved it too: its output is this one's input."""
        saved = self.before.items if self.before is not None else []
        return next((x for x in saved if x.data is not None and storage_of(x.data) == key), None)

    def unpack(self, saved: _Saved) -> torch.Tensor:
        """Give back what was packed, from wherever it is."""
        layer = saved.item.layer
        if layer._state is not _State.OPEN:  # the forward pass may look at what it keeps
            layer._arrive()
        return saved.tensor()

    def close(self) -> None:
        """The forward pass is over."""
        self._open.clear()
        self._small.clear()
        self._state = _State.HERE

    def leave(self) -> None:
        """Start the copies to the host."""
        items, counts = self.items, self._offload.counts
        if self._state is not _State.HERE or self.asked or not items:
            return
        # What some nodes saved has gone with them: TorchScript's make many that nobody needs.
        counts.saved += self._small_bytes + sum(item.size for item in items)
        want = round(self._offload.ratio * counts.saved) - counts.offloaded
        going, parts, at = [], [], 0
        for item in sorted(items, key=lambda item: -item.size):
            part = item.cut_at(want - at)
            if part is not None:
                item.start = at
                going.append(item)
                parts.append(part)
                at += len(part)
        if going:
            counts.offloaded += at
            parcel, self._done = self.copies.to_host(parts)
            for item in going:
                item.parcel = parcel
            self._state = _State.LEAVING

    def let_go(self) -> None:
        """The copies have had a layer's time; take the memory, unless backward has come first."""
        if self._state is _State.LEAVING:
            self.copies.wait(self._done)
            for item in self.items:
                item.drop()
            self._state = _State.AWAY

    def _arrive(self) -> None:
        """Backward needs what was saved: be here, and let the next one come."""
        if not self.asked:
            self.asked = True
            if self._state is _State.LEAVING:
                self._state = _State.HERE  # nothing was dropped
            elif self._state is _State.AWAY:
                self._offload.counts.late += sum(item.cut for item in self.items)
                self._fetch()
            ahead = self._offload._after(self)
            if ahead is not None:
                ahead._fetch()
        if self._state is _State.COMING:
            self.copies.wait(self._done)
            for item in self.items:
                item.take()
            self._coming = []
            self._state = _State.HERE

    def _fetch(self) -> None:
        """Start the copies to the device."""
        if self._state is _State.AWAY:
            pairs = [pair for item in self.items for pair in item.come()]
            self._done = self.copies.to_device(pairs)
            self._coming = [into for into, _ in pairs]  # even if the graph goes meanwhile
            self._state = _State.COMING

    def give_up(self) -> None:
        """Nothing of it is needed any more, though it may be on its way."""
        if self._state is _State.COMING and not self.items:
            self.copies.wait(self._done)
            self._coming = []
            self._state = _State.HERE


class _Item:
    """The memory of one or more saved tensors: on the device, on the host, or cut between both."""

    def __init__(self, layer: _Layer, tensor: torch.Tensor) -> None:
        self.layer = layer
        storage = tensor.untyped_storage()
        self.size = storage.nbytes()
        self.data: torch.Tensor | None = _bytes_of(storage)
        self.cut = self.start = 0  # bytes that go to the host, and where they are in the parcel
        self.parcel: Parcel | None = None
        self._rest: torch.Tensor | None = None
        self._into: torch.Tensor | None = None
        self._witness: torch.Tensor | None = tensor.detach()
        self._version = tensor._version

    def cut_at(self, want: int) -> torch.Tensor | None:
        """The bytes that go, at most so many; None: none do."""
        self.check()
        part = min(self.size, want)
        if part < self.size:
            part -= part % _ALIGNMENT
        if part <= 0 or self.data is None:
            return None
        self.cut = part
        self._rest = self.data[part:].clone() if part < self.size else None
        return self.data[:part]

    def drop(self) -> None:
        """Give the memory back, after the copies."""
        if self.cut:
            self.data = self._witness = None

    def come(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """New memory, and what is to be copied into its parts."""
        if self.parcel is None:
            return []
        self._into = torch.empty(self.size, dtype=torch.uint8, device=self.layer.copies.device)
        pieces = self.parcel.pieces(self.start, self.start + self.cut)
        pieces += [self._rest] if self._rest is not None else []
        return list(zip(self._into.split([len(x) for x in pieces]), pieces, strict=True))

    def take(self) -> None:
        """The copies have arrived."""
        if self._into is not None:
            self.data, self._into = self._into, None
            self.parcel = self._rest = None

    def check(self) -> None:
        """Raise if the memory was written to since it was saved."""
        if self._witness is not None and self._witness._version != self._version:
            raise RecomputeError(
                f"a tensor {list(self._witness.shape)} that backward needs was changed in place "
                f"(version {self._witness._version}, saved at {self._version})"
            )


class _Saved(NamedTuple):
    """A saved tensor: a view of an item's memory."""

    item: _Item
    dtype: torch.dtype
    view: View

    def tensor(self) -> torch.Tensor:
        """The tensor; its memory must be here."""
        item = self.item
        item.check()
        if item.data is None:
            raise RecomputeError("a saved tensor was asked for while its memory is on the host")
        empty = torch.empty(0, dtype=self.dtype, device=item.data.device)
        return empty.set_(
            item.data.untyped_storage(), self.view.offset, self.view.size, self.view.stride
        )


def _plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than a view of some bytes."""
    strided = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return strided and type(tensor) is torch.Tensor and tensor.untyped_storage().nbytes() > 0


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
