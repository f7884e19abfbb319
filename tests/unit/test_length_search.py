"""The search for the longest sequence: lengths it tries, and where it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.append(str(BENCH))

from length_search import Search  # noqa: E402


def trials(capacity: int, fixed: int, per_token: int, *, limit: int | None = None) -> Search:
    """All trials of a machine on which ``fixed + per_token * tokens`` bytes are allocated."""
    search = Search(capacity, first=1024, unit=256)
    for _ in range(20):
        tokens = search.next()
        if tokens is None:
            return search
        assert tokens % 256 == 0 and tokens not in (*search.peaks, search.failed)
        if tokens > (limit or (capacity - fixed) // per_token):
            assert search.failed is None or tokens < search.failed
            search.failed = tokens
        else:
            assert tokens > search.longest
            search.peaks[tokens] = fixed + per_token * tokens
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("fixed", [0, 10**6])
@pytest.mark.parametrize("longest", [100, 1500, 2048, 50_000, 1_000_000])
def test_the_longest_sequence_is_within_3_percent_or_a_unit(fixed: int, longest: int) -> None:
    search = trials(fixed + 7 * longest, fixed, 7)
    assert (
        search.longest
        <= longest
        < search.failed
        <= max(search.longest + 256, 1.03 * search.longest + 256)
    )
    assert len(search.peaks) <= 6


def test_a_limit_before_the_memory_ends_is_bracketed() -> None:
    search = trials(10**9, 0, 7, limit=30_000)
    assert search.longest <= 30_000 < search.failed <= 1.04 * 30_000
