"""Packed documents: borders that are right or refused, and plans that cover every pair once."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import ALL_LAYOUTS

from ds_usp import ConfigError, MaskSpec, TokenLayout
from ds_usp.geometry.document_sharding import balance_documents
from ds_usp.geometry.kernel_calls import kernel_calls_from_tiles
from ds_usp.geometry.ring_schedule import ring_schedule
from ds_usp.geometry.ring_traffic import visible_runs
from ds_usp.geometry.tiles import Tile

Borders = list[int]


# ------------------------------------------------------------------ the mask


def test_samples_have_their_own_documents() -> None:
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
def test_borders_of_any_kind_are_one_value(given: Any) -> None:
    masks = [MaskSpec.causal(documents=given), MaskSpec.causal([0, 5, 17])]
    assert masks[0].documents == ((0, 5, 17),) and masks[0] == masks[1]
    assert hash(masks[0]) == hash(masks[1]) and masks[0] != MaskSpec.causal()
    assert MaskSpec.window(3, 1, given) == MaskSpec(3, 1, [0, 5, 17])
    assert MaskSpec.full(given).band == MaskSpec.full() and not masks[0].is_causal


def test_names_tell_documents_apart() -> None:
    assert str(MaskSpec.causal([0, 5, 17])) == "causal in documents 0-5-17"
    assert str(MaskSpec.window(2, 1, [0, 4])) == "window(2, 1) in documents 0-4"
    assert str(MaskSpec.full([[0, 4], [0, 1, 4]])) == "full in documents 0-4 | 0-1-4"
    many = [str(MaskSpec.causal(range(0, end, 2))) for end in (200, 202)]
    assert many[0] != many[1] and all(len(text) < 80 and "documents" in text for text in many)


@pytest.mark.parametrize(
    ("borders", "messages"),
    [
        ([1, 5], ["[1, 5]", "from 0"]),
        ([0], ["[0]", "to the length"]),
        ([0, 0], ["to the length"]),
        ([0, 7, 5, 9], ["border 2 is 5, after one of 7"]),
        ([0, 2.0], ["whole numbers", "2.0"]),
        ([0, True], ["whole numbers"]),
        ([[0, 4], []], ["[]"]),
        ([], ["[]"]),
        (torch.tensor([], dtype=torch.int32), ["[]"]),
        ([[0, 4], 5], ["documents=5"]),
        ("0,4", ["'0,4'"]),
        (5, ["documents=5"]),
        (torch.tensor([0.0, 4.0]), ["whole numbers"]),
    ],
    ids=str,
)
def test_wrong_borders_are_refused_with_the_numbers(borders: Any, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        MaskSpec.causal(documents=borders)
    for message in messages:
        assert message in str(caught.value)


def test_documents_must_be_those_of_the_batch() -> None:
    MaskSpec.causal([0, 3, 8]).check_length(8, batch=5)
    MaskSpec.causal([[0, 8], [0, 8]]).check_length(8, batch=2)
    with pytest.raises(ConfigError, match="sample 1 end at 7, the sequence has 8 tokens"):
        MaskSpec.causal([[0, 8], [0, 7]]).check_length(8, batch=2)
    with pytest.raises(ConfigError, match="given for 2 samples, the batch has 3"):
        MaskSpec.causal([[0, 8], [0, 8]]).check_length(8, batch=3)


# ------------------------------------------------------------------ the plan


def test_the_own_step_covers_every_row() -> None:
    # Sums rely on it: a row that no call has touched yet has no log-sum-exp to compare with.
    mask = MaskSpec.window(2, documents=[0, 3, 4, 30, 64])
    for kind in ALL_LAYOUTS:
        layout = TokenLayout(kind, 64, 2, 4)
        for rank in range(4):
            own = ring_schedule(layout, mask, rank).steps[0]
            rows = {
                r for call in own.calls for t in call.tiles[0] for r in range(t.q_start, t.q_stop)
            }
            assert rows == set(range(layout.ring_length(rank)))


# Documents, and the tokens of each owner (a quarter of 64) that each user sees.
SEEN = {
    (0, 16, 32, 48, 64): {},
    (0, 10, 20, 64): {
        (1, 0): ((10, 16),),
        (2, 1): ((4, 16),),
        (3, 1): ((4, 16),),
        (3, 2): ((0, 16),),
    },
    (0, 48, 64): {(1, 0): ((0, 16),), (2, 0): ((0, 16),), (2, 1): ((0, 16),)},
}


@pytest.mark.parametrize("borders", SEEN, ids=str)
def test_what_nobody_sees_does_not_travel(borders: tuple[int, ...]) -> None:
    layout, mask = TokenLayout("contiguous", 64, 1, 4), MaskSpec.causal(borders)
    runs = visible_runs(layout, mask)
    pairs = [(user, owner) for user in range(4) for owner in range(4) if user != owner]
    assert {pair: runs[pair[0]][pair[1]] for pair in pairs if runs[pair[0]][pair[1]]} == SEEN[
        borders
    ]
    steps = {len(ring_schedule(layout, mask, rank).steps) for rank in range(4)}
    assert steps == {1 + len({user - owner for user, owner in SEEN[borders]})}


def test_halos_alone_travel() -> None:
    # The middle two quarters, of which the outer two see a border each.
    runs = visible_runs(TokenLayout("zigzag", 64, 1, 2), MaskSpec.window(2, 2))
    assert runs[0][1] == ((0, 2), (30, 32)) and runs[1][0] == ((14, 18),)


def test_many_documents_take_one_call_a_step() -> None:
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


def test_far_tiles_are_calls_of_their_own() -> None:
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
def test_planning_is_fast(borders: Sequence[int]) -> None:
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
