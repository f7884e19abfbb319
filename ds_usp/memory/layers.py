"""What a host does with each of its transformer layers, by the name of the policy."""

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

# What is computed again in the backward pass, from nothing to everything.
RECOMPUTE = ("none", "gemm-last", "attention", "full")

Checkpoint = Callable[[Callable[..., Any], torch.Tensor], Any]


def reentrant_checkpoint(run: Callable[..., Any], hidden: torch.Tensor) -> Any:
    """torch's checkpoint that suits ZeRO-3, whose parameters have other shapes when they wait."""
    return checkpoint(run, hidden, use_reentrant=True)


@dataclass(frozen=True)
class LayerMemory:
    """What becomes of what a host's transformer layers would keep for backward.

    Args:
        recompute: ``none`` and ``gemm-last`` keep what autograd saves; for ``gemm-last`` the
            layers' linear modules are to be called by :func:`recompute_before` or linked by
            :class:`GemmLast`. ``attention`` keeps a layer's input and what attention computed,
            ``full`` the input alone.
        offload: a share of what is kept waits on the host; None: nothing does.
        checkpoint: the host's activation checkpoint, which may know more random states.

    Raises:
        ConfigError: another policy.
    """

    recompute: str = "none"
    offload: Offload | None = None
    checkpoint: Checkpoint = reentrant_checkpoint

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ConfigError(
                f"recompute={self.recompute!r} is unknown; there are {', '.join(RECOMPUTE)}"
            )

    def run(self, number: int, layer: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
        """``layer(hidden)``, keeping what the policy says.

        Args:
            number: the layer's place among those of this rank.
            layer: its only input with a gradient is ``hidden``.
        """
        with self.offload.layer(number) if self.offload else nullcontext():
            if self.recompute in ("none", "gemm-last") or not torch.is_grad_enabled():
                return layer(hidden)
            saving_layer = keep_attention(layer) if self.recompute == "attention" else layer
            return self.checkpoint(saving_layer, hidden)
