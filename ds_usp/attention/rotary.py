"""Rotary position embedding as attention takes it: tables, as DeepSpeed's, or positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.kernels.rotary import apply_rotary, rotate_in_place
from ds_usp.kernels.rotary_positions import RotaryPositions, rotated

Rotary = tuple[torch.Tensor, torch.Tensor]  # RotaryPositions is one, too


def rotate(q: torch.Tensor, k: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys ``[b, s, h, d]`` rotated, as new tensors; differentiable."""
    if isinstance(rotary, RotaryPositions):
        return rotated(q, rotary, 1), rotated(k, rotary, 1)
    q, k = apply_rotary((q, k), *rotary, token_dim=1)
    return q, k


def turn_in_place(
    tensors: Sequence[torch.Tensor], rotary: Rotary, *, transposed: bool = False
) -> None:
    """Rotate heads ``[b, s, h, d]`` in place, or gradients by the transpose."""
    if isinstance(rotary, RotaryPositions):
        rotary.rotate_in_place(tensors, 1, transposed=transposed)
    else:
        rotate_in_place(tensors, *rotary, token_dim=1, transposed=transposed)


def check_local_rotary(rotary: Rotary, tokens: int, head_dim: int) -> None:
    """Check that a table ``[s, r]``, or positions, are those of a rank's tokens.

    Raises:
        ConfigError: shapes that do not fit; a table or inverse frequencies that are trained.
    """
    if isinstance(rotary, RotaryPositions):
        rotary.check()
        positions, inverse = rotary
        if positions.shape != (tokens,) or inverse.ndim != 1 or 2 * len(inverse) > head_dim:
            raise ConfigError(
                f"rotary must be positions [s] of this rank's {tokens} tokens and at most "
                f"{head_dim // 2} inverse frequencies; got {list(positions.shape)} and "
                f"{list(inverse.shape)}"
            )
        return
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        raise ConfigError("rotary must be two tables, cos and sin [s, r], or RotaryPositions")
    cos, sin = rotary
    fits = cos.ndim == 2 and cos.shape == sin.shape and len(cos) == tokens
    if not fits or cos.shape[1] % 2 or cos.shape[1] > head_dim:
        raise ConfigError(
            f"rotary must be cos and sin [s, r] of this rank's {tokens} tokens, r even and "
            f"at most {head_dim}; got {list(cos.shape)} and {list(sin.shape)}"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ConfigError("rotary tables get no gradient: give them without requires_grad")


def check_rotary(rotary: Sequence[torch.Tensor], seq_len: int, head_dim: int) -> None:
    """Check that cos and sin ``[tokens, 1, 1, rot_dim]`` cover the whole sequence.

    Raises:
        ConfigError: no pair, cos and sin of another shape, or for fewer tokens than the sequence
            has.
    """
    shape: Any = getattr(rotary, "shape", None)  # not a pair, but a tensor of something else
    if shape is not None or len(rotary) != 2:
        given = len(rotary) if shape is None else list(shape)
        raise ConfigError(
            "the argument behind batch_dim_idx is rotary_pos_emb, cos and sin (as in DeepSpeed), "
            f"and got {type(rotary).__name__} {given}. Give what the local attention takes, such "
            "as a mask, behind it, attn(q, k, v, 0, None, mask), or by name"
        )
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
