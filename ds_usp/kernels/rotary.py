"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ds_usp.errors import ConfigError
from ds_usp.lowlevel import load_triton_module

_MAX_FUSED = 2  # queries and keys
# Of a chunk of tokens, where torch rotates in place by intermediate tensors.
_CPU_ELEMENTS, _GPU_ELEMENTS = 2**16, 2**22


def apply_rotary(
    tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, token_dim: int
) -> tuple[torch.Tensor, ...]:
    """Rotate the first ``r`` features of each head by its token's angles; the others stay.

    Computed in fp32 (fp64 for fp64) and rounded once, to each tensor's own dtype. On GPUs one
    Triton kernel rotates queries and keys; only the table is saved for backward.

    Shapes:
        tensors: ``[b, s, h, D]`` with ``token_dim`` 1, or ``[s, b, h, D]`` with 0.
        cos, sin: ``[s, r]``, r even and at most D; result: as the tensors.

    Raises:
        ConfigError: a table that does not fit the tensors.

    Source: RoFormer (arXiv 2104.09864), equation 34, halves instead of pairs as in GPT-NeoX.
    """
    _check(tensors, cos, sin, token_dim)
    triton = (
        load_triton_module("ds_usp.kernels.rotary_triton") if _can_fuse(tensors, cos, sin) else None
    )
    if triton is None:
        return tuple(_rotate_reference(x, cos, sin, token_dim) for x in tensors)
    out: tuple[torch.Tensor, ...] = Rotation.apply(triton, cos, sin, token_dim, False, *tensors)
    return out


def rotate_in_place(
    tensors: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    token_dim: int,
    *,
    transposed: bool = False,
    rounded: bool = False,
) -> None:
    """:func:`apply_rotary` into the tensors themselves; not differentiable.

    Shapes:
        as of :func:`apply_rotary`.

    Args:
        transposed: the transpose, which gradients go through.
        rounded: the products are rounded to the tensors' dtype before their sum, as where each is
            a tensor of its own.
    """
    _check(tensors, cos, sin, token_dim)
    if _can_fuse(tensors, cos, sin) and all(x.stride(-1) == 1 for x in tensors):
        triton = load_triton_module("ds_usp.kernels.rotary_triton")
        if triton is not None:
            triton.rotate_fused(
                tensors, cos, sin, token_dim, transposed, in_place=True, rounded=rounded
            )
            return
    rotate = _rotate_back_reference if transposed else _rotate_reference
    for x in tensors:
        row = x.numel() // max(1, x.shape[token_dim])
        tokens = max(1, (_CPU_ELEMENTS if x.device.type == "cpu" else _GPU_ELEMENTS) // row)
        dtype = x.dtype if rounded else None
        parts = x.split(tokens, token_dim), cos.split(tokens), sin.split(tokens)
        for part, of_cos, of_sin in zip(*parts, strict=True):
            part.copy_(rotate(part, of_cos, of_sin, token_dim, dtype))


def _check(
    tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, token_dim: int
) -> None:
    """Check that cos and sin ``[s, r]`` fit queries and keys ``[b, s, h, D]`` or ``[s, b, h, D]``.

    Raises:
        ConfigError: shapes that do not fit, with the shapes found and wanted.
    """
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


def _can_fuse(tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether one Triton kernel can rotate all tensors: on one GPU, of one dtype but not fp64, and,
    except for the heads, one shape; not in a graph, nor where cos or sin require a gradient.
    """
    if torch.compiler.is_compiling() or not 0 < len(tensors) <= _MAX_FUSED:
        return False
    first, last = tensors[0], tensors[-1]
    same_shape = first.shape[:2] == last.shape[:2] and first.shape[3] == last.shape[3]
    same_dtype = first.dtype == last.dtype != torch.float64
    one_device = first.device == last.device == cos.device == sin.device
    table_needs_grad = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    return first.is_cuda and same_shape and same_dtype and one_device and not table_needs_grad


def _rotate_reference(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Rotation in PyTorch: ``x cos + rotate_half(x) sin`` of the first r features.

    Shapes:
        x ``[b, s, h, D]`` or ``[s, b, h, D]``, cos and sin ``[s, r]``; the result like x.

    Args:
        dim: dim of the tokens.
        dtype: in which it is computed; None: fp32, fp64 for fp64.
    """
    dtype = dtype or torch.promote_types(x.dtype, torch.float32)
    shape = [len(cos) if i == dim else 1 for i in range(x.ndim - 1)]
    cos, sin = (table.to(dtype).view(*shape, -1) for table in (cos, sin))
    rotated, passed = x[..., : cos.shape[-1]].to(dtype), x[..., cos.shape[-1] :]
    front, back = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-back, front), dim=-1) * sin
    return torch.cat((rotated.to(x.dtype), passed), dim=-1)


def _rotate_back_reference(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The transpose of :func:`_rotate_reference`."""
    dtype = dtype or torch.promote_types(x.dtype, torch.float32)
    shape = [len(cos) if i == dim else 1 for i in range(x.ndim - 1)]
    cos, sin = (table.to(dtype).view(*shape, -1) for table in (cos, sin))
    rotated, passed = x[..., : cos.shape[-1]].to(dtype), x[..., cos.shape[-1] :]
    front, back = (rotated * sin).chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((back, -front), dim=-1)
    return torch.cat((rotated.to(x.dtype), passed), dim=-1)


class Rotation(torch.autograd.Function):
    """Rotation by Triton; backward rotates by the transposed matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        triton: ModuleType,
        cos: torch.Tensor,
        sin: torch.Tensor,
        token_dim: int,
        transposed: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Rotate ``tensors`` by one kernel launch; the results in their order, of their shapes.

        Args:
            triton: the module :mod:`ds_usp.kernels.rotary_triton`.
            transposed: rotate by the transposed matrix, as backward does.
        """
        ctx.save_for_backward(cos, sin)
        ctx.args = triton, token_dim, transposed
        rotated: tuple[torch.Tensor, ...] = triton.rotate_fused(
            tensors, cos, sin, token_dim, transposed
        )
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        triton, token_dim, transposed = ctx.args
        cos, sin = ctx.saved_tensors
        rotated = Rotation.apply(triton, cos, sin, token_dim, not transposed, *grads)
        return None, None, None, None, None, *rotated
