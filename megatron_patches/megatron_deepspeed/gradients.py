"""Corrections of DeepSpeed's gradient reduction, scale and clipping; where its states wait.

The reductions are collective: one a step, with ZeRO-3 one a bucket in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ds_usp.training import (
    ParallelGroups,
    keep_states_on_host,
    own_clipping,
    with_large_enough_buckets,
)
from megatron_patches.megatron_deepspeed.state import find_state, get_state


def reduce_gradients(
    original: Callable[..., None], engine: Any, grads: Any, elements_per_buffer: int
) -> None:
    """``DeepSpeedEngine._reduce_non_expert_gradients`` over sequence-parallel ranks too: once a
    step with ZeRO-0 or a ``BF16_Optimizer``; other optimizers reduce by themselves."""
    # Under a pipeline DeepSpeed reduces over the data-parallel group alone; without one over data-
    # and sequence-parallel ranks, which is right for both.
    state = find_state()
    pipeline_parallelism = engine.pipeline_parallelism
    engine.pipeline_parallelism = pipeline_parallelism and not (
        state and state.is_sequence_parallel
    )
    try:
        original(engine, grads, elements_per_buffer)
    finally:
        engine.pipeline_parallelism = pipeline_parallelism


def scatter_gradients(
    original: Callable[..., list[torch.Tensor]], optimizer: Any, *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """ZeRO-3's ``__avg_scatter_grads`` as a sum over sequence-parallel ranks, not an average."""
    partitions = original(optimizer, *args, **kwargs)
    if optimizer.sequence_parallel_size == 1:
        return partitions
    return [partition * optimizer.sequence_parallel_size for partition in partitions]


def initialize_engine(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize`` with gradient norm and clipping by ds_usp for ZeRO-0 in fp32, with
    ZeRO-2's buckets large enough, and with ``--usp-states-on-host``."""
    # Megatron-DeepSpeed passes keywords alone, and the configuration as a dict.
    config, optimizer, model = (kwargs.get(name) for name in ("config", "optimizer", "model"))
    if isinstance(config, Mapping) and model is not None:
        kwargs["config"] = config = with_large_enough_buckets(config, model.parameters())
    from megatron import get_args

    state = find_state()
    if state is not None and isinstance(config, Mapping) and optimizer is not None:
        is_sharded = state.is_sequence_parallel or state.grid.size("pp") > 1
        low_precision = any(config.get(name, {}).get("enabled") for name in ("fp16", "bf16"))
        stage = config.get("zero_optimization", {}).get("stage", 0)
        # Here DeepSpeed reports no norm, and over pipeline stages it clips by a wrong one.
        if is_sharded and not low_precision and stage == 0:
            kwargs["config"] = own_clipping(config, optimizer, _parallel_groups())
    engine, *others = original(*args, **kwargs)
    if state is not None and get_args().usp_states_on_host and optimizer is not None:
        keep_states_on_host(engine)
    return engine, *others


def _parallel_groups() -> ParallelGroups:
    """Megatron-DeepSpeed's process groups and the number of pipeline stages."""
    from megatron.core import parallel_state

    return ParallelGroups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        sp=parallel_state.get_sequence_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        sp_dp=parallel_state.get_sequence_data_parallel_group(),
        model=parallel_state.get_model_parallel_group(),
        stages=get_state().grid.size("pp"),
    )
