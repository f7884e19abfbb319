"""Slices of a ring rank's tokens, beside its positions."""

from __future__ import annotations

import pytest

from ds_usp.geometry.layout import Run, TokenLayout
from ds_usp.geometry.token_slices import TokenSlices


def slices_of(layout: TokenLayout, ring_rank: int) -> TokenSlices | None:
    return TokenSlices.of_runs(layout.runs(ring_rank), layout.ulysses)


@pytest.mark.parametrize("rest", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("ulysses", [1, 2, 3, 4])
@pytest.mark.parametrize("ring", [1, 2, 3])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped", "context_parallel"])
def test_slices_lead_to_the_tokens_that_a_rank_holds(
    kind: str, ring: int, ulysses: int, rest: int
) -> None:
    layout = TokenLayout(kind, 12 * ulysses * ring + rest, ulysses, ring)
    for ring_rank in range(ring):
        slices = slices_of(layout, ring_rank)
        assert slices is not None
        assert slices.in_rank_order == (kind != "context_parallel" or ulysses == 1)
        ranks = [layout.sp_rank(rank, ring_rank) for rank in range(ulysses)]
        assert slices.lengths == [layout.length(rank) for rank in ranks]
        tokens = sorted(position for rank in ranks for position in layout.positions(rank))
        for rank, of_rank in zip(ranks, slices.of_rank, strict=True):
            held = layout.positions(rank)
            for start, stop, row in of_rank:
                assert tokens[start:stop] == held[row : row + stop - start]
            assert sum(x.length for x in of_rank) == len(held)


def test_slices_of_many_documents_are_none() -> None:
    layout = TokenLayout("context_parallel", 32, 2, 1, documents=(0, 16, 32))
    assert slices_of(layout, 0) is None


def test_slices_in_another_order_than_the_ring_rank_s_are_none() -> None:
    runs = [Run(0, 2, 2), Run(1, 0, 4), Run(0, 0, 2)]
    assert TokenSlices.of_runs(runs, 2) is None
    assert TokenSlices.of_runs([Run(0, 0, 4)], 2) is None, "a rank without tokens"
