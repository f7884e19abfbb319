"""What cannot be trained exactly with sequences spread over ranks: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_usp.errors import ConfigError


@dataclass(frozen=True)
class Refusal:
    """One thing that is refused.

    Args:
        asked: whether the host's arguments, and DeepSpeed's configuration, ask for it.
        why: the reason; ``{name}`` stands for an argument.
        fix: what works instead.
    """

    asked: Callable[[Any, Mapping[str, Any]], Any]
    why: str
    fix: str


_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
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
        "--attention-dropout {attention_dropout} would drop other weights for each split of the "
        "sequence, and again others in the backward pass",
        "Set --attention-dropout 0, or use --use-flash-attn-v2 with flash-attn installed and "
        "--ulysses-degree {ds_sequence_parallel_size}",
    ),
    Refusal(
        lambda args, _: args.reset_attention_mask and not args.no_pipeline_parallel,
        "--reset-attention-mask: documents do not travel from stage to stage of a pipeline",
        "Add --no-pipeline-parallel",
    ),
    Refusal(
        lambda args, _: args.reset_attention_mask and args.attention_dropout > 0,
        "--reset-attention-mask with --attention-dropout {attention_dropout}: the host's flash "
        "attention, which drops weights, knows no documents",
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
        "curriculum learning and random-LTD change the length of sequences that are cut already",
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
        lambda args, _: args.partition_activations and args.tensor_model_parallel_size > 1,
        "--partition-activations with tensor parallelism fails in the host itself, sequence "
        "parallel or not",
        "Leave it out: activations are cut along the sequence",
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
        lambda _, config: (
            config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1) > 1
            or config.get("zero_optimization", {}).get("zero_quantized_gradients")
            or config.get("zero_optimization", {}).get("mics_shard_size", -1) > 0
        ),
        "ZeRO++ and MiCS reduce gradients by groups that know no sequence axis",
        "Leave out zero_hpz_partition_size, zero_quantized_gradients and mics_shard_size",
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
        "Leave it out: --ds-sequence-parallel-size says it",
    ),
)


def refuse(args: Any, deepspeed_config: Mapping[str, Any]) -> None:
    """Look at the host's validated arguments.

    Raises:
        ConfigError: the first row that applies.
    """
    for row in _REFUSALS:
        if row.asked(args, deepspeed_config):
            raise ConfigError(f"{row.why}. {row.fix}".format(**vars(args)))
