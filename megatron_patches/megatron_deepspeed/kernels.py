"""The host's fused kernels, left out or replaced where they cannot be built."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LAST_CUDA_WITH_VOLTA = 12


def switch_off_missing_fusions(args: Any) -> None:
    """Leave out fusions whose compiled kernels are not there and cannot be built, and the one that
    TorchScript would compile: no torch of today fuses it, and in place of a dropout of 0 it runs
    one that draws, keeps a mask, and keeps all else that its gradient might need."""
    args.bias_dropout_fusion = False
    if not _can_build():
        args.masked_softmax_fusion = False
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        args.gradient_accumulation_fusion = False


def load_fused_kernels(original: Callable[[Any], None], args: Any) -> None:
    """``fused_kernels.load``, where a CUDA compiler can do what its flags ask for."""
    if _can_build():
        original(args)


def set_jit_fusion_options(original: Callable[[], None]) -> None:
    """``set_jit_fusion_options``, whose switches newer torch lacks."""
    if hasattr(torch._C, "_jit_set_nvfuser_enabled"):
        original()


def gelu(original: Callable[..., Tensor], ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
    """``GeLUFunction.forward``: tanh's GELU of ``given + bias``, on GPUs in one kernel, or two
    without Triton.

    The host's is TorchScript that a fuser made one kernel of. TorchScript lost it before torch 2.6
    (its switch was there to 2.11, and did nothing): each of the ten operations is a kernel, a sixth
    of the GPU's time of GPT 1.3B on 16K tokens (2 H200).
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
    """``LinearWithGradAccumulationAndAsyncCommunication.forward``: the product adds the bias.

    The host adds it afterwards, in a pass over the whole output that takes half as long as the
    product of queries, keys and values.
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
    """What the host's backward, which reads it under autocast too, needs kept."""
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
    """``bias_dropout_add`` without a dropout: one pass instead of two, of which that of the bias
    is slow."""
    can_fuse = x.is_cuda and x.shape == residual.shape and x.dtype == residual.dtype
    if bias is not None and can_fuse and not (training and prob):
        triton_kernels = _triton_kernels_for(x, _unexpand_bias(bias))
        if triton_kernels is not None:
            out: Tensor = _Add.apply(x, bias.expand_as(x), residual, triton_kernels)
            return out
    return original(x, bias, residual, prob, training)


class _Add(torch.autograd.Function):
    """``x + bias + residual`` of three tensors of one shape; the bias may be a row for all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, triton_kernels: Any) -> Tensor:
        out: Tensor = triton_kernels.add(x, _unexpand_bias(bias), residual)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, grad, grad, None


def _unexpand_bias(bias: Tensor) -> Tensor:
    """The bias ``[width]`` that was expanded for all tokens; others as they are."""
    while bias.ndim > 1 and (bias.stride(0) == 0 or len(bias) == 1):
        bias = bias[0]
    return bias


def _triton_kernels_for(x: Tensor, bias: Tensor) -> ModuleType | None:
    """The Triton kernels, if there are any for this."""
    if x.dtype == torch.float64 or x.dtype != bias.dtype:
        return None
    if bias.shape != x.shape[-1:]:
        return None
    return _import_triton_kernels()


@cache
def _import_triton_kernels() -> ModuleType | None:
    try:
        return importlib.import_module("megatron_patches.megatron_deepspeed.bias_triton")
    except ImportError:
        return None


def _tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """``torch.tensor``; a number goes to a GPU as an argument of a kernel."""
    if (
        isinstance(data, (int, float))
        and device is not None
        and torch.device(device).type == "cuda"
    ):
        return torch.full((), data, device=device, **options)
    return torch.tensor(data, device=device, **options)


def lazy_sync_torch() -> ModuleType:
    """``torch`` as a module of the host sees it, with a ``tensor`` that the host need not wait for.

    ``torch.tensor(0.0, device="cuda")`` copies 4 bytes and waits until the GPU has done all that
    was launched before. Twice in each layer, that leaves the GPU idle wherever it is faster than
    its launches: of GPT 1.3B on 16K tokens (2 H200) an eighth of the time.
    """
    module = ModuleType("torch")
    # All else is torch's as it is when it is asked for: profilers and ZeRO change it later.
    vars(module).update(tensor=_tensor, __getattr__=partial(getattr, torch))
    return module


def _can_build() -> bool:
    from torch.utils import cpp_extension

    # The flags ask for Volta, which CUDA 13 and later do not compile for.
    cuda = int((torch.version.cuda or "0").split(".")[0])
    return cpp_extension.CUDA_HOME is not None and 0 < cuda <= _LAST_CUDA_WITH_VOLTA
