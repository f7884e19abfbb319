"""Shim: torch's FlashAttention-2 under the names of the package flash-attn.

For libraries that import flash-attn where it is not installed; the kernels are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch


@contextmanager
def torch_flash_attn() -> Iterator[None]:
    """Context in which ``import flash_attn`` resolves to the package or, if it is not installed,
    to this shim. Modules imported in it keep their reference; ``sys.modules`` is restored."""
    name, inner = "flash_attn", "flash_attn.flash_attn_interface"
    spec = find_spec(name)
    if spec is not None and spec.origin is not None:  # not just a folder that flash-attn-4 makes
        yield
        return
    before = {module_name: sys.modules.get(module_name) for module_name in (name, inner)}
    package, interface = ModuleType(name), ModuleType(inner)
    package.__version__ = "2.8.0"  # type: ignore[attr-defined]
    package.__path__ = []
    for module in (package, interface):
        module.__getattr__ = _absent  # type: ignore[method-assign]
    interface._flash_attn_forward = forward  # type: ignore[attr-defined]
    interface._flash_attn_backward = backward  # type: ignore[attr-defined]
    sys.modules.update({name: package, inner: interface})
    try:
        yield
    finally:
        for module_name, module in before.items():
            del sys.modules[module_name]
            if module is not None:
                sys.modules[module_name] = module


def _absent(name: str) -> None:
    """Names that libraries import and that no benchmark calls."""
    if name.startswith("__"):
        raise AttributeError(name)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    """``_flash_attn_forward`` without windows and dropout: out, lse, and two unused values."""
    lengths = None, None, q.shape[1], k.shape[1]
    out, lse, *_rest = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, dropout_p, causal, False, scale=softmax_scale
    )
    return out, lse, None, None


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    *_: Any,
) -> None:
    """``_flash_attn_backward``: writes the gradients into ``dq``, ``dk`` and ``dv``."""
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)
    lengths = None, None, q.shape[1], k.shape[1]
    grads = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *lengths, dropout_p, causal, unread, unread, scale=softmax_scale
    )
    for out_buffer, x in zip((dq, dk, dv), grads, strict=True):
        out_buffer.copy_(x)
