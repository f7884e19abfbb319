"""Activation memory of Megatron-DeepSpeed's layers: ``--usp-recompute``, ``--usp-mlp-chunks``,
``--usp-checkpoint-layers``, and the checks of all memory flags."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ds_usp.errors import ConfigError
from ds_usp.memory import GemmLast, in_chunks, recompute_before
from megatron_patches import flags
from megatron_patches.megatron_deepspeed.state import get_state


def check_flags(args: Any) -> None:
    """Check the memory flags in the validated arguments.

    Raises:
        ConfigError: recomputation by Megatron-DeepSpeed too, layers without GEMM-last, or flags
            that ``--usp-loss-chunks``, ``--usp-mlp-chunks``, ``--usp-checkpoint-layers`` or
            ``--usp-states-on-host`` does not support.
    """
    _check_loss_chunks(args)
    _check_mlp_chunks(args)
    _check_checkpoint_layers(args)
    _check_states(args)
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
        "more than one expert": _has_experts(args),
    }
    refused = own_checkpoint | (gemm_last if args.usp_recompute == "gemm-last" else {})
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"--usp-recompute {args.usp_recompute} and {name} do not go together: leave one "
                "of them out"
            )


def _check_loss_chunks(args: Any) -> None:
    """Check ``--usp-loss-chunks``, the number of pieces in which logits and loss are computed.

    Raises:
        ConfigError: a negative number, or, unless it is 0, a flag that does not go with it.
    """
    chunks = args.usp_loss_chunks
    if chunks < 0:
        raise ConfigError(f"--usp-loss-chunks {chunks}: must be 0 or more")
    refused = {
        "a pipeline, whose last stage passes logits to its loss: --no-pipeline-parallel": (
            not args.no_pipeline_parallel
        ),
        "--fp16: use --bf16": args.fp16,
        "--sequence-parallel (Megatron's)": args.sequence_parallel,
        "--ds-sequence-parallel-fpdt": args.ds_sequence_parallel_fpdt,
    }
    for name, is_set in refused.items():
        if chunks and is_set:
            raise ConfigError(f"--usp-loss-chunks {chunks} does not go together with {name}")


def _check_mlp_chunks(args: Any) -> None:
    """Check ``--usp-mlp-chunks``; ranges are checked where the layout is known.

    Raises:
        ConfigError: a flag with which it was not tested, or with which MLPs are no functions of
            single tokens.
    """
    refused = {
        "more than one expert": _has_experts(args),
        "--sequence-parallel (Megatron's)": args.sequence_parallel,
        "--ds-sequence-parallel-fpdt": args.ds_sequence_parallel_fpdt,
        "--transformer-impl transformer_engine": args.transformer_impl == "transformer_engine",
        "gradient accumulation fusion": args.gradient_accumulation_fusion,
    }
    for name, is_set in refused.items():
        if args.usp_mlp_chunks and is_set:
            raise ConfigError(
                f"--usp-mlp-chunks {args.usp_mlp_chunks} and {name} do not go together: leave one "
                "of them out"
            )


def _check_checkpoint_layers(args: Any) -> None:
    """Check ``--usp-checkpoint-layers``.

    Raises:
        ConfigError: layers that are no checkpoints, or DeepSpeed's activation checkpointing, which
            keeps the inputs of all layers itself.
    """
    flags.check_checkpoint_layers(args)
    if args.usp_checkpoint_layers > 1 and args.deepspeed_activation_checkpointing:
        raise ConfigError(
            f"--usp-checkpoint-layers {args.usp_checkpoint_layers} and "
            "--deepspeed-activation-checkpointing do not go together: DeepSpeed keeps the input of "
            "each layer. Leave the second one out"
        )


def _check_states(args: Any) -> None:
    """Check ``--usp-states-on-host``; where states are is known when DeepSpeed has made them.

    Raises:
        ConfigError: no DeepSpeed, or a flag that reads states between steps or keeps them in host
            memory itself.
    """
    refused = {
        "a run without --deepspeed": not args.deepspeed,
        "--cpu-optimizer": args.cpu_optimizer,
        "--log-optimizer-states-to-tensorboard": args.log_optimizer_states_to_tensorboard,
    }
    for name, is_set in refused.items():
        if args.usp_states_on_host and is_set:
            raise ConfigError(f"--usp-states-on-host and {name} do not go together")


def _has_experts(args: Any) -> bool:
    return bool(max(args.num_experts) > 1 or args.num_experts_switch)


def build_layer(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """``ParallelTransformerLayer.__init__``: norms are recomputed before the GEMM they feed."""
    original(layer, *args, **kwargs)
    state = get_state()
    if state.memory.recompute == "gemm-last":
        GemmLast.between(layer.input_layernorm, layer.self_attention.query_key_value)
        # Chunks save the input of the MLP, and no tensor behind it.
        consumer = layer.mlp if state.mlp_chunks else layer.mlp.dense_h_to_4h
        GemmLast.between(layer.post_attention_layernorm, consumer)


def run_layer(
    original: Callable[..., Any], layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """``ParallelTransformerLayer.forward`` under the memory policy."""

    def run(hidden: Tensor) -> Any:
        return original(layer, hidden, *args, **kwargs)

    return get_state().memory.run(layer.layer_number, run, hidden_states)


def run_mlp(original: Callable[..., Any], mlp: Any, hidden_states: Tensor) -> Any:
    """``ParallelMLP.forward``: in chunks of tokens, or with an activation function that is
    recomputed before the second GEMM."""
    state = get_state()
    if state.mlp_chunks:
        return _run_in_chunks(mlp, partial(original, mlp), hidden_states, state.mlp_chunks)
    if state.memory.recompute != "gemm-last":
        return original(mlp, hidden_states)
    projected, bias = mlp.dense_h_to_4h(hidden_states)
    return recompute_before(partial(_activate, mlp, bias), mlp.dense_4h_to_h, projected)


def _run_in_chunks(
    mlp: Any, run: Callable[[Tensor], tuple[Tensor, Tensor | None]], hidden: Tensor, chunks: int
) -> tuple[Tensor, Tensor | None]:
    """``run(hidden)`` in chunks of tokens; the bias, which the layer adds, is that of all chunks.

    Shapes:
        hidden and the first result ``[tokens, b, h]``.
    """
    biases: list[Tensor | None] = []

    def run_chunk(part: Tensor) -> Tensor:
        output, bias = run(part)
        biases[:] = [bias]
        return output

    output = in_chunks(run_chunk, hidden, chunks, module=mlp)
    return output, biases[0]


def _activate(mlp: Any, bias: Tensor | None, projected: Tensor) -> Tensor:
    """Bias and activation function between the two GEMMs of ``ParallelMLP.forward``."""
    activated: Tensor
    if mlp.bias_gelu_fusion:
        from megatron.model.fused_bias_gelu import bias_gelu_impl

        activated = bias_gelu_impl(projected, bias)
        return activated
    activated = mlp.activation_func(projected if bias is None else projected + bias)
    return activated
