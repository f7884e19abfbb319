"""Symmetric memory: torch's (torch.distributed._symmetric_memory), which the GPUs of a node map
from each other."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ds_usp.comm.cuda_driver import driver
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.errors import MeshError


class PeerMappedTensor:
    """This rank's tensor in symmetric memory, and the addresses of the other ranks'."""

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
    """A tensor in memory that can be shared; collective, so that all ranks have one or none.

    Raises:
        MeshError: a rank is out of memory.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    tensor, reason = None, ""
    for last in (False, True):
        try:
            tensor = symmetric_memory.empty(shape, dtype=dtype, device=device)
            break
        except RuntimeError as error:  # out of memory, of which torch's allocator may cache some
            reason = str(error).splitlines()[0]
            if not last:
                torch.cuda.empty_cache()
    failed = torch.tensor(float(tensor is None), device=device)
    dist.all_reduce(failed, group=group)
    if tensor is None or failed.item():
        raise MeshError(f"a rank cannot allocate symmetric memory of {shape} {dtype} {reason}")
    return tensor


def copy_engine_unavailable_reason(group: dist.ProcessGroup, nodes: Sequence[bytes]) -> str | None:
    """Why the ranks of a group cannot copy from each other's GPUs; None if they can. Collective
    over it.

    Args:
        nodes: each rank's node.
    """
    gpu = torch.device("cuda")
    if gpu not in group._device_types or group._get_backend(gpu).name() != "nccl":
        return "the ranks do not exchange on GPUs"
    reason = peer_copy_unavailable_reason(group.size())
    gpu_index = torch.cuda.current_device().to_bytes(4, "big")
    ranks = all_gather_bytes(bytes([reason is None]) + gpu_index, group)
    if reason is not None:
        return reason
    if len(set(nodes)) > 1 or len({data[:1] for data in ranks}) > 1:
        return "the ranks are on several nodes, or one of them cannot"
    if len({data[1:] for data in ranks}) < len(ranks):
        return "each process sees its own GPU only, or several share one"
    return None


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
    except (ImportError, OSError, RuntimeError) as error:
        return f"symmetric memory cannot be used: {error}"
    device = torch.cuda.current_device()
    peers = (peer for peer in range(torch.cuda.device_count()) if peer != device)
    if not all(torch.cuda.can_device_access_peer(device, peer) for peer in peers):
        return "the GPUs of this node do not reach each other's memory"
    return None
