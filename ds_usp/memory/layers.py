"""The activation memory policy of a framework's transformer layers, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ds_usp.errors import ConfigError
from ds_usp.memory.layer_groups import LayerGroups, RandomTracker
from ds_usp.memory.offload import Offload
from ds_usp.memory.saved_attention import keep_attention

# What is recomputed in the backward pass, from nothing to everything.
RECOMPUTE = ("none", "gemm-last", "attention", "full")
# Of them, those whose layers are checkpoints, so that checkpoint_layers can be above 1.
GROUPED_RECOMPUTE = ("attention", "full")

Checkpoint = Callable[..., Any]  # of the function and its inputs


def reentrant_checkpoint(run: Callable[..., Any], *inputs: Any) -> Any:
    """torch's reentrant checkpoint: suits ZeRO-3, whose partitioned parameters change shape. What
    the function returns when it is recomputed is not kept in memory during its backward pass."""
    return checkpoint(partial(run_for_gradients, run), *inputs, use_reentrant=True)


def run_for_gradients(run: Callable[..., Any], *inputs: Any) -> Any:
    """The function's results; in the recomputation of a reentrant checkpoint, where torch enables
    gradients, without their values, which the backward pass starts from but does not read. Single
    elements keep theirs: Megatron-DeepSpeed's checkpoint reads the loss of experts."""
    out = run(*inputs)
    if not torch.is_grad_enabled():
        return out
    results = [
        WithoutValues.apply(x)
        if isinstance(x, torch.Tensor) and x.requires_grad and x.numel() > 1
        else x
        for x in (out if isinstance(out, tuple) else (out,))
    ]
    return tuple(results) if isinstance(out, tuple) else results[0]


class WithoutValues(torch.autograd.Function):
    """A tensor of the same shape in the memory of one element, and the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Uninitialized."""
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


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
        checkpoint_layers: K of :class:`ds_usp.memory.layer_groups.LayerGroups`: of K consecutive
            layers only the first one's input is saved, and the forward pass of the other K - 1 runs
            once more. Only for ``full``, and for ``attention``, whose results are saved all the
            same. Layers take one tensor, the result, or first result, of the layer before.
        random_tracker: returns the framework's own random generators, as Megatron's; for
            ``checkpoint_layers`` above 1.

    Raises:
        ConfigError: an unknown policy, or ``checkpoint_layers`` that it does not have.
    """

    recompute: str = "none"
    offload: Offload | None = None
    checkpoint: Checkpoint = reentrant_checkpoint
    checkpoint_layers: int = 1
    random_tracker: Callable[[], RandomTracker] | None = None
    _groups: LayerGroups | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ConfigError(
                f"recompute={self.recompute!r} is unknown; there are {', '.join(RECOMPUTE)}"
            )
        count = self.checkpoint_layers
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"checkpoint_layers={count!r} must be a whole number of 1 or more")
        if self.checkpoint_layers > 1:
            if self.recompute not in GROUPED_RECOMPUTE:
                raise ConfigError(
                    f"checkpoint_layers={self.checkpoint_layers} with recompute="
                    f"{self.recompute!r}: there are no checkpoints of layers to group. Use "
                    f"{' or '.join(GROUPED_RECOMPUTE)}"
                )
            groups = LayerGroups(self.checkpoint_layers, self.offload, self.random_tracker)
            object.__setattr__(self, "_groups", groups)

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
            if self._groups is None:
                return self.checkpoint(saving_layer, *inputs)
            if len(inputs) != 1:
                raise ConfigError(
                    f"checkpoint_layers={self.checkpoint_layers}: a layer got {len(inputs)} "
                    "inputs. Pass hidden states alone, and the others by functools.partial"
                )
            return self._groups.run(number, self.checkpoint, saving_layer, inputs[0])
