"""Arguments that a host hands to its local attention, checked against what the ring computes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_usp.attention.local_attention import LocalAttention
from ds_usp.errors import UnsupportedAttentionError
from ds_usp.geometry.masks import MaskSpec

_MASKS = ("attention_mask", "attn_mask", "mask")
_CAUSAL = ("causal", "is_causal")
_SCALES = ("softmax_scale", "scale")
_ADDITIVE_MINUS_INFINITY = -1e4


class HostArguments:
    """Refuses every argument that would change the result, accepts those that say the same.

    Args:
        attention: what the ring computes.
    """

    def __init__(self, attention: LocalAttention) -> None:
        self.attention = attention
        self._seen: tuple[weakref.ref[torch.Tensor], int, int] | None = None

    def check(
        self, seq_len: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, None]:
        """Look at one call's extra arguments; describe them for the other ranks.

        Raises:
            UnsupportedAttentionError: an argument that the ring cannot honour.
        """
        for index, value in enumerate(args):
            self._check_one(f"extra argument {index}", "attention_mask", value, seq_len)
        for name, value in kwargs.items():
            self._check_one(name, name, value, seq_len)
        return f"{len(args)} extra arguments, {', '.join(sorted(kwargs)) or 'no keywords'}", None

    def _check_one(self, label: str, name: str, value: Any, seq_len: int) -> None:
        attention = self.attention
        if value is None:
            return
        if name in _MASKS and isinstance(value, torch.Tensor):
            fits = self._is_mask(value, seq_len)
        elif name in _CAUSAL:
            fits = bool(value) == (attention.mask.right == 0)
        elif name in _SCALES:
            fits = value == attention.softmax_scale
        elif name == "dropout_p":
            fits = value == attention.dropout_p
        else:
            fits = False
        if not fits:
            shown = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else value
            raise UnsupportedAttentionError(
                f"{label}={shown!s} asks for something else than the ring's {attention.mask} mask, "
                f"scale {attention.softmax_scale or 'head_dim ** -0.5'}, dropout "
                f"{attention.dropout_p}. Leave it out, pass mask= and softmax_scale= to "
                "USPAttention, or use ring degree 1."
            )

    def _is_mask(self, mask: torch.Tensor, seq_len: int) -> bool:
        """Whether a dense mask ``[..., tokens, tokens]`` is the one the ring computes.

        Compared once for each tensor: hosts pass the same one to every layer.
        """
        seen = self._seen
        if seen and seen[0]() is mask and seen[1:] == (mask._version, seq_len):
            return True
        if mask.ndim < 2 or mask.shape[-2:] != (seq_len, seq_len):
            return False
        allowed = _dense(self.attention.mask, seq_len, mask.device)
        if mask.dtype == torch.bool:
            # torch marks what may attend, Megatron what may not; only one of the two can match.
            same = bool((mask == allowed).all()) or bool((mask != allowed).all())
        else:
            hidden = mask <= _ADDITIVE_MINUS_INFINITY
            same = bool((hidden != allowed).all()) and not bool(mask[~hidden].any())
        if same and not mask.is_inference():  # those keep no version
            self._seen = weakref.ref(mask), mask._version, seq_len
        return same


def _dense(mask: MaskSpec, seq_len: int, device: torch.device) -> torch.Tensor:
    tokens = torch.arange(seq_len, device=device)
    distance = tokens[None, :] - tokens[:, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if mask.left is not None:
        allowed &= distance >= -mask.left
    if mask.right is not None:
        allowed &= distance <= mask.right
    return allowed
