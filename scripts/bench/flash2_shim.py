"""torch's FlashAttention-2 by the names of the package flash-attn, for peers that import these.

The same kernels; only the package's Python is missing where it is not installed.
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
def torchs_flash_attn() -> Iterator[None]:
    """In here ``import flash_attn`` finds the package or, where it is missing, this. What was
    imported keeps what it has found; others do not see it."""
    name, inner = "flash_attn", "flash_attn.flash_attn_interface"
    spec = find_spec(name)
    if spec is not None and spec.origin is not None:  # not just a folder that flash-attn-4 makes
        yield
        return
    before = {each: sys.modules.get(each) for each in (name, inner)}
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
        for each, module in before.items():
            del sys.modules[each]
            if module is not None:
                sys.modules[each] = module


def _absent(name: str) -> None:
    """What peers import and do not call here."""
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
    """``_flash_attn_forward`` without windows and dropout: out, log-sum-exp, and what is unread."""
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
    """``_flash_attn_backward``: writes the gradients into the given tensors."""
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)
    lengths = None, None, q.shape[1], k.shape[1]
    found = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *lengths, dropout_p, causal, unread, unread, scale=softmax_scale
    )
    for place, x in zip((dq, dk, dv), found, strict=True):
        place.copy_(x)
