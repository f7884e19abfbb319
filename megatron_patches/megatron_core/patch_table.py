"""The patches of megatron-core: for USP attention, and for machines without a GPU."""

from __future__ import annotations

from megatron_patches.guards import Guard
from megatron_patches.megatron_core import cpu_fallbacks
from megatron_patches.megatron_core.context_parallel import (
    ContextParallel,
    index_from_one,
    without_transformer_engine,
)
from megatron_patches.patch import Patch, add, wrap

_GROUPS = "megatron.core.parallel_state"
_TE = "megatron.core.extensions.transformer_engine"
_ROPE = "megatron.core.models.common.embeddings"


def usp(context_parallel: ContextParallel) -> tuple[Patch, ...]:
    """The patches of megatron-core's process groups and attention."""
    return (
        wrap(
            f"{_GROUPS}:initialize_model_parallel",
            context_parallel.initialize_model_parallel,
            guard=_mcore("d8517166c3e33430"),
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
            guard=_mcore("95e0f8adf123b731"),
            reason="refuses context parallelism; becomes USPCoreAttention",
        ),
        wrap(
            f"{_TE}:TEDotProductAttention.__init__",
            context_parallel.build_attention,
            guard=_mcore("03c3164aec808be6"),
            needs="transformer_engine",
            reason="has context parallelism of its own; becomes USPCoreAttention, unless the "
            "layer names another cp_comm_type",
        ),
        wrap(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            index_from_one,
            guard=_mcore("550f56a2af65ecad"),
            reason="indexes a list cp_comm_type by a layer number that starts at 1",
            upstream="index error at the last layer; fixed after 0.16",
        ),
        wrap(
            "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.__init__",
            without_transformer_engine,
            guard=_mcore("92f0ff254e442de1"),
            reason="takes TransformerEngine for installed where it is not, and raises",
        ),
    )


def without_gpu() -> tuple[Patch, ...]:
    """Fallbacks where there is no GPU; with one they call the originals."""
    return (
        wrap(
            "torch.cuda:current_device",
            cpu_fallbacks.current_device,
            also_in=("torch.cuda.random:current_device",),
            reason="no GPU: buffers and rotary frequencies are allocated on this device",
        ),
        wrap(
            f"{_ROPE}.rope_utils:get_pos_emb_on_this_cp_rank",
            cpu_fallbacks.rotary_of_this_rank,
            also_in=(
                f"{_ROPE}.rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
                f"{_ROPE}.yarn_rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
            ),
            guard=_mcore("19b817c357778e2f"),
            reason="no GPU: pins memory and copies to CUDA",
        ),
        wrap(
            "torch.cuda.random:get_rng_state",
            cpu_fallbacks.get_random_state,
            also_in=("torch.cuda:get_rng_state",),
            reason="no GPU: there is no CUDA generator; dropout and recomputation ask for it",
        ),
        wrap(
            "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
            cpu_fallbacks.set_random_state,
            guard=_mcore("3e3539caa0117e64"),
            reason="no GPU: as above",
        ),
        wrap(
            "megatron.core.transformer.utils:get_default_causal_mask",
            cpu_fallbacks.causal_mask,
            also_in=("megatron.core.fusions.fused_softmax:get_default_causal_mask",),
            guard=_mcore("a575730f598fa571"),
            reason="no GPU: makes the mask on CUDA (stock attention, context parallel 1)",
        ),
    )


def _mcore(fingerprint: str) -> Guard:
    return Guard("megatron-core", ">=0.16,<0.17", fingerprint)
