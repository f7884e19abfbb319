"""A training step with dropout seeds of its own; ``megatron_lm/step.py`` has Megatron-LM's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.megatron_deepspeed.state import get_state
from megatron_patches.step import dropout_seeds

# ------------------------------------------------------------------------------------------------
# Dropout seeds that differ over sequence-parallel and data-parallel ranks, where sequences are
# sharded.
#
# Megatron-DeepSpeed gives all of them one seed, so the dropout masks of all shards would be equal;
# with one rank a sequence its data-parallel ranks keep equal seeds, unless --data-parallel-
# random-init is given. Seeds depend on the number of the step: a resumed run draws what an
# uninterrupted one does, whatever the checkpoint contains.


def seed_step(flags: Any) -> None:
    """Seed this step, where sequences are sharded and dropout is on; ``curr_iteration`` counts
    the steps before."""
    if get_state().is_sequence_parallel and max(flags.hidden_dropout, flags.attention_dropout) > 0:
        _seed(flags.seed, flags.curr_iteration)


def _seed(seed: int, step: int) -> None:
    """Seed the accelerator and Megatron's model-parallel random state tracker."""
    from deepspeed.accelerator import get_accelerator
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import random as megatron_random

    replicated, tensor_parallel_seed = dropout_seeds(
        seed,
        step,
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        sp=parallel_state.get_sequence_parallel_rank(),
        tp=parallel_state.get_tensor_model_parallel_rank(),
    )
    get_accelerator().manual_seed(replicated)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME, tensor_parallel_seed)


def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``train_step`` with seeds of this step."""
    from megatron import get_args

    seed_step(get_args())
    return original(*args, **kwargs)
