"""Activation memory of megatron-core's transformer layers, local and TransformerEngine's: GEMM-last
recomputation, and an MLP in chunks of tokens.

megatron-core 0.16 has it for norms (``recompute_modules=["layernorm"]``), on GPUs; the activation
function of a dense MLP it recomputes together with the first product. Megatron-LM's patches call
:func:`save_less` once for each layer, when it was built; the layer's forward passes call the rest.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ds_usp.errors import ConfigError
from ds_usp.memory import GemmLast, in_chunks, recompute_before


def activate(config: Any, bias: Tensor | None, projected: Tensor) -> Tensor:
    """The activation function as ``MLP.forward`` of megatron-core 0.16 applies it, without fusion.

    Shapes:
        projected: ``[tokens, b, f]``, ``2 f`` of a gated MLP; bias: as wide, None: there is none;
        result: ``[tokens, b, f]``.
    """
    projected = projected if bias is None else projected + bias
    if not config.gated_linear_unit:
        return config.activation_func(projected)
    gate, value = torch.chunk(projected, 2, dim=-1)
    if (limit := config.activation_func_clamp_value) is not None:
        gate, value = gate.clamp(max=limit), value.clamp(min=-limit, max=limit)
    if config.glu_linear_offset:
        value = value + config.glu_linear_offset
    return config.activation_func(gate) * value


def save_less(layer: TransformerLayer, recompute: str, chunks: int) -> None:
    """Let a layer follow ``--usp-recompute`` and ``--usp-mlp-chunks`` within it: the MLP in chunks,
    and GEMM-last recomputation of what is not in chunks; ConfigError as of these."""
    if chunks > 1:
        mlp_in_chunks(layer, chunks)
    if recompute == "gemm-last":
        recompute_gemm_last(layer, mlp=chunks <= 1)


# ------------------------------------------------------------------------------------------------
# The MLP of megatron-core's transformer layers in chunks of tokens, with its norm and residual.


def mlp_in_chunks(layer: TransformerLayer, chunks: int) -> None:
    """Compute all of a layer behind attention in so many chunks of this rank's tokens, each
    recomputed in backward; ConfigError for a layer whose MLP is not dense, or that recomputes or
    offloads it already."""
    config = layer.config
    options = {
        "fine_grained_activation_offloading": config.fine_grained_activation_offloading,
        "fp8 or fp4": bool(config.fp8 or config.fp4),
        "hidden_dropout": config.hidden_dropout > 0,
    }
    _refuse(layer, "an MLP in chunks", options)
    layer._forward_mlp = partial(_forward_mlp, layer, chunks)


def _forward_mlp(
    layer: TransformerLayer, chunks: int, hidden: Tensor, *unsupported: Any, **options: Any
) -> Tensor:
    """``TransformerLayer._forward_mlp`` in chunks: norm, MLP, bias and residual, of ``hidden
    [tokens, b, h]``; ConfigError where the layer was given anything for inference."""
    if any(value is not None for value in (*unsupported, *options.values())):
        raise ConfigError(
            f"an MLP in chunks: the layer was given {unsupported} and {options} for its MLP, and "
            "chunks are for training with dense layers alone"
        )
    return in_chunks(partial(type(layer)._forward_mlp, layer), hidden, chunks)


def recompute_gemm_last(layer: TransformerLayer, *, mlp: bool = True) -> None:
    """Recompute a layer's norms and activation function in backward, but no matrix product;
    ConfigError for a layer that recomputes them already, or without a dense ``MLP``.

    Args:
        mlp: also those of the MLP; False where it is recomputed in chunks.
    """
    config = layer.config
    options = {
        "bias_activation_fusion": config.bias_activation_fusion,
        "use_te_activation_func": config.use_te_activation_func,
        "fp8": bool(config.fp8),
    }
    _refuse(layer, "GEMM-last recomputation", options)
    pairs = [(layer.input_layernorm, layer.self_attention.linear_qkv)]
    if mlp:
        pairs.append((layer.pre_mlp_layernorm, layer.mlp.linear_fc1))
        layer.mlp.forward = partial(_mlp, layer.mlp)
    for norm, linear in pairs:
        if not isinstance(norm, IdentityOp):  # fused into the linear layer
            GemmLast.between(norm, linear)


def _refuse(layer: TransformerLayer, feature: str, options: dict[str, bool]) -> None:
    """ConfigError for an MLP that is not dense, and for options of a layer that are set, with which
    such recomputation is not exact, or not tested. Rows of ``megatron_lm/memory.py`` refuse their
    flags before layers are built."""
    config = layer.config
    refused = {
        f"{type(layer.mlp).__name__}": type(layer.mlp) is not MLP,
        "recompute_granularity": config.recompute_granularity is not None,
        **options,
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
        "cuda_graph_impl": config.cuda_graph_impl != "none",
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{feature} and {name} of megatron-core do not go together: use a dense MLP and "
                f"set none of {', '.join(list(refused)[1:])}"
            )


def _mlp(mlp: Any, hidden: Tensor, **unsupported: Any) -> tuple[Tensor, Tensor | None]:
    """``MLP.forward`` of a dense layer, whose activation function is recomputed before fc2's
    backward; the output, and the bias that the layer adds to it. Megatron-LM's patches refuse
    edits of the original (``relied_on.py``)."""
    names = [name for name, value in unsupported.items() if value is not None]
    if names:
        raise ConfigError(f"GEMM-last recomputation: MLP.forward was given {names}")
    projected, bias = mlp.linear_fc1(hidden)
    return recompute_before(partial(activate, mlp.config, bias), mlp.linear_fc2, projected)
