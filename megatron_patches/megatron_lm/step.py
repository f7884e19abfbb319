"""A training step with dropout seeds of its own; those of Megatron-DeepSpeed: its ``step.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.megatron_lm.context_parallel_kind import uses_usp
from megatron_patches.step import dropout_seeds

# ------------------------------------------------------------------------------------------------
# Dropout seeds that differ over context-parallel and data-parallel ranks, where USP shards
# sequences.
#
# Megatron-LM gives all of them one seed, so the masks of hidden dropout, and the noise of
# --moe-input-jitter-eps, would be equal for all shards of a sequence. Seeds depend on the number of
# the step: a resumed run draws what an uninterrupted one does, whatever the checkpoint contains.


def seed_step(flags: Any) -> None:
    """Seed this step, where USP shards sequences, and dropout or the jitter of routers is on;
    ``curr_iteration`` counts the steps before."""
    if uses_usp(flags) and (flags.hidden_dropout > 0 or flags.moe_input_jitter_eps):
        _seed(flags)


def _seed(flags: Any) -> None:
    """Seed all random states on the device, those of tensor-parallel and expert-parallel ranks
    from the same seed, as Megatron-LM does at its start."""
    from megatron.core import parallel_state, tensor_parallel

    seed, _ = dropout_seeds(
        flags.seed,
        flags.curr_iteration,
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        sp=parallel_state.get_context_parallel_rank(),
        tp=0,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, flags.te_rng_tracker, flags.inference_rng_tracker
    )


def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``train_step`` with seeds of this step."""
    from megatron.training import get_args

    seed_step(get_args())
    return original(*args, **kwargs)
