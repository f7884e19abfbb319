"""Process groups that only their members make."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_usp.comm.gather import all_gather_bytes, transport_device


def subgroup(
    parent: dist.ProcessGroup, ranks: list[int], backend: str | None = None
) -> dist.ProcessGroup | None:
    """A communicator of its own over some ranks of a group, with its backend and timeout."""
    if len(ranks) == 1:
        return None
    own = dist.get_backend(parent)
    # Only members call: the ranks of other sequence-parallel groups need not take part.
    group = dist.new_group(
        ranks,
        timeout=parent._get_backend(transport_device(parent)).options._timeout,
        backend=backend or (None if own == "undefined" else own),
        use_local_synchronization=True,
    )
    # Point-to-point messages need a communicator that all its ranks have met in.
    dist.all_reduce(torch.zeros(1, device=transport_device(group)), group=group)
    return group


def align_group_counters(group: dist.ProcessGroup) -> None:
    """Let all ranks have made as many groups as the one that has made most.

    torch names a group that only its members make after the number of groups that a process
    has, so ranks with other numbers would wait for each other under other names.
    """
    count = len(c10d._world.pg_names)
    counts = [
        int.from_bytes(each, "big") for each in all_gather_bytes(count.to_bytes(8, "big"), group)
    ]
    for _ in range(max(counts) - count):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
