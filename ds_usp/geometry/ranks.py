"""The grid of ranks: from axis sizes to the list of ranks of every process group. Each rank asks
when meshes and groups are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ds_usp.errors import ConfigError

# The axis with the most traffic belongs on the fastest links (USP paper, section 5).
DEFAULT_ORDER = ("tp", "ulysses", "ring", "dp", "pp")


@dataclass(frozen=True, init=False)
class RankGrid:
    """A world of ranks laid out along named axes, innermost (fastest varying) first.

    Args:
        sizes: ranks along each axis; an axis that is left out has size 1.
        order: every axis, innermost first.

    Attributes:
        shape: ranks along each axis of ``order``.

    Raises:
        ConfigError: a size below 1, or an axis that ``order`` does not name exactly once.
    """

    order: tuple[str, ...]
    shape: tuple[int, ...]

    def __init__(self, sizes: Mapping[str, int], order: Sequence[str] = DEFAULT_ORDER) -> None:
        unknown = sorted(set(sizes) - set(order))
        if unknown or len(set(order)) != len(order):
            raise ConfigError(
                f"the rank order {'-'.join(order)} must name each axis once; it was given sizes "
                f"for {', '.join(sizes)}. Add the missing axis to the order or drop its size."
            )
        wrong = {
            axis: size
            for axis, size in sizes.items()
            if isinstance(size, bool) or not isinstance(size, int) or size < 1
        }
        if wrong:
            raise ConfigError(f"every axis needs a whole size of 1 or more, got {wrong}")
        object.__setattr__(self, "order", tuple(order))
        object.__setattr__(self, "shape", tuple(sizes.get(axis, 1) for axis in order))

    @property
    def world_size(self) -> int:
        return math.prod(self.shape)

    def size(self, *axes: str) -> int:
        """Ranks in one group over ``axes``."""
        return math.prod(self.shape[self._index(axis)] for axis in axes)

    def rank(self, **coords: int) -> int:
        """Global rank at ``coords``; an axis that is left out is at 0."""
        for axis in coords:
            self._index(axis)
        rank, step = 0, 1
        for axis, size in zip(self.order, self.shape, strict=True):
            coord = coords.get(axis, 0)
            if not 0 <= coord < size:
                raise ConfigError(f"{axis}={coord} is outside its axis of {size} ranks")
            rank, step = rank + coord * step, step * size
        return rank

    def coords(self, rank: int) -> dict[str, int]:
        """Position of a global rank along every axis."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside the grid of {self.world_size} ranks")
        coords = {}
        for axis, size in zip(self.order, self.shape, strict=True):
            rank, coords[axis] = divmod(rank, size)
        return coords

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups that vary along ``axes`` and share the other coordinates: tuples of ascending
        global ranks, ascending by first rank."""
        for axis in axes:
            self._index(axis)
        inside = [a for a in self.order if a in axes]
        outside = [a for a in self.order if a not in axes]
        firsts = [self.rank(**fixed) for fixed in self._iter_coords(outside)]
        steps = [self.rank(**moving) for moving in self._iter_coords(inside)]
        return tuple(tuple(first + step for step in steps) for first in firsts)

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The one group over ``axes`` that holds ``rank``."""
        self.coords(rank)
        return next(group for group in self.groups(*axes) if rank in group)

    def _iter_coords(self, axes: Sequence[str]) -> list[dict[str, int]]:
        ranges = [range(self.shape[self._index(axis)]) for axis in reversed(axes)]
        return [dict(zip(reversed(axes), point, strict=True)) for point in product(*ranges)]

    def _index(self, axis: str) -> int:
        if axis not in self.order:
            raise ConfigError(f"no axis {axis!r} in the rank order {'-'.join(self.order)}")
        return self.order.index(axis)
