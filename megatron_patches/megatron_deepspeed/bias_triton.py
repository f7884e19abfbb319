"""Triton kernels: bias with tanh GELU and its gradient, and bias with a residual."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 2048
# gelu(v) = v / 2 (1 + tanh u) = v sigmoid(2 u), u = sqrt(2 / pi) (v + 0.044715 v^3)
_TWICE_U = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _gelu(out, x, bias, count, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    value = tl.load(x + offsets, mask=inside).to(tl.float32)
    value += tl.load(bias + offsets % width, mask=inside).to(tl.float32)
    gate = tl.sigmoid(_TWICE_U * (value + _CUBIC * value * value * value))
    tl.store(out + offsets, (value * gate).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward(out, grad, x, bias, count, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Triton kernel: gradient of GELU(x + bias), tanh approximation, with respect to x.

    ``out``, ``grad``, ``x``: contiguous, ``count`` elements; ``bias``: ``width`` elements, added
    to the last dimension. One program computes BLOCK elements, in fp32."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    value = tl.load(x + offsets, mask=inside).to(tl.float32)
    value += tl.load(bias + offsets % width, mask=inside).to(tl.float32)
    square = value * value
    gate = tl.sigmoid(_TWICE_U * (value + _CUBIC * value * square))
    slope = gate + value * gate * (1 - gate) * _TWICE_U * (1 + 3 * _CUBIC * square)
    result = tl.load(grad + offsets, mask=inside).to(tl.float32) * slope
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add(out, residual, x, bias, count, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    value = tl.load(x + offsets, mask=inside).to(tl.float32)
    value += tl.load(bias + offsets % width, mask=inside).to(tl.float32)
    value += tl.load(residual + offsets, mask=inside).to(tl.float32)
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside)


def gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Tanh GELU of ``x [..., width] + bias [width]``."""
    return _launch(_gelu, bias, x)


def gelu_backward(grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The gradient of :func:`gelu` with respect to ``x``, ``[..., width]``."""
    return _launch(_gelu_backward, bias, grad, x)


def add(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """``x + bias + residual``, rounded once; ``x`` and ``residual`` ``[..., width]``."""
    return _launch(_add, bias, residual, x)


def _launch(kernel: Any, bias: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """One elementwise kernel over tensors of one shape and a bias ``[width]``."""
    tensors = tuple(x.contiguous() for x in tensors)
    out = torch.empty_like(tensors[0])
    count = out.numel()
    with torch.cuda.device(out.device):
        kernel[(triton.cdiv(count, _BLOCK),)](
            out, *tensors, bias.contiguous(), count, bias.numel(), BLOCK=_BLOCK
        )
    return out
