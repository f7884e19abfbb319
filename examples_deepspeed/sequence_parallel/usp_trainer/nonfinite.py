"""NaN and infinity checks: name the first tensor that is not finite, and never save one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_usp import USPError

FLAG = "--no-check-for-nan-in-loss-and-grad"


class NotFiniteError(USPError):
    """A loss, a gradient or a weight is NaN or infinite."""


@dataclass(frozen=True, order=True)
class NonFiniteTensor:
    """A tensor that is not finite; sorts by the order of computation.

    Args:
        order: its index in the order of computation.
        name: of the parameter, output, gradient or optimizer state.
        count, total: values that are not finite, and all values.
    """

    order: int
    rank: int
    name: str
    count: int
    total: int

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank} ({self.count} of {self.total} values)"


class _FirstNonFinite:
    """Records the first tensor on this rank that is not finite."""

    def __init__(self) -> None:
        self.order = 0
        self.first: NonFiniteTensor | None = None

    def check(self, name: str, value: Any) -> None:
        self.order += 1
        for tensor in filter(torch.is_tensor, tree_leaves(value)):
            if self.first is None and tensor.is_floating_point():
                nonfinite = int((~torch.isfinite(tensor.detach())).sum())
                if nonfinite:
                    numbers = nonfinite, tensor.numel()
                    self.first = NonFiniteTensor(self.order, dist.get_rank(), name, *numbers)

    def check_parameters(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.check(f"parameter {name}", getattr(parameter, "ds_tensor", parameter.detach()))

    @contextlib.contextmanager
    def hooks_on(self, module: nn.Module) -> Iterator[None]:
        handles = []
        for name, submodule in module.named_modules():
            if not list(submodule.children()):
                check = partial(self.check, f"the output of {name}")
                hook = submodule.register_forward_hook(lambda _, __, out, check=check: check(out))
                handles.append(hook)
        for name, parameter in module.named_parameters():
            check = partial(self.check, f"the gradient of {name}")
            handles.append(parameter.register_hook(check))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def over_ranks(self) -> NonFiniteTensor | None:
        all_ranks: list[NonFiniteTensor | None] = [None] * dist.get_world_size()
        dist.all_gather_object(all_ranks, self.first)
        return min((first for first in all_ranks if first), default=None)


def check_weights(engine: Any, step: int) -> None:
    """NotFiniteError on every rank where weights or optimizer states are not finite. Collective."""
    search = _FirstNonFinite()
    search.check_parameters(engine.module)
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for number, state in enumerate(base.state.values()):
        for name, value in state.items():
            search.check(f"the optimizer's {name} of partition {number}", value)
    first = search.over_ranks()
    if first:
        raise NotFiniteError(
            f"step {step} is not saved: {first} is not finite. Start again from an earlier "
            f"checkpoint; {FLAG} saves it anyway"
        )


def not_finite_error(
    step: int,
    loss: float,
    gradient_norm: float,
    module: nn.Module,
    recompute_step: Callable[[], Any],
) -> NotFiniteError:
    """The error for a step that is not finite, with the first tensor that is not. Collective.

    Args:
        recompute_step: runs the step again.
    """
    # DeepSpeed skips an update whose gradients are not finite: the weights are still those from
    # before the step, which can be run again with hooks.
    search = _FirstNonFinite()
    search.check_parameters(module)
    first = search.over_ranks()
    if first is None:
        search = _FirstNonFinite()
        with search.hooks_on(module):
            recompute_step()
        first = search.over_ranks()
    source = f"The first tensor that is not finite: {first}" if first else "All tensors are finite"
    return NotFiniteError(
        f"step {step}: loss {loss}, gradient norm {gradient_norm}. {source}. Nothing of this step "
        f"is saved: start again from an earlier checkpoint with a lower --lr or a longer warm-up, "
        f"or check the data; {FLAG} continues anyway"
    )
