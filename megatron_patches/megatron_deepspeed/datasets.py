"""Indexes of the host's datasets, which rank 0 writes and others read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def build_index_mappings(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``_build_index_mappings``: tensor-parallel ranks wait for the first of them.

    Rank 0 builds, and the host lets the ranks of its data and pipeline groups wait for it. Under
    sequence parallelism all tensor-parallel ranks read, which are in neither.
    """
    from megatron import get_args
    from megatron.core import parallel_state

    is_sequence_parallel = parallel_state.get_sequence_parallel_world_size() > 1
    if not (is_sequence_parallel or get_args().force_ds_sequence_parallel):
        return original(*args, **kwargs)  # the first of them is the only one here
    group = parallel_state.get_tensor_model_parallel_group()
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    if not first:
        dist.barrier(group=group)
    mappings = original(*args, **kwargs)
    if first:
        dist.barrier(group=group)
    return mappings
