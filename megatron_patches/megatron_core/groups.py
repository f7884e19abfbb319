"""Ranks and token order of megatron-core's context-parallel group."""

from __future__ import annotations

from typing import Any

import ds_usp
from ds_usp.errors import MeshError

# As in hierarchical_context_parallel_sizes: the inner level is Ulysses.
RANK_ORDER = "ulysses-ring"
LAYOUT = "context_parallel"  # megatron-core's own order of tokens


def check_size(config: Any, mesh: ds_usp.SequenceMesh) -> None:
    """Raise MeshError unless the mesh is the context-parallel group of a configuration."""
    if config.context_parallel_size != mesh.sp_degree:
        raise MeshError(
            f"TransformerConfig.context_parallel_size={config.context_parallel_size} but the "
            f"mesh has {mesh.sp_degree} ranks (ulysses {mesh.ulysses_degree} x ring "
            f"{mesh.ring_degree}); they must be the same group"
        )
