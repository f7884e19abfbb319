"""Kernels in Triton: where there are any, on which device they run, and launched at little cost."""

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
    """A module of Triton kernels; None where Triton is not installed."""
    try:
        return import_module(module)
    except ImportError:
        return None


class CachedLauncher:
    """A Triton kernel that is launched again and again with the same numbers.

    Triton looks at every argument of every launch, to find what it has compiled for such ones: half
    of the host's time. Here that is looked up by all numbers at once.

    Args:
        kernel: decorated by ``triton.jit``; its tensors come first, then its numbers, then its
            constants.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: dict[object, Any] = {}

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
        known = self._known.get(key)
        with _on(device):
            if known is not None:
                known[(*grid, 1, 1)[:3]](*tensors, *numbers, *constants.values())
                return
            made = self._kernel[grid](*tensors, *numbers, **constants, num_warps=num_warps)
        if made is not None and _launcher_passes_constexprs():
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[key] = made


@lru_cache(maxsize=1)
def _launcher_passes_constexprs() -> bool:
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return _TRITON[0] <= version < _TRITON[1]


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The device as the current one, on which Triton launches."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
