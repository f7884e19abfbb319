"""Checks of the extra arguments that a framework passes to its local attention, with a ring."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_usp.attention.local_attention import LocalAttention
from ds_usp.errors import UnsupportedAttentionError

_MASKS = ("attention_mask", "attn_mask", "mask")
_CAUSAL = ("causal", "is_causal")
_SCALES = ("softmax_scale", "scale")
_ADDITIVE_MINUS_INFINITY = -1e4
_COMPARE_BLOCK = 1 << 24  # elements of a mask

NO_ARGUMENTS = "0 extra arguments, no keywords"


class FrameworkArguments:
    """Refuses every argument that would change the result; accepts those that agree with the ring.

    Args:
        attention: what the ring computes.
    """

    def __init__(self, attention: LocalAttention) -> None:
        self.attention = attention
        self._seen: tuple[weakref.ref[torch.Tensor], int, int] | None = None

    def check(
        self, seq_len: int, head_dim: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str:
        """Check one call's extra arguments; returns their part of the call signature.

        Raises:
            UnsupportedAttentionError: an argument that the ring cannot honour.
        """
        scale = self.attention.softmax_scale or head_dim**-0.5
        for index, value in enumerate(args):
            self._check_argument(f"extra argument {index}", "attention_mask", value, seq_len, scale)
        for name, value in kwargs.items():
            self._check_argument(name, name, value, seq_len, scale)
        if not args and not kwargs:
            return NO_ARGUMENTS
        return f"{len(args)} extra arguments, {', '.join(sorted(kwargs)) or 'no keywords'}"

    def _check_argument(
        self, label: str, name: str, value: Any, seq_len: int, scale: float
    ) -> None:
        """Check one extra argument of a call; None as a value always passes.

        Args:
            label: the argument in the error message.
            name: of the parameter: a mask, a causal flag, a scale or ``dropout_p``.
            seq_len: global length of the sequence.
            scale: factor of the scores that the ring uses.

        Raises:
            UnsupportedAttentionError: the value differs from the ring's, or the name is unknown.
        """
        attention = self.attention
        if value is None:
            return
        if name in _MASKS and isinstance(value, torch.Tensor):
            fits = self._is_mask(value, seq_len)
        elif name in _CAUSAL:
            causal = attention.mask.right == 0 and not attention.mask.prefix
            fits = isinstance(value, bool) and value == causal
        elif name in _SCALES:
            fits = isinstance(value, (int, float)) and math.isclose(value, scale, rel_tol=1e-9)
        elif name == "dropout_p":
            fits = isinstance(value, (int, float)) and value == attention.dropout_p
        else:
            fits = False
        if not fits:
            shown = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else value
            means = "hides a pair" if attention.true_means_masked else "lets a pair attend"
            raise UnsupportedAttentionError(
                f"{label}={shown!s} differs from the ring's {attention.mask} mask "
                f"(True {means}), scale {scale:.6g}, dropout {attention.dropout_p}. Leave it out, "
                "give what the local attention computes as mask=, softmax_scale= and dropout_p= "
                "of USPAttention, or use ring degree 1."
            )

    def _is_mask(self, mask: torch.Tensor, seq_len: int) -> bool:
        """Whether a dense mask ``[..., tokens, tokens]`` is the one the ring computes.

        Compared once for each tensor: frameworks pass the same one to every layer.
        """
        seen = self._seen
        if seen and seen[0]() is mask and seen[1:] == (mask._version, seq_len):
            return True
        if mask.ndim < 2 or mask.shape[-2:] != (seq_len, seq_len):
            return False
        if self.attention.mask.documents:  # the dense mask would have to contain them
            return False
        rows = max(1, _COMPARE_BLOCK // seq_len)  # row blocks: masks are large
        same = all(
            self._is_per_row(mask[..., start : start + rows, :], start)
            for start in range(0, seq_len, rows)
        )
        if same and not mask.is_inference():  # inference tensors have no version
            self._seen = weakref.ref(mask), mask._version, seq_len
        return same

    def _is_per_row(self, mask: torch.Tensor, start: int) -> bool:
        """Whether rows of a dense mask hide exactly what the ring's window and prefix hide.

        Copies one bool to the CPU. An additive mask must also be 0 where it hides nothing.

        Args:
            mask: ``[..., rows, tokens]``, bool or additive.
            start: global position of the first row.
        """
        rows, tokens = mask.shape[-2:]
        queries = torch.arange(start, start + rows, device=mask.device, dtype=torch.int32)
        keys = torch.arange(tokens, device=mask.device, dtype=torch.int32)
        distance = keys[None, :] - queries[:, None]
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if self.attention.mask.left is not None:
            allowed &= distance >= -self.attention.mask.left
        if self.attention.mask.right is not None:
            allowed &= distance <= self.attention.mask.right
        allowed |= keys < self.attention.mask.prefix
        if mask.dtype == torch.bool:
            return bool((mask == (allowed ^ self.attention.true_means_masked)).all())
        hidden = mask <= _ADDITIVE_MINUS_INFINITY
        return bool((hidden != allowed).all()) and not bool(mask[~hidden].any())
