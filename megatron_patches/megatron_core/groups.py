"""megatron-core's process groups and the mesh over its context-parallel group."""

from __future__ import annotations

from megatron.core import parallel_state

import ds_usp
from ds_usp.training import ParallelGroups
from megatron_patches.megatron_core.context_parallel import RANK_ORDER


def initialize_groups(
    *, tensor: int, sequence: int, pipeline: int, ulysses: int, timeout_minutes: float | None = None
) -> tuple[ds_usp.SequenceMesh, ParallelGroups]:
    """Create every process group of this world through megatron-core's parallel state. Collective.

    Rank order, innermost first: tensor, Ulysses, ring, data, pipeline. megatron-core's
    context-parallel group is the sequence-parallel group, Ulysses ranks next to each other.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=sequence,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_minutes or 30,
        order="tp-cp-ep-dp-pp",
    )
    sp = parallel_state.get_context_parallel_group()
    groups = ParallelGroups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        sp=sp,
        dp=parallel_state.get_data_parallel_group(),
        sp_dp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        model=parallel_state.get_model_parallel_group(),
        stages=pipeline,
    )
    return ds_usp.SequenceMesh.shared(sp, ulysses, RANK_ORDER), groups
