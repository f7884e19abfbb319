"""Plans for prefixes and for keys of another sequence, against a count of the pairs they allow."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest
from cases import ALL_LAYOUTS

from ds_usp.errors import LayoutError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_schedule import RingStep, ring_schedule
from ds_usp.geometry.tiles import ANY_BAND, Tile, TileSupport

SUPPORTS = (ANY_BAND, TileSupport(tall=False), TileSupport(False, True), TileSupport(False, False))
Pairs = Counter[tuple[int, int]]


def pairs_of(layout: TokenLayout, kv_layout: TokenLayout, rank: int, step: RingStep) -> Pairs:
    """What a step computes, in positions."""
    rows = layout.ring_positions(rank)
    columns = [
        position
        for piece in step.kv_ranges
        for position in kv_layout.ring_positions(piece.rank)[piece.start : piece.stop]
    ]
    return Counter(
        (rows[i], columns[j])
        for call in step.calls
        for tile in call.tiles[0]
        for i, j in pairs_in(tile)
    )


def pairs_in(tile: Tile) -> list[tuple[int, int]]:
    rows, columns = range(tile.q_start, tile.q_stop), range(tile.k_start, tile.k_stop)
    return [(i, j) for i, j in product(rows, columns) if tile.low <= j - i <= tile.high]


def sent(layout: TokenLayout, plans: list[list[RingStep]]) -> None:
    """What leaves one rank in a step is what comes to another."""
    for steps in zip(*plans, strict=True):
        gives = Counter(
            (r, p.rank, p.start, p.stop) for r, s in enumerate(steps) for p in s.send_ranges
        )
        takes = Counter(
            (p.rank, r, p.start, p.stop)
            for r, s in enumerate(steps)
            if not s.is_local
            for p in s.kv_ranges
        )
        assert gives == takes


@pytest.mark.parametrize("seed", range(4))
def test_every_allowed_pair_is_computed_once(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        ulysses, ring = draw.choice([(1, 1), (1, 2), (1, 3), (2, 2), (1, 4), (2, 4), (1, 7)])
        shortest = 2 * ulysses * ring
        tokens = draw.randint(shortest, shortest + 40)
        layout = TokenLayout(draw.choice(ALL_LAYOUTS), tokens, ulysses, ring)
        kv_layout, mask = layout, MaskSpec.full()
        if draw.random() < 0.5:
            keys = draw.randint(shortest, shortest + 40)
            kv_layout = TokenLayout(draw.choice(ALL_LAYOUTS), keys, ulysses, ring)
        else:
            window = draw.choice([(None, 0), (None, 0), (5, 0), (3, 2), (None, 4)])
            mask = MaskSpec(*window, prefix=draw.randint(0, tokens))
        allowed = Counter(
            (q, k)
            for q, k in product(range(tokens), range(kv_layout.seq_len))
            if kv_layout is not layout or mask.allows(q, k)
        )
        able = [s for s in SUPPORTS if s.window or mask.left is None]
        options = draw.choice(able), draw.random() < 0.5, draw.random() < 0.5, kv_layout
        plans = [ring_schedule(layout, mask, rank, *options) for rank in range(ring)]
        for way in ("steps", "backward_steps"):
            found: Pairs = Counter()
            for rank, plan in enumerate(plans):
                for step in getattr(plan, way):
                    found += pairs_of(layout, kv_layout, rank, step)
            assert found == allowed, (layout, kv_layout, mask, options)
            sent(layout, [getattr(plan, way) for plan in plans])


def test_a_window_needs_one_stride() -> None:
    layouts = TokenLayout("striped", 32, 1, 4), TokenLayout("zigzag", 32, 1, 4)
    with pytest.raises(LayoutError, match="stride 4 cannot meet keys of stride 1"):
        ring_schedule(layouts[0], MaskSpec.causal(), 0, kv_layout=layouts[1])
