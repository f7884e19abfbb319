"""GEMM-last recomputation: backward recomputes the cheap producer of a linear layer's input.

Norms, activation functions and the product of a gated MLP cost next to nothing, and what they keep
for backward is half of a layer's. Here the linear layer (the consumer) does not save its input, nor
does the producer save its own tensors: when the linear layer's backward needs its input, the
producer runs once more, from its own input, which is saved anyway. No matrix product (GEMM) runs
twice. The linear layer, of any class, is recognized by the tensor that it saves for backward.

``megatron_patches`` links norms and linear layers once, when it builds a layer, and calls
:func:`recompute_before` in each forward pass of an MLP, on each rank. Nothing here communicates,
except the hooks by which a producer's module gathers its weights (ZeRO-3), in both runs.

Source: Kuaishou (Yuan et al., ATC 24), section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_usp.errors import RecomputeError
from ds_usp.memory.saved_attention import (
    RandomState,
    StorageView,
    current_autocast,
    save_tensor,
    saved_tensors,
    storage_id,
)

Params = ParamSpec("Params")
Result = TypeVar("Result")
Producer = Callable[..., torch.Tensor]


def recompute_before(
    producer: Producer, consumer: Callable[[torch.Tensor], Result], *inputs: torch.Tensor
) -> Result:
    """``consumer(producer(*inputs))``, which saves the inputs and not the producer's output.
    Gradients are those of the plain call bit for bit: the graph is the same one.

    Args:
        producer: is recomputed in backward; deterministic, draws no random numbers. Its tensors
            are its ``inputs``, or parameters.
        consumer: anything that saves the producer's output for backward: a linear layer.

    Raises:
        RecomputeError: the producer draws random numbers; in backward: it computes something else
            when it runs again.
    """
    link = GemmLast()
    return link.consume(consumer)(link.produce(producer)(*inputs))


class GemmLast:
    """:func:`recompute_before` where a framework calls producer and consumer in two places: one
    link for each pair; :meth:`between` for two modules."""

    def __init__(self) -> None:
        self._recomputing = False
        self._produced: _Recompute | None = None  # of an output that the consumer has not got yet

    @classmethod
    def between(cls, producer: torch.nn.Module, consumer: torch.nn.Module) -> None:
        """Recompute the first module when the backward of the second one needs its output."""
        link = cls()
        producer.forward = link.produce(producer.forward, producer)
        consumer.forward = link.consume(consumer.forward)

    def produce(self, producer: Producer, again: Producer | None = None) -> Producer:
        """The producer, wrapped: its saved tensors are recomputed.

        Args:
            again: what to call for that, if not the producer itself: the module that it is the
                ``forward`` of, whose hooks gather its weights (ZeRO-3).
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
            self._produced = recompute
            return output

        return run

    def consume(self, consumer: Callable[Params, Result]) -> Callable[Params, Result]:
        """The consumer, wrapped: where its next call takes the producer's output, known by its
        storage, that is not saved but recomputed in backward."""

        def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            recompute, self._produced = self._produced, None
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            if recompute is None or not any(map(recompute.is_output, tensors)):
                return consumer(*args, **kwargs)
            with saved_tensors(recompute.pack_output, recompute.unpack_output):
                return consumer(*args, **kwargs)

        return run


class _Recompute:
    """Recomputes a producer's output and saved tensors of one forward call by ``rerun``, in
    backward, when autograd asks for the first of them."""

    # The graph refers to this, and this to no graph: freed with the last tensor that it recomputes.

    def __init__(self, producer: Producer, rerun: Producer, inputs: Sequence[torch.Tensor]) -> None:
        self._producer, self._run_again = producer, rerun
        self._requires_grad = [x.requires_grad for x in inputs]
        self._inputs = [save_tensor(x) for x in inputs]
        self._autocast = current_autocast(inputs[0].device.type)
        self._input_storages = {storage_id(x) for x in inputs}
        self._views: list[StorageView] = []
        self._recomputed: list[torch.Tensor] = []
        self._output: torch.Tensor | None = None

    def first_run(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the output; of the tensors that the producer saves, its inputs alone are kept."""
        before = RandomState.capture(inputs[0].device)
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
        self._input_storages = set()  # numbers that later storages may have again
        self._output_view = StorageView.from_tensor(output)
        # Weak, but no other storage gets its address.
        self._output_storage = StorageWeakRef(output.untyped_storage())
        return output

    def is_output(self, tensor: torch.Tensor) -> bool:
        return storage_id(tensor) == self._output_storage.cdata

    def pack_output(self, tensor: torch.Tensor) -> StorageView | None:
        return StorageView.from_tensor(tensor) if self.is_output(tensor) else None

    def unpack_output(self, view: StorageView) -> torch.Tensor:
        return view.apply_to(self._recompute())

    def _pack_index(self, tensor: torch.Tensor) -> int | None:
        if storage_id(tensor) in self._input_storages:
            return None
        self._views.append(StorageView.from_tensor(tensor))
        return len(self._views) - 1

    def _unpack_saved(self, index: int) -> torch.Tensor:
        self._recompute()
        return self._recomputed[index]

    def _recompute(self) -> torch.Tensor:
        """The producer's output, and in ``_recomputed`` its saved tensors: the first call computes
        both; RecomputeError if they have other views than in the first run."""
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
                    f"{_name(self._producer)} computes something else when it runs again: it saves "
                    f"and returns {views}, and first {[*self._views, self._output_view]}. It must "
                    "do the same both times"
                )
        return self._output


def _unreachable_unpack(_: None) -> torch.Tensor:
    raise RecomputeError("backward of a graph that only collects its saved tensors")


def _name(producer: object) -> str:
    owner = getattr(producer, "__self__", producer)
    return getattr(owner, "__name__", None) or type(owner).__name__
