"""Rotary position embedding in place, by positions instead of a table of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ds_usp.errors import ConfigError
from ds_usp.kernels.rotary import rotate_in_place

_TABLE_ELEMENTS = 2**21  # of cos, and of sin, which exist for so many tokens at a time
_EXACT_IN_FP32 = 2**24  # integers up to it


class RotaryPositions(NamedTuple):
    """Angles of tokens, of which cosines and sines are computed where they are needed, for some
    tokens at a time.

    An angle is position times inverse frequency, rounded to the inverse frequencies' dtype; cosine
    and sine are computed in that dtype and rounded to that of queries and keys; products and their
    sum are rounded to it each. In fp32 angles this is what megatron-core computes without fusion,
    bit for bit. fp32 has no integers above 2^24: longer sequences take angles in fp64.

    Attributes:
        positions: ``[s]`` of this rank's tokens, int64.
        inverse_frequencies: ``[r / 2]``, fp32 or fp64.
    """

    positions: torch.Tensor
    inverse_frequencies: torch.Tensor

    @classmethod
    def of(
        cls, positions: torch.Tensor, dim: int, base: float = 10000.0, *, seq_len: int
    ) -> RotaryPositions:
        """Those of RoFormer (arXiv 2104.09864), equation 15.

        Args:
            positions: ``[s]``.
            dim: r, features of a head that are rotated.
            seq_len: tokens of the whole sequence: fp64 angles above 2^24.
        """
        dtype = torch.float32 if seq_len <= _EXACT_IN_FP32 else torch.float64
        return cls(positions, inverse_frequencies(dim, base, dtype, positions.device))

    def check(self) -> None:
        """Refuse inverse frequencies that are trained.

        Raises:
            ConfigError: they require a gradient, which no rotation by positions computes.
        """
        if torch.is_grad_enabled() and self.inverse_frequencies.requires_grad:
            raise ConfigError(
                "inverse_frequencies require a gradient, which a rotation by positions does not "
                "compute: detach them, or rotate by tables, apply_rotary((q, k), cos, sin, ...)"
            )

    def table(self, start: int, stop: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin ``[stop - start, r]`` of these tokens."""
        inverse = self.inverse_frequencies
        angles = torch.outer(self.positions[start:stop].to(inverse.dtype), inverse)
        cos, sin = (x.to(dtype).repeat(1, 2) for x in (angles.cos(), angles.sin()))
        return cos, sin

    def rotate_in_place(
        self, tensors: Sequence[torch.Tensor], token_dim: int, *, transposed: bool = False
    ) -> None:
        """Rotate queries and keys ``[b, s, h, D]`` with ``token_dim`` 1, or ``[s, b, h, D]`` with
        0, of one dtype; not differentiable.

        Args:
            transposed: the transpose, which gradients go through.

        Raises:
            ConfigError: shapes that do not fit.
        """
        tokens, dim = len(self.positions), 2 * len(self.inverse_frequencies)
        step = max(1, _TABLE_ELEMENTS // dim)
        for start in range(0, tokens, step):
            count = min(step, tokens - start)
            table = self.table(start, start + count, tensors[0].dtype)
            parts = [x.narrow(token_dim, start, count) for x in tensors]
            rotate_in_place(parts, *table, token_dim, transposed=transposed, rounded=True)


def inverse_frequencies(
    dim: int, base: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``base ** (-2 i / dim)``, ``[dim / 2]``."""
    exponent = torch.arange(0, dim, 2, dtype=dtype, device=device) / dim
    return base**-exponent


def rotate_projected(
    qkv: torch.Tensor, rotary: RotaryPositions, kv_heads: int, head_dim: int
) -> torch.Tensor:
    """Rotate queries and keys in place in the output of their projection, before it is split.

    Shapes:
        qkv: ``[s, b, g n D]`` as megatron-core has it: for each of g key/value heads its query
        heads, its key and its value; the result is the same tensor.

    Args:
        rotary: of the s tokens.
        kv_heads, head_dim: g, D.

    Within an activation checkpoint qkv is computed there too: an input of the checkpoint would be
    rotated again when it is recomputed.

    Raises:
        ConfigError: shapes that do not fit, or inverse frequencies that are trained.
    """
    rotary.check()
    if qkv.ndim != 3 or qkv.shape[2] % (kv_heads * head_dim):
        raise ConfigError(
            f"qkv {list(qkv.shape)} must be [s, b, g n D] of g={kv_heads} key/value heads, D="
            f"{head_dim}"
        )
    qkv = qkv.clone() if qkv._is_view() else qkv  # autograd forbids to change some views
    heads = -1, qkv.shape[2] // (kv_heads * head_dim), head_dim
    out: torch.Tensor = RotationInPlace.apply(qkv, *rotary, 0, heads, False)
    return out


def rotated(x: torch.Tensor, rotary: RotaryPositions, token_dim: int) -> torch.Tensor:
    """Rotated heads ``[b, s, h, D]`` with ``token_dim`` 1, or ``[s, b, h, D]`` with 0, as a new
    tensor."""
    rotary.check()
    copy = x.clone(memory_format=torch.contiguous_format)
    out: torch.Tensor = RotationInPlace.apply(copy, *rotary, token_dim, None, False)
    return out


class RotationInPlace(torch.autograd.Function):
    """Rotation in place; backward is the transposed rotation of a copy of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        positions: torch.Tensor,
        inverse: torch.Tensor,
        token_dim: int,
        heads: tuple[int, int, int] | None,
        transposed: bool,
    ) -> torch.Tensor:
        """Rotate x.

        Args:
            heads: sizes of the dims into which all dims of x behind the tokens are viewed: KV heads
                of all samples, heads for each of them, of which the last is not rotated, features;
                None: x has heads and features.
        """
        ctx.save_for_backward(positions, inverse)
        ctx.args = token_dim, heads, transposed
        ctx.mark_dirty(x)
        part = x.view(x.shape[0], *heads)[:, :, :-1] if heads else x
        rotary = RotaryPositions(positions, inverse)
        rotary.rotate_in_place([part], token_dim, transposed=transposed)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient may be another's too, so it is copied."""
        token_dim, heads, transposed = ctx.args
        copy = grad.clone(memory_format=torch.contiguous_format)
        turned = RotationInPlace.apply(copy, *ctx.saved_tensors, token_dim, heads, not transposed)
        return turned, None, None, None, None, None
