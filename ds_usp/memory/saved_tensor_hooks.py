"""Saved-tensor hooks that nest: torch runs the innermost pair alone, these run all of them.

A pair packs the tensors that it handles and passes the others on to the pair around it; what no
pair packs is saved as it is. So recomputation inside a layer and offload around it see each
other's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from ds_usp.errors import RecomputeError

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class StorageView(NamedTuple):
    """Shape, strides and offset of a tensor in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> StorageView:
        """The view that a tensor is."""
        return cls(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def apply_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same view of another tensor's storage, without a gradient."""
        return tensor.detach().as_strided(self.size, self.stride, self.offset)


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the tensor's storage as long as that lives."""
    return tensor.untyped_storage()._cdata


class _HookPair(NamedTuple):
    pack: Pack
    unpack: Unpack
    outer: _HookPair | None


# Dynamic scope, as torch's own stack of hooks is: each thread has its own.
_INNERMOST: Final[ContextVar[_HookPair | None]] = ContextVar("innermost", default=None)


@contextmanager
def saved_tensors(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """``torch.autograd.graph.saved_tensors_hooks`` that nests.

    Args:
        pack: what is saved instead of a tensor; None: the tensor is for the pair around this one.
            Never called for parameters: they live as long as the model.
        unpack: the tensor for what ``pack`` returned.
    """
    pair = _HookPair(pack, unpack, _INNERMOST.get())
    token = _INNERMOST.set(pair)
    try:
        with torch.autograd.graph.saved_tensors_hooks(partial(_save, pair), _unpack):
            yield
    finally:
        _INNERMOST.reset(token)


def save_tensor(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Save a tensor as if autograd saved it here; the result returns it.

    For what is saved for backward outside of autograd, so that it can be offloaded too.
    """
    return _save(_INNERMOST.get(), tensor)


def _save(pair: _HookPair | None, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Save a tensor by the innermost hook pair that takes it; returns the function to restore it.

    Parameters and tensors that no pair takes are kept as they are.
    """
    if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
        # The parameter itself, as it will be then: ZeRO-3 frees and reallocates its memory.
        return lambda: tensor
    while pair is not None:
        packed = pair.pack(tensor)
        if packed is not None:
            return partial(pair.unpack, packed)
        pair = pair.outer
    # Detached: a hook that returned its input would tie a node to its own output.
    return partial(_unchanged, tensor.detach(), tensor._version)


def _unpack(saved: Callable[[], torch.Tensor]) -> torch.Tensor:
    return saved()


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    check_version(tensor, version)
    return tensor


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Refuse a saved tensor that was changed in place; torch checks only tensors without hooks.

    Raises:
        RecomputeError: the tensor was changed in place since it had this version.
    """
    if tensor._version != version:
        raise RecomputeError(
            f"a tensor {list(tensor.shape)} that backward needs was changed in place "
            f"(version {tensor._version}, saved at {version})"
        )
