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


def gelu(original: Callable[..., Tensor], ctx: Any, given: Tensor, bias: Tensor) -> Tensor:
    """``GeLUFunction.forward``: tanh's GELU of ``given + bias``, on GPUs in one kernel, or two
    without Triton.

    The host's is TorchScript that a fuser made one kernel of. TorchScript lost it before torch 2.6
    (its switch was there to 2.11, and did nothing): each of the ten operations is a kernel, a sixth
    of the GPU's time of GPT 1.3B on 16K tokens (2 H200).
    """
    if not given.is_cuda:
        return original(ctx, given, bias)
    ctx.save_for_backward(given, bias)
    fast = _in_one_pass(given, bias)
    if fast is None:
        return F.gelu(given + bias, approximate="tanh")
    made: Tensor = fast.gelu(given, bias)
    return made


def gelu_backward(original: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """``GeLUFunction.backward``; autograd sums the bias' gradient over the tokens."""
    if not grad.is_cuda:
        found: tuple[Tensor, Tensor] = original(ctx, grad)
        return found
    given, bias = ctx.saved_tensors
    fast = _in_one_pass(given, bias)
    if fast is None:
        mine = torch.ops.aten.gelu_backward(grad, given + bias, approximate="tanh")
    else:
        mine = fast.gelu_backward(grad, given, bias)
    return mine, mine


def linear(
    original: Callable[..., Tensor],
    ctx: Any,
    given: Tensor,
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
    how = gradient_accumulation_fusion, async_grad_allreduce, sequence_parallel
    alike = bias is not None and given.dtype == weight.dtype == bias.dtype
    if not alike or sequence_parallel or not given.is_cuda or torch.is_autocast_enabled("cuda"):
        return original(ctx, given, weight, bias, *how)
    ctx.use_bias = True
    ctx.gradient_accumulation_fusion, ctx.async_grad_allreduce, ctx.sequence_parallel = how
    return _linear(ctx, given, weight, bias)


@partial(torch.amp.custom_fwd, device_type="cuda")
def _linear(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What the host's backward, which reads it under autocast too, needs kept."""
    ctx.save_for_backward(given, weight)
    return F.linear(given, weight, bias)


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
    alike = x.is_cuda and x.shape == residual.shape and x.dtype == residual.dtype
    if bias is not None and alike and not (training and prob):
        fast = _in_one_pass(x, _one_row(bias))
        if fast is not None:
            out: Tensor = _Add.apply(x, bias.expand_as(x), residual, fast)
            return out
    return original(x, bias, residual, prob, training)


class _Add(torch.autograd.Function):
    """``x + bias + residual`` of three tensors of one shape; the bias may be a row for all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, fast: Any) -> Tensor:
        made: Tensor = fast.add(x, _one_row(bias), residual)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, grad, grad, None


def _one_row(bias: Tensor) -> Tensor:
    """The bias ``[width]`` that was expanded for all tokens; others as they are."""
    while bias.ndim > 1 and (bias.stride(0) == 0 or len(bias) == 1):
        bias = bias[0]
    return bias


def _in_one_pass(given: Tensor, bias: Tensor) -> ModuleType | None:
    """The Triton kernels, if there are any for this."""
    if given.dtype == torch.float64 or given.dtype != bias.dtype:
        return None
    if bias.shape != given.shape[-1:]:
        return None
    return _triton()


@cache
def _triton() -> ModuleType | None:
    try:
        return importlib.import_module("megatron_patches.megatron_deepspeed.bias_triton")
    except ImportError:
        return None


def _tensor(data: Any, *, device: Any = None, **how: Any) -> Tensor:
    """``torch.tensor``; a number goes to a GPU as an argument of a kernel."""
    if (
        isinstance(data, (int, float))
        and device is not None
        and torch.device(device).type == "cuda"
    ):
        return torch.full((), data, device=device, **how)
    return torch.tensor(data, device=device, **how)


def unhurried_torch() -> ModuleType:
    """``torch`` as a module of the host sees it, with a ``tensor`` that the host need not wait for.

    ``torch.tensor(0.0, device="cuda")`` copies 4 bytes and waits until the GPU has done all that
    was launched before. Twice in each layer, that leaves the GPU idle wherever it is faster than
    its launches: of GPT 1.3B on 16K tokens (2 H200) an eighth of the time.
    """
    seen = ModuleType("torch")
    # All else is torch's as it is when it is asked for: profilers and ZeRO change it later.
    vars(seen).update(tensor=_tensor, __getattr__=partial(getattr, torch))
    return seen


def _can_build() -> bool:
    from torch.utils import cpp_extension

    # The flags ask for Volta, which CUDA 13 and later do not compile for.
    cuda = int((torch.version.cuda or "0").split(".")[0])
    return cpp_extension.CUDA_HOME is not None and 0 < cuda <= _LAST_CUDA_WITH_VOLTA
