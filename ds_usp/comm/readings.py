"""Reads the tensors that describe a batch once in each forward pass of a model.

Every layer is given the positions, cumulative lengths or masks of its batch. To read them waits
for the GPU, and to join what the ranks read is a collective: the first layer of a pass does it.
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

# Code between a module and this, which has no modules.
_BETWEEN = "ds_usp.comm.", "ds_usp.compat.", "torch._dynamo."

# Note [a forward pass begins]
#
# Whether a layer reads must be the same on all ranks, as reading is collective. Values do not tell:
# a rank's part of a batch may be that of the batch before, while another rank's is not. Memory does
# not tell either: a loader fills one buffer again and again, and a tensor's version does not show
# what numpy, another process or ``x.data`` writes. The program tells, which is one on all ranks: a
# pass of a model begins at a layer that has been called in the pass before, or that stands before
# the one that was called last. Within a pass a layer that is given another tensor reads it.
#
# The layer is the innermost module on Python's stack. A call outside of modules reads each time.
#
# A layer that is recomputed in backward begins no pass and posts nothing: it finds what was read of
# the memory that its checkpoint keeps, which is not another tensor's as long as it does.


class Readings:
    """Keeps what was read of tensors in the last forward passes of the models over a mesh."""

    def __init__(self) -> None:
        self._records: deque[_Record] = deque(maxlen=_MOST_RECORDS)
        self._models: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Readings], tuple[()]]:
        """A copy has read nothing."""
        return Readings, ()

    def of(self, tensors: Sequence[Tensor], key: Hashable, read: Callable[[], Reading]) -> Reading:
        """Return what ``read()`` has returned of these tensors in this pass.

        Args:
            key: what else the reading depends on, and what kind it is.
        """
        if any(x.layout is not torch.strided for x in tensors):  # without one storage
            return read()
        in_backward = torch._C._current_graph_task_id() != -1
        layer = None if in_backward else next(calling_modules(), None)
        model = None if layer is None else self._model_of(layer)
        for record in reversed(self._records):
            if record.key != key or not (in_backward or (model and record.model() is model)):
                continue
            if record.is_of(tensors) and (layer is None or record.goes_on_at(layer)):
                return record.reading
            if not in_backward:
                break
        record = _Record(key, tensors, model, read())
        if layer is not None:
            record.goes_on_at(layer)
        self._records.append(record)
        return record.reading

    def _model_of(self, layer: nn.Module) -> nn.Module:
        """The module that runs the layers: two models may be given one tensor in turn."""
        known = self._models.get(layer)
        model = None if known is None else known()
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
    """Modules and the variables of their code that calls, innermost first: ``self`` of methods, and
    ``module``, as functions name it that compute for one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # To look at the variables of a frame copies all of them.
        if not frame.f_globals.get("__name__", "").startswith(_BETWEEN):
            variables = frame.f_locals
            for name in ("module", "self"):
                if isinstance(found := variables.get(name), nn.Module):
                    yield found, variables
                    break
        frame = frame.f_back


class Place(NamedTuple):
    """The memory of a tensor, which this does not keep alive."""

    storage: weakref.ref[Any]
    view: tuple[Any, ...]

    @classmethod
    def of(cls, x: Tensor) -> Place:
        return cls(weakref.ref(x.untyped_storage()), _view(x))

    def is_of(self, x: Tensor) -> bool:
        return self.storage() is x.untyped_storage() and self.view == _view(x)


def _view(x: Tensor) -> tuple[Any, ...]:
    return x.storage_offset(), x.shape, x.stride(), x.dtype


class _Record:
    """One reading, and the layers of its pass so far."""

    def __init__(
        self, key: Hashable, tensors: Sequence[Tensor], model: nn.Module | None, reading: Any
    ) -> None:
        self.key, self.reading = key, reading
        self._places = [Place.of(x) for x in tensors]
        self.model = weakref.ref(model) if model is not None else lambda: None
        self._layers: set[int] = set()  # ids: one that is another module's now reads once more
        self._last = -1  # index of the layer that was called last, where layers have one

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        places = self._places
        return len(places) == len(tensors) and all(map(Place.is_of, places, tensors))

    def goes_on_at(self, layer: nn.Module) -> bool:
        """Whether a layer is the next one of this pass, to which it then belongs."""
        own = vars(layer)
        index = own.get("layer_idx", own.get("layer_number"))
        index = index if isinstance(index, int) else self._last
        if id(layer) in self._layers or index < self._last:
            return False
        self._layers.add(id(layer))
        self._last = index
        return True
