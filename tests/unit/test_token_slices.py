"""Slices of equal length of a ring rank's tokens, beside its positions."""

from __future__ import annotations

import pytest

from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.token_slices import TokenSlices


def slices_of(layout: TokenLayout, ring_rank: int) -> TokenSlices | None:
    return TokenSlices.of_runs(layout.runs(ring_rank), layout.ulysses)


@pytest.mark.parametrize("ulysses", [1, 2, 3, 4])
@pytest.mark.parametrize("ring", [1, 2, 3])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped", "context_parallel"])
def test_slices_lead_to_the_tokens_that_a_rank_holds(kind: str, ring: int, ulysses: int) -> None:
    layout = TokenLayout(kind, 12 * ulysses * ring, ulysses, ring)
    for ring_rank in range(ring):
        slices = slices_of(layout, ring_rank)
        assert slices is not None
        assert slices.in_rank_order == (kind != "context_parallel" or ulysses == 1)
        ranks = [layout.sp_rank(rank, ring_rank) for rank in range(ulysses)]
        tokens = sorted(position for rank in ranks for position in layout.positions(rank))
        length = 12 // slices.per_rank
        for rank, numbers in zip(ranks, slices.of_rank, strict=True):
            held = [tokens[number * length + i] for number in numbers for i in range(length)]
            assert held == list(layout.positions(rank))


@pytest.mark.parametrize("kind, seq_len", [("contiguous", 25), ("context_parallel", 30)])
def test_unequal_slices_are_none(kind: str, seq_len: int) -> None:
    assert slices_of(TokenLayout(kind, seq_len, 2, 2), 0) is None


def test_slices_of_many_documents_are_none() -> None:
    layout = TokenLayout("context_parallel", 32, 2, 1, documents=(0, 16, 32))
    assert slices_of(layout, 0) is None
