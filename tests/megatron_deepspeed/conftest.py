"""The server that forks worlds of the real host, where a checkout of it is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_runs import HostServer

VARIABLE = "MEGATRON_DEEPSPEED_PATH"


@pytest.fixture(scope="session")
def checkout() -> Path:
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"{VARIABLE} is not set")
    return Path(path)


@pytest.fixture(scope="session")
def host(checkout: Path) -> Iterator[HostServer]:
    server = HostServer(checkout)
    yield server
    server.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The full matrix runs when it is asked for: -m slow."""
    if "slow" not in config.option.markexpr:
        for item in items:
            if "slow" in item.keywords and item.path.parent.name == "megatron_deepspeed":
                item.add_marker(pytest.mark.skip(reason="run the full matrix with -m slow"))
