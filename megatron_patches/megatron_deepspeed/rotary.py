"""Rotary position embedding at the positions that a rank holds.

The host's is right for none of its paths but one, so it is switched off and attention rotates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import ds_usp
from ds_usp.training import local_positions, rotary_frequencies
from megatron_patches.megatron_deepspeed.state import is_active


def switch_off_in_model(original: Callable[..., None], model: Any, *args: Any, **kw: Any) -> None:
    """``TransformerLanguageModel.__init__`` whose layers get no rotary embedding."""
    from megatron import get_args

    original(model, *args, **kw)
    if is_active(get_args()):
        model.use_rotary_position_embeddings = False


@lru_cache(maxsize=8)
def rotary_table(
    layout: ds_usp.TokenLayout, rank: int, dim: int, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine for every token of one rank, made once for all layers.

    Shapes:
        two of ``[s_local, dim]``, fp32.
    """
    angles = rotary_frequencies(local_positions(layout, rank, device), dim, base)[:, 0, 0]
    return angles.cos(), angles.sin()
