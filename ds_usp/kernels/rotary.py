"""Rotary position embedding of one rank's queries and keys, by a table of angles (``USPAttention``
with ``rotary_pos_emb``) or by positions (models' own calls). Nothing here communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ds_usp.errors import ConfigError

Rotary = tuple[torch.Tensor, torch.Tensor]  # tables of cos and sin; not RotaryPositions

# Of a chunk of tokens, where torch rotates in place by intermediate tensors.
_CPU_ELEMENTS, _GPU_ELEMENTS = 2**16, 2**22
_TABLE_ELEMENTS = 2**21  # of cos, and of sin, which exist for so many tokens at a time
_EXACT_IN_FP32 = 2**24  # integers up to it


# An angle belongs to a token's global position. So a rank may rotate its own tokens before the
# exchange of heads, in any layout, and a block that goes around the ring is rotated already; or, as
# DeepSpeed does, all tokens of its heads after it, by the table of the whole sequence. It is
# computed in fp32 (fp64 for fp64) and rounded once, to each tensor's own dtype.
def apply_rotary(
    tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, token_dim: int
) -> tuple[torch.Tensor, ...]:
    """Rotate the first ``r`` features of each head by its token's angles; the others stay.

    Shapes:
        tensors: ``[b, s, h, D]`` with ``token_dim`` 1, or ``[s, b, h, D]`` with 0.
        cos, sin: ``[s, r]``, both halves equal, r even, at most D; result: as the tensors.

    Raises:
        ConfigError: a table that does not fit the tensors.

    Source: RoFormer (arXiv 2104.09864), equation 34, halves instead of pairs as in GPT-NeoX.
    """
    _check(tensors, cos, sin, token_dim)
    return tuple(_rotate(x, cos, sin, token_dim) for x in tensors)


def _rotate_in_place(
    tensors: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    token_dim: int,
    *,
    transposed: bool,
) -> None:
    """:func:`apply_rotary` into the tensors themselves, not differentiable; the products are
    rounded to the tensors' dtype before their sum, as where each is a tensor of its own."""
    _check(tensors, cos, sin, token_dim)
    for x in tensors:
        row = x.numel() // max(1, x.shape[token_dim])
        elements = _CPU_ELEMENTS if x.device.type == "cpu" else _GPU_ELEMENTS
        tokens = max(1, elements // max(1, row))
        parts = x.split(tokens, token_dim), cos.split(tokens), sin.split(tokens)
        for part, part_cos, part_sin in zip(*parts, strict=True):
            part.copy_(_rotate(part, part_cos, part_sin, token_dim, x.dtype, transposed=transposed))


def _check(
    tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, token_dim: int
) -> None:
    """ConfigError for what :func:`apply_rotary` does not take."""
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[1] % 2 or not cos.shape[1]:
        raise ConfigError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} must both be [s, r] with an even r"
        )
    for x in tensors:
        if x.ndim != 4 or token_dim not in (0, 1):
            raise ConfigError(
                f"queries and keys must be [b, s, h, D] with token_dim 1 or [s, b, h, D] with 0; "
                f"got {list(x.shape)} with token_dim {token_dim}"
            )
        if x.shape[token_dim] != len(cos) or x.shape[3] < cos.shape[1]:
            raise ConfigError(
                f"a table {list(cos.shape)} does not fit {x.shape[token_dim]} tokens with heads "
                f"of {x.shape[3]} features: make it for these tokens"
            )


def _rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """``x cos + rotate_half(x) sin`` of the first r features, or its transpose.

    Args:
        dim: dim of the tokens.
        dtype: in which it is computed; None: fp32, fp64 for fp64. The result has that of ``x``.
        transposed: multiply by the transpose, as gradients are: backward of what it is without.
    """
    dtype = dtype or torch.promote_types(x.dtype, torch.float32)
    shape = [len(cos) if i == dim else 1 for i in range(x.ndim - 1)]
    cos, sin = (table.to(dtype).view(*shape, table.shape[1]) for table in (cos, sin))
    features, passed = x[..., : cos.shape[-1]].to(dtype), x[..., cos.shape[-1] :]
    front, back = (features * sin if transposed else features).chunk(2, dim=-1)
    halves = (back, -front) if transposed else (-back, front)
    swapped = torch.cat(halves, dim=-1)
    rotated = features * cos + (swapped if transposed else swapped * sin)
    return torch.cat((rotated.to(x.dtype), passed), dim=-1)


# ------------------------------------------------------------------------------------------------
# By positions instead of a table of all tokens.
#
# A table of cosines and sines has 2 values for each token and rotated feature. Angles are cheap:
# they are computed again for some tokens at a time, and queries and keys are rotated in place.


class RotaryPositions(NamedTuple):
    """Positions of tokens, of which cosines and sines are computed where they are needed, for some
    tokens at a time.

    Attributes:
        positions: ``[s]`` of this rank's tokens, int64.
        inverse_frequencies: ``[r / 2]``, fp32 or fp64.
    """

    # An angle is position times inverse frequency, rounded to the inverse frequencies' dtype;
    # cosine and sine are computed in that dtype and rounded to that of queries and keys; products
    # and their sum are rounded to it each. In fp32 angles this is what megatron-core computes
    # without fusion, bit for bit. fp32 has no integers above 2^24: longer sequences take fp64.
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
        """ConfigError for other shapes, and for inverse frequencies that are trained: no rotation
        by positions has their gradient."""
        positions, inverse = self
        if positions.ndim != 1 or inverse.ndim != 1 or not len(inverse):
            raise ConfigError(
                f"positions {list(positions.shape)} and inverse frequencies {list(inverse.shape)} "
                "must be [s] and [r / 2], of at least 2 rotated features"
            )
        if torch.is_grad_enabled() and self.inverse_frequencies.requires_grad:
            raise ConfigError(
                "inverse_frequencies require a gradient, which a rotation by positions does not "
                "compute: detach them, or rotate by tables, apply_rotary((q, k), cos, sin, ...)"
            )

    def table(self, start: int, stop: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin ``[stop - start, r]``, both halves equal, of the tokens ``start : stop``."""
        inverse = self.inverse_frequencies
        angles = torch.outer(self.positions[start:stop].to(inverse.dtype), inverse)
        cos, sin = (x.to(dtype).repeat(1, 2) for x in (angles.cos(), angles.sin()))
        return cos, sin

    def rotate_in_place(
        self, tensors: Sequence[torch.Tensor], token_dim: int, *, transposed: bool = False
    ) -> None:
        """Rotate queries and keys of one dtype in place, not differentiable; ``transposed``: by the
        transpose, as gradients are. ConfigError for another number of tokens than of positions."""
        tokens, dim = len(self.positions), 2 * len(self.inverse_frequencies)
        for x in tensors:
            self._check_tokens(x, token_dim)
        step = max(1, _TABLE_ELEMENTS // dim)
        for start in range(0, tokens, step):
            count = min(step, tokens - start)
            table = self.table(start, start + count, tensors[0].dtype)
            parts = [x.narrow(token_dim, start, count) for x in tensors]
            _rotate_in_place(parts, *table, token_dim, transposed=transposed)

    def _rotated(self, x: torch.Tensor, token_dim: int) -> torch.Tensor:
        """Rotate as :meth:`rotate_in_place` into a new tensor, by operators that autograd knows."""
        # For graphs of torch.compile: they hold no function of autograd that works in place, and
        # need none, as a compiler fuses the table and the products.
        self._check_tokens(x, token_dim)
        cos, sin = self.table(0, len(self.positions), x.dtype)
        _check([x], cos, sin, token_dim)
        return _rotate(x, cos, sin, token_dim, x.dtype)

    def _check_tokens(self, x: torch.Tensor, token_dim: int) -> None:
        if x.shape[token_dim] != len(self.positions):
            raise ConfigError(
                f"{x.shape[token_dim]} tokens along dim {token_dim} of {list(x.shape)}, but "
                f"{len(self.positions)} rotary positions: give a position for each token of this "
                "rank"
            )


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

    Within an activation checkpoint qkv is computed there too: an input of the checkpoint would be
    rotated again when it is recomputed.

    Args:
        qkv: ``[s, b, g n D]`` as megatron-core has it: for each of g key/value heads its query
            heads, its key and its value, n heads; the result is the same tensor, but a new one in a
            graph and where qkv is a view.
        rotary: of the s tokens; ``kv_heads``, ``head_dim``: g, D.

    Raises:
        ConfigError: shapes that do not fit, or inverse frequencies that are trained.
    """
    rotary.check()
    if qkv.ndim != 3 or qkv.shape[2] % (kv_heads * head_dim):
        raise ConfigError(
            f"qkv {list(qkv.shape)} must be [s, b, g n D] of g={kv_heads} key/value heads, D="
            f"{head_dim}"
        )
    heads = qkv.shape[1] * kv_heads, qkv.shape[2] // (kv_heads * head_dim), head_dim
    if torch.compiler.is_compiling():
        turned, value = qkv.reshape(len(qkv), *heads).split([heads[1] - 1, 1], dim=2)
        return torch.cat((rotary._rotated(turned, 0), value), dim=2).view(qkv.shape)
    qkv = qkv.clone() if qkv._is_view() else qkv  # autograd forbids to change some views
    out: torch.Tensor = RotationInPlace.apply(qkv, *rotary, heads, False)
    return out


class RotationInPlace(torch.autograd.Function):
    """Rotation in place; backward is the transposed rotation of a copy of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        positions: torch.Tensor,
        inverse: torch.Tensor,
        heads: tuple[int, int, int],
        transposed: bool,
    ) -> torch.Tensor:
        """Rotate a projection ``x [s, b, g n D]``, and return it.

        Args:
            positions, inverse: the fields of :class:`RotaryPositions`, tensors that backward needs.
            heads: (b g, n, D), as which x is viewed; of each n the last, the value, is not rotated.
        """
        ctx.save_for_backward(positions, inverse)
        ctx.args = heads, transposed
        ctx.mark_dirty(x)
        queries_and_keys = x.view(x.shape[0], *heads)[:, :, :-1]
        rotary = RotaryPositions(positions, inverse)
        rotary.rotate_in_place([queries_and_keys], 0, transposed=transposed)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        heads, transposed = ctx.args
        copy = grad.clone(memory_format=torch.contiguous_format)
        turned = RotationInPlace.apply(copy, *ctx.saved_tensors, heads, not transposed)
        return turned, None, None, None, None
