"""Reads the tensors that describe a batch once in each forward pass of a model.

Every layer is given the positions, cumulative lengths or masks of its batch. To read them waits
for the GPU, and to join what the ranks read is a collective: the first layer of a pass does it. The
attention functions of ``ds_usp.compat`` and ``attention/local_attention.py`` ask in each layer.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

Reading = TypeVar("Reading")

# Passes of a pipeline that are in flight: of more than these a recomputed layer reads anew.
_MOST_RECORDS = 32

# Code that runs between a layer and this file; no module's own code is in it.
_BETWEEN = "ds_usp.comm.", "ds_usp.compat.", "torch._dynamo."

# Note [a forward pass begins]
#
# Whether a layer reads must be the same on all ranks, as reading is collective. Values do not show
# it: a rank's part of a batch may be that of the batch before, while another rank's is not. Nor
# does memory: a loader fills one buffer again and again, and a tensor's version does not show
# what numpy, another process or ``x.data`` writes. The program does, which is one on all ranks: a
# pass of a model begins at a layer that has been called in the pass before, or whose index is not
# above that of the layer called last. Within a pass a layer that is given another tensor reads it.
#
# A program may also fill a buffer between two layers of what looks like one pass: two models of a
# layer each in one module, a model that is driven in halves. So a layer goes on only where the
# version is the one that was read, which is one on all ranks too, and on CPUs the content, which
# need not be: where it has changed on some ranks alone, they post a gather that the others do not,
# and all raise a MeshError. On GPUs to compare content would wait in each layer.
#
# The layer is the innermost module on Python's stack. A call outside of modules reads each time.
#
# A layer that is recomputed in backward begins no pass and posts nothing: it finds what was read of
# the memory that its checkpoint keeps, which is not another tensor's as long as it does. Of several
# readings of one buffer it takes the last one that this layer was given.


class Readings:
    """Keeps what was read of tensors in the last forward passes of the models over a mesh."""

    def __init__(self) -> None:
        self._records: deque[_Record] = deque(maxlen=_MOST_RECORDS)
        self._models: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Readings], tuple[()]]:
        """A copy has read nothing."""
        return Readings, ()

    def of(self, tensors: Sequence[Tensor], key: Hashable, read: Callable[[], Reading]) -> Reading:
        """Return what ``read()`` has returned of these tensors in this pass, or call it: on all
        ranks at the same layers, so it may be collective.

        Args:
            key: what else the reading depends on, and what kind it is.
        """
        if any(x.layout is not torch.strided for x in tensors):  # without one storage
            return read()
        in_backward = torch._C._current_graph_task_id() != -1
        layer = next(calling_modules(), None)
        if in_backward:
            records = [x for x in reversed(self._records) if x.key == key and x.is_of(tensors)]
            if records:
                return next((x for x in records if x.has_read_for(layer)), records[0]).reading
            layer = None
        model = before = None
        if layer is not None:
            model = self._model_of(layer)
            matching = (x for x in reversed(self._records) if x.key == key and x.model() is model)
            before = next(matching, None)
            if before is not None and before.goes_on(layer, tensors):
                return before.reading
        record = _Record(key, tensors, model)  # what is written while it is read shows at a layer
        record.reading = read()
        if before is not None:
            before.contents.clear()  # nothing is compared with them any more
        if layer is not None:
            record.take_in(layer, _index_of(layer))
        self._records.append(record)
        return record.reading

    def _model_of(self, layer: nn.Module) -> nn.Module:
        """The module that runs the layers: the innermost that has several of this class, else the
        outermost. Two models may be given one tensor in turn."""
        model_reference = self._models.get(layer)
        model = None if model_reference is None else model_reference()
        if model is None:
            outer = list(calling_modules())
            model = next((x for x in outer[1:] if _has_several(x, type(layer))), outer[-1])
            self._models[layer] = weakref.ref(model)
        return model


def _has_several(model: nn.Module, kind: type) -> bool:
    return sum(type(module) is kind for module in model.modules()) > 1


def calling_modules() -> Iterator[nn.Module]:
    """The modules whose code calls, innermost first."""
    return (module for module, _ in calling_code())


def calling_code() -> Iterator[tuple[nn.Module, Mapping[str, Any]]]:
    """The modules on Python's stack, innermost first, each with the local variables of its frame. A
    frame's module is its ``module`` (in functions that compute for one), else its ``self``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # To look at the variables of a frame copies all of them.
        if not frame.f_globals.get("__name__", "").startswith(_BETWEEN):
            variables = frame.f_locals
            for name in ("module", "self"):
                if isinstance(module := variables.get(name), nn.Module):
                    yield module, variables
                    break
        frame = frame.f_back


class TensorMemory(NamedTuple):
    """The memory of a tensor, which this does not keep alive."""

    storage: weakref.ref[Any]
    view: tuple[Any, ...]

    @classmethod
    def of(cls, x: Tensor) -> TensorMemory:
        return cls(weakref.ref(x.untyped_storage()), _view(x))

    def is_of(self, x: Tensor) -> bool:
        return self.storage() is x.untyped_storage() and self.view == _view(x)


def _view(x: Tensor) -> tuple[Any, ...]:
    return x.storage_offset(), x.shape, x.stride(), x.dtype


def version_of(x: Tensor) -> int:
    """Return how often torch has written into a tensor, where it counts that."""
    return 0 if x.is_inference() else x._version


class _Record:
    """One reading, and the layers of its pass so far.

    Attributes:
        contents: copies of those tensors that are on the CPU, by their index.
    """

    reading: Any

    def __init__(self, key: Hashable, tensors: Sequence[Tensor], model: nn.Module | None) -> None:
        self.key = key
        self._places = [TensorMemory.of(x) for x in tensors]
        self._versions = [version_of(x) for x in tensors]
        self.contents = {i: x.detach().clone() for i, x in enumerate(tensors) if x.is_cpu}
        self.model = weakref.ref(model) if model is not None else lambda: None
        self._layers: set[int] = set()  # ids: one that is another module's now reads once more
        self._last = -1  # index of the layer that was called last, where layers have one

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        places = self._places
        return len(places) == len(tensors) and all(map(TensorMemory.is_of, places, tensors))

    def goes_on(self, layer: nn.Module, tensors: Sequence[Tensor]) -> bool:
        """Whether a layer is the next one of this pass, to which it then belongs."""
        index = _index_of(layer)
        if id(layer) in self._layers or (index is not None and index <= self._last):
            return False
        if not self.is_unchanged(tensors):
            return False
        self.take_in(layer, index)
        return True

    def is_unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that were read, and hold what they held then, as far as the
        CPU knows."""
        if not self.is_of(tensors) or self._versions != [version_of(x) for x in tensors]:
            return False
        return all(torch.equal(tensors[i], content) for i, content in self.contents.items())

    def has_read_for(self, layer: nn.Module | None) -> bool:
        return id(layer) in self._layers

    def take_in(self, layer: nn.Module, index: int | None) -> None:
        self._layers.add(id(layer))
        if index is not None:
            self._last = index


def _index_of(layer: nn.Module) -> int | None:
    attributes = vars(layer)
    index = attributes.get("layer_idx", attributes.get("layer_number"))
    return index if isinstance(index, int) else None
