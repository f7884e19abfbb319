"""What bench_length.py searches and tabulates: lengths it tries, where it ends, differences."""

import pytest
from length_search import Search
from length_table import runs_of, table


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
def test_the_longest_sequence_is_within_3_percent_or_a_unit(fixed, longest):
    search = trials(fixed + 7 * longest, fixed, 7)
    assert (
        search.longest
        <= longest
        < search.failed
        <= max(search.longest + 256, 1.03 * search.longest + 256)
    )
    assert len(search.peaks) <= 6


def test_a_limit_before_the_memory_ends_is_bracketed():
    search = trials(10**9, 0, 7, limit=30_000)
    assert search.longest <= 30_000 < search.failed <= 1.04 * 30_000


def test_the_table_has_the_largest_difference_and_the_median_of_later_steps():
    sizes = {"peak_gib": 3.0, "pinned_gib": 0.5, "states_gib": 0.25, "predicted_gib": 2.5}
    rows = [
        {"part": "flags", "name": name, "step": n + 1, "loss": loss, "grad_norm": 2.0, **sizes}
        | {"seconds": 9.0 if n == 0 else pace}
        for name, losses, pace in (
            ("none", (7.0, 5.0, 4.0), 1.0),  # an earlier run of the same name
            ("none", (4.0, 2.0, 1.0), 2.0),
            ("all", (4.0, 2.5, 1.0), 3.0),
        )
        for n, loss in enumerate(losses)
    ]
    rows += [{"part": "layer", "name": "all", "step": 1}, {"part": "flags", "refused": "no memory"}]
    lines = table(runs_of(rows))
    assert "| all | 3 | 2.5e-01 | 0.0e+00 |" in lines
    assert "| none | 2.00 | 1.00 | 3.0 | 0.8 | 2.5 |" in lines
    assert "| all | 3.00 | 1.50 | 3.0 | 0.8 | 2.5 |" in lines


@pytest.mark.parametrize(("capacity", "second"), [(8 * 1024, 1280), (100 * 1024, 2048)])
def test_the_second_length_fits_by_the_first(capacity, second):
    search = Search(capacity, first=1024, unit=256)
    assert search.next() == 1024
    search.peaks[1024] = 6 * 1024
    assert search.next() == second


def test_a_table_without_the_plain_run_has_no_ratio():
    sizes = {"peak_gib": 3.0, "pinned_gib": 0.5, "states_gib": 0.25, "predicted_gib": 2.5}
    row = {"part": "flags", "name": "all", "step": 1, "loss": 4.0, "seconds": 3.0, **sizes}
    assert table(runs_of([row]))[-1] == "| all | 3.00 |  | 3.0 | 0.8 | 2.5 |"
