"""megatron-core's process groups and the mesh over its context-parallel group."""

from __future__ import annotations

from typing import Any

import ds_usp
from ds_usp.errors import MeshError
from ds_usp.training import ParallelGroups

# As in hierarchical_context_parallel_sizes: the inner level is Ulysses.
RANK_ORDER = "ulysses-ring"


def initialize_groups(
    *, tensor: int, sequence: int, pipeline: int, ulysses: int, timeout_minutes: float | None = None
) -> tuple[ds_usp.SequenceMesh, ParallelGroups]:
    """Create every process group of this world through megatron-core's parallel state. Collective.

    Rank order, innermost first: tensor, Ulysses, ring, data, pipeline. megatron-core's
    context-parallel group is the sequence-parallel group, Ulysses ranks next to each other.
    """
    from megatron.core import parallel_state

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


def check_size(config: Any, mesh: ds_usp.SequenceMesh) -> None:
    """Raise MeshError unless the mesh is the context-parallel group of a configuration."""
    if config.context_parallel_size != mesh.sp_degree:
        raise MeshError(
            f"TransformerConfig.context_parallel_size={config.context_parallel_size} but the "
            f"mesh has {mesh.sp_degree} ranks (ulysses {mesh.ulysses_degree} x ring "
            f"{mesh.ring_degree}); they must be the same group"
        )
