"""The steps of the ring as data: what a rank computes, what comes to it and what it sends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.segments import cut
from ds_usp.geometry.tiles import ANY_BAND, Tile, TileSupport, plan_tiles


class Span(NamedTuple):
    """Tokens ``start : stop`` of a block of keys and values."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class RingStep:
    """Attention of this rank's queries with one rank's keys and values.

    Blocks travel straight from their owner to their user, ``offset`` ranks on, and only the tokens
    that the user's queries see. Gradients of these tokens travel the same way back.

    Args:
        offset: distance to the owner. 0 is the rank's own block, which does not travel.
        kv_owner: ring rank whose keys and values are used.
        columns: its tokens that come here.
        sends: this rank's own tokens that go to the rank ``offset`` places on.
        calls: one entry a kernel call: the tiles, with disjoint query rows, that it computes.
            Their columns count from ``columns.start``.
    """

    offset: int
    kv_owner: int
    columns: Span
    sends: Span
    calls: tuple[tuple[Tile, ...], ...]

    @property
    def pairs(self) -> int:
        """(query, key) pairs computed in this step."""
        return sum(tile.pairs for call in self.calls for tile in call)

    def __str__(self) -> str:
        work = "; ".join(str(tile) for call in self.calls for tile in call) or "nothing"
        block = f"+{self.offset} kv of {self.kv_owner} [{self.columns.start}:{self.columns.stop}]"
        sent = f", sends [{self.sends.start}:{self.sends.stop}]" if self.sends.length else ""
        return f"{block}: {work}{sent}"


@dataclass(frozen=True)
class RingSchedule:
    """All steps of one ring rank. Every rank of the ring has the same offsets.

    Args:
        steps: forward; the own block first, while the next one comes.
        backward_steps: backward; the own block's work is cut in two, so that its first part hides
            the first block's arrival and its last part the way home of the last gradients.
        longest: tokens of the longest block that travels between any two ranks: what a buffer
            must hold.
    """

    ring_rank: int
    ring_degree: int
    steps: tuple[RingStep, ...]
    backward_steps: tuple[RingStep, ...]
    longest: int

    @property
    def pairs(self) -> int:
        """(query, key) pairs that this rank computes."""
        return sum(step.pairs for step in self.steps)

    def __str__(self) -> str:
        head = f"ring rank {self.ring_rank} of {self.ring_degree}, {self.pairs} pairs"
        return "\n  ".join([head, *map(str, self.steps)])


@lru_cache(maxsize=4096)
def ring_schedule(
    layout: TokenLayout, mask: MaskSpec, ring_rank: int, support: TileSupport = ANY_BAND
) -> RingSchedule:
    """Plan one rank's steps; offsets at which no rank has work are not visited.

    A window shortens the ring and sends only the tokens at the border; of a block that a causal
    mask half hides only the visible half travels.
    """
    own, *others = (
        _step(layout, mask, ring_rank, offset, support) for offset in _useful_offsets(layout, mask)
    )
    backward: list[RingStep] = [own]
    if others:
        length = layout.ring_length(ring_rank)
        halves = (
            _step(layout, mask, ring_rank, 0, support, Span(start, stop))
            for start, stop in ((0, length // 2), (length // 2, length))
        )
        first, last = halves
        backward = [first, *others, last]
    longest = _longest(layout, mask)
    return RingSchedule(ring_rank, layout.ring, (own, *others), tuple(backward), longest)


def _step(
    layout: TokenLayout,
    mask: MaskSpec,
    ring_rank: int,
    offset: int,
    support: TileSupport,
    rows: Span | None = None,
) -> RingStep:
    """One step, of all query rows or of some."""
    owner = (ring_rank - offset) % layout.ring
    if offset == 0:
        columns, sends = Span(0, layout.ring_length(ring_rank)), Span(0, 0)
    else:
        columns = _seen(layout, mask, ring_rank, owner)
        sends = _seen(layout, mask, (ring_rank + offset) % layout.ring, ring_rank)
    rows = rows or Span(0, layout.ring_length(ring_rank))
    queries = cut(layout.ring_segments(ring_rank), rows.start, rows.stop)
    tiles = plan_tiles(queries, layout.ring_segments(owner), mask, support)
    placed = (tile.shifted(rows.start, -columns.start) for tile in tiles)
    return RingStep(offset, owner, columns, sends, tuple((tile,) for tile in placed))


@lru_cache(maxsize=4096)
def _seen(layout: TokenLayout, mask: MaskSpec, ring_rank: int, owner: int) -> Span:
    """The shortest run of the owner's tokens that holds all that the rank's queries see."""
    tiles = plan_tiles(layout.ring_segments(ring_rank), layout.ring_segments(owner), mask)
    if not tiles:
        return Span(0, 0)
    return Span(min(tile.k_start for tile in tiles), max(tile.k_stop for tile in tiles))


@lru_cache(maxsize=4096)
def _useful_offsets(layout: TokenLayout, mask: MaskSpec) -> tuple[int, ...]:
    ranks = range(layout.ring)
    return tuple(
        offset
        for offset in ranks
        if offset == 0
        or any(_seen(layout, mask, r, (r - offset) % layout.ring).length for r in ranks)
    )


@lru_cache(maxsize=4096)
def _longest(layout: TokenLayout, mask: MaskSpec) -> int:
    ranks = range(layout.ring)
    spans = (_seen(layout, mask, a, b) for a in ranks for b in ranks if a != b)
    return max((span.length for span in spans), default=0)
