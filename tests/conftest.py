"""Fixtures and marks that every test shares."""

import gc
import os
import sys
from collections.abc import Iterator
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
from harness import WorkerPool, no_work, set_seeds  # noqa: E402

_POOL = pytest.StashKey[WorkerPool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tables in the docs be rewritten by the tests that check them."""
    parser.addoption(
        "--write-support-table", action="store_true", help="rewrite the tables in docs"
    )
    parser.addoption("--write-durations", action="store_true", help="rewrite tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
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


def pytest_collection_finish() -> None:
    """Spare every later garbage collection what is imported and collected until here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    set_seeds()


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
