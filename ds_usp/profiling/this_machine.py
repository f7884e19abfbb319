"""What is automatic about this machine: its cluster, and the offload ratio that fits its memory.

Both ask the planner, and so are here and not in ``ds_usp.training``, which knows none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_usp.config import num_ranks_on_node, single_hw_queue
from ds_usp.errors import ConfigError, warn_once
from ds_usp.planner.choose_degree import cluster_of
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import offload_needed
from ds_usp.planner.parallel_config import ParallelConfig, Workload

# Of a GPU's memory; what is left is the CUDA context's, NCCL's, and fragmentation.
_USABLE = 0.9
_WORKSPACE_BYTES = 2 * 2**30  # in no formula: cuBLAS, gradient buckets, attention workspaces


def this_cluster(requested: str | None, ranks: int, *, on_gpu: bool) -> Cluster:
    """The cluster that the user names, else the built-in one of the GPU here; with the GPUs of this
    node and their memory.

    Args:
        requested: a built-in name, or a profile; None: neither.
        ranks: of the program.
        on_gpu: they compute on GPUs, else on CPUs.

    Raises:
        ConfigError: a cluster that is none, or a GPU that the planner's table does not have.
    """
    local_ranks = num_ranks_on_node(ranks)
    if not on_gpu:
        return cluster_of(requested, "", local_ranks)
    memory = float(torch.cuda.get_device_properties().total_memory)
    local_ranks = min(local_ranks, torch.cuda.device_count())
    return cluster_of(requested, torch.cuda.get_device_name(), local_ranks, memory)


def solved_ratio(
    requested: float | str,
    work: Workload,
    split: ParallelConfig,
    device: torch.device,
    memory_bytes: float | None = None,
) -> float:
    """The requested offload ratio; for ``auto`` the smallest with which the workload fits.

    Args:
        split: its ``offload_ratio`` does not matter.
        memory_bytes: of the device; None: what the device reports.

    Raises:
        ConfigError: ``auto`` where no GPU sets a budget, or nothing fits.

    Source: :func:`ds_usp.planner.memory.offload_needed`, closed form.
    """
    if requested and device.type == "cuda" and single_hw_queue():
        warn_once(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams of a GPU one queue: kernels wait "
            "behind copies to and from the host. Unset it, unless tensor parallelism needs it",
            rank=dist.get_rank() if dist.is_initialized() else 0,
        )
    if not isinstance(requested, str):
        return requested
    if memory_bytes is None:
        if device.type != "cuda":
            raise ConfigError(
                f"--usp-offload-ratio auto fills a GPU's memory, and the device is {device}: give "
                "a number from 0 to 1"
            )
        memory_bytes = torch.cuda.get_device_properties(device).total_memory * _USABLE
    ratio = offload_needed(work, split, memory_bytes, _WORKSPACE_BYTES)
    if ratio > 1:
        raise ConfigError(
            f"{work.seq_len} tokens of {work.model.name} on {split} do not fit into "
            f"{memory_bytes / 2**30:.0f} GiB even with everything offloaded. Use more ranks a "
            "sequence, --usp-recompute attention or full, or a higher ZeRO stage"
        )
    return ratio
