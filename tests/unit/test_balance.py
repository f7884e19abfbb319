"""The layout that is made for documents: as many tokens and as much work on every ring rank."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp import ConfigError, LayoutError, MaskSpec, TokenLayout
from ds_usp.geometry.rank_pair_balance import SearchBudget, rebalance_pair
from ds_usp.geometry.ring_schedule import ring_schedule


def log_uniform(seed: int, tokens: int, shortest: int, longest: int) -> list[int]:
    """Borders of documents whose lengths are log-uniform, the last one cut."""
    draw, borders = random.Random(seed), [0]
    while borders[-1] < tokens:
        length = int(shortest * (longest / shortest) ** draw.random())
        borders.append(min(tokens, borders[-1] + length))
    return borders


def imbalance(borders: list[int], ring: int) -> float:
    """Work of the busiest ring rank over the mean, query by query; work adds up."""
    layout = TokenLayout("balanced", borders[-1], 2, ring, documents=borders)
    lengths = torch.tensor([b - a for a, b in pairwise(borders)])
    starts = torch.tensor(borders[:-1]).repeat_interleave(lengths)
    pairs = torch.arange(borders[-1]) - starts + 1
    work = [int(pairs[layout.ring_positions(rank)].sum()) for rank in range(ring)]
    assert sum(work) == int(pairs.sum())
    return max(work) * ring / sum(work)


@pytest.mark.parametrize("ring", [2, 4, 8])
@pytest.mark.parametrize("longest", [512, 8192, 32768])
def test_work_is_balanced(ring: int, longest: int) -> None:
    assert imbalance(log_uniform(ring, 1 << 17, 64, longest), ring) <= 1.05


def test_few_documents_are_rebalanced_until_ranks_are_even() -> None:
    """A greedy split leaves 3 to 5 % here; one document split in the right place evens it."""
    imbalances = [
        imbalance(log_uniform(seed, 1 << 15, 512, 8192), ring)
        for seed in range(20)
        for ring in (2, 4)
    ]
    assert max(imbalances) <= 1.03
    assert sorted(imbalances)[len(imbalances) // 2] <= 1.005


@given(st.data(), st.integers(0, 10**6), st.integers(2, 400), st.sampled_from([3, 40, 400]))
@examples(100)
def test_rebalancing_keeps_the_tokens_of_both_ranks(
    data: st.DataObject, seed: int, tokens: int, longest: int
) -> None:
    borders = log_uniform(seed, tokens, 1, longest)
    splits = data.draw(st.sets(st.integers(0, tokens), max_size=6)) | {0, tokens}
    runs = data.draw(st.permutations(list(pairwise(sorted(splits)))))
    at = data.draw(st.integers(0, len(runs)))
    budget = SearchBudget(data.draw(st.sampled_from([0, 100, 5000])))
    before, after = (runs[:at], runs[at:]), rebalance_pair(borders, runs[:at], runs[at:], budget)
    for old, new in zip(before, after, strict=True):
        assert sum(b - a for a, b in old) == sum(b - a for a, b in new)
    assert sorted(i for run in (*after[0], *after[1]) for i in range(*run)) == list(range(tokens))
    loads = [
        max(sum(pairs_seen(borders, *run) for run in side) for side in pair)
        for pair in (before, after)
    ]
    assert loads[1] <= loads[0]


def pairs_seen(borders: list[int], start: int, stop: int) -> int:
    """(query, key) pairs, query by query."""
    return sum(i - max(b for b in borders if b <= i) + 1 for i in range(start, stop))


def test_short_documents_stay_whole_and_nothing_of_them_travels() -> None:
    tokens = 1 << 14
    borders = list(range(0, tokens + 1, 128))
    layout = TokenLayout("balanced", tokens, 1, 4, documents=borders)
    plans = [ring_schedule(layout, MaskSpec.causal(borders), rank) for rank in range(4)]
    assert all(len(plan.steps) == 1 and len(plan.steps[0].calls) == 1 for plan in plans)
    assert {plan.pairs for plan in plans} == {32 * 128 * 129 // 2}
    # Neighbours stay together: shards are few runs, which copies go by.
    assert all(len(layout.ring_segments(rank)) <= 32 for rank in range(4))


def test_one_document_is_a_zigzag() -> None:
    for ring in (1, 2, 5):
        one = TokenLayout("balanced", 60 * ring, 1, ring, documents=[0, 60 * ring])
        zigzag = TokenLayout("zigzag", 60 * ring, 1, ring)
        assert [one.segments(r) for r in range(ring)] == [zigzag.segments(r) for r in range(ring)]


WRONG: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "no documents": (("balanced", 16, 1, 2), LayoutError, "none were given"),
    "of each sample": (
        ("balanced", 16, 1, 2, "ulysses-ring", [[0, 16], [0, 4, 16]]),
        LayoutError,
        "borders for each of 2 samples, and all samples of a batch share one layout",
    ),
    "another length": (
        ("balanced", 16, 1, 2, "ulysses-ring", [0, 15]),
        LayoutError,
        "end at 15, the sequence has 16",
    ),
    "does not divide": (
        ("context_parallel", 16, 1, 2, "ulysses-ring", [0, 6, 16]),
        LayoutError,
        "of 6 tokens does not divide into 4 chunks",
    ),
    "another layout": (("zigzag", 16, 1, 2, "ulysses-ring", [0, 16]), LayoutError, "'zigzag'"),
    "no borders": (("balanced", 16, 1, 2, "ulysses-ring", [3, 16]), ConfigError, "from 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    arguments, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        TokenLayout(*arguments)


def test_megatron_cores_packed_order_is_a_zigzag_for_each_document() -> None:
    layout = TokenLayout("context_parallel", 24, 1, 2, documents=[0, 8, 24])
    assert layout.positions(0) == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    assert layout.positions(1) == [2, 3, 4, 5, *range(12, 20)]


def test_a_layout_of_documents_is_a_value_that_prints() -> None:
    layout = TokenLayout("balanced", 8, 1, 2, documents=torch.tensor([0, 3, 8]))
    assert layout == TokenLayout("balanced", 8, 1, 2, documents=[0, 3, 3, 8])
    assert str(layout) == "balanced(8 tokens in documents 0-3-8, ulysses 1 x ring 2)"
