"""Tests of models and trainers of other libraries, skipped where these are absent."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import harness
import pytest
from graph_tapes import Tape, tapes_for_graphs


class NotInstalled(pytest.Module):
    """A file of tests whose library is absent: not imported, and one skip in the summary."""

    def collect(self) -> list[pytest.Item]:
        name = missing_library(self.path)
        tests = len(re.findall(r"^def test_", self.path.read_text(encoding="utf-8"), re.MULTILINE))
        pytest.skip(f"{name} is not installed: {tests} tests of {self.path.name} do not run")


def missing_library(path: Path) -> str:
    """The library, or the version, that a file of tests needs and that is absent; "" if all are
    here."""
    needed = ["transformers"]
    if path.name.startswith("test_diffus"):
        needed.append("diffusers")  # which needs Python 3.11
    missing = next((name for name in needed if find_spec(name) is None), "")
    if not missing and path.name in ("test_recurrent_layers.py", "test_sparse_layers.py"):
        from tiny_models import HAS_STATES, OLDEST_WITH_STATES

        missing = "" if HAS_STATES else f"transformers>={OLDEST_WITH_STATES}"
    return missing


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Say of each file that cannot run that it does not, and how many tests it has."""
    if missing_library(module_path):
        return NotInstalled.from_parent(parent, path=module_path)
    return None


# Imported once by the server that ranks are forked from: alone, four ranks take 30 s of two cores.
harness.PRELOAD = (
    *harness.PRELOAD,
    "transformers.trainer",
    "transformers.models.qwen3.modeling_qwen3",
    "trl.trainer.sft_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
    "peft",
    "ds_usp.integrations.transformers",
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.wan.pipeline_wan",
    "ds_usp.integrations.diffusers",
    "hf_trainer_runs",
    "model_runs",
    "training_models",
    "further_diffusers",
    "tiny_diffusers",
)


@pytest.fixture
def tapes() -> Iterator[list[Tape]]:
    """All graphs that a test has made, without autograd."""
    with tapes_for_graphs() as made:
        yield made
