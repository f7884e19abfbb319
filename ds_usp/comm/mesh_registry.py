"""Objects that are found by a word, as an op of torch needs them, which takes tensors and plain
values alone."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Generic, TypeVar

from ds_usp.errors import MeshError

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """Words for objects. It keeps none of them alive: a word is free again when its object is gone.

    Two objects that live at the same time never have the same word.
    """

    def __init__(self) -> None:
        self._found: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()

    def register(self, thing: T, text: str) -> str:
        """A word for an object, which begins with a text."""
        name = next(each for n in count() if (each := f"{text} #{n}") not in self._found)
        self._found[name] = thing
        return name

    def lookup(self, name: str) -> T:
        """The object.

        Raises:
            MeshError: there is none any more.
        """
        found = self._found.get(name)
        if found is None:
            raise MeshError(
                f"compiled code asks for the mesh {name!r}, which is gone: keep the mesh as long "
                "as what was compiled with it"
            )
        return found
