"""The fast tier: which cases it takes, and that a slow one fails it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
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


@pytest.mark.parametrize(
    ("library", "names"),
    [
        ("transformers", ("test_weights.py", "test_diffusers_page.py")),
        ("diffusers", ("test_diffusers_page.py",)),
    ],
)
def test_files_whose_library_is_absent_are_skips_with_a_count(
    library: str, names: tuple[str, ...]
) -> None:
    """They must not vanish from a run without a line."""
    hide = (
        "import importlib.util as util, sys, pytest; found = util.find_spec\n"
        f"util.find_spec = lambda name, *rest: name != {library!r} and found(name, *rest) or None\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    folder = Path(__file__).parents[1] / "integrations"
    flags = ("-q", "-p", "no:cacheprovider", *(str(folder / name) for name in names))
    done = subprocess.run([sys.executable, "-c", hide, *flags], capture_output=True, text=True)
    for name in names:
        tests = (folder / name).read_text().count("\ndef test_")
        assert f"{library} is not installed: {tests} tests of {name} do not run" in done.stdout
    assert f"{len(names)} skipped" in done.stdout
