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
from ds_usp.memory.saved_tensor_hooks import save_tensor, saved_tensors, storage_id
from ds_usp.memory.views import StorageView

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
        self._recomputing = False
        # Weakly, but so that no other storage gets its address.
        self._produced: tuple[StorageWeakRef, _Recompute] | None = None

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

        def run_again(*inputs: torch.Tensor) -> torch.Tensor:
            self._recomputing = True
            try:
                return (again or producer)(*inputs)
            finally:
                self._recomputing = False

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            if self._recomputing or not torch.is_grad_enabled():
                return producer(*inputs)
            self._produced = None
            recompute = _Recompute(producer, run_again, inputs)
            output = recompute.first_run(inputs)
            self._produced = StorageWeakRef(output.untyped_storage()), recompute
            return output

        return run

    def consume(self, consumer: Callable[Params, Result]) -> Callable[Params, Result]:
        """The consumer, which does not keep what was produced; other tensors it keeps as ever."""

        def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            produced, self._produced = self._produced, None
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            if produced is None or all(storage_id(x) != produced[0].cdata for x in tensors):
                return consumer(*args, **kwargs)
            with produced[1].consumed(produced[0].cdata):
                return consumer(*args, **kwargs)

        return run


class _Recompute:
    """How to make a producer's output, and what it saves, once more.

    The graph refers to this, and this to no graph: it goes when the last tensor it makes has been
    used.
    """

    def __init__(self, producer: Producer, again: Producer, inputs: Sequence[torch.Tensor]) -> None:
        self._producer, self._run_again = producer, again
        self._requires_grad = [x.requires_grad for x in inputs]
        self._inputs = [save_tensor(x) for x in inputs]
        self._autocast = _autocast(inputs[0].device.type)
        self._input_storages: set[int] = set()
        self._views: list[StorageView] = []
        self._recomputed: list[torch.Tensor] = []
        self._output: torch.Tensor | None = None

    def first_run(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output; of what is saved the inputs alone stay."""
        before = RandomState.capture(inputs[0].device)
        self._input_storages = {storage_id(x) for x in inputs}
        with saved_tensors(self._pack_index, self._unpack_saved):
            output = self._producer(*inputs)
        if not before.is_unchanged():
            raise RecomputeError(
                f"{_name(self._producer)} draws random numbers, so it cannot be computed again: "
                "set its dropout to 0, or leave it out of GEMM-last recomputation"
            )
        if storage_id(output) in self._input_storages:
            raise RecomputeError(
                f"{_name(self._producer)} returns its input: there is nothing to compute again"
            )
        self._input_storages = set()
        self._output_view = StorageView.from_tensor(output)
        return output

    def consumed(self, storage: int) -> AbstractContextManager[None]:
        """A context in which whoever saves the output saves this recipe."""

        def pack(tensor: torch.Tensor) -> StorageView | None:
            return StorageView.from_tensor(tensor) if storage_id(tensor) == storage else None

        return saved_tensors(pack, self._unpack_output)

    def _pack_index(self, tensor: torch.Tensor) -> int | None:
        """First run: the number of a saved tensor that is not (part of) an input."""
        if storage_id(tensor) in self._input_storages:
            return None
        self._views.append(StorageView.from_tensor(tensor))
        return len(self._views) - 1

    def _unpack_saved(self, number: int) -> torch.Tensor:
        """Backward: a tensor that the producer saves."""
        self._recompute_output()
        return self._recomputed[number]

    def _unpack_output(self, view: StorageView) -> torch.Tensor:
        """Backward: the producer's output."""
        return view.apply_to(self._recompute_output())

    def _recompute_output(self) -> torch.Tensor:
        """What the producer gives; it runs when it is asked first."""
        if self._output is None:
            inputs = [
                x().detach().requires_grad_(requires_grad)
                for x, requires_grad in zip(self._inputs, self._requires_grad, strict=True)
            ]
            input_storages = {storage_id(x) for x in inputs}

            def collect(tensor: torch.Tensor) -> None:
                if storage_id(tensor) not in input_storages:
                    self._recomputed.append(tensor.detach())

            with torch.enable_grad(), self._autocast(), saved_tensors(collect, _unreachable_unpack):
                self._output = self._run_again(*inputs).detach()
            views = [StorageView.from_tensor(x) for x in (*self._recomputed, self._output)]
            if views != [*self._views, self._output_view]:
                raise RecomputeError(
                    f"{_name(self._producer)} does something else when it runs again: it saves "
                    f"and gives {views}, and did {[*self._views, self._output_view]}. It must do "
                    "the same both times"
                )
        return self._output


def _unreachable_unpack(_: None) -> torch.Tensor:
    raise RecomputeError("a graph that only collects was walked backward")


def _autocast(device: str) -> Callable[[], torch.autocast]:
    """The automatic casts that are on now, for another time."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype, enabled, cached)


def _name(producer: object) -> str:
    owner = getattr(producer, "__self__", producer)
    return getattr(owner, "__name__", None) or type(owner).__name__
