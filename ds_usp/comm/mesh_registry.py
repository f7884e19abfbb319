"""A weak registry of objects by name: ops of torch take tensors and plain values alone."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Generic, TypeVar

from ds_usp.errors import MeshError

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """Unique names of live objects. It keeps none alive: a name is free again when its object is
    gone."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()

    def register(self, obj: T, prefix: str) -> str:
        """A name for an object, which begins with ``prefix``."""
        names = (f"{prefix} #{number}" for number in count())
        name = next(name for name in names if name not in self._objects)
        self._objects[name] = obj
        return name

    def lookup(self, name: str) -> T:
        """The registered object of a name.

        Raises:
            MeshError: there is none any more.
        """
        obj = self._objects.get(name)
        if obj is None:
            raise MeshError(
                f"compiled code asks for the mesh {name!r}, which is gone: keep the mesh as long "
                "as what was compiled with it"
            )
        return obj
