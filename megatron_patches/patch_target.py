"""Where in a host something stands: an attribute of a module or of a class in it."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

ABSENT: Final = object()


@dataclass(frozen=True, eq=False)
class PatchTarget:
    """An attribute of a module or of a class in it."""

    module: ModuleType
    owner: Any
    name: str

    @classmethod
    def find(cls, target: str) -> PatchTarget:
        """Import the module and walk to the attribute's owner."""
        module_name, _, path = target.partition(":")
        module = importlib.import_module(module_name)
        *outer, name = path.split(".")
        return cls(module, functools.reduce(getattr, outer, module), name)

    def read(self) -> Any:
        """What is there, descriptors of classes as they are; a mark for nothing."""
        owned = vars(self.owner).get(self.name, ABSENT)
        return getattr(self.owner, self.name, ABSENT) if owned is ABSENT else owned

    def read_existing(self) -> Any:
        """What is there.

        Raises:
            AttributeError: nothing.
        """
        value = self.read()
        if value is ABSENT:
            raise AttributeError("does not exist")
        return value

    def owned(self) -> Any:
        """What the owner holds itself, not by inheritance."""
        return vars(self.owner).get(self.name, ABSENT)

    def write(self, value: Any) -> None:
        """Put ``value`` there, or nothing."""
        if value is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)
