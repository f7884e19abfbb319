"""Bias with GELU, with the GEMM and with the residual: one GPU kernel each instead of several."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu(original: Callable[..., Tensor], ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
    """``GeLUFunction.forward``: tanh GELU of ``x + bias``, on GPUs in one Triton kernel, or
    two of torch.

    Megatron-DeepSpeed relies on TorchScript's nvfuser, which torch 2.6 no longer has: each of the
    ten operations is a kernel, a sixth of the GPU time of GPT 1.3B on 16K tokens (2 H200).
    """
    if not x.is_cuda:
        return original(ctx, x, bias)
    ctx.save_for_backward(x, bias)
    triton_kernels = _triton_kernels_for(x, bias)
    if triton_kernels is None:
        return F.gelu(x + bias, approximate="tanh")
    out: Tensor = triton_kernels.gelu(x, bias)
    return out


def gelu_backward(original: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """``GeLUFunction.backward``; autograd sums the bias' gradient over the tokens."""
    if not grad.is_cuda:
        grads: tuple[Tensor, Tensor] = original(ctx, grad)
        return grads
    x, bias = ctx.saved_tensors
    triton_kernels = _triton_kernels_for(x, bias)
    if triton_kernels is None:
        grad_input = torch.ops.aten.gelu_backward(grad, x + bias, approximate="tanh")
    else:
        grad_input = triton_kernels.gelu_backward(grad, x, bias)
    return grad_input, grad_input


def linear(
    original: Callable[..., Tensor],
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    async_grad_allreduce: bool,
    sequence_parallel: bool,
) -> Tensor:
    """``LinearWithGradAccumulationAndAsyncCommunication.forward`` with the bias in the GEMM.

    Megatron-DeepSpeed adds it in a second pass over the output, which takes half as long as the
    QKV projection.
    """
    options = gradient_accumulation_fusion, async_grad_allreduce, sequence_parallel
    same_dtype = bias is not None and x.dtype == weight.dtype == bias.dtype
    if not same_dtype or sequence_parallel or not x.is_cuda or torch.is_autocast_enabled("cuda"):
        return original(ctx, x, weight, bias, *options)
    ctx.use_bias = True
    ctx.gradient_accumulation_fusion, ctx.async_grad_allreduce, ctx.sequence_parallel = options
    return _linear(ctx, x, weight, bias)


@partial(torch.amp.custom_fwd, device_type="cuda")
def _linear(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The GEMM, saving what the original backward reads, under autocast too."""
    ctx.save_for_backward(x, weight)
    return F.linear(x, weight, bias)


def add_bias(
    original: Callable[..., Tensor],
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    prob: float,
    training: bool,
) -> Tensor:
    """``bias_dropout_add`` without dropout: bias and residual in one pass instead of two."""
    can_fuse = x.is_cuda and x.shape == residual.shape and x.dtype == residual.dtype
    if bias is not None and can_fuse and not (training and prob):
        triton_kernels = _triton_kernels_for(x, _unexpand_bias(bias))
        if triton_kernels is not None:
            out: Tensor = _Add.apply(x, bias.expand_as(x), residual, triton_kernels)
            return out
    return original(x, bias, residual, prob, training)


class _Add(torch.autograd.Function):
    """``x + bias + residual`` of three tensors of one shape; the bias may be an expanded row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, triton_kernels: Any) -> Tensor:
        out: Tensor = triton_kernels.add(x, _unexpand_bias(bias), residual)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, grad, grad, None


def _unexpand_bias(bias: Tensor) -> Tensor:
    """The bias ``[width]`` of one that was expanded over tokens; any other as it is."""
    while bias.ndim > 1 and (bias.stride(0) == 0 or len(bias) == 1):
        bias = bias[0]
    return bias


def _triton_kernels_for(x: Tensor, bias: Tensor) -> ModuleType | None:
    """The module of Triton kernels; None where they do not serve these tensors."""
    if x.dtype == torch.float64 or x.dtype != bias.dtype:
        return None
    if bias.shape != x.shape[-1:]:
        return None
    return _import_triton_kernels()


@cache
def _import_triton_kernels() -> ModuleType | None:
    """The module of Triton kernels; None without triton."""
    try:
        return importlib.import_module("megatron_patches.megatron_deepspeed.speedups.bias_triton")
    except ImportError:
        return None
