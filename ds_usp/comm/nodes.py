"""Which ranks share a host, and what their GPUs can do there."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from ds_usp.comm.gather import all_gather_bytes
from ds_usp.comm.symmetric_memory import why_not
from ds_usp.geometry.ranks import RankGrid


def node_ids(group: dist.ProcessGroup) -> list[bytes]:
    """A name of the host of each rank of a group; collective over it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text() if boot.exists() else platform.node()
    return all_gather_bytes(hashlib.sha256(host.encode()).digest(), group)


def count_ring_ranks_per_node(hosts: Sequence[bytes], grid: RankGrid) -> int:
    """How many ranks of every ring, in a row, share a host; the ring's degree where hosts do not
    hold as many each.

    Args:
        hosts: of each rank of a grid of axes ``ulysses`` and ``ring``.
    """
    runs = {
        len(list(run))
        for ring in grid.groups("ring")
        for _, run in groupby(hosts[rank] for rank in ring)
    }
    return runs.pop() if len(runs) == 1 else grid.size("ring")


def copy_engine_unavailable_reason(group: dist.ProcessGroup, hosts: Sequence[bytes]) -> str | None:
    """Why the ranks of a group, on these hosts, cannot copy from each other's GPUs; None if they
    can. Collective over it."""
    gpu = torch.device("cuda")
    if gpu not in group._device_types or group._get_backend(gpu).name() != "nccl":
        return "the ranks do not exchange on GPUs"
    mine = why_not(group)
    index = torch.cuda.current_device().to_bytes(4, "big")
    said = all_gather_bytes(bytes([mine is None]) + index, group)
    if mine is not None:
        return mine
    if len(set(hosts)) > 1 or len({each[:1] for each in said}) > 1:
        return "the ranks are on several hosts, or differ in what they can"
    if len({each[1:] for each in said}) < len(said):
        return "each process sees its own GPU only, or several share one"
    return None
