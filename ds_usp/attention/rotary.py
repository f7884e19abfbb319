"""Tables of rotary position embedding as DeepSpeed's attention takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import TokenLayout

Rotary = tuple[torch.Tensor, torch.Tensor]


def check_rotary(rotary: Sequence[torch.Tensor], seq_len: int, head_dim: int) -> None:
    """Check that cos and sin ``[tokens, 1, 1, rot_dim]`` cover the whole sequence.

    Raises:
        ConfigError: cos and sin of another shape, or for fewer tokens than the sequence has.
    """
    cos, sin = rotary
    if cos.ndim != 4 or cos.shape != sin.shape or cos.shape[1:3] != (1, 1):
        raise ConfigError(
            "rotary_pos_emb must be cos and sin of shape [tokens, 1, 1, rot_dim], got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    if cos.shape[0] < seq_len or cos.shape[3] > head_dim or cos.shape[3] % 2:
        raise ConfigError(
            f"rotary_pos_emb {list(cos.shape)} does not fit {seq_len} tokens of the whole "
            f"sequence and head dim {head_dim}"
        )


def local_rotary(rotary: Rotary, layout: TokenLayout, rank: int | None) -> Rotary:
    """Cos and sin ``[s, rot_dim]`` of a rank's tokens (before a head exchange), or, with no rank,
    of the whole sequence (after it)."""
    cos, sin = (table[: layout.seq_len, 0, 0] for table in rotary)
    if rank is None:
        return cos, sin
    return layout.shard(cos, 0, rank), layout.shard(sin, 0, rank)
