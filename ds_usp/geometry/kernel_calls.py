"""Kernel calls made of tiles: many documents in one variable-length call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ds_usp.geometry.segments import Span
from ds_usp.geometry.tiles import Bounds, Tile

# Rows or columns that a call may leave out between two tiles, as a part of the shard's: a call's
# results cover all between its first row and its last one.
_MAX_GAP_FRACTION = 8


@dataclass(frozen=True)
class KernelCall:
    """The tiles of one kernel call. Its results cover all rows and columns between the outermost.

    Args:
        tiles: for each sample of a batch, or once for all, tiles with ascending rows and columns
            that no two of them share.
        window: the window that is right for each of them, aligned to its bottom right corner.

    Attributes:
        q_start, q_stop, k_start, k_stop: the rows and columns of the results.
        q_span, k_span: the same as (start, stop).
        tile: the only tile, if it is the same for all samples; its results are the tile's.
        is_causal: the plain causal mask in every tile, aligned to its bottom right corner.
    """

    tiles: tuple[tuple[Tile, ...], ...]
    window: Bounds
    q_start: int = field(init=False)
    q_stop: int = field(init=False)
    k_start: int = field(init=False)
    k_stop: int = field(init=False)
    q_span: Span = field(init=False, compare=False, repr=False)
    k_span: Span = field(init=False, compare=False, repr=False)
    tile: Tile | None = field(init=False, compare=False, repr=False)
    is_causal: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        ends = [(tiles[0], tiles[-1]) for tiles in self.tiles if tiles]
        q_span = min(first.q_start for first, _ in ends), max(last.q_stop for _, last in ends)
        k_span = min(first.k_start for first, _ in ends), max(last.k_stop for _, last in ends)
        values = {
            "q_start": q_span[0],
            "q_stop": q_span[1],
            "k_start": k_span[0],
            "k_stop": k_span[1],
            "q_span": q_span,
            "k_span": k_span,
            "tile": self.tiles[0][0] if len(self.tiles) == len(self.tiles[0]) == 1 else None,
            "is_causal": self.window == (None, 0),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        """Cheap: calls are looked up by what they are, and mostly by the one that is there."""
        return hash((self.q_start, self.q_stop, self.k_start, self.k_stop, self.window))

    @classmethod
    def of(cls, tile: Tile) -> KernelCall:
        """A call of one tile, for all samples."""
        return cls(((tile,),), tile.window)

    @property
    def pairs(self) -> int:
        """(query, key) pairs, of one sample where all have the same and else of all."""
        return sum(tile.pairs for tiles in self.tiles for tile in tiles)

    def __str__(self) -> str:
        if self.tile is not None:
            return str(self.tile)
        counts = " + ".join(str(len(tiles)) for tiles in self.tiles)
        rows, columns = f"q[{self.q_start}:{self.q_stop}]", f"k[{self.k_start}:{self.k_stop}]"
        return f"{counts} tiles in {rows} {columns} window{self.window}"


def kernel_calls_from_tiles(
    tiles: Sequence[Sequence[Tile]], rows: int, columns: int
) -> tuple[KernelCall, ...]:
    """Group all tiles of a step into few calls, each tile into the first that can take it.

    Args:
        tiles: for each sample, or once for all.
        rows, columns: tokens of the two shards.
    """
    builders: list[_CallBuilder] = []
    for sample, sample_tiles in enumerate(tiles):
        for tile in sorted(sample_tiles, key=_sort_key):
            window = tile.window
            for call in builders:
                if call.can_add(sample, tile, window):
                    break
            else:
                call = _CallBuilder(
                    len(tiles), rows // _MAX_GAP_FRACTION, columns // _MAX_GAP_FRACTION
                )
                builders.append(call)
            call.add(sample, tile, window)
    return tuple(call.build() for call in builders)


def _sort_key(tile: Tile) -> tuple[int, int]:
    return tile.q_start, tile.k_start


class _CallBuilder:
    """Collects the tiles of one kernel call."""

    def __init__(self, samples: int, row_gap: int, column_gap: int) -> None:
        self._tiles: list[list[Tile]] = [[] for _ in range(samples)]
        self._gaps = row_gap, column_gap
        self._window: Bounds = (None, None)
        # Tiles that a side of the window does not bind need it to be as wide as this.
        self._widest = (0, 0)

    def can_add(self, sample: int, tile: Tile, window: Bounds) -> bool:
        """Whether a tile fits into the call: after its sample's last tile with a gap within the
        limits, and with bounds that one window of all tiles can express."""
        if self._tiles[sample]:
            last = self._tiles[sample][-1]
            gaps = tile.q_start - last.q_stop, tile.k_start - last.k_stop
            if not all(0 <= gap <= limit for gap, limit in zip(gaps, self._gaps, strict=True)):
                return False
        merged, widest = self._merged(tile, window)
        binds = zip(self._window, window, merged, widest, strict=True)
        return all(
            bound is None or (old in (None, bound) and new in (None, bound) and limit <= bound)
            for old, new, bound, limit in binds
        )

    def add(self, sample: int, tile: Tile, window: Bounds) -> None:
        """Add a tile to the call."""
        self._window, self._widest = self._merged(tile, window)
        self._tiles[sample].append(tile)

    def build(self) -> KernelCall:
        """The kernel call of all added tiles."""
        return KernelCall(tuple(map(tuple, self._tiles)), self._window)

    def _merged(self, tile: Tile, window: Bounds) -> tuple[Bounds, tuple[int, int]]:
        """The call's state after adding a tile: its window, and the widest unbound tile.

        Returns:
            (left, right) of the window, a side None while no tile is bound by it; and for each side
            the least bound that hides no pair of the tiles which that side does not bind.
        """
        reach = tile.columns - 1, tile.rows - 1
        left, right = (
            new if old is None else old for old, new in zip(self._window, window, strict=True)
        )
        widest_left, widest_right = (
            max(limit, needed) if new is None else limit
            for limit, needed, new in zip(self._widest, reach, window, strict=True)
        )
        return (left, right), (widest_left, widest_right)
