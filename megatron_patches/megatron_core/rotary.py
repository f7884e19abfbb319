"""Rotary positions of megatron-core's layers: no table, in place in a projection's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ds_usp.errors import ConfigError
from ds_usp.training import RotaryPositions, rotate_projected

# Options of a configuration with which megatron-core rotates otherwise.
_OPTIONS = (
    "attention_output_gate",
    "fused_single_qkv_rope",
    "multi_latent_attention",
    "no_rope_freq",
    "rotary_interleaved",
    "yarn_rotary_scaling_factor",
)


@dataclass(frozen=True, eq=False)
class RotatingForward:
    """The forward pass of a layer's query, key and value projection, with the rotation.

    Args:
        project: the projection's own forward.
        rotary: of the tokens that it returns.
        kv_heads: of this tensor-parallel rank.
    """

    project: Callable[..., tuple[Tensor, Tensor | None]]
    rotary: RotaryPositions
    kv_heads: int
    head_dim: int

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values ``[s, b, features]``, and the projection's bias if it is not
        added."""
        qkv, bias = self.project(*args, **kwargs)
        return rotate_projected(qkv, self.rotary, self.kv_heads, self.head_dim), bias


def rotate_in_projection(layer: TransformerLayer, rotary: RotaryPositions) -> None:
    """Rotate a layer's queries and keys by the positions of this rank's tokens, to the bits that
    megatron-core's unfused rotation computes. The layer must get no ``rotary_pos_emb``.

    Call it after what replaces the projection's forward.

    Raises:
        ConfigError: a layer that rotates otherwise.
    """
    attention = layer.self_attention
    if reason := _reason(attention):
        raise ConfigError(f"rotary positions without a table: {reason}")
    attention.linear_qkv.forward = RotatingForward(
        attention.linear_qkv.forward,
        rotary,
        attention.num_query_groups_per_partition,
        attention.hidden_size_per_attention_head,
    )


def _reason(attention: Any) -> str:
    """Why a layer is not served; "" if it is."""
    if type(attention) is not SelfAttention:
        return f"attention is a {type(attention).__name__}, no SelfAttention"
    for norm in (attention.q_layernorm, attention.k_layernorm):
        if norm is not None and not isinstance(norm, IdentityOp):
            return "queries or keys are normalized between their projection and the rotation"
    for name in _OPTIONS:
        if getattr(attention.config, name, None):
            return f"megatron-core's {name} is set"
    return ""
