"""The host's fused kernels, left out or replaced where they cannot be built."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LAST_CUDA_WITH_VOLTA = 12


def switch_off_missing_fusions(args: Any) -> None:
    """Leave out fusions whose compiled kernels are not there and cannot be built."""
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
    if _has_fuser():
        original()


def gelu(original: Callable[..., Tensor], ctx: Any, given: Tensor, bias: Tensor) -> Tensor:
    """``GeLUFunction.forward``: tanh's GELU of ``given + bias``, on GPUs in two kernels.

    The host's is TorchScript that a fuser makes one kernel of. Without it each of its ten
    operations is one, an eighth of the GPU's time of GPT 1.3B on 32K tokens (4 H200).
    """
    if not _unfused(given):
        return original(ctx, given, bias)
    ctx.save_for_backward(given, bias)
    return F.gelu(given + bias, approximate="tanh")


def gelu_backward(original: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """``GeLUFunction.backward``; autograd sums the bias' gradient over the tokens."""
    if not _unfused(grad):
        found: tuple[Tensor, Tensor] = original(ctx, grad)
        return found
    given, bias = ctx.saved_tensors
    mine = torch.ops.aten.gelu_backward(grad, given + bias, approximate="tanh")
    return mine, mine


def _unfused(x: Tensor) -> bool:
    """Whether TorchScript on this tensor is a kernel an operation that need not be one."""
    return x.is_cuda and not _has_fuser()


def _has_fuser() -> bool:
    return hasattr(torch._C, "_jit_set_nvfuser_enabled")


def _can_build() -> bool:
    from torch.utils import cpp_extension

    # The flags ask for Volta, which CUDA 13 and later do not compile for.
    cuda = int((torch.version.cuda or "0").split(".")[0])
    return cpp_extension.CUDA_HOME is not None and 0 < cuda <= _LAST_CUDA_WITH_VOLTA
