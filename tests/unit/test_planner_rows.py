"""Rows of a profile that a planner cannot draw a line through are refused, one by one."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from ds_usp.errors import ConfigError
from ds_usp.planner.hardware import (
    Cluster,
    MeasuredAttention,
    MeasuredEmbeddingHead,
    MeasuredExchange,
    MeasuredLayer,
    MeasuredStep,
    load_cluster,
)

KINDS = {
    "layers": MeasuredLayer(64, 128, 64, 32, True, 1, 48, 0.1, 0.2, 0.01, 0.02),
    "calls": MeasuredAttention(2, 1, 96, 4, 2, 16, 0.1, 0.2),
    "ends": MeasuredEmbeddingHead(64, 100, 1, 48, 0.1),
    "steps": MeasuredStep(1000, 0, 4, 0.1),
    "exchanges": MeasuredExchange("all_to_all", 2, 1024, 0.1),
}


def loaded(folder: Path, kind: str, *rows: dict[str, object]) -> Cluster:
    file = folder / "mine.json"
    file.write_text(json.dumps({"base": "h200", kind: rows}))
    return load_cluster(str(file))


@pytest.mark.parametrize("kind", KINDS)
def test_a_thing_is_measured_once(tmp_path: Path, kind: str) -> None:
    """Two times of one size have no line through them, nor has the planner a reason to choose."""
    row = vars(KINDS[kind])
    seconds = "seconds" if "seconds" in row else "forward_s"
    for name in row:
        if not name.endswith(("_s", "seconds")):  # another thing, then
            other = {"gated": False, "zero": 1, "collective": "p2p"}.get(name, 3)
            assert loaded(tmp_path, kind, row, {**row, name: other}).name == "mine"
    with pytest.raises(ConfigError, match=f"{kind}: two rows of .*: leave one of them out"):
        loaded(tmp_path, kind, row, {**row, seconds: 0.3})


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_rows(tmp_path: Path, kind: str) -> None:
    row = vars(KINDS[kind])
    not_a_number = (float("nan"), True, "4", None)
    wrong: dict[str, tuple[object, ...]] = {
        "Count": (1.5, 0, -1, *not_a_number),
        "ZeroStage": (1.5, 4, -1, *not_a_number),
        "Positive": (0, -0.1, float("inf"), *not_a_number),
        "LaunchSeconds": (-0.1, float("inf"), *not_a_number),
        "bool": (1, "yes"),
        "Collective": ("all_to_some", 3),
    }
    for field in fields(KINDS[kind]):
        for value in wrong[str(field.type)]:
            with pytest.raises(ConfigError, match=f"{kind}: {field.name}=.* must be "):
                loaded(tmp_path, kind, {**row, field.name: value})


def test_what_may_be_zero(tmp_path: Path) -> None:
    layer = vars(KINDS["layers"])
    assert loaded(tmp_path, "layers", {**layer, "forward_host_s": 0}).layers[0].forward_host_s == 0
    with pytest.raises(ConfigError, match=r"forward_host_s=-1 must be .* above 0, or 0: not known"):
        loaded(tmp_path, "layers", {**layer, "forward_host_s": -1})
    step = vars(KINDS["steps"])
    assert loaded(tmp_path, "steps", {**step, "zero": 0}).steps[0].zero == 0
    with pytest.raises(ConfigError, match="zero=4 must be 0, 1, 2 or 3"):
        loaded(tmp_path, "steps", {**step, "zero": 4})
