"""The host's fused CUDA builds, left out where they cannot be built."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

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
    if hasattr(torch._C, "_jit_set_nvfuser_enabled"):
        original()


def _can_build() -> bool:
    from torch.utils import cpp_extension

    # The flags ask for Volta, which CUDA 13 and later do not compile for.
    cuda = int((torch.version.cuda or "0").split(".")[0])
    return cpp_extension.CUDA_HOME is not None and 0 < cuda <= _LAST_CUDA_WITH_VOLTA
