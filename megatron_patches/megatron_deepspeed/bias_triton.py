"""What follows a product and its bias, each in one pass on the GPU: GELU by tanh and its gradient,
and the sum with a residual."""

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
def _gelu(out, given, bias, count, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(given + at, mask=inside).to(tl.float32)
    value += tl.load(bias + at % width, mask=inside).to(tl.float32)
    share = tl.sigmoid(_TWICE_U * (value + _CUBIC * value * value * value))
    tl.store(out + at, (value * share).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward(out, grad, given, bias, count, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(given + at, mask=inside).to(tl.float32)
    value += tl.load(bias + at % width, mask=inside).to(tl.float32)
    square = value * value
    share = tl.sigmoid(_TWICE_U * (value + _CUBIC * value * square))
    slope = share + value * share * (1 - share) * _TWICE_U * (1 + 3 * _CUBIC * square)
    result = tl.load(grad + at, mask=inside).to(tl.float32) * slope
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add(out, residual, given, bias, count, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(given + at, mask=inside).to(tl.float32)
    value += tl.load(bias + at % width, mask=inside).to(tl.float32)
    value += tl.load(residual + at, mask=inside).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def gelu(given: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Of ``given [..., width] + bias [width]``."""
    return _of_all(_gelu, bias, given)


def gelu_backward(grad: torch.Tensor, given: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The gradient of :func:`gelu` with respect to ``given``, and of every token to the bias."""
    return _of_all(_gelu_backward, bias, grad, given)


def add(given: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """``given + bias + residual``, rounded once; ``given`` and ``residual`` ``[..., width]``."""
    return _of_all(_add, bias, residual, given)


def _of_all(kernel: Any, bias: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    """One number for each of those given, which are as many as the first."""
    given = tuple(x.contiguous() for x in given)
    out = torch.empty_like(given[0])
    count = out.numel()
    with torch.cuda.device(out.device):
        kernel[(triton.cdiv(count, _BLOCK),)](
            out, *given, bias.contiguous(), count, bias.numel(), BLOCK=_BLOCK
        )
    return out
