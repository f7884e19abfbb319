"""``TransformerConfig.cp_comm_type`` as a list: one entry a layer, the first being number 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex


class ListByLayerNumber(list):
    """A list whose entries are taken by layer number, from 1."""

    def __getitem__(self, number: SupportsIndex | slice) -> Any:
        if isinstance(number, slice):
            return super().__getitem__(number)
        return super().__getitem__(number.__index__() - 1)


def index_from_one(
    original: Callable[..., None], layer: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Build a ``TransformerLayer`` that finds its own entry in the list."""
    kinds = config.cp_comm_type
    if isinstance(kinds, list) and not isinstance(kinds, ListByLayerNumber):
        config.cp_comm_type = ListByLayerNumber(kinds)
    original(layer, config, *args, **kwargs)
