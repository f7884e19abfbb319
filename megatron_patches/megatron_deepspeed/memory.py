"""What the host's layers keep for their backward pass: ``--usp-recompute``."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ds_usp
from ds_usp.errors import ConfigError
from ds_usp.memory import RECOMPUTE, GemmLast, LayerMemory, Offload, recompute_before
from ds_usp.planner import Split, Workload
from ds_usp.training import offload_ratio, solved_ratio
from megatron_patches.megatron_deepspeed.auto_args import model_shape, parallel_config
from megatron_patches.megatron_deepspeed.state import get_state


def add_flags(parser: ArgumentParser) -> None:
    """The flags, with the trainer's names and meanings."""
    group = parser.add_argument_group(title="unified sequence parallel, memory")
    group.add_argument(
        "--usp-recompute",
        choices=RECOMPUTE,
        default="none",
        help="What each layer computes again in backward: nothing, norms and activation functions "
        "(gemm-last), all but attention and its exchanges (attention), or all (full).",
    )
    group.add_argument(
        "--usp-offload-ratio",
        type=offload_ratio,
        default=0.0,
        help="Share, 0 to 1, of what layers keep that waits in host memory; auto: the least with "
        "which the model fits by the planner's formulas.",
    )
    group.add_argument(
        "--usp-loss-chunks",
        type=int,
        default=0,
        help="Compute the loss in so many parts of the tokens and never hold all logits; 0: at "
        "once.",
    )


def check_flags(args: Any) -> None:
    """Look at the host's validated arguments.

    Raises:
        ConfigError: recomputation by two hands, or what GEMM-last cannot see into.
    """
    _check_chunks(args)
    if args.usp_recompute == "none":
        return
    own_checkpoint = {
        "--checkpoint-activations": args.checkpoint_activations,
        f"--recompute-granularity {args.recompute_granularity}": args.recompute_granularity,
    }
    gemm_last = {
        "--transformer-impl transformer_engine": args.transformer_impl == "transformer_engine",
        "--apply-residual-connection-post-layernorm": (
            args.apply_residual_connection_post_layernorm
        ),
        "gradient accumulation fusion": args.gradient_accumulation_fusion,
        "--ds-sequence-parallel-fpdt": args.ds_sequence_parallel_fpdt,
        "more than one expert": max(args.num_experts) > 1 or args.num_experts_switch,
    }
    refused = own_checkpoint | (gemm_last if args.usp_recompute == "gemm-last" else {})
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"--usp-recompute {args.usp_recompute} and {name} do not go together: leave one "
                "of them out"
            )


def _check_chunks(args: Any) -> None:
    chunks = args.usp_loss_chunks
    if chunks < 0:
        raise ConfigError(f"--usp-loss-chunks {chunks}: must be 0 or more")
    refused = {
        "a pipeline, whose last stage hands logits to its loss: --no-pipeline-parallel": (
            not args.no_pipeline_parallel
        ),
        "--fp16: use --bf16": args.fp16,
        "--sequence-parallel (Megatron's)": args.sequence_parallel,
        "--ds-sequence-parallel-fpdt": args.ds_sequence_parallel_fpdt,
    }
    for name, is_set in refused.items():
        if chunks and is_set:
            raise ConfigError(f"--usp-loss-chunks {chunks} does not go together with {name}")


def layer_memory(args: Any) -> LayerMemory:
    """What the flags say, with the host's own activation checkpoint, which knows its dropout."""
    from deepspeed.accelerator import get_accelerator
    from megatron.core import tensor_parallel

    def checkpoint(run: Callable[..., Any], hidden: Tensor) -> Any:
        return tensor_parallel.checkpoint(run, False, hidden)

    device = torch.device(get_accelerator().current_device_name())
    ratio = solved_ratio(args.usp_offload_ratio, *planner_inputs(args), device)
    return LayerMemory(args.usp_recompute, Offload(ratio, device), checkpoint)


def planner_inputs(args: Any) -> tuple[Workload, Split]:
    """The run as the planner sees it."""
    config = ds_usp.USPConfig.from_args(args)
    split = replace(
        parallel_config(args, args.zero_stage), ulysses=config.ulysses, ring=config.ring
    )
    return Workload(model_shape(args), args.seq_length, args.global_batch_size), split


def build_layer(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """``ParallelTransformerLayer.__init__``: norms that run again before the product they are
    for."""
    original(layer, *args, **kwargs)
    if get_state().memory.recompute == "gemm-last":
        GemmLast.between(layer.input_layernorm, layer.self_attention.query_key_value)
        GemmLast.between(layer.post_attention_layernorm, layer.mlp.dense_h_to_4h)


def run_layer(
    original: Callable[..., Any], layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """``ParallelTransformerLayer.forward``, keeping what the policy says."""

    def run(hidden: Tensor) -> Any:
        return original(layer, hidden, *args, **kwargs)

    return get_state().memory.run(layer.layer_number, run, hidden_states)


def run_mlp(original: Callable[..., Any], mlp: Any, hidden_states: Tensor) -> Any:
    """``ParallelMLP.forward``: the activation function runs again before the second product."""
    if get_state().memory.recompute != "gemm-last":
        return original(mlp, hidden_states)
    projected, bias = mlp.dense_h_to_4h(hidden_states)
    return recompute_before(partial(_activate, mlp, bias), mlp.dense_4h_to_h, projected)


def _activate(mlp: Any, bias: Tensor | None, projected: Tensor) -> Tensor:
    """What stands between the two products of ``ParallelMLP.forward``."""
    activated: Tensor
    if mlp.bias_gelu_fusion:
        from megatron.model.fused_bias_gelu import bias_gelu_impl

        activated = bias_gelu_impl(projected, bias)
        return activated
    activated = mlp.activation_func(projected if bias is None else projected + bias)
    return activated
