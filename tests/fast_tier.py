"""Which cases ``scripts/test.sh fast`` runs, from measured durations.

Every test function outside of the framework and GPU folders is in the fast tier, with as many of
its cases as fit ``FUNCTION_S`` seconds, spread evenly over them; a function whose single case is
slower than ``CASE_S`` is not. ``durations.json`` holds the seconds of each function's cases, from a
run of all tests with ``--write-durations``; a function without an entry is fast. Seconds that have
passed say nothing of a test on a machine with other work: no case fails for them. Whoever adds a
slow test sees it in the durations that ``scripts/test.sh --durations 20`` prints, and writes the
file anew.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

CASE_S = 5.0
FUNCTION_S = 1.5
FOLDERS = ("unit/", "distributed/", "examples/")
DURATIONS = Path(__file__).with_name("durations.json")
MARK = "fast"


def function_of(nodeid: str) -> str:
    """The test function of a case: its node id without ``tests/`` and parameters."""
    return nodeid.removeprefix("tests/").partition("[")[0]


def spread(count: int, chosen: int) -> set[int]:
    """Positions of ``chosen`` of ``count`` cases, the first among them, evenly spread."""
    chosen = min(chosen, count)
    return {index * count // chosen for index in range(chosen)}


def mark_fast(items: Iterable[pytest.Item]) -> None:
    seconds = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    functions = defaultdict(list)
    for item in items:
        name = function_of(item.nodeid)
        if name.startswith(FOLDERS):
            functions[name].append(item)
    for name, cases in functions.items():
        case_s = seconds.get(name, 0.0) / len(cases)
        if case_s <= CASE_S / 3:  # a loaded machine takes several times as long
            chosen = max(1, int(FUNCTION_S / case_s)) if case_s else len(cases)
            for index in spread(len(cases), chosen):
                cases[index].add_marker(MARK)


class Durations:
    """Adds up what the cases of each function take; the process that reports writes the file."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = function_of(report.nodeid)
        if not report.skipped and name.startswith(FOLDERS):
            self.seconds[name] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        rows = {name: round(s, 1) for name, s in sorted(self.seconds.items()) if s >= 0.5}
        lines = ",\n".join(f"  {json.dumps(name)}: {seconds}" for name, seconds in rows.items())
        if not hasattr(session.config, "workerinput"):
            DURATIONS.write_text("{\n" + lines + "\n}\n")
