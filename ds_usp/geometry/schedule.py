"""The steps of the ring as data: what a rank holds, computes and passes on, and when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.tiles import ANY_BAND, Tile, TileSupport, plan_tiles


@dataclass(frozen=True, slots=True)
class RingStep:
    """One stop of the keys and values on their way around the ring.

    Args:
        offset: how many ranks the block has come: this rank holds the block of the rank that
            stands ``offset`` before it. 0 in the first step.
        kv_owner: ring rank whose keys and values are here in this step.
        kv_length: tokens in that block.
        calls: one entry a kernel call: the tiles, with disjoint query rows, that it computes.
    """

    offset: int
    kv_owner: int
    kv_length: int
    calls: tuple[tuple[Tile, ...], ...]

    @property
    def pairs(self) -> int:
        """(query, key) pairs computed in this step."""
        return sum(tile.pairs for call in self.calls for tile in call)

    def __str__(self) -> str:
        work = "; ".join(str(tile) for call in self.calls for tile in call) or "nothing"
        return f"+{self.offset} kv of {self.kv_owner}: {work}"


@dataclass(frozen=True)
class RingSchedule:
    """All steps of one ring rank. Every rank of the ring has the same offsets."""

    ring_rank: int
    ring_degree: int
    steps: tuple[RingStep, ...]

    def hops(self) -> Iterator[tuple[RingStep, RingStep | None]]:
        """Each step with the one after it; None after the last."""
        return zip_longest(self.steps, self.steps[1:])

    @property
    def longest(self) -> int:
        """Tokens of the longest block that comes by: what a buffer must hold."""
        return max(step.kv_length for step in self.steps)

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
    """Plan one rank's walk; offsets at which no rank has work are not visited.

    The first step is always the rank's own block: a window shortens the ring, and blocks that
    nobody needs next are jumped over in one hop.
    """
    steps = []
    for offset in _useful_offsets(layout, mask):
        owner = (ring_rank - offset) % layout.ring
        tiles = _tiles(layout, mask, ring_rank, owner, support)
        steps.append(RingStep(offset, owner, layout.ring_length(owner), tuple((t,) for t in tiles)))
    return RingSchedule(ring_rank, layout.ring, tuple(steps))


@lru_cache(maxsize=4096)
def _useful_offsets(layout: TokenLayout, mask: MaskSpec) -> tuple[int, ...]:
    ranks = range(layout.ring)
    return tuple(
        offset
        for offset in ranks
        if offset == 0
        or any(_tiles(layout, mask, r, (r - offset) % layout.ring, ANY_BAND) for r in ranks)
    )


def _tiles(
    layout: TokenLayout, mask: MaskSpec, ring_rank: int, owner: int, support: TileSupport
) -> tuple[Tile, ...]:
    return plan_tiles(layout.ring_segments(ring_rank), layout.ring_segments(owner), mask, support)
