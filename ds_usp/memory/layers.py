"""What a host does with each of its transformer layers, by the name of the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ds_usp.errors import ConfigError
from ds_usp.memory.keep import keep_attention

# What is computed again in the backward pass, from nothing to everything.
RECOMPUTE = ("none", "gemm-last", "attention", "full")

Checkpoint = Callable[[Callable[..., Any], torch.Tensor], Any]


def reentrant(run: Callable[..., Any], hidden: torch.Tensor) -> Any:
    """torch's checkpoint that suits ZeRO-3, whose parameters have other shapes when they wait."""
    return checkpoint(run, hidden, use_reentrant=True)


def checkpointed_layer(
    run: Callable[..., Any],
    hidden: torch.Tensor,
    recompute: str,
    how: Checkpoint = reentrant,
) -> Any:
    """``run(hidden)`` of one layer, of which backward finds what the policy keeps.

    ``none`` and ``gemm-last`` keep what autograd saves; for ``gemm-last`` the layer's linear
    layers are to be called by :func:`recompute_before` or :class:`GemmLast`. ``attention`` keeps
    the layer's input and what attention computed, ``full`` the input alone.

    Args:
        run: the layer; its only input with a gradient is ``hidden``.
        how: the host's activation checkpoint, which may know more random states.

    Raises:
        ConfigError: another policy.
    """
    if recompute not in RECOMPUTE:
        raise ConfigError(f"recompute={recompute!r} is unknown; there are {', '.join(RECOMPUTE)}")
    if recompute in ("none", "gemm-last") or not torch.is_grad_enabled():
        return run(hidden)
    return how(keep_attention(run) if recompute == "attention" else run, hidden)
