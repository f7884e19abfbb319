"""The servers that fork worlds and starts of Megatron-LM, where a checkout of it is named."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout_runs import fixtures
from lm_start import Starts

checkout, server, pytest_collection_modifyitems = fixtures(
    "lm_adapter", "MEGATRON_LM_PATH", "megatron_lm"
)


@pytest.fixture(scope="session")
def starts(checkout: Path) -> Iterator[Starts]:
    starts = Starts(checkout)
    yield starts
    starts.close()
