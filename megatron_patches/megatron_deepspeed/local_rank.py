"""The local rank of a process on a machine without GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist


def initialize_distributed(original: Callable[[], None]) -> None:
    """``_initialize_distributed``, which numbers CPU ranks by NUMA nodes: DeepSpeed refuses that.

    With a GPU a rank the number of devices says the same as the launcher.
    """
    from deepspeed.accelerator import get_accelerator
    from megatron import get_args

    original()
    if get_accelerator().device_name() == "cpu":
        args = get_args()
        args.local_rank = dist.get_node_local_rank(fallback_rank=args.local_rank)
