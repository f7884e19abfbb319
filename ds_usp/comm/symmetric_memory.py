"""Memory that all GPUs of a host reach: torch's (torch.distributed._symmetric_memory)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ds_usp.comm.cuda_driver import driver
from ds_usp.errors import MeshError


class PeerMappedTensor:
    """A tensor of symmetric memory and those of the other ranks."""

    def __init__(self, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.local = own
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
    return peer_copy_unavailable_reason(group.size())


def peer_copy_unavailable_reason(ranks: int) -> str | None:
    """Why this process's GPU cannot copy from those of a group of so many ranks, one a GPU of this
    node, as far as one process can see it; None if it can."""
    if torch.cuda.device_count() < 1 or torch.version.cuda is None:
        return "no NVIDIA GPU"
    if torch.cuda.device_count() < ranks:
        return f"this process sees {torch.cuda.device_count()} GPUs, the group has {ranks}"
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


def alloc_symmetric(
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
