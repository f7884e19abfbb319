"""The activation memory policy of a framework's transformer layers, by name, and groups of
checkpointed layers of which the first one alone keeps its input.

Of ``n`` layers in groups of ``k``, ``n / k`` inputs are saved, and ``k - 1`` more exist while one
group's backward runs; the forward pass of ``k - 1`` of ``k`` layers runs once more.

Integrations and ``megatron_patches`` run each layer of a forward pass by :meth:`LayerMemory.run`;
the rest runs from there, and in backward from autograd's hooks. Nothing here communicates, but a
layer that runs again repeats its own exchanges: all ranks need one policy.

Source: recursive checkpointing (Chen et al., 1604.06174), section 4.3, with one level of recursion.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_usp.errors import ConfigError, RecomputeError
from ds_usp.memory.offload import Offload
from ds_usp.memory.saved_attention import (
    RandomState,
    StorageView,
    current_autocast,
    keep_attention,
    save_tensor,
    saved_tensors,
    storage_id,
)

# What is recomputed in the backward pass, from nothing to everything.
RECOMPUTE = ("none", "gemm-last", "attention", "full")
# Of them, those whose layers are checkpoints, so that checkpoint_layers can be above 1.
GROUPED_RECOMPUTE = ("attention", "full")

Checkpoint = Callable[..., Any]  # of the function and its inputs


def reentrant_checkpoint(run: Callable[..., Any], *inputs: Any) -> Any:
    """torch's reentrant checkpoint: suits ZeRO-3, whose partitioned parameters change shape."""
    # What the function returns when it is recomputed is not kept in memory during its backward.
    return checkpoint(partial(run_for_gradients, run), *inputs, use_reentrant=True)


def run_for_gradients(run: Callable[..., Any], *inputs: Any) -> Any:
    """The function's results; in the recomputation of a reentrant checkpoint, where torch enables
    gradients, without their values."""
    # Backward starts from the results but does not read them. Single elements keep their values:
    # Megatron-DeepSpeed's checkpoint reads the loss of experts.
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
        checkpoint_layers: of so many consecutive layers only the first one's input is saved, and
            the forward pass of the others runs once more. Only for ``full`` and ``attention``,
            whose results are saved all the same. Layers take one tensor, the (first) result of the
            layer before.
        random_tracker: returns the framework's own random generators, as Megatron's; for
            ``checkpoint_layers`` above 1.

    Raises:
        ConfigError: an unknown policy; ``checkpoint_layers`` that is no whole number of 1 or more,
            or above 1 where the policy checkpoints no layer.
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
        if count > 1:
            if self.recompute not in GROUPED_RECOMPUTE:
                raise ConfigError(
                    f"checkpoint_layers={self.checkpoint_layers} with recompute="
                    f"{self.recompute!r}: there are no checkpoints of layers to group. Use "
                    f"{' or '.join(GROUPED_RECOMPUTE)}"
                )
            groups = LayerGroups(count, self.offload, self.random_tracker)
            object.__setattr__(self, "_groups", groups)

    def run(self, number: int, layer: Callable[..., Any], *inputs: Any) -> Any:
        """``layer(*inputs)`` under the policy.

        Args:
            number: the layer's index; one not above the last call's begins another micro batch.
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


Layer = Callable[[Tensor], Any]  # its result, or the first of its results, is the next one's input


class RandomTracker(Protocol):
    """A framework's own random generators, as Megatron's tracker has them."""

    def get_states(self) -> Any: ...

    def set_states(self, states: Any) -> None: ...


class LayerGroups:
    """Checkpoints of layers in groups of ``size``; the last group of a pass may have fewer.

    Args:
        size: layers of a group.
        offload: as in ``LayerMemory``; inputs that are computed again are offloaded by its ratio.
        tracker: returns the framework's own random generators; None: torch's are all.
    """

    def __init__(
        self, size: int, offload: Offload | None, tracker: Callable[[], RandomTracker] | None
    ) -> None:
        self._size, self._offload, self._tracker = size, offload, tracker
        # Saved inputs alone keep a group alive, so it is freed with the graph.
        self._open: weakref.ref[_Group] | None = None

    def run(self, number: int, checkpoint: Callable[..., Any], layer: Layer, hidden: Tensor) -> Any:
        """``checkpoint(layer, hidden)``, as the next layer of the open group or in a new group.

        Args:
            number: as for :meth:`LayerMemory.run`.

        Raises:
            ConfigError: the input is not the result of the group's previous layer; or the
                checkpoint keeps the input otherwise than through autograd.
        """
        # Note [a group without a function around it]
        # Nested checkpoints (one around the group, one around each layer) save as much, but need
        # the group's layers in one function, and frameworks call layers one by one, pipelines in
        # several stages. Here each layer is a checkpoint of its own, and its saved input is
        # replaced by a handle, when autograd packs it. Backward unpacks the handle of the group's
        # last layer first: that computes the inputs of all its layers from the first one's, in one
        # sweep.
        group = self._open() if self._open is not None else None
        self._open = None  # unless the layer ends without an error
        if group is None or not group.continues_with(number, self._size):
            tracker = self._tracker() if self._tracker else None
            group = _Group(hidden, self._offload, tracker)
        group.check_input(number, hidden)
        handle = group.add(number, layer, hidden)
        with saved_tensors(handle.pack, _Handle.unpack):
            result = checkpoint(layer, hidden)
        output = _first(result)
        if output.requires_grad and not handle.is_saved:
            raise ConfigError(
                "checkpoint_layers needs a checkpoint that saves its input by save_for_backward, "
                "as torch's and Megatron's do: this one keeps it otherwise. Use "
                "checkpoint_layers=1, or switch off DeepSpeed's activation checkpointing"
            )
        group.output = _Result(output)
        self._open = weakref.ref(group)
        return result


class _Group:
    """The layers of one group in one forward pass."""

    # The graph refers to this through the layers' saved inputs, and this only to the first one.

    def __init__(
        self, hidden: Tensor, offload: Offload | None, tracker: RandomTracker | None
    ) -> None:
        self._first = save_tensor(hidden)  # offloaded, if the first layer is
        self._offload, self._tracker = offload, tracker
        self._number: int | None = None
        self._layers: list[tuple[Layer, _ForwardState]] = []
        self._inputs: dict[int, Callable[[], Tensor]] = {}  # computed again, for backward
        self.output: _Result | None = None  # the last layer's

    def continues_with(self, number: int, size: int) -> bool:
        return self._number is not None and number > self._number and len(self._layers) < size

    def check_input(self, number: int, hidden: Tensor) -> None:
        if not self._layers:
            return
        if self.output is None or not self.output.is_unchanged(hidden):
            raise ConfigError(
                f"checkpoint_layers: the input of layer {number} is not the result of layer "
                f"{self._number}, from which it would be computed again. Pass results from layer "
                "to layer unchanged, or use checkpoint_layers=1"
            )

    def add(self, number: int, layer: Layer, hidden: Tensor) -> _Handle:
        """Make ``layer`` the group's last one; returns what is saved instead of its input."""
        self._layers.append((layer, _ForwardState(hidden.device, self._tracker)))
        self._number = number
        return _Handle(self, len(self._layers) - 1, hidden)

    def input(self, index: int) -> Tensor:
        """The input of layer ``index`` of the group, for backward, and no longer kept here; the
        last layer's comes first, and computes those of all layers before it too."""
        if index == 0:
            return self._first()
        if index not in self._inputs:
            self._compute_inputs(index)
        return self._inputs.pop(index)()

    def _compute_inputs(self, last: int) -> None:
        """Compute the inputs of the group's layers 1 to ``last`` again, from that of layer 0."""
        # Their copies to the host overlap as those of layers do: the last two stay on the device.
        # Each layer with the random states of its forward pass, or dropout would differ; then those
        # of now, or what runs next would.
        current = _ForwardState(self._first().device, self._tracker)
        offload = self._offload.nested() if self._offload else None
        hidden = self._first()
        try:
            for index, (layer, state) in enumerate(self._layers[:last]):
                with _offload_unit(offload, index), torch.no_grad(), state.restored():
                    if index:
                        self._inputs[index] = save_tensor(hidden)
                    hidden = _first(layer(hidden)).detach()
        finally:
            current.restore_random()
        self._inputs[last] = lambda: hidden


class _Result:
    """A tensor, recognized without being kept alive: by its storage, since ZeRO-3 passes results on
    through functions of its own, which return a view of all."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._form = StorageView.from_tensor(tensor), tensor.dtype, tensor._version

    def is_unchanged(self, tensor: Tensor) -> bool:
        form = StorageView.from_tensor(tensor), tensor.dtype, tensor._version
        return self._storage() is tensor.untyped_storage() and self._form == form


class _Handle:
    """Stands for a layer's input, and is saved instead of it: :func:`saved_tensors` calls ``pack``
    in forward, for all that the layer's checkpoint saves, and ``unpack`` in backward."""

    def __init__(self, group: _Group, index: int, hidden: Tensor) -> None:
        self._group, self._index, self.is_saved = group, index, False
        self._storage = storage_id(hidden)
        self._view, self._dtype = StorageView.from_tensor(hidden), hidden.dtype

    def pack(self, tensor: Tensor) -> _Handle | None:
        view, form = StorageView.from_tensor(tensor), (self._storage, self._dtype, self._view)
        if (storage_id(tensor), tensor.dtype, view) != form:
            return None
        self.is_saved = True
        return self

    def unpack(self) -> Tensor:
        hidden = self._group.input(self._index)
        if hidden.shape != self._view.size or hidden.dtype != self._dtype:
            raise RecomputeError(
                f"the input of a layer is {list(hidden.shape)} {hidden.dtype} when computed again, "
                f"and was {list(self._view.size)} {self._dtype}. A checkpointed layer must do the "
                "same each time"
            )
        return hidden


class _ForwardState:
    """Random states and autocast, now; what a layer's result depends on besides its input."""

    def __init__(self, device: torch.device, tracker: RandomTracker | None) -> None:
        self._random = RandomState.capture(device)
        self._tracker = tracker
        self._tracker_states = tracker.get_states() if tracker is not None else None
        self._autocast = current_autocast(device.type)

    def restore_random(self) -> None:
        self._random.restore()
        if self._tracker is not None:
            self._tracker.set_states(self._tracker_states)

    @contextmanager
    def restored(self) -> Iterator[None]:
        self.restore_random()
        with self._autocast():
            yield


@contextmanager
def _offload_unit(offload: Offload | None, number: int) -> Iterator[None]:
    """``offload.layer(number)``, also where gradients are disabled."""
    if offload is None:
        yield
        return
    with torch.enable_grad(), offload.layer(number):
        yield


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result
