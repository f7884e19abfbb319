"""``--ulysses-degree auto``: the planner's word on the host's arguments.

Each rank asks for itself, before there are groups, with the same arguments; ranks on GPUs of
different kinds that come to different degrees are refused before they make groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ds_usp.planner import ModelShape, Split, Workload, choose_ulysses, engine
from ds_usp.training import this_cluster

GPT2_VOCABULARY = 50257  # the host reads its vocabulary later, and it weighs the same on any split


def auto_degree(args: Any, zero_stage: int) -> int:
    """The degree, told on rank 0 with its reasons.

    Args:
        args: of the host, validated by it.

    Raises:
        ConfigError: the planner knows no such cluster, or finds that no degree fits.
    """
    # "auto" is solved when the degrees are known; a ratio that is given stays.
    engine_caps = replace(engine("megatron-deepspeed"), offloads=args.usp_offload_ratio == "auto")
    choice = choose_ulysses(
        this_cluster(args.usp_cluster, args.world_size, on_gpu=torch.cuda.is_available()),
        Workload(model_shape(args), args.seq_length, args.global_batch_size),
        engine_caps,
        parallel_config(args, zero_stage),
        args.world_size,
    )
    if args.rank == 0:
        print("\n".join(choice.why), flush=True)  # noqa: T201 - beside the host's own lines
    return choice.ulysses


def parallel_config(args: Any, zero_stage: int) -> Split:
    """The run as the planner sees it, but for how ulysses and ring share a sequence."""
    ranks_per_replica = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.ds_sequence_parallel_size
    )
    return Split(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        dp=args.world_size // ranks_per_replica,
        zero=zero_stage,
        recompute="full" if args.checkpoint_activations else args.usp_recompute,
        micro_batch=args.micro_batch_size,
        offload_ratio=0.0 if args.usp_offload_ratio == "auto" else args.usp_offload_ratio,
        offload_unit="layer",
        tp_sequence=False,
        schedule="deepspeed",
        fused_loss=args.usp_loss_chunks > 0,
        param_bytes=2 if args.fp16 or args.bf16 else 4,
    )


def model_shape(args: Any) -> ModelShape:
    """The host's model as the planner knows it."""
    return ModelShape(
        name="this model",
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        kv_heads=args.num_key_value_heads,
        vocab=getattr(args, "padded_vocab_size", None) or args.vocab_size or GPT2_VOCABULARY,
        head_dim=args.kv_channels,
        gated=args.swiglu,
        tied=not args.untie_embeddings_and_output_weights,
        learned_positions=not args.use_rotary_position_embeddings,
        biases=args.add_bias_linear,
    )
