"""Tests of models and trainers of other libraries, skipped where these are absent."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import harness
import pytest
import torch
from graph_tapes import Tape, Tapes

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
if not find_spec("diffusers"):  # which needs Python 3.11
    collect_ignore_glob.append("test_diffus*.py")

# Imported once by the server that ranks are forked from: alone, four ranks take 30 s of two cores.
harness.PRELOAD = (
    *harness.PRELOAD,
    "transformers.trainer",
    "transformers.models.qwen3.modeling_qwen3",
    "trl.trainer.sft_trainer",
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
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tape]]:
    """All graphs that a test has made, without autograd."""
    from ds_usp.integrations.diffusers import graphs, model

    monkeypatch.setattr(graphs, "CudaGraphs", Tapes)
    monkeypatch.setattr(graphs, "check_device", lambda *_: None)
    monkeypatch.setattr(model, "check_graphs", lambda *_: None)
    monkeypatch.setattr(Tapes, "made", [])
    with torch.no_grad():
        yield Tapes.made
