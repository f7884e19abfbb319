"""The ring's plan: every pair once over all ranks, balanced, and no longer than it has to be."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import get_args

import oracle
import pytest
import torch
from cases import ALL_LAYOUTS, ALL_ORDERS

from ds_usp import LayoutError, MaskSpec, TokenLayout
from ds_usp.geometry.double_ring import TokenRange
from ds_usp.geometry.ring_schedule import ChunkPosition as Position
from ds_usp.geometry.ring_schedule import RingSchedule, RingStep, ring_schedule
from ds_usp.geometry.tiles import ANY_BAND, Tile, TileSupport

BALANCED = ("zigzag", "striped", "context_parallel")
CAUSAL = MaskSpec.causal()
PLACES: tuple[Position, ...] = get_args(Position)


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


def random_mask(draw: random.Random) -> MaskSpec:
    left, right = draw.randint(0, 20), draw.randint(0, 6)
    bounds = [(None, 0), (None, None), (left, 0), (left, right), (None, right), (left, None)]
    return MaskSpec(*draw.choice(bounds))


def random_support(draw: random.Random, mask: MaskSpec) -> TileSupport:
    window = mask.left is not None or draw.random() < 0.5
    return TileSupport(draw.random() < 0.5, window, tall=draw.random() < 0.5)


def travelling(plan: RingSchedule) -> list[RingStep]:
    """The steps in which something may travel."""
    return [step for step in plan.steps if not step.is_local]


Walks = list[tuple[int, tuple[RingStep, ...]]]


def forward(plans: list[RingSchedule]) -> Walks:
    return [(plan.ring_rank, plan.steps) for plan in plans]


def backward(plans: list[RingSchedule]) -> Walks:
    return [(plan.ring_rank, plan.backward_steps) for plan in plans]


def tiles_of(step: RingStep, sample: int = 0) -> list[Tile]:
    """The tiles of all calls of a step, of one sample."""
    return [
        tile for call in step.calls for tile in call.tiles[sample if len(call.tiles) > 1 else 0]
    ]


def computed(layout: TokenLayout, walks: Walks) -> torch.Tensor:
    """How often each (query, key) pair of the whole sequence is computed, by any rank's steps."""
    counts = torch.zeros(layout.seq_len, layout.seq_len, dtype=torch.int64)
    for ring_rank, steps in walks:
        q = torch.tensor(layout.ring_positions(ring_rank))
        for step in steps:
            # The keys as they lie in the buffer: the pieces one after the other.
            positions = [
                position
                for owner, start, stop in step.kv_ranges
                for position in layout.ring_positions(owner)[start:stop]
            ]
            assert step.num_kv_tokens == len(positions)
            k = torch.tensor(positions)
            for tile in tiles_of(step):
                rows, columns = q[tile.q_start : tile.q_stop], k[tile.k_start : tile.k_stop]
                # As a kernel reads the tile: a window aligned to the bottom right corner.
                shift = tile.columns - tile.rows
                pairs = oracle.window(
                    range(shift, shift + tile.rows), range(tile.columns), *tile.window
                )
                counts[rows[:, None], columns[None, :]] += pairs
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_every_allowed_pair_is_computed_exactly_once_by_the_whole_ring(seed: int) -> None:
    draw = random.Random(seed)
    for index in range(375):
        ulysses, ring = draw.randint(1, 4), draw.randint(1, 5)
        seq_len = 2 * ulysses * ring + draw.randint(0, 30)
        kind, order = ALL_LAYOUTS[index % 4], draw.choice(ALL_ORDERS)
        layout, mask = TokenLayout(kind, seq_len, ulysses, ring, order), random_mask(draw)
        support = random_support(draw, mask)
        gather, position = draw.random() < 0.6, draw.choice(PLACES)
        plans = schedules(layout, mask, support, gather, position)
        allowed = oracle.window(range(seq_len), range(seq_len), mask.left, mask.right)
        for walks in (forward(plans), backward(plans)):
            assert torch.equal(computed(layout, walks), allowed.long()), (layout, mask, support)
        assert sum(plan.pairs for plan in plans) == int(allowed.sum())
        check_own_blocks(layout, plans, position)
        check_visits(plans, 1 + (position == "only") if gather else None)
        check_travel(layout, plans, allowed)


def check_own_blocks(layout: TokenLayout, plans: list[RingSchedule], position: Position) -> None:
    """The own block comes first, where it stands; backward it comes last in the last part, and
    alone, its rows in two halves around the others. Later than another part it may come with the
    others', the last of them."""
    for rank, plan in enumerate(plans):
        assert (plan.ring_rank, plan.ring_degree) == (rank, layout.ring)
        first, *others = plan.steps
        length = layout.ring_length(rank)
        assert not any(step.is_local for step in others)
        if not first.is_local:
            assert position == "local_merged" and not others and plan.backward_steps == plan.steps
            assert first.kv_ranges[-1] == (rank, 0, length) and len(first.kv_ranges) > 1
            continue
        assert all(run.rank != rank for step in others for run in step.kv_ranges)
        if position == "local_last":
            assert plan.backward_steps == (*others, first)
            continue
        early, *middle = plan.backward_steps
        late = [middle.pop()] if others and position == "only" else []
        assert middle == others
        for step in (first, early, *late):
            assert (
                step.is_local and step.kv_ranges == ((rank, 0, length),) and step.send_ranges == ()
            )
        half = length // 2 if late else length
        assert all(call.q_stop <= half for call in early.calls)
        assert all(call.q_start >= half for step in late for call in step.calls)


def check_visits(plans: list[RingSchedule], gathered: int | None) -> None:
    """All ranks walk together and no step is in vain; gathered, there is a step or two."""
    steps = list(zip(*map(travelling, plans), strict=True))
    assert all(any(step.pairs for step in each) for each in steps)
    if gathered:
        assert len(steps) <= gathered
        for plan in plans:
            for step in travelling(plan):
                apart = [(plan.ring_rank - run.rank) % len(plans) for run in step.kv_ranges]
                assert apart == sorted(apart, reverse=True)
    else:
        visited = offsets(plans)
        assert visited[0] == 0 and visited == sorted(set(visited)), visited


def check_travel(layout: TokenLayout, plans: list[RingSchedule], allowed: torch.Tensor) -> None:
    """Of every block that a rank sees anything of, the runs that hold all of it come, once, without
    the gaps that are worth a message; and what comes is what its owner sends, parcel by parcel."""
    ring = layout.ring
    taken, given = [0] * ring, [0] * ring
    for user, plan in enumerate(plans):
        came = [run for step in plan.steps for run in step.kv_ranges if run.rank != user]
        wanted = []
        for owner in (rank for rank in range(ring) if rank != user):
            q, k = (torch.tensor(layout.ring_positions(rank)) for rank in (user, owner))
            seen = allowed[q][:, k].any(0).nonzero().flatten().tolist()
            wanted += [(owner, *run) for run in runs_of(seen, len(k))]
        assert sorted(came) == wanted
    for steps in zip(*map(travelling, plans), strict=True):
        for owner, step in enumerate(steps):
            sent = step.send_ranges
            # A user's pieces lie one after the other.
            assert list(step.peer_offsets) == [
                start
                for user in range(ring)
                if user != owner
                for start, run in placed(steps[user].kv_ranges)
                if run.rank == owner
            ]
            given[owner] = max(given[owner], sum(stop - start for _, start, stop in sent))
            for user in range(ring):
                if user == owner:
                    continue
                takes = [run for run in steps[user].kv_ranges if run.rank != user]
                assert [run[1:] for run in sent if run.rank == user] == [
                    run[1:] for run in takes if run.rank == owner
                ]
                taken[user] = max(taken[user], sum(stop - start for _, start, stop in takes))
    assert [plan.max_recv_per_step for plan in plans] == taken
    assert [plan.max_sent_per_step for plan in plans] == given
    longest = max(map(layout.ring_length, range(ring)))
    assert {plan.max_local_tokens for plan in plans} == {longest}
    assert {plan.max_recv_tokens for plan in plans} == {max(taken)}
    (mixed,) = {plan.max_merged_tokens for plan in plans}
    steps = [(each.ring_rank, step) for each in plans for step in travelling(each)]
    most = [
        step.num_kv_tokens for own, step in steps if own in {run.rank for run in step.kv_ranges}
    ]
    assert mixed == max(most, default=0)


def placed(takes: tuple[TokenRange, ...]) -> list[tuple[int, TokenRange]]:
    """Each run with the first of its tokens among all."""
    starts = accumulate((run.length for run in takes), initial=0)
    return list(zip(starts, takes, strict=False))


def runs_of(seen: list[int], owned: int) -> list[tuple[int, int]]:
    """Half-open runs of ascending tokens, cut at gaps of a 32nd of what their owner has or more."""
    gaps = (i for i in range(1, len(seen)) if 32 * (seen[i] - seen[i - 1] - 1) >= max(owned, 1))
    edges = [0, *gaps]
    parts = [seen[a:b] for a, b in zip(edges, [*edges[1:], len(seen)], strict=True)]
    return [(part[0], part[-1] + 1) for part in parts if part]


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


def test_kernels_without_windows_serve_every_mask_that_is_open_to_the_left() -> None:
    layout = TokenLayout("context_parallel", 20, 2, 5, "ring-ulysses")
    plans = schedules(layout, MaskSpec(None, 2), TileSupport(False, False))
    assert int(computed(layout, forward(plans)).sum()) == 20 * 21 // 2 + 19 + 18


@pytest.mark.parametrize("ring_rank", [-1, 2])
def test_a_rank_outside_the_ring_is_refused(ring_rank: int) -> None:
    with pytest.raises(LayoutError, match=f"ring rank {ring_rank}"):
        ring_schedule(TokenLayout("zigzag", 32, 2, 2), CAUSAL, ring_rank)
