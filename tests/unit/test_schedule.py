"""The ring's plan: every pair once over all ranks, balanced, and no longer than it has to be."""

from __future__ import annotations

import random

import oracle
import pytest
import torch
from cases import ALL_LAYOUTS, ALL_ORDERS

from ds_usp import LayoutError, MaskSpec, TokenLayout
from ds_usp.geometry.schedule import RingSchedule, RingStep, ring_schedule
from ds_usp.geometry.tiles import ANY_BAND, TileSupport

BALANCED = ("zigzag", "striped", "context_parallel")
CAUSAL = MaskSpec.causal()


def schedules(
    layout: TokenLayout, mask: MaskSpec, support: TileSupport = ANY_BAND
) -> list[RingSchedule]:
    """Every ring rank's plan."""
    return [ring_schedule(layout, mask, rank, support) for rank in range(layout.ring)]


def random_mask(draw: random.Random) -> MaskSpec:
    left, right = draw.randint(0, 20), draw.randint(0, 6)
    bounds = [(None, 0), (None, None), (left, 0), (left, right), (None, right), (left, None)]
    return MaskSpec(*draw.choice(bounds))


def random_support(draw: random.Random, mask: MaskSpec) -> TileSupport:
    window = mask.left is not None or draw.random() < 0.5
    return TileSupport(rectangular=draw.random() < 0.5, window=window)


Walks = list[tuple[int, tuple[RingStep, ...]]]


def forward(plans: list[RingSchedule]) -> Walks:
    return [(plan.ring_rank, plan.steps) for plan in plans]


def backward(plans: list[RingSchedule]) -> Walks:
    return [(plan.ring_rank, plan.backward_steps) for plan in plans]


def computed(layout: TokenLayout, walks: Walks) -> torch.Tensor:
    """How often each (query, key) pair of the whole sequence is computed, by any rank's steps."""
    counts = torch.zeros(layout.seq_len, layout.seq_len, dtype=torch.int64)
    for ring_rank, steps in walks:
        q = torch.tensor(layout.ring_positions(ring_rank))
        for step in steps:
            k = torch.tensor(layout.ring_positions(step.kv_owner))
            k = k[step.columns.start : step.columns.stop]
            for tile in (tile for call in step.calls for tile in call):
                rows, columns = q[tile.q_start : tile.q_stop], k[tile.k_start : tile.k_stop]
                # As a kernel reads the tile: a window aligned to the bottom right corner.
                shift = tile.columns - tile.rows
                pairs = oracle.window(
                    range(shift, shift + tile.rows), range(tile.columns), *tile.window
                )
                counts[rows[:, None], columns[None, :]] += pairs
    return counts


def test_every_allowed_pair_is_computed_exactly_once_by_the_whole_ring() -> None:
    draw = random.Random(4)
    for index in range(1500):
        ulysses, ring = draw.randint(1, 4), draw.randint(1, 5)
        seq_len = 2 * ulysses * ring + draw.randint(0, 30)
        kind, order = ALL_LAYOUTS[index % 4], draw.choice(ALL_ORDERS)
        layout, mask = TokenLayout(kind, seq_len, ulysses, ring, order), random_mask(draw)
        support = random_support(draw, mask)
        plans = schedules(layout, mask, support)
        allowed = oracle.window(range(seq_len), range(seq_len), mask.left, mask.right).long()
        assert torch.equal(computed(layout, forward(plans)), allowed), (layout, mask, support)
        assert torch.equal(computed(layout, backward(plans)), allowed), (layout, mask, support)
        assert sum(plan.pairs for plan in plans) == int(allowed.sum())
        check_walk(layout, plans)


def check_walk(layout: TokenLayout, plans: list[RingSchedule]) -> None:
    """All ranks visit the same offsets, own block first, and send what their receivers use."""
    offsets = [step.offset for step in plans[0].steps]
    assert offsets[0] == 0 and offsets == sorted(set(offsets)) and offsets[-1] < layout.ring
    for rank, plan in enumerate(plans):
        assert (plan.ring_rank, plan.ring_degree) == (rank, layout.ring)
        assert [step.offset for step in plan.steps] == offsets
        assert [step.kv_owner for step in plan.steps] == [(rank - o) % layout.ring for o in offsets]
        others = plan.steps[1:]
        for at, step in enumerate(others, 1):
            receiver = plans[(rank + step.offset) % layout.ring].steps[at]
            assert (receiver.kv_owner, receiver.columns) == (rank, step.sends)
            check_columns(layout, step)
        # Backward: the same blocks, the own one's work before and after the others'.
        assert plan.backward_steps[1 : 1 + len(others)] == others
        own = (plan.backward_steps[0], *plan.backward_steps[1 + len(others) :])
        assert [step.offset for step in own] == [0] * (1 + bool(others))
    travelling = [step.columns.length for plan in plans for step in plan.steps[1:]]
    assert {plan.longest for plan in plans} == {max(travelling, default=0)}
    # A step in which nobody computes would be a hop for nothing.
    for step in range(1, len(offsets)):
        assert any(plan.steps[step].pairs for plan in plans), (layout, step)


def check_columns(layout: TokenLayout, step: RingStep) -> None:
    """What travels holds all that is used, and neither its first nor its last token in vain."""
    assert 0 <= step.columns.start <= step.columns.stop <= layout.ring_length(step.kv_owner)
    tiles = [tile for call in step.calls for tile in call]
    if tiles:
        used = min(tile.k_start for tile in tiles), max(tile.k_stop for tile in tiles)
        assert used == (0, step.columns.length)
    assert bool(tiles) == bool(step.columns.length)


def most_calls(kind: str, ulysses: int, ring: int, order: str, support: TileSupport) -> int:
    """Most kernel calls of any rank in any step of causal attention, over many lengths."""
    shortest = 4 * ulysses * ring
    return max(
        len(step.calls)
        for seq_len in (shortest, *range(shortest + 1, shortest + 2 * ulysses * ring, 3))
        for plan in schedules(TokenLayout(kind, seq_len, ulysses, ring, order), CAUSAL, support)
        for step in plan.steps
    )


@pytest.mark.parametrize("order", ALL_ORDERS)
@pytest.mark.parametrize("kind", ALL_LAYOUTS)
@pytest.mark.parametrize("support", [TileSupport(False, False), ANY_BAND], ids=["plain", "any"])
def test_causal_takes_one_kernel_call_a_step(kind: str, order: str, support: TileSupport) -> None:
    for ulysses in (1, 2, 3):
        for ring in (1, 2, 3, 4):
            # Megatron's zigzag over all ranks gives a ring rank two pieces only where its Ulysses
            # ranks stand next to each other; else it has 2 * ulysses pieces.
            scattered = kind == "context_parallel" and order == "ring-ulysses" and ring > 1
            expected = 2 * ulysses - 1 if scattered else 1
            assert most_calls(kind, ulysses, ring, order, support) == expected


@pytest.mark.parametrize("ring", [2, 4, 8])
@pytest.mark.parametrize("kind", ALL_LAYOUTS)
def test_causal_work_is_balanced_over_ranks_and_steps(kind: str, ring: int) -> None:
    local = 32
    layout = TokenLayout(kind, local * ring, 1, ring)
    plans = schedules(layout, CAUSAL)
    work = [plan.pairs for plan in plans]
    if kind not in BALANCED:
        # Contiguous, for comparison: the last rank has almost twice the mean.
        assert max(work) / (sum(work) / ring) == pytest.approx(2 - 1 / ring, rel=0.02)
        return
    if kind == "striped":
        # A stripe's diagonal is computed or not: one local length of pairs a step at most.
        assert max(work) - min(work) <= (ring - 1) * local
        for step in range(1, ring):
            pairs = [plan.steps[step].pairs for plan in plans]
            assert max(pairs) - min(pairs) <= local
        assert max(work) / min(work) < 1.07
        return
    assert len(set(work)) == 1
    for step in range(ring):
        assert len({plan.steps[step].pairs for plan in plans}) == 1
    # The own block is a triangle, every other one half of a square.
    assert plans[0].steps[0].pairs == local * (local + 1) // 2
    assert {step.pairs for step in plans[0].steps[1:]} == {local * local // 2}


@pytest.mark.parametrize("kind", BALANCED)
def test_uneven_lengths_stay_balanced(kind: str) -> None:
    for seq_len in range(256, 320):
        work = [plan.pairs for plan in schedules(TokenLayout(kind, seq_len, 1, 4), CAUSAL)]
        assert max(work) / min(work) < 1.08


# Tokens a rank, window to the left, offsets at which blocks are visited in a ring of 8.
SHORT_RINGS = [
    ("contiguous", 16, 0, [0]),
    ("contiguous", 16, 1, [0, 1]),
    ("contiguous", 16, 16, [0, 1]),
    ("contiguous", 16, 17, [0, 1, 2]),
    ("contiguous", 16, 48, [0, 1, 2, 3]),
    ("zigzag", 16, 0, [0]),
    # Chunks run up through the ranks and down again: neighbours on both sides are needed.
    ("zigzag", 16, 8, [0, 1, 7]),
    ("zigzag", 16, 9, [0, 1, 2, 6, 7]),
    ("striped", 16, 2, [0, 1, 2]),
    ("striped", 16, 7, [0, 1, 2, 3, 4, 5, 6, 7]),
]


@pytest.mark.parametrize(("kind", "local", "left", "offsets"), SHORT_RINGS)
def test_a_window_shortens_the_ring(kind: str, local: int, left: int, offsets: list[int]) -> None:
    layout = TokenLayout(kind, 8 * local, 1, 8)
    for plan in schedules(layout, MaskSpec.window(left)):
        assert [step.offset for step in plan.steps] == offsets


def test_causal_visits_every_block_and_one_rank_visits_its_own() -> None:
    for kind in ALL_LAYOUTS:
        (plan,) = schedules(TokenLayout(kind, 16), CAUSAL)
        assert len(plan.steps) == 1 and plan.pairs == 16 * 17 // 2
        assert len(schedules(TokenLayout(kind, 64, 1, 4), CAUSAL)[0].steps) == 4


# What the first two of three ring ranks send to the next rank and to the one after it.
TRAVEL = [
    # A later rank needs the first half of a zigzag block, an earlier one all of it.
    ("zigzag", CAUSAL, [[(0, 4), (0, 4)], [(0, 4), (0, 8)]]),
    ("contiguous", CAUSAL, [[(0, 8), (0, 8)], [(0, 8), (0, 0)]]),
    ("contiguous", MaskSpec.full(), [[(0, 8), (0, 8)], [(0, 8), (0, 8)]]),
    # Of a block before a window only the border travels.
    ("contiguous", MaskSpec.window(3), [[(5, 8)], [(5, 8)]]),
]


@pytest.mark.parametrize(("kind", "mask", "sends"), TRAVEL, ids=str)
def test_only_what_is_used_travels(
    kind: str, mask: MaskSpec, sends: list[list[tuple[int, int]]]
) -> None:
    plans = schedules(TokenLayout(kind, 24, 1, 3), mask)[:2]
    assert [[step.sends for step in plan.steps[1:]] for plan in plans] == sends


def test_a_schedule_prints_as_a_table() -> None:
    layout = TokenLayout("contiguous", 16, 1, 2)
    first, last = schedules(layout, CAUSAL)
    assert str(first).splitlines() == [
        "ring rank 0 of 2, 36 pairs",
        "  +0 kv of 0 [0:8]: q[0:8] k[0:8] causal",
        "  +1 kv of 1 [0:0]: nothing, sends [0:8]",
    ]
    assert str(last).splitlines()[-1] == "  +1 kv of 0 [0:8]: q[0:8] k[0:8] full"
    windowed = schedules(TokenLayout("zigzag", 16, 1, 2), MaskSpec.window(2, 1))[0]
    assert "q[0:4] k[0:4] window(2,1); q[4:8] k[4:8] window(2,1)" in str(windowed)


def test_equal_questions_share_one_plan() -> None:
    plans = [ring_schedule(TokenLayout("zigzag", 32, 2, 2), MaskSpec.causal(), 1) for _ in "ab"]
    assert plans[0] is plans[1]


def test_kernels_without_windows_serve_every_mask_that_is_open_to_the_left() -> None:
    layout = TokenLayout("context_parallel", 20, 2, 5, "ring-ulysses")
    plans = schedules(layout, MaskSpec(None, 2), TileSupport(False, False))
    assert int(computed(layout, forward(plans)).sum()) == 20 * 21 // 2 + 19 + 18


@pytest.mark.parametrize("ring_rank", [-1, 2])
def test_a_rank_outside_the_ring_is_refused(ring_rank: int) -> None:
    with pytest.raises(LayoutError, match=f"ring rank {ring_rank}"):
        ring_schedule(TokenLayout("zigzag", 32, 2, 2), CAUSAL, ring_rank)
