"""The activation function of megatron-core's dense MLP, without tensors that change nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


def without_zero_offset(layer: TransformerLayer) -> None:
    """Let a layer's gated MLP add no ``glu_linear_offset`` of 0.

    megatron-core 0.16 without ``bias_activation_fusion`` multiplies the gate by ``value + 0.0``,
    a copy that autograd saves: one tensor of the MLP's width more than the product needs.
    """
    mlp, config = layer.mlp, layer.config
    fused = config.bias_activation_fusion or config.use_te_activation_func
    if type(mlp) is MLP and config.gated_linear_unit and not fused:
        mlp.forward = partial(_forward, mlp)


def _forward(mlp: Any, hidden: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """``MLP.forward`` of a dense layer; with other arguments than the hidden states the original.

    Shapes:
        hidden ``[tokens, b, h]``, the first result too; the second: fc2's bias ``[h]``.
    """
    if args or any(value is not None for value in options.values()):
        original: tuple[Tensor, Tensor | None] = type(mlp).forward(mlp, hidden, *args, **options)
        return original
    projected, bias = mlp.linear_fc1(hidden)
    result: tuple[Tensor, Tensor | None] = mlp.linear_fc2(activate(mlp.config, bias, projected))
    return result


def activate(config: Any, bias: Tensor | None, projected: Tensor) -> Tensor:
    """The activation function as ``MLP.forward`` applies it, without fusion.

    Shapes:
        projected: ``[tokens, b, f]``, ``2 f`` of a gated MLP; bias: as wide, None: there is none;
        result: ``[tokens, b, f]``.
    """
    projected = projected if bias is None else projected + bias
    if not config.gated_linear_unit:
        activated: Tensor = config.activation_func(projected)
        return activated
    gate, value = torch.chunk(projected, 2, dim=-1)
    if (limit := config.activation_func_clamp_value) is not None:
        gate, value = gate.clamp(max=limit), value.clamp(min=-limit, max=limit)
    if config.glu_linear_offset:
        value = value + config.glu_linear_offset
    product: Tensor = config.activation_func(gate) * value
    return product
