"""Triton kernels: optional import, and a launcher that caches compiled kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

_MAX_CACHED = 1024  # launches; documents differ from step to step
_ALIGNMENT = 16  # bytes; Triton compiles anew where a pointer's differs
# Triton's compiled kernels take all arguments, constants too, in their order.
_TRITON = (3, 3), (3, 9)


@lru_cache(maxsize=8)
def load_triton_module(module: str) -> ModuleType | None:
    """Import a module of Triton kernels; None where Triton is not installed."""
    try:
        return import_module(module)
    except ImportError:
        return None


class CachedLauncher:
    """Launches a Triton kernel that is called again and again with the same integers.

    Triton inspects every argument of every launch to find the compiled kernel: half of the CPU
    time. Here it is one dictionary lookup by all integers, dtypes and alignments.

    Args:
        kernel: decorated by ``triton.jit``; its tensors come first, then its integers,
            then its constants.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._cache: dict[object, Any] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[torch.Tensor],
        numbers: tuple[int, ...],
        *,
        num_warps: int = 4,
        **constants: Any,
    ) -> None:
        """Launch on the tensors' device, in its current stream."""
        device = tensors[0].device
        kinds = tuple([(x.dtype, x.data_ptr() % _ALIGNMENT) for x in tensors])
        key = device.index, numbers, kinds, num_warps, *constants.values()
        cached = self._cache.get(key)
        with _on(device):
            if cached is not None:
                cached[(*grid, 1, 1)[:3]](*tensors, *numbers, *constants.values())
                return
            compiled = self._kernel[grid](*tensors, *numbers, **constants, num_warps=num_warps)
        if compiled is not None and _launcher_passes_constexprs():
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[key] = compiled


@lru_cache(maxsize=1)
def _launcher_passes_constexprs() -> bool:
    """Whether this Triton's compiled launcher takes constexprs as arguments too."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return _TRITON[0] <= version < _TRITON[1]


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The device as the current one, on which Triton launches."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
