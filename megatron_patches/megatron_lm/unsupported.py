"""Options that cannot be trained exactly where USP computes attention: one row each.

``arguments.py`` refuses them at the start; ``memory.py`` has the rows of memory settings.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ds_usp.errors import ConfigError
from megatron_patches import refusals, transformer_engine
from megatron_patches.megatron_lm.context_parallel_kind import (
    attends_on_one_rank,
    is_mixed,
    uses_usp,
)
from megatron_patches.refusals import Refusal

DELTA_NET = "gated_delta_net"
_CP = "with --context-parallel-size {context_parallel_size}"

_ATTENTION = (
    Refusal(
        lambda args: args.attention_dropout > 0,
        "--attention-dropout {attention_dropout}: ranks that share a sequence would drop different "
        "entries in forward and in backward",
        "Set --attention-dropout 0",
    ),
    Refusal(
        lambda args: args.qk_clip or args.log_max_attention_logit,
        "--qk-clip and --log-max-attention-logit need the largest attention logit, which attention "
        "kernels do not return",
        "Leave them out",
    ),
    Refusal(
        lambda args: args.position_embedding_type == "relative",
        "--position-embedding-type relative adds a bias to the attention scores",
        "Use rope, learned_absolute or none",
    ),
    Refusal(
        lambda args: args.position_embedding_type == "mrope",
        "--position-embedding-type mrope needs positions in three axes, which pretrain_gpt.py does "
        "not make",
        "Use rope, learned_absolute or none",
    ),
    Refusal(
        lambda args: args.window_size and args.window_size[1] > 0,
        "--window-size {window_size} looks {window_size[1]} tokens beyond the causal mask of a GPT",
        "Use a window whose second number is 0, such as --window-size {window_size[0]},0",
    ),
    Refusal(
        lambda args: (
            args.multi_latent_attention
            and args.tensor_model_parallel_size > 1
            and args.transformer_impl == "local"
        ),
        "--multi-latent-attention with --tensor-model-parallel-size {tensor_model_parallel_size} "
        "in the local layers: Megatron-LM does not add up the gradients that tensor-parallel ranks "
        "have of the keys' positional part (linear_kv_down_proj)",
        "Use --tensor-model-parallel-size 1",
    ),
    Refusal(
        lambda args: args.attention_backend.name != "auto" and not is_mixed(args),
        "--attention-backend {attention_backend.name} chooses among the kernels of "
        "TransformerEngine's attention, and USP computes attention",
        "Leave it out, and choose by --usp-kernel",
    ),
    Refusal(
        lambda args: args.experimental_attention_variant not in (None, DELTA_NET),
        "--experimental-attention-variant {experimental_attention_variant} does not compute its "
        f"attention in a core attention, {_CP}",
        "Leave it out, or use --context-parallel-size 1",
    ),
    Refusal(
        lambda args: getattr(args, "use_kitchen_attention", False),
        "--use-kitchen-attention has a core attention of its own",
        "Leave it out",
    ),
    Refusal(
        lambda args: args.deterministic_mode and args.transformer_impl == "transformer_engine",
        "--deterministic-mode with TransformerEngine's layers was not proven with USP",
        "Use --transformer-impl local, or leave it out",
    ),
    Refusal(
        lambda args: args.batch_invariant_mode,
        "--batch-invariant-mode needs kernels whose sums do not depend on the batch",
        "Leave it out",
    ),
    Refusal(
        lambda args: args.reset_attention_mask,
        "--reset-attention-mask makes a dense mask of the documents of each sequence, and USP "
        "computes one rule for all sequences",
        "Leave it out, or train packed sequences (--sft)",
    ),
    Refusal(
        lambda args: args.sft and args.pipeline_model_parallel_size > 1,
        "--sft with --pipeline-model-parallel-size {pipeline_model_parallel_size}: Megatron-LM "
        "gives the documents to the first and the last stage alone",
        "Use --pipeline-model-parallel-size 1",
    ),
    Refusal(
        lambda args: args.sft and args.tensor_model_parallel_size > 1,
        "--sft with --tensor-model-parallel-size {tensor_model_parallel_size}: the tensor-parallel "
        "ranks of Megatron-LM disagree about which tensors of a batch are broadcast",
        "Use --tensor-model-parallel-size 1",
    ),
)
_MODEL = (
    Refusal(
        lambda args: args.hybrid_context_parallel,
        f"--hybrid-context-parallel gives every batch groups of its own, {_CP}",
        "Leave it out",
    ),
    Refusal(
        lambda args: args.transformer_impl not in ("local", "transformer_engine"),
        "--transformer-impl {transformer_impl} is for inference",
        "Use transformer_engine or local",
    ),
    Refusal(
        lambda args: args.perform_rl_step,
        f"--perform-rl-step generates with the model that it trains, {_CP}",
        "Train without it",
    ),
)
_LOSS = (
    Refusal(
        lambda args: args.mtp_num_layers and len(args.cp_comm_type) > 1,
        "--cp-comm-type with one entry a layer has none for --mtp-num-layers {mtp_num_layers}",
        "Give one entry for all layers",
    ),
    Refusal(
        lambda args: args.calculate_per_token_loss and _has_router_loss(args),
        "--moe-aux-loss-coeff and --moe-z-loss-coeff with --calculate-per-token-loss: Megatron-LM "
        f"divides the gradient of these losses by the number of context-parallel ranks, {_CP}",
        "Leave --calculate-per-token-loss out: the loss is the mean over the tokens of all ranks",
    ),
)
_EXPERTS = (
    Refusal(
        lambda args: args.num_experts and (args.moe_expert_capacity_factor or 0) > 0,
        "--moe-expert-capacity-factor {moe_expert_capacity_factor} lets each rank drop tokens by "
        f"what its own shard of the sequence sends to an expert, {_CP}",
        "Leave it out: no token is dropped",
    ),
    Refusal(
        lambda args: args.num_experts and "sinkhorn" in args.moe_router_load_balancing_type,
        "--moe-router-load-balancing-type sinkhorn balances each rank's own shard of the sequence, "
        f"{_CP}",
        "Use aux_loss, seq_aux_loss, global_aux_loss or none",
    ),
    Refusal(
        lambda args: args.num_experts and args.moe_router_force_load_balancing,
        "--moe-router-force-load-balancing draws experts at random, other ones at other degrees",
        "Leave it out",
    ),
)
_WITHOUT_GPU = (
    Refusal(
        lambda args: (
            args.async_save and args.use_persistent_ckpt_worker and not torch.cuda.is_available()
        ),
        "--use-persistent-ckpt-worker: Megatron-LM's process that saves needs a GPU",
        "Leave it and --async-save out",
    ),
)
_SCHEDULE = (
    Refusal(
        lambda args: args.cuda_graph_impl != "none",
        "--cuda-graph-impl {cuda_graph_impl} captures layers, and the exchanges of USP between "
        "ranks were not proven in its graphs",
        "Leave it out",
    ),
    Refusal(
        lambda args: args.overlap_moe_expert_parallel_comm,
        "--overlap-moe-expert-parallel-comm runs the layers of two micro batches in turns, and "
        "the order of the exchanges of USP between ranks was not proven there",
        "Leave it out",
    ),
    Refusal(
        lambda args: args.fine_grained_activation_offloading or args.cpu_offloading_num_layers,
        "Megatron-LM's offloading of activations hooks into TransformerEngine's attention",
        "Leave out --fine-grained-activation-offloading and --cpu-offloading-num-layers",
    ),
    Refusal(
        lambda args: args.fake_process_group,
        "--fake-process-group skips all communication, and USP compares its calls between ranks",
        "Leave it out",
    ),
)
UNKNOWN_TO_PLANNER = (
    Refusal(
        lambda args: carries_state(args),
        "--ulysses-degree auto: the planner does not know Megatron-LM's Mamba layers and gated "
        "delta nets",
        "Give a number",
    ),
    Refusal(
        lambda args: args.num_experts or args.multi_latent_attention,
        "--ulysses-degree auto: the planner knows dense models with one projection of queries, "
        "keys and values",
        "Give a number",
    ),
    Refusal(
        lambda args: args.use_torch_fsdp2 or args.use_megatron_fsdp,
        "--ulysses-degree auto: the planner does not know Megatron-LM's FSDP",
        "Give a number",
    ),
)


def is_hybrid(args: Any) -> bool:
    """Whether each layer is a Mamba mixer, attention or an MLP: the models of
    ``pretrain_mamba.py``, which needs no flag for Mamba mixers alone."""
    return bool(
        args.is_hybrid_model
        or args.hybrid_override_pattern
        or args.hybrid_attention_ratio
        or args.hybrid_mlp_ratio
        or hasattr(sys.modules["__main__"], "mamba_builder")
    )


def carries_state(args: Any) -> bool:
    """Whether layers carry a state from token to token."""
    return is_hybrid(args) or args.experimental_attention_variant == DELTA_NET


def refuse(args: Any) -> None:
    """ConfigError for options of validated arguments: what fails without a GPU, and what cannot be
    trained exactly where ds_usp computes attention."""
    refusals.refuse(_WITHOUT_GPU, args)
    if uses_usp(args):
        refusals.refuse((*_ATTENTION, *_MODEL, *_EXPERTS, *_LOSS, *_SCHEDULE), args)
    elif attends_on_one_rank(args):
        refusals.refuse(_ATTENTION, args)


def refuse_transformer_engine(args: Any) -> None:
    """ConfigError for TransformerEngine's layers where it is missing or too old."""
    missing = transformer_engine.what_is_missing()
    if args.transformer_impl == "transformer_engine" and missing:
        raise ConfigError(
            f"--transformer-impl transformer_engine (the default) needs TransformerEngine "
            f"{transformer_engine.OLDEST} or newer, which {missing}. Install it, or use "
            "--transformer-impl local"
        )


def _has_router_loss(args: Any) -> bool:
    """Whether the routers of experts have losses of their own."""
    auxiliary = args.moe_aux_loss_coeff
    coefficients = auxiliary if isinstance(auxiliary, list) else [auxiliary]
    return bool(args.num_experts) and any([*coefficients, args.moe_z_loss_coeff])
