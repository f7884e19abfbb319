"""The server that forks worlds of Megatron-DeepSpeed, where a checkout of it is named."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mds_runs import TrainingServer
from programs import checkout_named_by, skip_full_matrix


@pytest.fixture(scope="session")
def checkout() -> Path:
    return checkout_named_by("MEGATRON_DEEPSPEED_PATH")


@pytest.fixture(scope="session")
def server(checkout: Path) -> Iterator[TrainingServer]:
    server = TrainingServer(checkout)
    yield server
    server.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The full matrix runs with -m slow alone."""
    skip_full_matrix(config, items, "megatron_deepspeed")
