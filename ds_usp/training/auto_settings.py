"""Resolves ``auto`` for a training loop's flags, at its start: the kernel, the offload ratio."""

from __future__ import annotations

import torch

from ds_usp.geometry.masks import MaskSpec
from ds_usp.kernels.api import KernelRequest
from ds_usp.kernels.registry import AUTO, select_kernel


def attention_kernel(
    kernel: str = AUTO,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    documents: bool = False,
) -> str:
    """The kernel that causal attention takes here: the named one, or the one that ``auto`` picks.

    Args:
        dtype, head_dim: of q, k and v.
        documents: the mask has documents.

    Raises:
        UnsupportedAttentionError: no kernel serves it; the message has each one's reason.
    """
    # Asked as attention/plan.py asks, so that a loop can name the kernel before its first step.
    request = KernelRequest(
        device.type,
        dtype,
        head_dim,
        MaskSpec.causal().band,
        documents=documents,
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    return select_kernel(request, kernel).name


def offload_ratio(text: str) -> float | str:
    """An offload ratio of a command line: a number from 0 to 1, or ``auto``; else ValueError."""
    if text == AUTO:
        return text
    ratio = float(text)
    if not 0 <= ratio <= 1:
        raise ValueError(f"{text} is not from 0 to 1")
    return ratio
