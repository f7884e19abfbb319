"""GEMM-last recomputation in megatron-core's transformer layers, local and TransformerEngine's.

megatron-core 0.16 has it for norms (``recompute_modules=["layernorm"]``), on GPUs; the activation
function of a dense MLP it recomputes together with the first product.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ds_usp.errors import ConfigError
from ds_usp.memory import GemmLast, recompute_before
from megatron_patches.megatron_core.activation import activate


def recompute_gemm_last(layer: TransformerLayer, *, mlp: bool = True) -> None:
    """Recompute a layer's norms and activation function in backward, but no matrix product.

    Args:
        mlp: also those of the MLP; without, it is recomputed in chunks.

    Raises:
        ConfigError: a layer that recomputes them already, or without a dense ``MLP``.
    """
    _refuse(layer)
    pairs = [(layer.input_layernorm, layer.self_attention.linear_qkv)]
    if mlp:
        pairs.append((layer.pre_mlp_layernorm, layer.mlp.linear_fc1))
        layer.mlp.forward = partial(_mlp, layer.mlp)
    for norm, linear in pairs:
        if not isinstance(norm, IdentityOp):  # fused into the linear layer
            GemmLast.between(norm, linear)


def _refuse(layer: TransformerLayer) -> None:
    """Raise ConfigError for options of a layer with which GEMM-last is not exact."""
    config = layer.config
    refused = {
        f"{type(layer.mlp).__name__}": type(layer.mlp) is not MLP,
        "recompute_granularity": config.recompute_granularity is not None,
        "bias_activation_fusion": config.bias_activation_fusion,
        "use_te_activation_func": config.use_te_activation_func,
        "fp8": config.fp8,
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
        "cuda_graph_impl": config.cuda_graph_impl != "none",
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"GEMM-last recomputation and {name} of megatron-core do not go together: use a "
                "dense MLP and set none of recompute_granularity, bias_activation_fusion, "
                "use_te_activation_func, fp8, gradient_accumulation_fusion and CUDA graphs"
            )


def _mlp(mlp: Any, hidden: Tensor, **unsupported: Any) -> tuple[Tensor, Tensor | None]:
    """``MLP.forward`` of a dense layer, whose activation function is recomputed before fc2's
    backward."""
    names = [name for name, value in unsupported.items() if value is not None]
    if names:
        raise ConfigError(f"GEMM-last recomputation: MLP.forward was given {names}")
    projected, bias = mlp.linear_fc1(hidden)
    result: tuple[Tensor, Tensor | None] = recompute_before(
        partial(activate, mlp.config, bias), mlp.linear_fc2, projected
    )
    return result
