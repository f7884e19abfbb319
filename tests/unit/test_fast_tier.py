"""The fast tier: which cases it takes, and that a slow one fails it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fast_tier


def test_cases_are_spread_over_their_function() -> None:
    assert fast_tier.spread(10, 3) == {0, 3, 6}
    assert fast_tier.spread(2, 5) == {0, 1}
    assert fast_tier.function_of("tests/unit/test_x.py::test_y[a[0]]") == "unit/test_x.py::test_y"


def test_a_case_that_is_too_slow_fails_the_tier(tmp_path: Path) -> None:
    """In a run of its own, with the limit at 10 ms."""
    tests = Path(fast_tier.__file__).parent
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path[:0] = [{str(tests)!r}, {str(tests.parent)!r}]\n"
        "import fast_tier\nfast_tier.CASE_S = 0.01\nfrom conftest_of_tests import *\n"
    )
    (tmp_path / "conftest_of_tests.py").write_text((tests / "conftest.py").read_text())
    (tmp_path / "test_a.py").write_text(
        "import time, pytest\n"
        "@pytest.mark.fast\ndef test_slow(): time.sleep(0.1)\n"
        "@pytest.mark.fast\ndef test_quick(): pass\n"
        "def test_elsewhere(): time.sleep(0.1)\n"
    )
    flags = ("-q", "-p", "no:cacheprovider", "-m", "fast", "--rootdir", str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, "-c", "/dev/null", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed, 1 deselected" in run.stdout, run.stdout + run.stderr
    assert "test_slow took 0.1 s in the fast tier, at most 0.01" in run.stdout
