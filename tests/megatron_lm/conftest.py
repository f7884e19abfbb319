"""The server that forks worlds of Megatron-LM, where a checkout of it is named."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lm_runs import TrainingServer
from lm_start import Starts
from programs import checkout_named_by, skip_full_matrix


@pytest.fixture(scope="session")
def checkout() -> Path:
    return checkout_named_by("MEGATRON_LM_PATH")


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
    skip_full_matrix(config, items, "megatron_lm")
