"""The ring's plan: balanced, never too long. That it is right is checked in
test_schedule_properties.py."""

import random
import time

import pytest
import torch
from cases import ALL_LAYOUTS, ALL_ORDERS

from ds_usp import ConfigError, LayoutError, MaskSpec, TokenLayout
from ds_usp.geometry.document_sharding import balance_documents
from ds_usp.geometry.ring_schedule import ChunkPosition as Position
from ds_usp.geometry.ring_schedule import RingSchedule, ring_schedule
from ds_usp.geometry.ring_traffic import visible_runs
from ds_usp.geometry.tiles import ANY_BAND, Tile, TileSupport, kernel_calls_from_tiles

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
def test_causal_takes_one_kernel_call_a_step(kind, order, support):
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


@pytest.mark.parametrize("kind", GATHERED)
def test_all_blocks_at_once_take_few_kernel_calls(kind):
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
@pytest.mark.parametrize("kind", ["contiguous", *BALANCED])
def test_causal_work_is_balanced_over_ranks_and_steps(kind, ring):
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
def test_uneven_lengths_stay_balanced(kind):
    for seq_len in range(256, 320):
        work = [plan.pairs for plan in schedules(TokenLayout(kind, seq_len, 1, 4), CAUSAL)]
        assert max(work) / min(work) < 1.08


def test_equal_questions_share_one_plan():
    plans = [ring_schedule(TokenLayout("zigzag", 32, 2, 2), MaskSpec.causal(), 1) for _ in "ab"]
    assert plans[0] is plans[1]


@pytest.mark.parametrize("ring_rank", [-1, 2])
def test_a_rank_outside_the_ring_is_refused(ring_rank):
    with pytest.raises(LayoutError, match=f"ring rank {ring_rank}"):
        ring_schedule(TokenLayout("zigzag", 32, 2, 2), CAUSAL, ring_rank)


# ------------------------------------------------------------------ the mask


def test_samples_have_their_own_documents():
    mask = MaskSpec.full(documents=[[0, 2, 4], [0, 4]])
    assert not mask.allows(1, 2, sample=0) and mask.allows(1, 2, sample=1)
    assert mask.samples == 2 and MaskSpec.full([[0, 4]]).samples is None


@pytest.mark.parametrize(
    "given",
    [
        [0, 5, 17],
        (0, 5, 17),
        torch.tensor([0, 5, 17], dtype=torch.int32),
        torch.tensor([0, 5, 17]).numpy(),
        list(torch.tensor([0, 5, 17])),
        [[0, 5, 17]],
        torch.tensor([[0, 5, 17]]),
        [torch.tensor([0, 5, 17])],
        [0, 0, 5, 5, 5, 17, 17],  # documents without tokens vanish
    ],
    ids=str,
)
def test_borders_of_any_kind_are_one_value(given):
    masks = [MaskSpec.causal(documents=given), MaskSpec.causal([0, 5, 17])]
    assert masks[0].documents == ((0, 5, 17),) and masks[0] == masks[1]
    assert hash(masks[0]) == hash(masks[1]) and masks[0] != MaskSpec.causal()
    assert MaskSpec.window(3, 1, given) == MaskSpec(3, 1, [0, 5, 17])
    assert MaskSpec.full(given).band == MaskSpec.full() and not masks[0].is_causal


def test_many_documents_have_names_that_differ():
    """Ranks compare the names."""
    many = [str(MaskSpec.causal(range(0, end, 2))) for end in (200, 202)]
    assert many[0] != many[1] and all(len(text) < 80 for text in many)


@pytest.mark.parametrize(
    ("borders", "number"),
    [
        ([1, 5], "[1, 5]"),
        ([0], "[0]"),
        ([0, 0], "[0, 0]"),
        ([0, 7, 5, 9], "5, after one of 7"),
        ([0, 2.0], "2.0"),
        ([0, True], "True"),
        ([[0, 4], []], "[]"),
        ([], "[]"),
        (torch.tensor([], dtype=torch.int32), "[]"),
        ([[0, 4], 5], "5"),
        ("0,4", "'0,4'"),
        (5, "documents=5"),
        (torch.tensor([0.0, 4.0]), "0.0"),
    ],
    ids=str,
)
def test_wrong_borders_are_refused_with_the_numbers(borders, number):
    with pytest.raises(ConfigError) as caught:
        MaskSpec.causal(documents=borders)
    assert number in str(caught.value)


# ------------------------------------------------------------------ the plan


def test_many_documents_take_one_call_a_step():
    tokens = 4096
    mask = MaskSpec.causal(range(0, tokens + 1, 16))
    for kind in ALL_LAYOUTS:
        layout = TokenLayout(kind, tokens, 1, 4)
        for rank in range(4):
            for step in ring_schedule(layout, mask, rank).steps:
                assert len(step.calls) <= 1, (kind, rank)
    # A window that most documents are shorter than is one call, too.
    window = MaskSpec.window(20, documents=[0, 5, 100, 103, 4096])
    (own,) = ring_schedule(TokenLayout("contiguous", tokens), window, 0).steps
    assert len(own.calls) == 1 and own.calls[0].window == (20, 0)


def test_far_tiles_are_calls_of_their_own():
    near = [Tile(0, 4, 0, 4, -3, 0), Tile(4, 8, 4, 8, -3, 0)]
    far = Tile(60, 64, 60, 64, -3, 0)
    calls = kernel_calls_from_tiles([[*near, far]], 64, 64)
    assert [call.q_span for call in calls] == [(0, 8), (60, 64)]
    assert calls[1].tile == far and calls[0].tile is None and calls[0].is_causal
    full = Tile(8, 12, 8, 12, -3, 3)
    assert len(kernel_calls_from_tiles([[*near, full]], 64, 64)) == 2, "one causal flag a call"


def exponential(tokens: int, mean: int, seed: int) -> list[int]:
    """Borders of documents of very different lengths, which a greedy split leaves uneven."""
    draw, borders = random.Random(seed), [0]
    while borders[-1] < tokens:
        borders.append(min(tokens, borders[-1] + 1 + int(draw.expovariate(1 / mean))))
    return borders


@pytest.mark.parametrize(
    "borders",
    [range(0, (1 << 17) + 1, 32), exponential(1 << 17, 1000, 3), exponential(1 << 17, 1000, 7)],
    ids=["equal", "many", "others"],
)
def test_planning_is_fast(borders):
    tokens = 1 << 17
    mask = MaskSpec.causal(borders)
    layout = TokenLayout("balanced", tokens, 2, 8, documents=mask.documents)
    best = 9.0
    for _ in range(3):  # the machine is shared
        balance_documents.cache_clear()
        visible_runs.cache_clear()
        ring_schedule.cache_clear()
        began = time.process_time()
        ring_schedule(layout, mask, 1)
        best = min(best, time.process_time() - began)
    assert best < 0.2
