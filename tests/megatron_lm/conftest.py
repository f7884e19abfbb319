"""The server that forks worlds of Megatron-LM, where a checkout of it is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lm_runs import TrainingServer
from lm_start import Starts

VARIABLE = "MEGATRON_LM_PATH"


@pytest.fixture(scope="session")
def checkout() -> Path:
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"{VARIABLE} is not set")
    return Path(path)


@pytest.fixture(scope="session")
def server(checkout: Path) -> Iterator[TrainingServer]:
    server = TrainingServer(checkout)
    yield server
    server.close()


@pytest.fixture(scope="session")
def starts(checkout: Path) -> Iterator[Starts]:
    starts = Starts(checkout)
    yield starts
    starts.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The full matrix runs with -m slow alone."""
    if "slow" not in config.option.markexpr:
        for item in items:
            if "slow" in item.keywords and item.path.parent.name == "megatron_lm":
                item.add_marker(pytest.mark.skip(reason="run the full matrix with -m slow"))
