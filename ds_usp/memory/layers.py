"""The activation memory policy of a framework's transformer layers, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ds_usp.errors import ConfigError
from ds_usp.memory.offload import Offload
from ds_usp.memory.saved_attention import keep_attention

# What is recomputed in the backward pass, from nothing to everything.
RECOMPUTE = ("none", "gemm-last", "attention", "full")

Checkpoint = Callable[..., Any]  # of the function and its inputs


def reentrant_checkpoint(run: Callable[..., Any], *inputs: Any) -> Any:
    """torch's reentrant checkpoint: suits ZeRO-3, whose partitioned parameters change shape."""
    return checkpoint(run, *inputs, use_reentrant=True)


@dataclass(frozen=True)
class LayerMemory:
    """Policy for the activations that a framework's transformer layers save for backward.

    Args:
        recompute: ``none`` and ``gemm-last`` save what autograd saves; for ``gemm-last`` the
            layers' linear modules must be called by :func:`recompute_before` or linked by
            :class:`GemmLast`. ``attention`` saves a layer's input and the results of attention,
            ``full`` the input alone.
        offload: offloads a fraction of what is saved to the host; None: nothing.
        checkpoint: the framework's activation checkpoint, which may restore more random states.

    Raises:
        ConfigError: an unknown policy.
    """

    recompute: str = "none"
    offload: Offload | None = None
    checkpoint: Checkpoint = reentrant_checkpoint

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ConfigError(
                f"recompute={self.recompute!r} is unknown; there are {', '.join(RECOMPUTE)}"
            )

    def run(self, number: int, layer: Callable[..., Any], *inputs: Any) -> Any:
        """``layer(*inputs)`` under the policy.

        Args:
            number: the layer's index among those of this rank.
            layer: has no inputs with a gradient other than these.
        """
        with self.offload.layer(number) if self.offload else nullcontext():
            if self.recompute in ("none", "gemm-last") or not torch.is_grad_enabled():
                return layer(*inputs)
            saving_layer = keep_attention(layer) if self.recompute == "attention" else layer
            return self.checkpoint(saving_layer, *inputs)
