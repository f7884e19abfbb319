"""The attention function that transformers calls in every layer of an enabled model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ds_usp.attention.functional import usp_attention
from ds_usp.attention.plan import AttentionOptions
from ds_usp.attention.score_mod import Scores
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import Borders, MaskSpec
from ds_usp.integrations.transformers.masks import (
    LayerMask,
    causal_mask,
    full_mask,
    mask_of,
    usp_mask,
    window_mask,
)

IMPLEMENTATION: Final = "usp"

# Tensors that layers hand down and that change nothing about attention: positions and borders are
# those of this rank's shard; the whole batch's are in the Shard.
_KNOWN_TENSORS = frozenset(
    {"position_ids", "cache_position", "num_items_in_batch", "labels", "shift_labels"}
)


class Shard:
    """What attention needs to know of one forward pass.

    It is passed through the layers as their keyword argument ``usp``, not in a global: the second
    run of a checkpointed layer has its own, even if another batch came between. It is no dataclass,
    because FSDP2 casts the tensors of arguments, and copies dataclasses for that.

    Args:
        call: what all layers have in common; the mask, scale and scores are each layer's.
        documents: cumulative borders, one tuple for all samples or one each; () without any.
        dropout_seed: of this forward pass.

    Attributes:
        layers: names of the attention modules that have run.
    """

    def __init__(
        self,
        call: AttentionOptions,
        documents: tuple[Borders, ...] = (),
        dropout_seed: int = 0,
    ) -> None:
        self.call, self.documents, self.dropout_seed = call, documents, dropout_seed
        self.layout = cast(TokenLayout, call.layout)
        self.layers: list[str] = []

    @property
    def length(self) -> int:
        """Tokens of this rank."""
        return self.layout.length(self.call.mesh.rank)


def usp_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    usp: Shard | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of this rank's tokens with the whole sequence.

    Shapes:
        query ``[b, h, s_local, d]``, key ``[b, h_kv, s_local, d]``, value ``[b, h_kv, s_local, e]``
        -> ``[b, s_local, h, e]``; s_aux (attention sinks) ``[h]``.

    Raises:
        ConfigError: the model was not enabled.
        UnsupportedAttentionError: an argument that changes attention and is not known.
    """
    usp, mask = check_call(module, attention_mask, is_causal, sliding_window, usp, others)
    layer = getattr(module, "layer_idx", None) or 0
    q, k, v = (x.transpose(1, 2) for x in _in_one_dtype(query, key, value))
    with torch.autocast(q.device.type, enabled=False):
        seed = (usp.dropout_seed + layer) % 2**63 if dropout else None
        scores = Scores(softcap or None, None, s_aux, seed)
        call = usp.call._replace(mask=mask, softmax_scale=scaling, dropout_p=dropout, scores=scores)
        out: Tensor = usp_attention(q, k, v, **call._asdict())
    return out, None


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Rotary embeddings and norms may leave queries and keys in fp32: as transformers' own
    functions do, all are cast to autocast's dtype, else to the values'."""
    kind, dtype = query.device.type, value.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) for x in (query, key, value))


def check_call(
    module: nn.Module,
    attention_mask: Any,
    is_causal: bool | None,
    sliding_window: int | None,
    usp: Shard | None,
    others: Mapping[str, Any],
) -> tuple[Shard, MaskSpec]:
    """The shard and the mask of a layer's call; the arguments are :func:`usp_attention_forward`'s.

    Raises:
        ConfigError, UnsupportedAttentionError: see there.
    """
    name = type(module).__name__
    if usp is None:
        raise ConfigError(
            f"{name} runs attention 'usp' without a sharded batch. Call the model that was given "
            "to ds_usp.integrations.transformers.enable, not a part of it; if you did, the model "
            "does not hand keyword arguments to its layers and is not served"
        )
    _refuse_unknown(name, others)
    usp.layers.append(name)
    mask = _layer_mask(module, attention_mask, is_causal, sliding_window)
    return usp, mask_of(mask, usp.documents, usp.layout.seq_len)


def _layer_mask(
    module: nn.Module, mask: Any, is_causal: bool | None, sliding_window: int | None
) -> LayerMask:
    """The mask that a layer asked for; where it asked for none, what its module says."""
    if isinstance(mask, LayerMask):
        return mask
    if mask is not None:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} was given a mask of its own ({type(mask).__name__} "
            f"{list(getattr(mask, 'shape', []))}): masks are served as transformers' mask "
            "functions make them, not as tensors"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", None)
    if causal is None:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} gives neither a mask nor is_causal: who sees whom is unknown"
        )
    if not sliding_window:
        return causal_mask() if causal else full_mask()
    return (
        window_mask(sliding_window - 1) if causal else window_mask(sliding_window, sliding_window)
    )


def _refuse_unknown(name: str, others: Mapping[str, Any]) -> None:
    """Refuse arguments that might change the scores."""
    if others.get("output_attentions"):
        raise UnsupportedAttentionError(
            "output_attentions: weights of tokens x tokens are never made; use one rank for them"
        )
    for argument, value in others.items():
        if isinstance(value, Tensor) and argument not in _KNOWN_TENSORS:
            raise UnsupportedAttentionError(
                f"{name} gives its attention the tensor {argument} {list(value.shape)}, which is "
                "not known here: this model is not served"
            )


def register() -> None:
    """Make ``usp`` an attention implementation of transformers; again and again if you like."""
    AttentionInterface.register(IMPLEMENTATION, usp_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, usp_mask)
