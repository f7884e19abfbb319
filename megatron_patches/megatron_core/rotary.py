"""Rotary positions of megatron-core's layers: without a table, in place in a projection's output;
and the table by which megatron-core rotates itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
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

_TABLE = "_usp_table"  # of a tensor of angles, which all layers of a pass share


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

    Call it after what replaces the projection's forward, and before
    :func:`megatron_patches.megatron_core.projections.project_again`.

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


def rotary_table(
    attention: SelfAttention, angles: Tensor, packed_seq_params: Any, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[s_local, r]`` of this rank's tokens, to the bits by which megatron-core
    rotates: read from unit vectors that it rotated.

    Args:
        angles: ``rotary_pos_emb``, ``[s, 1, 1, r]``: of this rank's tokens, or, where documents are
            packed in the format ``thd``, of the positions in the longest one.
        hidden: ``[s_local, b, c]``, in whose dtype megatron-core rotates.
    """
    packed = getattr(packed_seq_params, "qkv_format", None) == "thd"
    version = None if angles.is_inference() else angles._version
    key = (hidden.shape[0], hidden.dtype, version)
    # Tensors of inference mode cannot be saved for backward.
    is_shared = not (packed or torch.is_inference_mode_enabled())
    known, table = getattr(angles, _TABLE, (None, None))
    if table is not None and known == key and is_shared:
        result: tuple[Tensor, Tensor] = table
        return result
    half = angles.shape[-1] // 2
    units = hidden.new_zeros(hidden.shape[0], 1, 2, 2 * half)
    units[:, :, 0, :half] = 1
    units[:, :, 1, half:] = 1
    offsets = None
    if packed:
        padded = packed_seq_params.cu_seqlens_q_padded
        offsets = packed_seq_params.cu_seqlens_q if padded is None else padded
        units = units.squeeze(1)
    rotated = _rotate(attention, units, angles, offsets).reshape(hidden.shape[0], 2, 2, half)
    # x1, x2 -> x1 cos1 - x2 sin1, x2 cos2 + x1 sin2
    (cos1, sin2), (minus_sin1, cos2) = (x.unbind(1) for x in rotated.unbind(1))
    table = torch.cat((cos1, cos2), 1), torch.cat((-minus_sin1, sin2), 1)
    if is_shared:
        setattr(angles, _TABLE, (key, table))
    return table


def _rotate(attention: Any, x: Tensor, angles: Tensor, offsets: Tensor | None) -> Tensor:
    """``x`` as ``Attention.forward`` rotates queries."""
    rotated: Tensor = apply_rotary_pos_emb(
        x, angles, config=attention.config, cu_seqlens=offsets, cp_group=attention.pg_collection.cp
    )
    return rotated


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
