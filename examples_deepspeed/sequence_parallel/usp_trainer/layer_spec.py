"""The specs of a layer and of a norm: megatron-core's local ones, or TransformerEngine's."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_patches.megatron_core.core_attention import USPCoreAttention
from usp_trainer.transformer_impl import LOCAL

Norm = ModuleSpec | type


def layer_specs_of(impl: str, config: TransformerConfig, **core: Any) -> tuple[ModuleSpec, Norm]:
    """A layer whose core attention is USP attention, and the norm after the last layer.

    Args:
        impl: value of ``--transformer-impl``.
        core: arguments of ``USPCoreAttention`` that are not megatron-core's.
    """
    layer, norm = _local(config) if impl == LOCAL else _transformer_engine()
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(USPCoreAttention, params=core)
    return layer, norm


def _local(config: TransformerConfig) -> tuple[ModuleSpec, Norm]:
    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    return layer, layer.submodules.input_layernorm


def _transformer_engine() -> tuple[ModuleSpec, Norm]:
    from megatron.core.extensions.transformer_engine import TENorm

    return get_gpt_layer_with_transformer_engine_spec(), TENorm
