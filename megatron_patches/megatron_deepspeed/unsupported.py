"""Options that cannot be trained exactly with sharded sequences: one row each.

``arguments.validate_args`` calls both functions; ``memory.py`` has the rows of memory settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_patches import refusals
from megatron_patches.megatron_deepspeed.compat import device_name
from megatron_patches.refusals import Refusal

# Options that fail in Megatron-DeepSpeed or DeepSpeed itself, with sharded sequences or not.
_FRAMEWORK_FAILURES = (
    Refusal(
        lambda args: args.distribute_saved_activations,
        "--distribute-saved-activations (tensor parallel {tensor_model_parallel_size}) looks for "
        "a field that Megatron-DeepSpeed's TransformerConfig does not have",
        "Leave it out: --usp-offload-ratio 1 offloads what layers save to host memory",
    ),
    Refusal(
        lambda args: args.distribute_checkpointed_activations,
        "--distribute-checkpointed-activations copies to a buffer for sequences of whole length",
        "Leave it out: --usp-offload-ratio 1 offloads what layers save to host memory",
    ),
    Refusal(
        lambda args: args.init_method_xavier_uniform,
        "--init-method-xavier-uniform sets a field that TransformerConfig does not have",
        "Leave it out; --init-method-std sets the width of the normal distribution",
    ),
    Refusal(
        lambda args: args.cpu_optimizer and args.cpu_torch_adam,
        "--cpu_torch_adam uses torch where Megatron-DeepSpeed does not import it",
        "Leave it out, or offload the optimizer in DeepSpeed's configuration (zero_optimization)",
    ),
    Refusal(
        lambda args: args.log_params_norm,
        "--log-params-norm takes the list of models for one, and fails at the first log line",
        "Leave it out; the gradient norm is logged without it",
    ),
    Refusal(
        lambda args: args.lazy_mpu_init,
        "--lazy-mpu-init leaves the process groups to another program, which does not make them",
        "Leave it out",
    ),
    Refusal(
        lambda args: args.log_optimizer_states_to_tensorboard and args.optimizer == "sgd",
        "--log-optimizer-states-to-tensorboard reads Adam's states, and --optimizer is {optimizer}",
        "Leave one of the two out",
    ),
    Refusal(
        lambda args: (
            args.checkpoint_activations
            and not args.deepspeed_activation_checkpointing
            and args.no_pipeline_parallel
        ),
        "--checkpoint-activations alone has no recomputation method in Megatron-DeepSpeed",
        "Add --deepspeed-activation-checkpointing, or use --usp-recompute full instead",
    ),
    Refusal(
        lambda args: (
            args.checkpoint_in_cpu and args.checkpoint_activations and device_name() == "cpu"
        ),
        "--checkpoint-in-cpu where there is no GPU: DeepSpeed frees the tensors that it saves",
        "Leave it out: they are in host memory already",
    ),
    Refusal(
        lambda args: (
            args.partition_activations and args.checkpoint_activations and args.no_pipeline_parallel
        ),
        "--partition-activations (tensor parallel {tensor_model_parallel_size}) without a pipeline "
        "calls layers with more arguments than they take",
        "Leave it out: --ds-sequence-parallel-size shards activations along the sequence. Or leave "
        "out --no-pipeline-parallel",
    ),
    Refusal(
        lambda args: (
            args.contigious_checkpointing
            and args.checkpoint_activations
            and not args.partition_activations
        ),
        "--contigious-checkpointing works with --partition-activations alone",
        "Leave it out",
    ),
)

_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
# Rows of the arguments and of DeepSpeed's configuration, a dict.
_REFUSALS = (
    Refusal(
        lambda args, _: not args.deepspeed,
        "without --deepspeed gradients are not reduced over the ranks that share a sequence",
        "Add --deepspeed and --deepspeed_config",
    ),
    Refusal(
        lambda args, _: args.ds_sequence_parallel_fpdt,
        "--ds-sequence-parallel-fpdt has an attention, a loss and a token order of its own",
        "Leave it out: with a ring, too, no rank holds a whole sequence",
    ),
    Refusal(
        lambda args, _: args.attention_dropout > 0 and not args.use_flash_attn,
        "--attention-dropout {attention_dropout} would drop other weights for each sequence "
        "shard, and others in backward than in forward",
        "Set --attention-dropout 0, or use --use-flash-attn-v2 with flash-attn installed and "
        "--ulysses-degree {ds_sequence_parallel_size}",
    ),
    Refusal(
        lambda args, _: args.reset_attention_mask and not args.no_pipeline_parallel,
        "--reset-attention-mask: documents are not sent from stage to stage of a pipeline",
        "Add --no-pipeline-parallel",
    ),
    Refusal(
        lambda args, _: args.reset_attention_mask and args.attention_dropout > 0,
        "--reset-attention-mask with --attention-dropout {attention_dropout}: Megatron-"
        "DeepSpeed's flash attention, which has the dropout, has no document mask",
        "Set --attention-dropout 0",
    ),
    Refusal(
        lambda args, _: (
            args.reset_position_ids
            and args.use_rotary_position_embeddings
            and not args.reset_attention_mask
        ),
        "--reset-position-ids does not reach rotary positions, which count from the first token "
        "of the sequence; that is the same within documents alone",
        "Add --reset-attention-mask, or leave one of the two out",
    ),
    Refusal(
        lambda args, _: max(args.num_experts) > 1 or args.num_experts_switch,
        "mixture of experts makes groups that know no sequence axis",
        "Use --num-experts 1",
    ),
    Refusal(
        lambda args, _: args.num_layers_per_virtual_pipeline_stage,
        "DeepSpeed's pipeline engine has no interleaved schedule",
        "Leave out --num-layers-per-virtual-pipeline-stage",
    ),
    Refusal(
        lambda args, config: (
            args.data_efficiency_curriculum_learning
            or args.random_ltd
            or config.get("curriculum_learning", {}).get("enabled")
        ),
        "curriculum learning and random-LTD change the length of sequences that are sharded",
        "Train at one length",
    ),
    Refusal(
        lambda args, _: args.mos or args.kd or args.retro_add_retriever,
        "distillation and Retro models take batches of their own",
        "Train a plain GPT",
    ),
    Refusal(
        lambda args, _: args.inference or args.ds_inference,
        "inference attends one token at a time, with a cache",
        "Generate without these patches",
    ),
    Refusal(
        lambda args, _: args.transformer_impl != "local",
        "--transformer-impl {transformer_impl} has layers with their own attention, over the "
        "tokens of one rank",
        "Use --transformer-impl local, without --fp8-e4m3 and --fp8-hybrid",
    ),
    Refusal(
        lambda args, config: (
            args.fp16
            and args.pipeline_model_parallel_size > 1
            and not config.get("zero_optimization", {}).get("stage")
        ),
        "fp16 with ZeRO-0 under a pipeline clips in an optimizer of its own, which is not proven",
        "Use ZeRO-1, or bf16",
    ),
    Refusal(
        lambda args, config: (
            config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1) > 1
            and args.tensor_model_parallel_size > 1
        ),
        "zero_hpz_partition_size takes ranks that follow each other for those of the same weights, "
        "and with --tensor-model-parallel-size {tensor_model_parallel_size} they have others",
        "Leave it out, or use --tensor-model-parallel-size 1",
    ),
    Refusal(
        lambda _, config: (
            config.get("zero_optimization", {}).get("zero_quantized_gradients")
            or config.get("zero_optimization", {}).get("mics_shard_size", -1) > 0
        ),
        "zero_quantized_gradients and mics_shard_size reduce gradients by groups of their own, in "
        "4 bits or over parts of the ranks",
        "Leave them out",
    ),
    Refusal(
        lambda _, config: config.get("optimizer", {}).get("type", "").lower() in _ONE_BIT,
        "a 1-bit optimizer averages gradients itself, over the data-parallel ranks alone",
        "Use --optimizer adam",
    ),
    Refusal(
        lambda _, config: "sequence_parallel_size" in config,
        "sequence_parallel_size in DeepSpeed's configuration makes a device mesh along which "
        "gradients are not summed over the ranks that share a sequence",
        "Leave it out: --ds-sequence-parallel-size is enough",
    ),
)


def refuse(args: Any, deepspeed_config: Mapping[str, Any]) -> None:
    """ConfigError for options of validated arguments, where ds_usp computes attention;
    ``use_flash_attn`` must be what ``arguments._choose_flash`` leaves of it."""
    refusals.refuse(_REFUSALS, args, deepspeed_config)


def refuse_framework_failures(args: Any) -> None:
    """ConfigError for options that fail in Megatron-DeepSpeed, before its own checks."""
    refusals.refuse(_FRAMEWORK_FAILURES, args)
