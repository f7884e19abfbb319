"""The patches of megatron-core for USP attention."""

from __future__ import annotations

from megatron_patches.guards import megatron_core_guard
from megatron_patches.megatron_core.context_parallel import (
    ContextParallel,
    index_from_one,
    without_transformer_engine,
)
from megatron_patches.megatron_core.cpu_patch_table import without_gpu
from megatron_patches.patch import Patch, add, wrap

__all__ = ["usp", "without_gpu"]

_GROUPS = "megatron.core.parallel_state"
_TE = "megatron.core.extensions.transformer_engine"


def usp(context_parallel: ContextParallel) -> tuple[Patch, ...]:
    """The patches of megatron-core's process groups and attention."""
    return (
        wrap(
            f"{_GROUPS}:initialize_model_parallel",
            context_parallel.initialize_model_parallel,
            guard=megatron_core_guard("d8517166c3e33430"),
            reason="checks the degrees before any group exists, and lays ulysses x ring over each "
            "context-parallel group",
        ),
        add(
            f"{_GROUPS}:get_sequence_mesh",
            context_parallel.sequence_mesh,
            reason="the mesh of this rank's context-parallel group",
        ),
        add(
            f"{_GROUPS}:get_ulysses_parallel_group",
            context_parallel.ulysses_group,
            reason="beside the stock getters",
        ),
        add(
            f"{_GROUPS}:get_ring_parallel_group",
            context_parallel.ring_group,
            reason="beside the stock getters",
        ),
        wrap(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
            context_parallel.build_attention,
            guard=megatron_core_guard("95e0f8adf123b731"),
            reason="refuses context parallelism; becomes USPCoreAttention",
        ),
        wrap(
            f"{_TE}:TEDotProductAttention.__init__",
            context_parallel.build_attention,
            guard=megatron_core_guard("03c3164aec808be6"),
            needs="transformer_engine",
            reason="has context parallelism of its own; becomes USPCoreAttention, unless the "
            "layer names another cp_comm_type",
        ),
        wrap(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            index_from_one,
            guard=megatron_core_guard("550f56a2af65ecad"),
            reason="indexes a list cp_comm_type by a layer number that starts at 1",
            upstream="index error at the last layer; fixed after 0.16",
        ),
        wrap(
            "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.__init__",
            without_transformer_engine,
            guard=megatron_core_guard("92f0ff254e442de1"),
            reason="takes TransformerEngine for installed where it is not, and raises",
        ),
    )
