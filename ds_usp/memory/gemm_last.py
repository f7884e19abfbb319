"""GEMM-last recomputation: what is cheap is computed again, in front of the product it is for.

Norms, activation functions and the product of a gated MLP cost next to nothing to compute, and
what they give and keep is half of what a layer keeps. Here their output is not kept by the linear
layer that consumes it, and what they save for their own backward is not kept either: when the
linear layer's backward asks for its input, the producer runs once more, from its own input, which
is kept anyway. No matrix product runs twice and nothing is sent, whatever class the linear layer
is of: it is seen by what it saves for backward, not by what it is.

``torch.utils.checkpoint`` over producer and consumer needs its early stop for that, which comes one
product too late where the consumer is an autograd function: such a one saves after it has computed.

Source: Kuaishou (Yuan et al., ATC 24), section 4.3, whose linear layers own their norm; here no
layer has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_usp.errors import RecomputeError
from ds_usp.memory.random_state import RandomState
from ds_usp.memory.saved_tensor_hooks import hold, saved_tensors, storage_of
from ds_usp.memory.views import View

Params = ParamSpec("Params")
Result = TypeVar("Result")
Producer = Callable[..., torch.Tensor]


def recompute_before(
    producer: Producer, consumer: Callable[[torch.Tensor], Result], *inputs: torch.Tensor
) -> Result:
    """``consumer(producer(*inputs))``, of which backward keeps the inputs and the result.

    Gradients are those of the plain call bit for bit: the graph is the same one.

    Args:
        producer: computes again what the consumer needs; deterministic, draws no random numbers.
            It gets its tensors as ``inputs``, or they are parameters.
        consumer: anything that saves the producer's output for backward: a linear layer.

    Raises:
        RecomputeError: the producer draws random numbers; later: it does something else when it
            runs again.
    """
    link = GemmLast()
    return link.consume(consumer)(link.produce(producer)(*inputs))


class GemmLast:
    """:func:`recompute_before` where producer and consumer are called in two places of a host, one
    link for each pair; :meth:`between` for two modules."""

    def __init__(self) -> None:
        self._again = False
        # Weakly, but so that no other storage gets its address.
        self._made: tuple[StorageWeakRef, _Recipe] | None = None

    @classmethod
    def between(cls, producer: torch.nn.Module, consumer: torch.nn.Module) -> None:
        """Let the first module run again when the second one's backward needs its output."""
        link = cls()
        producer.forward = link.produce(producer.forward, producer)
        consumer.forward = link.consume(consumer.forward)

    def produce(self, producer: Producer, again: Producer | None = None) -> Producer:
        """The producer, whose saved tensors are computed again.

        Args:
            again: what to call for that, if not the producer itself: the module that it is the
                ``forward`` of, whose hooks bring its weights (ZeRO-3).
        """

        def once_more(*inputs: torch.Tensor) -> torch.Tensor:
            self._again = True
            try:
                return (again or producer)(*inputs)
            finally:
                self._again = False

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            if self._again or not torch.is_grad_enabled():
                return producer(*inputs)
            self._made = None
            recipe = _Recipe(producer, once_more, inputs)
            made = recipe.first_run(inputs)
            self._made = StorageWeakRef(made.untyped_storage()), recipe
            return made

        return run

    def consume(self, consumer: Callable[Params, Result]) -> Callable[Params, Result]:
        """The consumer, which does not keep what was produced; other tensors it keeps as ever."""

        def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            made, self._made = self._made, None
            handed = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            if made is None or all(storage_of(x) != made[0].cdata for x in handed):
                return consumer(*args, **kwargs)
            with made[1].consumed(made[0].cdata):
                return consumer(*args, **kwargs)

        return run


class _Recipe:
    """How to make a producer's output, and what it saves, once more.

    The graph refers to this, and this to no graph: it goes when the last tensor it makes has been
    used.
    """

    def __init__(self, producer: Producer, again: Producer, inputs: Sequence[torch.Tensor]) -> None:
        self._producer, self._once_more = producer, again
        self._learn = [x.requires_grad for x in inputs]
        self._inputs = [hold(x) for x in inputs]
        self._autocast = _autocast(inputs[0].device.type)
        self._given: set[int] = set()
        self._places: list[View] = []
        self._made: list[torch.Tensor] = []
        self._output: torch.Tensor | None = None

    def first_run(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output; of what is saved the inputs alone stay."""
        before = RandomState.now(inputs[0].device)
        self._given = {storage_of(x) for x in inputs}
        with saved_tensors(self._number, self._saved):
            made = self._producer(*inputs)
        if not before.is_now():
            raise RecomputeError(
                f"{_name(self._producer)} draws random numbers, so it cannot be computed again: "
                "set its dropout to 0, or leave it out of GEMM-last recomputation"
            )
        if storage_of(made) in self._given:
            raise RecomputeError(
                f"{_name(self._producer)} returns its input: there is nothing to compute again"
            )
        self._given = set()
        self._place = View.of(made)
        return made

    def consumed(self, storage: int) -> AbstractContextManager[None]:
        """A context in which whoever saves the output saves this recipe."""

        def pack(tensor: torch.Tensor) -> View | None:
            return View.of(tensor) if storage_of(tensor) == storage else None

        return saved_tensors(pack, self._out)

    def _number(self, tensor: torch.Tensor) -> int | None:
        """First run: the number of a saved tensor that is not (part of) an input."""
        if storage_of(tensor) in self._given:
            return None
        self._places.append(View.of(tensor))
        return len(self._places) - 1

    def _saved(self, number: int) -> torch.Tensor:
        """Backward: a tensor that the producer saves."""
        self._again()
        return self._made[number]

    def _out(self, view: View) -> torch.Tensor:
        """Backward: the producer's output."""
        return view.on(self._again())

    def _again(self) -> torch.Tensor:
        """What the producer gives; it runs when it is asked first."""
        if self._output is None:
            inputs = [
                x().detach().requires_grad_(learns)
                for x, learns in zip(self._inputs, self._learn, strict=True)
            ]
            given = {storage_of(x) for x in inputs}

            def collect(tensor: torch.Tensor) -> None:
                if storage_of(tensor) not in given:
                    self._made.append(tensor.detach())

            with torch.enable_grad(), self._autocast(), saved_tensors(collect, _never):
                self._output = self._once_more(*inputs).detach()
            now = [View.of(x) for x in (*self._made, self._output)]
            if now != [*self._places, self._place]:
                raise RecomputeError(
                    f"{_name(self._producer)} does something else when it runs again: it saves "
                    f"and gives {now}, and did {[*self._places, self._place]}. It must do the "
                    "same both times"
                )
        return self._output


def _never(_: None) -> torch.Tensor:
    raise RecomputeError("a graph that only collects was walked backward")


def _autocast(device: str) -> Callable[[], torch.autocast]:
    """The automatic casts that are on now, for another time."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype, enabled, cached)


def _name(producer: object) -> str:
    owner = getattr(producer, "__self__", producer)
    return getattr(owner, "__name__", None) or type(owner).__name__
