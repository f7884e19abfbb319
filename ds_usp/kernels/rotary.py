"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ds_usp.fused import fused

_MOST_FUSED = 2  # queries and keys


def apply_rotary(
    tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, token_dim: int
) -> tuple[torch.Tensor, ...]:
    """Rotate the first ``r`` features of each head by its token's angles; the rest pass.

    Computed in fp32 (fp64 for fp64) and rounded once, to each tensor's own dtype. On GPUs queries
    and keys are one kernel of Triton, and nothing but the table is kept for backward.

    Shapes:
        tensors: ``[b, s, h, D]``, or ``[s, b, h, D]``, as ``token_dim`` says: 1 or 0.
        cos, sin: ``[s, r]``, r even and at most D; result: as the tensors.

    Source: RoFormer (arXiv 2104.09864), equation 34, halves instead of pairs as in GPT-NeoX.
    """
    triton = fused("ds_usp.kernels.rotary_triton") if _can_fuse(tensors, cos, sin) else None
    if triton is None:
        return tuple(_rotated(x, cos, sin, token_dim) for x in tensors)
    out: tuple[torch.Tensor, ...] = Rotation.apply(triton, cos, sin, token_dim, *tensors)
    return out


def _can_fuse(tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> bool:
    alike = all(x.is_cuda and x.ndim == 4 and x.dtype == tensors[0].dtype for x in tensors)
    learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    few = 0 < len(tensors) <= _MOST_FUSED
    return alike and few and tensors[0].dtype != torch.float64 and not learned


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    shape = [len(cos) if each == dim else 1 for each in range(x.ndim - 1)]
    cos, sin = (table.to(wide).view(*shape, -1) for table in (cos, sin))
    turned, passed = x[..., : cos.shape[-1]].to(wide), x[..., cos.shape[-1] :]
    front, back = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-back, front), dim=-1) * sin
    return torch.cat((turned.to(x.dtype), passed), dim=-1)


class Rotation(torch.autograd.Function):
    """Rotation by Triton; backward is that by the transposed matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        triton: ModuleType,
        cos: torch.Tensor,
        sin: torch.Tensor,
        token_dim: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.triton, ctx.token_dim = triton, token_dim
        turned: tuple[torch.Tensor, ...] = triton.rotate_fused(tensors, cos, sin, token_dim)
        return turned

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        back = ctx.triton.rotate_fused(grads, cos, sin, ctx.token_dim, transposed=True)
        return None, None, None, None, *back
