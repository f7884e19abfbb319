"""Tensors that wait in host memory between two uses: their device memory is freed and given back.

The storage of a tensor is emptied and filled again, as FSDP does with parameters, so every view of
it, and every reference to it, is right again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ds_usp.memory.pinned_transfer import CopyEvent, HostDeviceCopier, PinnedAllocation
from ds_usp.memory.saved_tensor_hooks import storage_id

_MIN_BYTES = 1 << 16  # copies of less are all latency


class HostStorages:
    """Storages on a device, or in host memory with no memory on the device.

    :meth:`send` starts their copies to pinned host memory, :meth:`free` frees the device memory
    after them, :meth:`bring_back` allocates it again and copies back. Between :meth:`free` and
    :meth:`bring_back` the tensors must not be read: they have no memory.

    Args:
        device: where the tensors are when they are used.
        copier: copies between device and host; for tests.
    """

    def __init__(self, device: torch.device, *, copier: HostDeviceCopier | None = None) -> None:
        self._device = device
        self._copier = copier or HostDeviceCopier(device)
        self._sent: _Sent | None = None
        self._is_freed = False

    @property
    def bytes_away(self) -> int:
        """Bytes that are in host memory and not on the device."""
        return sum(self._sent.sizes) if self._sent is not None and self._is_freed else 0

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Start the copies of the tensors' storages to the host, after all work queued so far.

        Storages on another device, of less than 64 KiB, or whose memory is not torch's own (a
        mapped file, an array of NumPy) stay where they are.
        What is written to them before :meth:`free` is sent again there, if torch counts it as a
        version of these tensors: not through ``.data``. Without effect if they were sent.
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
            allocation, event = self._copier.to_host([_bytes_of(x) for x in chosen])
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
        # All memory first: where there is not enough, everything is still in host memory.
        for storage, size in zip(sent.storages, sent.sizes, strict=True):
            storage.resize_(size)
        self._sent, self._is_freed = None, False
        pairs, offset = [], 0
        for storage, size in zip(sent.storages, sent.sizes, strict=True):
            sources = sent.allocation.slices(offset, offset + size)
            parts = _bytes_of(storage).split([len(source) for source in sources])
            pairs += list(zip(parts, sources, strict=True))
            offset += size
        # The host memory is reused by the next copies to the host, which start after these.
        self._copier.wait(self._copier.to_device(pairs))


class _Sent(NamedTuple):
    """Storages whose bytes are, or are being copied, in host memory, one after another.

    Attributes:
        versions: the tensors that were sent, with their versions then.
    """

    storages: list[torch.UntypedStorage]
    sizes: list[int]
    allocation: PinnedAllocation
    event: CopyEvent
    versions: list[tuple[Tensor, int]]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
