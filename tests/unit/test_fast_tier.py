"""The fast tier: which cases it takes, and that a slow one fails it."""

from __future__ import annotations

from typing import Literal

import fast_tier
import pytest


def test_cases_are_spread_over_their_function() -> None:
    assert fast_tier.spread(10, 3) == {0, 3, 6}
    assert fast_tier.spread(2, 5) == {0, 1}
    assert fast_tier.function_of("tests/unit/test_x.py::test_y[a[0]]") == "unit/test_x.py::test_y"


@pytest.mark.parametrize(
    ("when", "seconds", "outcome"),
    [("call", 9.0, "failed"), ("call", 4.9, "passed"), ("setup", 9.0, "passed")],
)
def test_a_case_that_is_too_slow_fails_the_tier(
    when: Literal["call", "setup"], seconds: float, outcome: str
) -> None:
    report = pytest.TestReport("a", ("", 0, ""), {}, "passed", None, when, duration=seconds)
    fast_tier.fail_if_slow(report)
    assert report.outcome == outcome
    if report.failed:
        assert "a took 9.0 s in the fast tier, at most 5 are allowed" in str(report.longrepr)
