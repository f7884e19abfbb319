"""A training step: its dropout seeds, and its report of communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_patches.megatron_deepspeed.dropout import seed_step
from megatron_patches.step_report import run_step


def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``train_step`` with seeds of this step, and traced if its report was asked for."""
    from megatron import get_args

    flags = get_args()
    seed_step(flags)
    return run_step(flags, partial(original, *args, **kwargs), _roles)


def _roles() -> Mapping[str, Any]:
    """Process groups by role; DeepSpeed's pipeline sends in the default group."""
    from megatron.core import parallel_state

    return {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "data": [
            parallel_state.get_data_parallel_group(),
            parallel_state.get_sequence_data_parallel_group(),
        ],
        "pipeline": [parallel_state.get_pipeline_model_parallel_group(), dist.group.WORLD],
        "sequence": parallel_state.get_sequence_parallel_group(),
    }
