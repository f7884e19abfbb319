"""Arguments and plan of one call of the drop-in module, see :mod:`ds_usp.attention.module`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_usp.attention.functional import head_exchange
from ds_usp.attention.local_attention import LocalAttention
from ds_usp.attention.plan import AttentionPlan
from ds_usp.attention.rotary import Rotary
from ds_usp.attention.validation import ChunkExchanges
from ds_usp.errors import ConfigError, warn_once
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import borders_of


class CallArguments(NamedTuple):
    """The arguments of a call besides q, k and v; see ``USPAttention.forward``."""

    batch_dim_idx: int | torch.Tensor | None
    rotary: Rotary | None
    documents: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class DropInPlan:
    """The validated plan of one drop-in call: the order of its dims, and its exchanges or ring
    plan."""

    batch_second: bool
    layout: TokenLayout
    args: tuple[Any, ...]
    rotary: Rotary | None
    call: AttentionPlan | ChunkExchanges
    attention: LocalAttention | None


def exchange_heads(
    traffic: ChunkExchanges, call: int, to_heads: bool, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Exchange q, k and v to heads, or the output back to the sequence."""
    return head_exchange(traffic.qkv if to_heads else traffic.out, to_heads, call, *tensors)


def batch_dim_text(dim: object) -> str:
    """The batch dim in the call signature."""
    return f"batch dim {dim}"


def hashable_documents(documents: Any) -> object:
    """Documents as a hashable value; None for what is refused later."""
    try:
        return None if documents is None else borders_of(documents)
    except ConfigError:
        return None


def warn_not_called(local_attention: object, attention: LocalAttention, where: str) -> None:
    """Warn, once for each class and condition, that a local attention is not called.

    Args:
        attention: what is computed instead.
        where: in which calls.
    """
    scale = "head_dim ** -0.5" if attention.softmax_scale is None else attention.softmax_scale
    warn_once(
        f"USPAttention does not call the local attention {type(local_attention).__name__} {where}: "
        f"ds_usp's own kernels compute it, with mask {attention.mask.band}, softmax_scale {scale}, "
        f"dropout {attention.dropout_p} in training",
        rank=dist.get_rank() if dist.is_initialized() else 0,
    )
