"""Everything that is changed in megatron-core, one row a change."""

from __future__ import annotations

from megatron_patches.guards import Guard
from megatron_patches.megatron_core import cpu_fallbacks
from megatron_patches.megatron_core.context_parallel import ContextParallel
from megatron_patches.megatron_core.layer_numbers import index_from_one
from megatron_patches.patch import Patch

_GROUPS = "megatron.core.parallel_state"
_TE = "megatron.core.extensions.transformer_engine"
_ROPE = "megatron.core.models.common.embeddings"


def usp(context_parallel: ContextParallel) -> tuple[Patch, ...]:
    """Groups and attention, on every machine."""
    return (
        Patch(
            f"{_GROUPS}:initialize_model_parallel",
            context_parallel.initialize_model_parallel,
            "wrap",
            guard=_mcore("d8517166c3e33430"),
            reason="checks the degrees before any group exists, and lays ulysses x ring over each "
            "context-parallel group",
        ),
        Patch(
            f"{_GROUPS}:get_sequence_mesh",
            context_parallel.sequence_mesh,
            "add",
            reason="the mesh of this rank's context-parallel group",
        ),
        Patch(
            f"{_GROUPS}:get_ulysses_parallel_group",
            context_parallel.ulysses_group,
            "add",
            reason="beside the stock getters",
        ),
        Patch(
            f"{_GROUPS}:get_ring_parallel_group",
            context_parallel.ring_group,
            "add",
            reason="beside the stock getters",
        ),
        Patch(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
            context_parallel.build_attention,
            "wrap",
            guard=_mcore("95e0f8adf123b731"),
            reason="refuses context parallelism; ours is built in its place",
        ),
        Patch(
            f"{_TE}:TEDotProductAttention.__init__",
            context_parallel.build_attention,
            "wrap",
            guard=_mcore("03c3164aec808be6"),
            needs="transformer_engine",
            reason="has context parallelism of its own; ours is built in its place, unless the "
            "layer names another cp_comm_type",
        ),
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            index_from_one,
            "wrap",
            guard=_mcore("550f56a2af65ecad"),
            reason="takes a list cp_comm_type by a layer number that counts from 1",
            upstream="index error at the last layer; mended after 0.16",
        ),
    )


def without_gpu() -> tuple[Patch, ...]:
    """What megatron-core needs on machines without a GPU; with one it is left as it is."""
    return (
        Patch(
            "torch.cuda:current_device",
            cpu_fallbacks.current_device,
            "wrap",
            also_in=("torch.cuda.random:current_device",),
            reason="no GPU: buffers and rotary frequencies are made on this device",
        ),
        Patch(
            f"{_ROPE}.rope_utils:get_pos_emb_on_this_cp_rank",
            cpu_fallbacks.rotary_of_this_rank,
            "wrap",
            also_in=(
                f"{_ROPE}.rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
                f"{_ROPE}.yarn_rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
            ),
            guard=_mcore("19b817c357778e2f"),
            reason="no GPU: pins memory and copies to CUDA",
        ),
        Patch(
            "torch.cuda.random:get_rng_state",
            cpu_fallbacks.get_random_state,
            "wrap",
            also_in=("torch.cuda:get_rng_state",),
            reason="no GPU: there is no CUDA generator; dropout and recomputation ask for it",
        ),
        Patch(
            "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
            cpu_fallbacks.set_random_state,
            "wrap",
            guard=_mcore("3e3539caa0117e64"),
            reason="no GPU: as above",
        ),
        Patch(
            "megatron.core.transformer.utils:get_default_causal_mask",
            cpu_fallbacks.causal_mask,
            "wrap",
            also_in=("megatron.core.fusions.fused_softmax:get_default_causal_mask",),
            guard=_mcore("a575730f598fa571"),
            reason="no GPU: makes the mask on CUDA (stock attention, context parallel 1)",
        ),
    )


def _mcore(fingerprint: str) -> Guard:
    return Guard("megatron-core", ">=0.16,<0.17", fingerprint)
