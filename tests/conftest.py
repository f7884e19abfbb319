"""Fixtures and marks that every test shares, and what is said of a run at its end."""

import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
MARK_OF_FOLDER = {
    "distributed": "dist",
    "megatron": "megatron",
    "megatron_deepspeed": "megatron_deepspeed",
    "integrations": "transformers",
    "gpu": "gpu",
}

# No test downloads anything; ranks and scripts that tests start take this over.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

# `from harness import ...` in every test, whichever folder it lies in; ranks get the same path.
for _folder in (str(TESTS), str(TESTS.parent)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)
# Programs are imported as from their own folders.
for _folder in ("examples_deepspeed/sequence_parallel", "scripts", "scripts/bench"):
    sys.path.append(str(TESTS.parent / _folder))

import fast_tier  # noqa: E402
from golden_curves import GoldenCurves  # noqa: E402
from harness import WorkerPool, no_work, set_seeds  # noqa: E402

_POOL = pytest.StashKey[WorkerPool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tables in the docs be rewritten by the tests that check them."""
    parser.addoption(
        "--write-support-table", action="store_true", help="rewrite the tables in docs"
    )
    parser.addoption("--write-durations", action="store_true", help="rewrite tests/durations.json")
    parser.addoption("--write-golden", action="store_true", help="record the curves that are run")
    parser.addoption("--record", type=Path, help="a JSON file of the run's result, or of one more")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(os, "SCHED_BATCH") and not torch.cuda.is_available():
        # For what the tests start too: a thread of gloo that a message wakes takes no core from
        # the rank that sends it. That rank holds a lock, on which other threads of gloo spin until
        # it runs again: a fifth of the time of ranks that share two cores.
        with suppress(OSError):  # where a container forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.getoption("--record")))
    if config.getoption("--write-durations"):
        config.pluginmanager.register(fast_tier.Durations())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and skip those that need a GPU where there is none."""
    no_gpu = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if TESTS in item.path.parents else ""
        if folder in MARK_OF_FOLDER:
            item.add_marker(MARK_OF_FOLDER[folder])
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
    fast_tier.mark_fast(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests and frameworks are imported, of which all is kept: a quarter
    of the time. Every later garbage collection is spared what is there by then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


class Outcomes:
    """Counts what the tests of a run came to, and says at its end why some were skipped.

    Several runs are one result where they have one file: each adds to what the file holds.
    """

    def __init__(self, record: Path | None) -> None:
        self.record = record
        self.passed = 0
        self.failed: list[str] = []
        self.skipped: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.start = time.time()
        if record and record.exists() and record.stat().st_size:
            before = json.loads(record.read_text())
            self.start = before["start"]
            self.passed = before.get("passed", 0)
            self.failed = before.get("failed", [])
            self.skipped.update(before.get("skipped", {}))
            self.seconds.update(before.get("seconds_of_files", {}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Of a file that is skipped, or fails, as a whole."""
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skipped, by reason")
            for reason, count in self.skipped.most_common():
                terminalreporter.write_line(f"{count:6} {reason}")
        if self.record:
            result = self.result()
            self.record.write_text(json.dumps(result, indent=1) + "\n")
            terminalreporter.section("recorded")
            counts = self.passed, len(self.failed), self.skipped.total()
            terminalreporter.write_line(
                "{} passed, {} failed, {} skipped".format(*counts)
                + f" in {result['seconds']} s on {result['machine']}: {self.record}"
            )

    def result(self) -> dict[str, object]:
        """What the file holds; the commit is ``GIT_COMMIT`` where there is no git."""
        git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        commit = subprocess.run(git, cwd=TESTS, capture_output=True, text=True).stdout.strip()
        gpus = Counter(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
        machine = [f"{count} x {name}" for name, count in gpus.items()]
        return {
            "start": self.start,
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.start)),
            "commit": commit or os.environ.get("GIT_COMMIT", "unknown"),
            "machine": ", ".join([*machine, f"{os.cpu_count()} CPU cores"]),
            "software": f"torch {torch.__version__}, CUDA {torch.version.cuda}",
            "seconds": round(time.time() - self.start),
            "passed": self.passed,
            "failed": self.failed,
            "skipped": dict(self.skipped.most_common()),
            "seconds_of_files": {k: round(s, 1) for k, s in sorted(self.seconds.items())},
        }


@pytest.fixture(autouse=True)
def seed() -> None:
    set_seeds()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> GoldenCurves:
    """The recorded curves of 20 steps."""
    return GoldenCurves(request.config.getoption("--write-golden"))


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Gloo ranks that the whole session shares."""
    workers = request.config.stash[_POOL] = WorkerPool()
    workers.run(no_work, 1)  # the server imports torch and the frameworks once, before any case
    yield workers
    workers.close()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks before a file that does not begin with them: they hold 40 MB each, and where
    they do not rest gloo wakes a hundred times a second for each group of each."""
    if nextitem is None or nextitem.path == item.path:
        return
    if "pool" not in getattr(nextitem, "fixturenames", ()) and _POOL in item.config.stash:
        item.config.stash[_POOL].close()
