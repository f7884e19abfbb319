"""The offload ratio with which a model just fits, from the planner's formulas."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_usp.config import single_hw_queue
from ds_usp.errors import ConfigError
from ds_usp.planner.memory import offload_needed
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.warn_once import warn_once

AUTO = "auto"

# Of a GPU's memory; what is left is the CUDA context's, NCCL's, and fragments'.
_USABLE = 0.9
_WORKSPACE_BYTES = 2 * 2**30  # what no formula sees: cuBLAS, buckets of gradients, attention's


def offload_ratio(text: str) -> float | str:
    """A ratio of a command line: a number from 0 to 1, or ``auto``.

    Raises:
        ValueError: neither.
    """
    if text == AUTO:
        return text
    ratio = float(text)
    if not 0 <= ratio <= 1:
        raise ValueError(f"{text} is not from 0 to 1")
    return ratio


def solved_ratio(
    asked: float | str,
    work: Workload,
    split: ParallelConfig,
    device: torch.device,
    memory_bytes: float | None = None,
) -> float:
    """The ratio that was asked for; for ``auto`` the smallest with which the workload fits.

    Args:
        split: its ``offload_ratio`` does not matter.
        memory_bytes: of the device; None: as it says.

    Raises:
        ConfigError: ``auto`` where no GPU sets a budget, or nothing fits.

    Source: :func:`ds_usp.planner.memory.offload_needed`, closed form.
    """
    if asked and device.type == "cuda" and single_hw_queue():
        warn_once(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams of a GPU one queue: kernels wait "
            "behind copies to and from the host. Unset it, unless tensor parallelism needs it",
            rank=dist.get_rank() if dist.is_initialized() else 0,
        )
    if not isinstance(asked, str):
        return asked
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
