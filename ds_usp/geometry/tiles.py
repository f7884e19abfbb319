"""Tiles: the rectangles of (query, key) pairs with a diagonal band that a kernel is called with.
``ring_schedule.py`` makes them while a call is planned; kernels read them at each call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from ds_usp.errors import LayoutError, UnsupportedAttentionError
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.segments import Segment, ShardIndex, Span

Bounds = tuple[int | None, int | None]


# From positions to tiles. A causal mask over zigzag shards, ring rank 0 of 2 (tokens 0-3, 12-15):
# its queries down, keys of rank 1 (4-11) across; # attends:
#
#            4 5 6 7 8 9 10 11
#     0-3    . . . . . . . .      no tile: nothing to compute, nothing to receive for these rows
#     12-15  # # # # # # # #      one full tile
#
# and its own keys (0-3, 12-15):
#
#            0-3      12-15
#     0-3    causal   .           three rectangles of positions, but the smallest band rectangle
#     12-15  full     causal      around them has exactly their pairs: one causal tile, one call
#
# Nothing here knows "zigzag" or "causal": two runs of positions and two bounds on their distance
# give a diagonal band, and bands are joined where that adds no pair. Windows and prefixes come out
# of the same two rules, so a new layout needs no new mask code. A mask is asked for its areas:
# documents are squares, an ancestor's columns under its descendants' rows a rectangle. Only runs of
# an area's rows and columns are paired, so the work grows with the areas that both shards have a
# part of and not with their squares, and tiles are joined inside of a document alone.
@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows and key columns of two shards, and the diagonal band of pairs that may attend.

    Row ``i`` sees column ``j`` if ``low <= j - i <= high``, in indices of the two shards. A tile is
    tight: it has no empty row or column, and the band is clamped to what the rectangle holds.

    Attributes:
        q_start, q_stop: its query rows, in the shard of queries.
        k_start, k_stop: its key columns, in the shard, or buffer of several ranks', of keys.
        rows, columns: number of query rows and key columns.
        window: ``(left, right)`` aligned to the bottom right corner, as flash kernels take it:
            row ``i`` of the rectangle sees columns ``i + columns - rows - left`` to
            ``i + columns - rows + right``. None: unbounded on that side.
        is_full: every row sees every column.
        is_causal: the plain causal mask, aligned to the bottom right corner.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int
    high: int
    # Computed once: every kernel call reads them.
    rows: int = field(init=False, compare=False, repr=False)
    columns: int = field(init=False, compare=False, repr=False)
    window: Bounds = field(init=False, compare=False, repr=False)
    is_full: bool = field(init=False, compare=False, repr=False)
    is_causal: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        rows, columns = self.q_stop - self.q_start, self.k_stop - self.k_start
        shift = self.k_start - self.q_start
        low, high = self.low - shift, self.high - shift
        left = None if low <= 1 - rows else columns - rows - low
        right = None if high >= columns - 1 else high - columns + rows
        set_field = object.__setattr__
        set_field(self, "rows", rows)
        set_field(self, "columns", columns)
        set_field(self, "window", (left, right))
        set_field(self, "is_full", left is None and right is None)
        set_field(self, "is_causal", left is None and right == 0)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that attend: the work."""
        low, high = self.low - self.k_start + self.q_start, self.high - self.k_start + self.q_start
        return _pairs_below(self.rows, self.columns, high) - _pairs_below(
            self.rows, self.columns, low - 1
        )

    def shifted(self, rows: int, columns: int) -> Tile:
        """The tile moved by so many query rows and key columns; the same pairs of tokens."""
        if not (rows or columns):
            return self
        return Tile(
            self.q_start + rows,
            self.q_stop + rows,
            self.k_start + columns,
            self.k_stop + columns,
            self.low + columns - rows,
            self.high + columns - rows,
        )

    def __str__(self) -> str:
        left, right = self.window
        kind = "full" if self.is_full else "causal" if self.is_causal else f"window({left},{right})"
        return f"q[{self.q_start}:{self.q_stop}] k[{self.k_start}:{self.k_stop}] {kind}"


@dataclass(frozen=True, slots=True)
class TileSupport:
    """Tiles that a kernel computes in one call besides full and square causal ones.

    Args:
        rectangular: causal tiles with more columns than rows, aligned to the bottom right.
        window: any other band.
        tall: of the bands that it computes those with more rows than columns, too.
    """

    rectangular: bool = True
    window: bool = True
    tall: bool = True


ANY_BAND = TileSupport()
_OPEN: Bounds = (None, None)


def plan_tiles(
    q_segments: Sequence[Segment],
    k_segments: Sequence[Segment],
    mask: MaskSpec,
    support: TileSupport = ANY_BAND,
    sample: int = 0,
) -> tuple[Tile, ...]:
    """Cover every allowed (query, key) pair of two shards exactly once, in few kernel calls.

    Args:
        q_segments, k_segments: the shards' tokens, in the order of the rows and columns of tiles.
        mask: who sees whom, in global positions.
        support: what the kernel can compute in one call.
        sample: whose documents, where samples have their own.

    Raises:
        LayoutError: runs of different stride under a window, whose common pairs are no band.
        UnsupportedAttentionError: a window for a kernel that has none.
    """
    queries, keys = ShardIndex(q_segments), ShardIndex(k_segments)
    legal: list[Tile] = []
    for areas in mask.areas_of(sample):
        tiles = [
            tile
            for area in areas
            for k, k_at in keys.between(area.k_start, area.k_stop)
            for q, q_at in queries.between(area.q_start, area.q_stop)
            if (tile := _tile(q, q_at, k, k_at, area[4:])) is not None
        ]
        for tile in _merge_tiles(tiles, open_left=mask.left is None) if len(tiles) > 1 else tiles:
            legal += _legalize(tile, support)
    return tuple(legal)


def visible_columns(q: Segment, k: Segment, window: Bounds) -> Span | None:
    """The half-open range of the tokens of ``k`` that some token of ``q`` sees; None: nothing."""
    low, high = _bounds(q, k, window)
    start, stop = max(0, low), min(k.length, high + q.length)
    return (start, stop) if low <= high and start < stop else None


def _bounds(q: Segment, k: Segment, window: Bounds) -> tuple[int, int]:
    """Bounds of ``j - i`` for the pairs of two runs, counted from their first tokens."""
    left, right = window
    if q.stride != k.stride and window != _OPEN:
        raise LayoutError(f"queries of stride {q.stride} do not see keys of stride {k.stride}")
    # Positions q.start + stride * i and k.start + stride * j: their distance bounds j - i.
    distance = k.start - q.start
    low = 1 - q.length if left is None else -((left + distance) // q.stride)
    high = k.length - 1 if right is None else (right - distance) // q.stride
    return low, high


def _tile(q: Segment, q_start: int, k: Segment, k_start: int, window: Bounds) -> Tile | None:
    """The tile of two runs at row ``q_start`` and column ``k_start`` of their shards, or None."""
    low, high = _bounds(q, k, window)
    shift = k_start - q_start
    return _trim(
        Tile(q_start, q_start + q.length, k_start, k_start + k.length, low + shift, high + shift)
    )


def _trim(tile: Tile) -> Tile | None:
    """The tile without empty rows and columns, with bounds as narrow as its pairs; None if it has
    none."""
    q_start = max(tile.q_start, tile.k_start - tile.high)
    q_stop = min(tile.q_stop, tile.k_stop - tile.low)
    k_start = max(tile.k_start, q_start + tile.low)
    k_stop = min(tile.k_stop, q_stop + tile.high)
    if q_start >= q_stop or k_start >= k_stop:
        return None
    # A row without a visible key has no softmax: kernels return NaN or garbage for it, each its own
    # way. Trimming means that no kernel is ever asked.
    low, high = max(tile.low, k_start - q_stop + 1), min(tile.high, k_stop - 1 - q_start)
    return Tile(q_start, q_stop, k_start, k_stop, low, high) if low <= high else None


def _merge_tiles(tiles: list[Tile], open_left: bool) -> list[Tile]:
    """Join tiles as long as two of them are exactly one band of their bounding rectangle.

    Where the mask is open to the left the tiles stay so: a kernel may have no windows.
    """
    merged: list[Tile] = []
    for tile in tiles:
        index = 0
        while index < len(merged):
            joined = _try_merge(merged[index], tile)
            if joined is None or (open_left and joined.window[0] is not None):
                index += 1
            else:
                tile = joined
                del merged[index]
                index = 0
        merged.append(tile)
    return merged


def _try_merge(a: Tile, b: Tile) -> Tile | None:
    """One tile with the pairs of two disjoint tiles; None if there is none.

    The smallest band rectangle around both contains both, so it is their union exactly when it
    holds as many pairs as they do.
    """
    q_start, q_stop = min(a.q_start, b.q_start), max(a.q_stop, b.q_stop)
    k_start, k_stop = min(a.k_start, b.k_start), max(a.k_stop, b.k_stop)
    if q_stop - q_start > a.rows + b.rows or k_stop - k_start > a.columns + b.columns:
        return None
    around = Tile(q_start, q_stop, k_start, k_stop, min(a.low, b.low), max(a.high, b.high))
    return around if around.pairs == a.pairs + b.pairs else None


def _legalize(tile: Tile, support: TileSupport) -> list[Tile]:
    """Split a tile into tiles that the kernel supports; every kernel has full and square causal."""
    left, right = tile.window
    if right is None and left is None:
        return [tile]
    if left is not None and not support.window:
        raise UnsupportedAttentionError(
            f"a window of {left} tokens to the left needs a kernel with window support"
        )
    if left is None and right == 0:
        if tile.rows == tile.columns or support.rectangular:
            return [tile]
        edge = tile.k_stop - tile.rows
        return _trim_all(replace(tile, k_stop=edge), replace(tile, k_start=edge))
    # cuDNN and torch's CPU kernel know square causal and full only, so a trapezoid becomes the full
    # rectangle before the diagonal and a square on it: more calls, never a wrong pair.
    computes_band = support.window and (support.rectangular or left is not None)
    if computes_band and (support.tall or tile.rows <= tile.columns):
        return [tile]
    # A tall band is cut at the row where one bound stops to bind: from there on down rows see the
    # last column (right bound), or up to there the first (left bound). So each half has a bound
    # less.
    row = tile.k_start - tile.low + 1 if right is None else tile.k_stop - tile.high
    halves = _trim_all(replace(tile, q_stop=row), replace(tile, q_start=row))
    return [legal for half in halves for legal in _legalize(half, support)]


def _trim_all(*tiles: Tile) -> list[Tile]:
    return [tight for tight in map(_trim, tiles) if tight is not None]


def _pairs_below(rows: int, columns: int, high: int) -> int:
    """Pairs with ``j - i <= high`` in a rectangle, closed form."""
    return _ramp(high + rows, columns) - _ramp(high, columns)


def _ramp(x: int, top: int) -> int:
    """Sum of ``min(max(t, 0), top)`` over all t <= x."""
    if x <= 0:
        return 0
    if x < top:
        return x * (x + 1) // 2
    return top * (top + 1) // 2 + (x - top) * top


# ------------------------------------------------------------------------------------------------
# Kernel calls made of tiles: many documents in one variable-length call.
#
# A library's varlen call has one window for all its sequences, aligned to each one's bottom right
# corner, and rows that follow each other. So tiles share a call if one window is right for all of
# them (a full tile does not bind it, but must fit into it), and if their rows and columns ascend
# without long gaps: what lies between is not computed, yet its results are allocated and merged.


# A call may leave out between two tiles 1 / this number of the shard's rows or columns: its results
# cover all between its first row and its last one.
_MAX_GAP_FRACTION = 8


@dataclass(frozen=True)
class KernelCall:
    """The tiles of one kernel call. Its results cover all rows and columns between the outermost.

    Args:
        tiles: for each sample of a batch, or once for all, tiles with ascending rows and columns
            that no two of them share.
        window: one that is right for every tile, aligned to the tile's bottom right corner.

    Attributes:
        q_start, q_stop, k_start, k_stop, q_span, k_span: the rows and columns of the results.
        tile: the only tile, if it is the same for all samples.
        is_causal: the plain causal mask in every tile, aligned to the tile's bottom right corner.
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

    def __hash__(self) -> int:  # without the tiles, of which there may be thousands
        return hash((self.q_start, self.q_stop, self.k_start, self.k_stop, self.window))

    @classmethod
    def of(cls, tile: Tile) -> KernelCall:
        return cls(((tile,),), tile.window)

    @property
    def pairs(self) -> int:
        """(query, key) pairs, of one sample where all have the same tiles, else of all samples."""
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
        rows, columns: query and key tokens of the step, by which gaps in a call are limited.
    """
    builders: list[_CallBuilder] = []
    max_gaps = rows // _MAX_GAP_FRACTION, columns // _MAX_GAP_FRACTION
    for sample, sample_tiles in enumerate(tiles):
        for tile in sorted(sample_tiles, key=attrgetter("q_start", "k_start")):
            for call in builders:
                if call.can_add(sample, tile):
                    break
            else:
                call = _CallBuilder(len(tiles), max_gaps)
                builders.append(call)
            call.add(sample, tile)
    return tuple(call.build() for call in builders)


class _CallBuilder:
    """Collects the tiles of one kernel call."""

    def __init__(self, samples: int, max_gaps: tuple[int, int]) -> None:
        self._tiles: list[list[Tile]] = [[] for _ in range(samples)]
        self._max_gaps = max_gaps  # in rows and in columns
        self._window: Bounds = (None, None)  # None: no tile so far is bound on that side
        # Tiles that a side of the window does not bind need it to be as wide as this.
        self._widest = (0, 0)

    def can_add(self, sample: int, tile: Tile) -> bool:
        """Whether a tile fits: after its sample's last one, with gaps within the limits, and with
        bounds that one window of all tiles can express."""
        if self._tiles[sample]:
            last = self._tiles[sample][-1]
            gaps = tile.q_start - last.q_stop, tile.k_start - last.k_stop
            if not all(0 <= gap <= limit for gap, limit in zip(gaps, self._max_gaps, strict=True)):
                return False
        merged, widest = self._merged(tile)
        binds = zip(self._window, tile.window, merged, widest, strict=True)
        return all(
            bound is None or (old in (None, bound) and new in (None, bound) and limit <= bound)
            for old, new, bound, limit in binds
        )

    def add(self, sample: int, tile: Tile) -> None:
        self._window, self._widest = self._merged(tile)
        self._tiles[sample].append(tile)

    def build(self) -> KernelCall:
        return KernelCall(tuple(map(tuple, self._tiles)), self._window)

    def _merged(self, tile: Tile) -> tuple[Bounds, tuple[int, int]]:
        """The call's window after adding a tile, a side None while no tile is bound by it; and for
        each side the least bound that hides no pair of the tiles which that side does not bind."""
        reach = tile.columns - 1, tile.rows - 1
        left, right = (
            new if old is None else old for old, new in zip(self._window, tile.window, strict=True)
        )
        widest_left, widest_right = (
            max(limit, needed) if bound is None else limit
            for limit, needed, bound in zip(self._widest, reach, tile.window, strict=True)
        )
        return (left, right), (widest_left, widest_right)
