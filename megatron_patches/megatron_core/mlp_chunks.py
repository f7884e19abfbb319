"""The MLP of megatron-core's transformer layers in chunks of tokens, with its norm and residual."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ds_usp.errors import ConfigError
from ds_usp.memory import in_chunks


def mlp_in_chunks(layer: TransformerLayer, chunks: int) -> None:
    """Compute all of a layer behind attention in so many chunks of this rank's tokens, each
    recomputed in backward.

    Raises:
        ConfigError: a layer whose MLP is not dense, or that recomputes or offloads it already.
    """
    _refuse(layer)
    layer._forward_mlp = partial(_forward_mlp, layer, chunks)


def _refuse(layer: TransformerLayer) -> None:
    """Raise ConfigError for layers that chunks would change, and options that no test covers."""
    config = layer.config
    refused = {
        f"{type(layer.mlp).__name__}": type(layer.mlp) is not MLP,
        "recompute_granularity": config.recompute_granularity is not None,
        "fine_grained_activation_offloading": config.fine_grained_activation_offloading,
        "fp8 or fp4": config.fp8 or config.fp4,
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
        "hidden_dropout": config.hidden_dropout > 0,
        "cuda_graph_impl": config.cuda_graph_impl != "none",
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"an MLP in chunks and {name} of megatron-core do not go together: use a dense MLP "
                f"and set none of {', '.join(list(refused)[1:])}"
            )


def _forward_mlp(
    layer: TransformerLayer, chunks: int, hidden: Tensor, *unsupported: Any, **options: Any
) -> Tensor:
    """``TransformerLayer._forward_mlp`` in chunks: norm, MLP, bias and residual.

    Shapes:
        hidden ``[tokens, b, h]``, the result too.
    """
    if any(value is not None for value in (*unsupported, *options.values())):
        raise ConfigError(
            f"an MLP in chunks: the layer was given {unsupported} and {options} for its MLP, and "
            "chunks are for training with dense layers alone"
        )
    return in_chunks(partial(type(layer)._forward_mlp, layer), hidden, chunks)
