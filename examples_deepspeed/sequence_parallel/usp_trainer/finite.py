"""Numbers that are not finite: found where they arise, and never saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_usp import USPError

FLAG = "--no-check-for-nan-in-loss-and-grad"


class NotFiniteError(USPError):
    """A loss, a gradient or a weight is NaN or infinite."""


@dataclass(frozen=True, order=True)
class Found:
    """A tensor that is not finite: earlier ones come first in the order.

    Args:
        place: its position in the order of computation.
        rank: the rank that holds it.
        name: what it is.
        count, total: how many of its values are not finite.
    """

    place: int
    rank: int
    name: str
    count: int
    total: int

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank} ({self.count} of {self.total} values)"


class _Search:
    """Notes the first tensor on this rank that is not finite."""

    def __init__(self) -> None:
        self.place = 0
        self.found: Found | None = None

    def look(self, name: str, value: Any) -> None:
        self.place += 1
        for tensor in _tensors(value):
            if self.found is None and tensor.is_floating_point():
                count = int((~torch.isfinite(tensor)).sum())
                if count:
                    self.found = Found(self.place, dist.get_rank(), name, count, tensor.numel())


def check_weights(engine: Any, step: int) -> None:
    """Refuse to save weights or optimizer states that are not finite. Collective.

    Raises:
        NotFiniteError: on every rank, naming the first such tensor.
    """
    search = _Search()
    _look_at_parameters(search, engine.module)
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for number, state in enumerate(base.state.values()):
        for name, value in state.items():
            search.look(f"the optimizer's {name} of partition {number}", value)
    found = _first_of_all(search)
    if found:
        raise NotFiniteError(
            f"step {step} is not saved: {found} is not finite. Start again from an earlier "
            f"checkpoint; {FLAG} saves it nevertheless"
        )


def not_finite_error(
    step: int, loss: float, gradient_norm: float, module: nn.Module, again: Callable[[], Any]
) -> NotFiniteError:
    """The error for a step that is not finite, with the tensor from which that came. Collective.

    Args:
        again: computes the step once more. DeepSpeed leaves out an update whose gradients are not
            finite, so the weights are still those that it began with.
    """
    search = _Search()
    _look_at_parameters(search, module)
    found = _first_of_all(search)
    if found is None:
        search = _Search()
        with _watched(search, module):
            again()
        found = _first_of_all(search)
    source = f"The first tensor that is not finite: {found}" if found else "All tensors are finite"
    return NotFiniteError(
        f"step {step}: loss {loss}, gradient norm {gradient_norm}. {source}. Nothing of this step "
        f"is saved: start again from an earlier checkpoint with a lower --lr or a longer warm-up, "
        f"or look into the data; {FLAG} goes on nevertheless"
    )


def _look_at_parameters(search: _Search, module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        search.look(f"parameter {name}", getattr(parameter, "ds_tensor", parameter.detach()))


@contextlib.contextmanager
def _watched(search: _Search, module: nn.Module) -> Iterator[None]:
    """Every output and every gradient of a parameter that is computed meanwhile is looked at."""
    handles = []
    for name, part in module.named_modules():
        if not list(part.children()):
            title = f"the output of {name}"
            handles.append(
                part.register_forward_hook(lambda _, __, output, t=title: search.look(t, output))
            )
    for name, parameter in module.named_parameters():
        title = f"the gradient of {name}"
        handles.append(parameter.register_hook(lambda gradient, t=title: search.look(t, gradient)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_of_all(search: _Search) -> Found | None:
    everyone: list[Found | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, search.found)
    return min((found for found in everyone if found), default=None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
