"""The ring's plan: every pair once over all ranks, balanced, and no longer than it has to be."""

from __future__ import annotations

import pytest
from cases import ALL_LAYOUTS, ALL_ORDERS

from ds_usp import LayoutError, MaskSpec, TokenLayout
from ds_usp.geometry.ring_schedule import ChunkPosition as Position
from ds_usp.geometry.ring_schedule import RingSchedule, ring_schedule
from ds_usp.geometry.tiles import ANY_BAND, TileSupport

BALANCED = ("zigzag", "striped", "context_parallel")
CAUSAL = MaskSpec.causal()


def schedules(
    layout: TokenLayout,
    mask: MaskSpec,
    support: TileSupport = ANY_BAND,
    gather: bool = False,
    position: Position = "only",
) -> list[RingSchedule]:
    """Every ring rank's plan."""
    return [
        ring_schedule(layout, mask, rank, support, gather, position) for rank in range(layout.ring)
    ]


def offsets(plans: list[RingSchedule]) -> list[int]:
    """How many ranks before its user each step's block stands, block by block."""
    ring, found = len(plans), []
    for steps in zip(*(plan.steps for plan in plans), strict=True):
        apart = {(r - run.rank) % ring for r, step in enumerate(steps) for run in step.kv_ranges}
        apart |= {(run.rank - r) % ring for r, step in enumerate(steps) for run in step.send_ranges}
        (offset,) = apart
        assert all(step.is_local == (offset == 0) for step in steps)
        found.append(offset)
    return found


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
            # Layouts over all ranks, Megatron's zigzag and contiguous, give a ring rank two pieces
            # and one only where its Ulysses ranks stand next to each other; else 2 * ulysses and
            # ulysses pieces.
            scattered = order == "ring-ulysses" and ring > 1
            over_all_ranks = {"context_parallel": 2 * ulysses - 1, "contiguous": ulysses}
            expected = over_all_ranks.get(kind, 1) if scattered else 1
            assert most_calls(kind, ulysses, ring, order, support) == expected


# Kernel calls of every rank of a ring of 5 with all other blocks at once, causal, where the
# sequence divides. A zigzag rank sees the front halves of all with all its queries, and the back
# halves of the ranks behind it with its back half. Stripes do not join: a call a block. Then with
# the own block among them, for a kernel that computes rectangular causal tiles: each half of a
# zigzag rank sees keys up to its own diagonal, and the halves of the last rank are one run.
GATHERED = {
    "contiguous": ([0, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
    "zigzag": ([1, 2, 2, 2, 1], [2, 2, 2, 2, 1]),
    "context_parallel": ([1, 2, 2, 2, 1], [2, 2, 2, 2, 1]),
    "striped": ([4, 4, 4, 4, 4], [5, 5, 5, 5, 5]),
}


@pytest.mark.parametrize("kind", ALL_LAYOUTS)
def test_all_blocks_at_once_take_few_kernel_calls(kind: str) -> None:
    others, whole = GATHERED[kind]
    plain = TileSupport(False, False)
    for layout in (TokenLayout(kind, 60 * ulysses, ulysses, 5) for ulysses in (1, 2, 3)):
        apart = (("local_first", plain), ("local_first", ANY_BAND), ("local_merged", plain))
        for plans in (schedules(layout, CAUSAL, can, True, position) for position, can in apart):
            calls = [[len(step.calls) for step in plan.steps] for plan in plans]
            assert calls == [[1, each] for each in others]
        plans = schedules(layout, CAUSAL, gather=True, position="local_merged")
        assert [sum(len(step.calls) for step in plan.steps) for plan in plans] == whole
        assert {len(plan.steps) for plan in plans[1:]} == {2 if kind == "striped" else 1}


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


@pytest.mark.parametrize(("kind", "local", "left", "visited"), SHORT_RINGS)
def test_a_window_shortens_the_ring(kind: str, local: int, left: int, visited: list[int]) -> None:
    layout, mask = TokenLayout(kind, 8 * local, 1, 8), MaskSpec.window(left)
    assert offsets(schedules(layout, mask)) == visited
    gathered = schedules(layout, mask, gather=True, position="local_first")
    assert {len(plan.steps) for plan in gathered} == {min(len(visited), 2)}


def test_alone_the_nearest_block_comes_first_and_hides_the_others() -> None:
    for plan in schedules(TokenLayout("zigzag", 80, 1, 5), MaskSpec.full(), gather=True):
        before = (plan.ring_rank - 1) % 5
        assert [[run.rank for run in step.kv_ranges] for step in plan.steps[1:]] == [
            [before],
            [(plan.ring_rank + apart) % 5 for apart in (1, 2, 3)],
        ]


@pytest.mark.parametrize("seq_len", [64, 63, 62, 61])
def test_a_zigzag_shard_is_cut_where_its_remote_steps_begin(seq_len: int) -> None:
    steps = ring_schedule(TokenLayout("zigzag", seq_len, 1, 2), CAUSAL, 0).backward_steps
    early, remote, late = [[(call.q_start, call.q_stop) for call in x.calls] for x in steps]
    assert early[0][1] == remote[0][0] == late[0][0] == 16


def test_causal_visits_every_block_and_one_rank_visits_its_own() -> None:
    for kind in ALL_LAYOUTS:
        (plan,) = schedules(TokenLayout(kind, 16), CAUSAL)
        assert len(plan.steps) == 1 and plan.pairs == 16 * 17 // 2
        for gather, steps in ((False, 4), (True, 2)):
            layout = TokenLayout(kind, 64, 1, 4)
            plans = schedules(layout, CAUSAL, gather=gather, position="local_first")
            assert {len(plan.steps) for plan in plans} == {steps}


# What the first two of three ring ranks give, step by step: (rank that takes it, start, stop).
TRAVEL = [
    # A later rank needs the first half of a zigzag block, an earlier one all of it.
    ("zigzag", CAUSAL, [[[(1, 0, 4)], [(2, 0, 4)]], [[(2, 0, 4)], [(0, 0, 8)]]]),
    ("contiguous", CAUSAL, [[[(1, 0, 8)], [(2, 0, 8)]], [[(2, 0, 8)], []]]),
    ("contiguous", MaskSpec.full(), [[[(1, 0, 8)], [(2, 0, 8)]], [[(2, 0, 8)], [(0, 0, 8)]]]),
    # Of a block before a window only the border travels.
    ("contiguous", MaskSpec.window(3), [[[(1, 5, 8)]], [[(2, 5, 8)]]]),
]


@pytest.mark.parametrize(("kind", "mask", "gives"), TRAVEL, ids=str)
def test_only_what_is_used_travels(
    kind: str, mask: MaskSpec, gives: list[list[list[tuple[int, int, int]]]]
) -> None:
    layout = TokenLayout(kind, 24, 1, 3)
    plans = schedules(layout, mask)[:2]
    assert [[list(step.send_ranges) for step in plan.steps[1:]] for plan in plans] == gives
    together = [[sorted(run for pieces in steps for run in pieces)] for steps in gives]
    plans = schedules(layout, mask, gather=True, position="local_first")[:2]
    assert [[list(step.send_ranges) for step in plan.steps[1:]] for plan in plans] == together


def test_equal_questions_share_one_plan() -> None:
    plans = [ring_schedule(TokenLayout("zigzag", 32, 2, 2), MaskSpec.causal(), 1) for _ in "ab"]
    assert plans[0] is plans[1]


@pytest.mark.parametrize("ring_rank", [-1, 2])
def test_a_rank_outside_the_ring_is_refused(ring_rank: int) -> None:
    with pytest.raises(LayoutError, match=f"ring rank {ring_rank}"):
        ring_schedule(TokenLayout("zigzag", 32, 2, 2), CAUSAL, ring_rank)


def test_keys_of_another_stride_are_refused_under_a_window() -> None:
    layouts = TokenLayout("striped", 32, 1, 4), TokenLayout("zigzag", 32, 1, 4)
    with pytest.raises(LayoutError, match="stride 4 cannot meet keys of stride 1"):
        ring_schedule(layouts[0], CAUSAL, 0, kv_layout=layouts[1])
