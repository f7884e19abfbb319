"""Activation memory of Megatron-DeepSpeed's layers: ``--usp-recompute``, ``--usp-mlp-chunks``,
``--usp-checkpoint-layers``, and the checks of all memory flags.

The state has its policy from ``arguments.layer_memory``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ds_usp.errors import ConfigError
from ds_usp.memory import GemmLast, in_chunks, recompute_before
from megatron_patches import flags
from megatron_patches.megatron_deepspeed.state import get_state
from megatron_patches.refusals import Refusal, apart, refuse, refuse_settings

_APART = "and %s do not go together: leave one of them out"
_CHUNKS = "--usp-mlp-chunks {usp_mlp_chunks}"
_RECOMPUTE = "--usp-recompute {usp_recompute}"
_Options = Mapping[str, Callable[[Any], object]]  # an option of Megatron-DeepSpeed -> is it set?

_OTHER_SEQUENCES: _Options = MappingProxyType(
    {
        "--sequence-parallel (Megatron's)": lambda args: args.sequence_parallel,
        "--ds-sequence-parallel-fpdt": lambda args: args.ds_sequence_parallel_fpdt,
    }
)
_OTHER_LAYERS: _Options = MappingProxyType(
    {
        "--transformer-impl transformer_engine": (
            lambda args: args.transformer_impl == "transformer_engine"
        ),
        "gradient accumulation fusion": lambda args: args.gradient_accumulation_fusion,
        "--ds-sequence-parallel-fpdt": lambda args: args.ds_sequence_parallel_fpdt,
        "more than one expert": lambda args: max(args.num_experts) > 1 or args.num_experts_switch,
    }
)
_REFUSALS: Mapping[str, Iterable[Refusal]] = MappingProxyType(
    {
        "loss_chunks": apart(
            "--usp-loss-chunks {usp_loss_chunks} does not go together with %s",
            {
                "a pipeline, whose last stage passes logits to its loss: --no-pipeline-parallel": (
                    lambda args: not args.no_pipeline_parallel
                ),
                "--fp16: use --bf16": lambda args: args.fp16,
                **_OTHER_SEQUENCES,
            },
        ),
        # MLPs that are no functions of single tokens, or with which it was not tested.
        "mlp_chunks": apart(f"{_CHUNKS} {_APART}", {**_OTHER_SEQUENCES, **_OTHER_LAYERS}),
        "checkpoint_layers": apart(
            "--usp-checkpoint-layers {usp_checkpoint_layers} and %s do not go together: DeepSpeed "
            "keeps the input of each layer. Leave the second one out",
            {
                "--deepspeed-activation-checkpointing": (
                    lambda args: args.deepspeed_activation_checkpointing
                )
            },
        ),
        # What reads states between steps, or keeps them in host memory itself.
        "states_on_host": apart(
            "--usp-states-on-host and %s do not go together",
            {
                "a run without --deepspeed": lambda args: not args.deepspeed,
                "--cpu-optimizer": lambda args: args.cpu_optimizer,
                "--log-optimizer-states-to-tensorboard": (
                    lambda args: args.log_optimizer_states_to_tensorboard
                ),
            },
        ),
        "recompute": apart(
            f"{_RECOMPUTE} {_APART}",
            {
                "--checkpoint-activations": lambda args: args.checkpoint_activations,
                "--recompute-granularity {recompute_granularity}": (
                    lambda args: args.recompute_granularity
                ),
            },
        ),
    }
)
_GEMM_LAST_REFUSALS = apart(
    f"{_RECOMPUTE} {_APART}",
    {
        "--apply-residual-connection-post-layernorm": (
            lambda args: args.apply_residual_connection_post_layernorm
        ),
        **_OTHER_LAYERS,
    },
)


def check_flags(args: Any) -> None:
    """Check the memory settings in validated arguments, once a start; whether a rank has tokens for
    all chunks of an MLP is checked where the layout is known, in ``arguments.py``.

    Raises:
        ConfigError: numbers out of range, or options that do not go together with a setting.
    """
    if args.usp_loss_chunks < 0:
        raise ConfigError(f"--usp-loss-chunks {args.usp_loss_chunks}: must be 0 or more")
    refuse(flags.CHECKPOINT_LAYERS_REFUSALS, args)
    refuse_settings(_REFUSALS, args)
    if args.usp_recompute == "gemm-last":
        refuse(_GEMM_LAST_REFUSALS, args)


def _mlp_chunks() -> int:
    from megatron import get_args

    return get_args().usp_mlp_chunks


def build_layer(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """``ParallelTransformerLayer.__init__``; for ``gemm-last`` its norms are recomputed before the
    backward of the GEMM they feed."""
    original(layer, *args, **kwargs)
    if get_state().memory.recompute == "gemm-last":
        GemmLast.between(layer.input_layernorm, layer.self_attention.query_key_value)
        # Chunks save the input of the MLP, and no tensor behind it.
        consumer = layer.mlp if _mlp_chunks() > 1 else layer.mlp.dense_h_to_4h
        GemmLast.between(layer.post_attention_layernorm, consumer)


def run_layer(
    original: Callable[..., Any], layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """``ParallelTransformerLayer.forward`` under the memory policy, in which layer numbers
    must rise."""

    def run(hidden: Tensor) -> Any:
        return original(layer, hidden, *args, **kwargs)

    return get_state().memory.run(layer.layer_number, run, hidden_states)


def run_mlp(original: Callable[..., Any], mlp: Any, hidden_states: Tensor) -> Any:
    """``ParallelMLP.forward``: in chunks of tokens, or with an activation function that is
    recomputed before the second GEMM."""
    if (chunks := _mlp_chunks()) > 1:
        return _run_in_chunks(mlp, partial(original, mlp), hidden_states, chunks)
    if get_state().memory.recompute != "gemm-last":
        return original(mlp, hidden_states)
    projected, bias = mlp.dense_h_to_4h(hidden_states)
    return recompute_before(partial(_activate, mlp, bias), mlp.dense_4h_to_h, projected)


def _run_in_chunks(
    mlp: Any, run: Callable[[Tensor], tuple[Tensor, Tensor | None]], hidden: Tensor, chunks: int
) -> tuple[Tensor, Tensor | None]:
    """``run(hidden)`` in chunks of tokens, each run again in backward; the bias, which the layer
    adds, is that of all chunks.

    Shapes:
        hidden and the first result ``[tokens, b, h]``.
    """
    biases: list[Tensor | None] = []

    def run_chunk(part: Tensor) -> Tensor:
        output, bias = run(part)
        biases[:] = [bias]  # the last one's: a view of the parameter
        return output

    # A closure does not show whose weights' gradients are summed over chunks in fp32.
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
