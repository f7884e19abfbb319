"""A training step: its dropout seeds, and its report of communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megatron_patches.megatron_lm.context_parallel_kind import uses_usp
from megatron_patches.step import dropout_seeds, run_step

# ------------------------------------------------------------------------------------------------
# Dropout seeds that differ over context-parallel and data-parallel ranks, where USP shards
# sequences.
#
# Megatron-LM seeds all of them alike, so the masks of hidden dropout, and the noise of
# --moe-input-jitter-eps, would be equal for all shards of a sequence. Seeds depend on the number of
# the step: a resumed run draws what an uninterrupted one does, whatever the checkpoint contains.


def seed_step(flags: Any) -> None:
    """Seed this step, where USP shards sequences, and dropout or the jitter of routers is on."""
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
    """``train_step`` with seeds of this step, and traced if its report was asked for."""
    from megatron.training import get_args

    flags = get_args()
    seed_step(flags)
    return run_step(flags, partial(original, *args, **kwargs), _roles)


def _roles() -> Mapping[str, Any]:
    """Process groups by role; the others by Megatron-LM's descriptions of them."""
    from megatron.core import parallel_state

    return {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "data": [
            parallel_state.get_data_parallel_group(),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        ],
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "sequence": parallel_state.get_context_parallel_group(),
    }
