"""Changes of other libraries' objects that the end of a ``with`` block undoes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class UndoneAtExit(ABC):
    """A context manager that is in effect from its construction on."""

    @abstractmethod
    def _undo(self) -> None:
        """Leave everything as it was before."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()
