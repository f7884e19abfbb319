"""Kernels in Triton: where there are any, and on which device they run."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch


@lru_cache(maxsize=8)
def fused(module: str) -> ModuleType | None:
    """A module of Triton kernels; None where Triton is not installed."""
    try:
        return import_module(module)
    except ImportError:
        return None


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The device as the current one, on which Triton launches."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
