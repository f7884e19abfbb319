"""Functions of Megatron-DeepSpeed that fail with current torch and CUDA, or without GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_LAST_CUDA_WITH_VOLTA = 12


def switch_off_missing_fusions(args: Any) -> None:
    """Switch off up to three of Megatron's fusions in ``args``, whatever the flags.

    Bias-dropout: always, since torch no longer fuses this TorchScript, and for a dropout of 0 it
    still draws random numbers and saves a mask and all inputs for backward. Masked softmax: where
    its CUDA kernels cannot be built. Gradient accumulation: where apex's extension
    ``fused_weight_gradient_mlp_cuda`` is not installed.
    """
    args.bias_dropout_fusion = False
    if not _can_build():
        args.masked_softmax_fusion = False
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        args.gradient_accumulation_fusion = False


def load_fused_kernels(original: Callable[[Any], None], args: Any) -> None:
    """``fused_kernels.load``, where a CUDA compiler accepts its flags."""
    if _can_build():
        original(args)


def set_jit_fusion_options(original: Callable[[], None]) -> None:
    """``set_jit_fusion_options``, whose nvfuser switches newer torch lacks."""
    if hasattr(torch._C, "_jit_set_nvfuser_enabled"):
        original()


def initialize_distributed(original: Callable[[], None]) -> None:
    """``_initialize_distributed``, which sets ``args.local_rank`` of CPU ranks by NUMA nodes, which
    DeepSpeed refuses."""
    from deepspeed.accelerator import get_accelerator
    from megatron import get_args

    original()
    if get_accelerator().device_name() == "cpu":
        args = get_args()
        args.local_rank = dist.get_node_local_rank(fallback_rank=args.local_rank)


def _can_build() -> bool:
    """Whether the installed CUDA compiler still targets Volta."""
    from torch.utils import cpp_extension

    # The compiler flags name Volta, which CUDA 13 dropped.
    cuda = int((torch.version.cuda or "0").split(".")[0])
    return cpp_extension.CUDA_HOME is not None and 0 < cuda <= _LAST_CUDA_WITH_VOLTA
