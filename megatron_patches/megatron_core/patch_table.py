"""The patches of megatron-core for USP attention: rows alone, which ``PatchSet`` applies."""

from __future__ import annotations

from functools import partial

from megatron_patches.guards import megatron_core_guard
from megatron_patches.megatron_core import loss, recurrent_layers
from megatron_patches.megatron_core.context_parallel import (
    ContextParallel,
    index_from_one,
    without_transformer_engine,
)
from megatron_patches.megatron_core.cpu_patch_table import without_gpu
from megatron_patches.patch import Patch, add, wrap

__all__ = ["usp", "without_gpu"]

_GROUPS = "megatron.core.parallel_state"
_ROPE = "megatron.core.models.common.embeddings"
_SSM = "megatron.core.ssm"
_TE = "megatron.core.extensions.transformer_engine"


def usp(context_parallel: ContextParallel) -> tuple[Patch, ...]:
    """The patches of megatron-core's process groups, attention and losses."""
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
        *(
            add(f"{_GROUPS}:{name}", getter, reason="beside the stock getters")
            for name, getter in (
                ("get_ulysses_parallel_group", context_parallel.ulysses_group),
                ("get_ring_parallel_group", context_parallel.ring_group),
            )
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
        wrap(
            f"{_ROPE}.rope_utils:get_pos_emb_on_this_cp_rank",
            context_parallel.rotary_shard,
            also_in=(
                f"{_ROPE}.rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
                f"{_ROPE}.yarn_rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
            ),
            guard=megatron_core_guard("19b817c357778e2f"),
            reason="takes every order of tokens for a zigzag over all ranks",
        ),
        wrap(
            "megatron.core.models.gpt.gpt_model:GPTModel._preprocess",
            context_parallel.prepare_inputs,
            guard=megatron_core_guard("9a51b4366fd9de1e"),
            reason="rotary embedding splits by documents' lengths unchecked, M-RoPE shards twice",
            upstream="wrong frequencies, or another number of them than tokens, on one rank alone",
        ),
        wrap(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            partial(loss.forward_step_calc_loss, context_parallel=context_parallel),
            guard=megatron_core_guard("f2566efccb050839"),
            reason="divides each rank's loss by its own number of loss tokens, and averages",
        ),
        wrap(
            "megatron.core.transformer.multi_token_prediction:roll_tensor",
            partial(loss.roll_tensor, uses_sum=False, context_parallel=context_parallel),
            guard=megatron_core_guard("74cba5b0b7a1d456"),
            reason="takes packed documents for packed without padding, and every order of tokens "
            "for a zigzag",
        ),
        wrap(
            "megatron.core.models.gpt.gpt_model:roll_tensor",
            partial(loss.roll_tensor, uses_sum=True, context_parallel=context_parallel),
            guard=megatron_core_guard("74cba5b0b7a1d456"),
            reason="the same; and the number of loss tokens is each rank's own",
        ),
        wrap(
            "megatron.core.transformer.multi_token_prediction:"
            "MultiTokenPredictionLayer._checkpointed_forward",
            loss.recompute_packed,
            guard=megatron_core_guard("9f28c47be348b440"),
            reason="gives packed documents to a function that saves tensors",
            upstream="TypeError with recompute_granularity full",
        ),
        wrap(
            "megatron.core.transformer.moe.router:TopKRouter.apply_z_loss",
            partial(loss.apply_z_loss, context_parallel=context_parallel),
            guard=megatron_core_guard("c9a28a9f1c508a88"),
            reason="refuses padding masks, by which ranks average over other numbers of tokens",
        ),
        *_mamba(context_parallel),
        *_gated_delta_net(context_parallel),
    )


def _mamba(context_parallel: ContextParallel) -> tuple[Patch, ...]:
    """Mamba layers, where they can be built: on one rank and over a mesh as megatron-core's own."""
    row = partial(wrap, needs="mamba_ssm")
    return (
        row(
            f"{_SSM}.mamba_mixer:MambaMixer.__init__",
            context_parallel.build_recurrent,
            guard=megatron_core_guard("b0d4c9a0ce0de7a7"),
            reason="exchanges heads, which have to divide, and takes every order of tokens for a "
            "zigzag over all ranks",
        ),
        row(
            f"{_SSM}.mamba_mixer:MambaMixer.forward",
            recurrent_layers.mamba_mixer,
            guard=megatron_core_guard("c3388f7c83348db2"),
            reason="computes a kernel that fuses convolution and scan; over a mesh both send "
            "something of their own; refuses inference",
        ),
        row(
            f"{_SSM}.mamba_mixer:MambaMixer._ssm_prefill",
            recurrent_layers.mamba_between_projections,
            guard=megatron_core_guard("c111008b79d66617"),
            reason="calls the convolution and the scan, which get the tokens and the state before "
            "this rank's",
        ),
    )


def _gated_delta_net(context_parallel: ContextParallel) -> tuple[Patch, ...]:
    row = partial(wrap, needs="fla")
    return (
        row(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            context_parallel.configure,
            guard=megatron_core_guard("58c6c750bb8640e6"),
            reason="refuses context parallelism with experimental_attention_variant "
            "gated_delta_net",
        ),
        row(
            f"{_SSM}.gated_delta_net:GatedDeltaNet.__init__",
            partial(context_parallel.build_recurrent, check=recurrent_layers.check_delta_net),
            guard=megatron_core_guard("9aa06abff43c947e"),
            reason="knows no context parallelism, and computes each rank's tokens as a sequence",
        ),
        row(
            f"{_SSM}.gated_delta_net:GatedDeltaNet.forward",
            recurrent_layers.gated_delta_net,
            guard=megatron_core_guard("ecd9ed26a1c7b600"),
            reason="calls the convolution and the delta rule, which get the tokens and the state "
            "before this rank's",
        ),
    )
