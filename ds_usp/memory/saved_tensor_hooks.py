"""Hooks on what autograd saves that nest: torch runs the innermost pair alone, these run all.

A pair takes what it knows and leaves the rest to the pair around it; what nobody takes stays as it
is. So recomputation inside a layer and offload around it see each other's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from ds_usp.errors import RecomputeError

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _HookPair:
    pack: Pack
    unpack: Unpack
    outer: _HookPair | None


@dataclass(frozen=True, slots=True)
class _Packed:
    unpack: Unpack
    packed: Any

    def __call__(self) -> torch.Tensor:
        return self.unpack(self.packed)


@dataclass(frozen=True, slots=True)
class _Unpacked:
    tensor: torch.Tensor
    version: int | None = None

    def __call__(self) -> torch.Tensor:
        # torch checks this itself for tensors that no hook has seen.
        if self.version is not None and self.tensor._version != self.version:
            raise RecomputeError(
                f"a tensor {list(self.tensor.shape)} that backward needs was changed in place "
                f"(version {self.tensor._version}, saved at {self.version})"
            )
        return self.tensor


# Dynamic scope, as torch's own stack of hooks is: each thread has its own.
_INNERMOST: Final[ContextVar[_HookPair | None]] = ContextVar("innermost", default=None)


@contextmanager
def saved_tensors(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """``torch.autograd.graph.saved_tensors_hooks`` that hands on what it does not take.

    Args:
        pack: what is kept instead of a tensor; None: the tensor is for the pair around this one.
            Never sees parameters: they live as long as the model.
        unpack: the tensor for what ``pack`` gave.
    """
    pair = _HookPair(pack, unpack, _INNERMOST.get())
    token = _INNERMOST.set(pair)
    try:
        with torch.autograd.graph.saved_tensors_hooks(partial(_save, pair), _unpack):
            yield
    finally:
        _INNERMOST.reset(token)


def save_tensor(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Keep a tensor as if autograd saved it here; the result gives it back.

    For what is kept by hand for backward, so that it can be offloaded too.
    """
    return _save(_INNERMOST.get(), tensor)


def _save(pair: _HookPair | None, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    if is_parameter(tensor):
        # Itself, as it will be then: ZeRO-3 takes a parameter's memory away and gives it another.
        return _Unpacked(tensor)
    while pair is not None:
        packed = pair.pack(tensor)
        if packed is not None:
            return _Packed(pair.unpack, packed)
        pair = pair.outer
    # Detached: a hook that returned what it was given would tie a node to its own output.
    return _Unpacked(tensor.detach(), tensor._version)


def _unpack(saved: Callable[[], torch.Tensor]) -> torch.Tensor:
    return saved()


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether this is a parameter, or a view of one."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def storage_id(tensor: torch.Tensor) -> int:
    """What tells storages apart, as long as they live."""
    return tensor.untyped_storage()._cdata
