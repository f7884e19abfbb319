"""Activation memory by flags: recomputation, offload, and the planner's view of the run."""

from __future__ import annotations

from argparse import Namespace

import torch

from ds_usp.memory import LayerMemory, Offload
from ds_usp.planner import ModelShape, ParallelConfig, Workload
from ds_usp.training import solved_ratio

BYTE_VOCABULARY = 257  # of text files; that of encoded data is --vocab-size


def layer_memory(args: Namespace, device: torch.device) -> LayerMemory:
    """The recomputation and offload that the flags request, shared by all layers of this rank."""
    ratio = solved_ratio(args.usp_offload_ratio, *planner_inputs(args), device)
    return LayerMemory(args.usp_recompute, Offload(ratio, device))


def planner_inputs(args: Namespace) -> tuple[Workload, ParallelConfig]:
    """The run as the planner's workload and parallel config."""
    split = ParallelConfig(
        tp=args.tensor_model_parallel_size,
        ulysses=args.ulysses_degree,
        ring=args.ring_degree,
        pp=args.pipeline_model_parallel_size,
        dp=args.data_parallel_size,
        zero=args.zero_stage,
        recompute=args.usp_recompute,
        micro_batch=args.micro_batch_size,
        offload_ratio=0.0 if args.usp_offload_ratio == "auto" else args.usp_offload_ratio,
        offload_unit="layer",
        tp_sequence=False,
        schedule="deepspeed",
        fused_loss=args.usp_loss_chunks > 0,
        param_bytes=2 if args.bf16 else 4,
    )
    return Workload(model_shape(args), args.seq_length, args.global_batch_size), split


def model_shape(args: Namespace) -> ModelShape:
    """The trainer's model for the planner; before the data is read, the vocabulary is that of the
    flags."""
    return ModelShape(
        name="this model",
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        kv_heads=args.num_key_value_heads,
        vocab=getattr(args, "padded_vocab_size", args.vocab_size or BYTE_VOCABULARY),
        gated=args.swiglu,
        tied=not args.untie_embeddings_and_output_weights,
        learned_positions=not args.use_rotary_position_embeddings,
        biases=not args.disable_bias_linear,
    )
