"""Runs of bench_length.py: the trainer's own losses, one row a step, and no memory left behind."""

from __future__ import annotations

import csv
import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankContext, fork_world
from trainer_runs import TRAINER, read_sources_once, relative_difference

BENCH = TRAINER.parents[1] / "scripts" / "bench"
LAYERS, STEPS = 2, 2


def large_storages() -> int:
    gc.collect()
    storages = (x.untyped_storage() for x in gc.get_objects() if isinstance(x, torch.Tensor))
    return len({x.data_ptr() for x in storages if x.nbytes() > 50_000})


def parts_on_rank(ctx: RankContext, folder: str) -> tuple[list[dict[str, Any]], int]:
    """Rows of a run with all settings and of one with none, and what they leave."""
    sys.path.insert(0, str(BENCH))
    import bench_length
    from bench_harness import Session
    from length_runs import Trained

    from ds_usp.training import prepare_deepspeed

    read_sources_once()
    prepare_deepspeed()
    line = ["train", "--smoke", "--device", "cpu", "--out", folder, "--steps", str(STEPS)]
    line += ["--layers", str(LAYERS), "--tokens", "128"]
    with mock.patch.object(sys, "argv", [str(BENCH / "bench_length.py"), *line]):
        args = bench_length.parse()
        session = Session(torch.device("cpu"), ctx.rank, ctx.world)
        before = large_storages()
        bench_length.train(session, args)
        plain = bench_length.new_run(args, "none")
        Trained(session, plain, args.out, 0.0, "train").train()
    path = args.out / "length.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()] if ctx.rank == 0 else []
    return rows, large_storages() - before


def test_all_settings_train_as_none_and_leave_nothing(tmp_path: Path) -> None:
    (rows, left), (_, left_on_other) = fork_world(parts_on_rank, 2, folder=str(tmp_path))
    assert (left, left_on_other) == (0, 0)
    assert [(row["name"], row["step"]) for row in rows] == [
        (name, step + 1) for name in ("train", "none") for step in range(STEPS)
    ]
    numbers = [(row["loss"], row["grad_norm"]) for row in rows]
    assert relative_difference(numbers[:STEPS], numbers[STEPS:]) < 2e-5
    assert numbers[0] != numbers[1]
    settings, plain = rows[STEPS - 1], rows[-1]
    assert settings["states_gib"] == pytest.approx(settings["predicted_host_gib"], abs=2e-3)
    assert settings["predicted_gib"] < plain["predicted_gib"]
    assert plain["of_layers_s"].keys() == {
        f"{part} {direction}"
        for part in ("layer", "attention")
        for direction in ("forward", "backward")
    }
    text = (tmp_path / "moments.csv").read_text(encoding="utf-8").splitlines()
    moments = list(csv.DictReader(line for line in text if not line.startswith("#")))
    forward = [f"forward {n + 1}" for n in range(LAYERS)]
    backward = [f"backward {n}" for n in range(LAYERS, 0, -1)]
    assert [row["place"] for row in moments] == STEPS * [*forward, *backward, "end"]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("", "none, all, none, other mesh, + recompute full, + loss in chunks, + MLP in chunks"),
        ("none;+ offload", "none, + offload"),
        ("only states on the host", "only states on the host"),
    ],
)
def test_flags_measures_the_named_runs(
    only: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = flags_without_training(tmp_path, monkeypatch, only)
    assert ", ".join(measured).startswith(names) and bool(only) == (len(measured) < 3)


def test_flags_refuses_a_name_that_no_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"--only 'offload': .* but none; all; .*\+ offload"):
        flags_without_training(tmp_path, monkeypatch, "offload")


def flags_without_training(folder: Path, monkeypatch: pytest.MonkeyPatch, only: str) -> list[str]:
    monkeypatch.syspath_prepend(str(BENCH))
    import bench_length

    measured: list[str] = []
    monkeypatch.setattr(bench_length, "_tried", lambda _, args, run: measured.append(run.name))
    line = ["flags", "--smoke", "--device", "cpu", "--out", str(folder)]
    line += ["--only", *only.split(";")] if only else []
    monkeypatch.setattr(sys, "argv", ["bench_length.py", *line])
    bench_length.flags(SimpleNamespace(rank=0, world=2, print0=print), bench_length.parse())
    return measured
