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
STATES = "--usp-states-on-host"


def large_storages() -> int:
    gc.collect()
    storages = (x.untyped_storage() for x in gc.get_objects() if isinstance(x, torch.Tensor))
    return len({x.data_ptr() for x in storages if x.nbytes() > 50_000})


def parts_on_rank(ctx: RankContext, folder: str) -> tuple[list[dict[str, Any]], int, list[str]]:
    """Rows of a run with all settings and of one with none, what they leave, and why projections
    did not run under the exchanges."""
    sys.path.insert(0, str(BENCH))
    import bench_length
    from bench_harness import Session
    from length_runs import Trained

    from ds_usp.experimental import projected_attention
    from ds_usp.training import prepare_deepspeed

    read_sources_once()
    prepare_deepspeed()
    line = ["train", "--smoke", "--device", "cpu", "--out", folder, "--steps", str(STEPS)]
    line += ["--layers", str(LAYERS), "--tokens", "128"]
    reasons: list[str] = []
    with (
        mock.patch.object(sys, "argv", [str(BENCH / "bench_length.py"), *line]),
        mock.patch.object(
            projected_attention, "warn_plain", lambda reason, _: reasons.append(reason)
        ),
    ):
        args = bench_length.parse()
        session = Session(torch.device("cpu"), ctx.rank, ctx.world)
        before = large_storages()
        bench_length.train(session, args)
        plain = bench_length.new_run(args, "none")
        Trained(session, plain, args.out, 0.0, "train").train()
    path = args.out / "length.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()] if ctx.rank == 0 else []
    return rows, large_storages() - before, reasons


def test_all_settings_train_as_none_and_leave_nothing(tmp_path: Path) -> None:
    first, second = fork_world(parts_on_rank, 2, folder=str(tmp_path))
    rows, *_ = first
    for _, left, reasons in (first, second):
        assert (left, reasons) == (0, [])
    assert [(row["name"], row["step"]) for row in rows] == [
        (name, step + 1) for name in ("train", "none") for step in range(STEPS)
    ]
    numbers = [(row["loss"], row["grad_norm"]) for row in rows]
    assert relative_difference(numbers[:STEPS], numbers[STEPS:]) < 2e-5
    assert numbers[0] != numbers[1]
    settings, plain = rows[STEPS - 1], rows[-1]
    assert settings["states_gib"] == pytest.approx(settings["predicted_host_gib"], abs=2e-3)
    assert settings["predicted_gib"] < plain["predicted_gib"]
    assert plain["of_layers_s"].keys() == {"layer forward", "layer backward"}
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


def test_flags_has_a_setting_in_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["--always", "loss in chunks"]
    runs = flags_runs(tmp_path, monkeypatch, *line)
    assert all("--usp-loss-chunks 4" in run.settings for run in runs)
    names = [run.name for run in runs]
    assert not any("loss in chunks" in name for name in names)
    assert "only recompute full and heads in chunks" in names
    settings = {run.name: run.settings for run in runs}
    assert settings["none"] == "--usp-loss-chunks 4"
    assert settings["all"].split() == [*settings["+ 4 layers a checkpoint"].split(), STATES]


def test_heads_are_in_chunks_where_there_is_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for world in (1, 2):
        runs = flags_runs(tmp_path, monkeypatch, world=world)
        assert ("+ heads in chunks" in [run.name for run in runs]) == (world > 1)


def flags_without_training(folder: Path, monkeypatch: pytest.MonkeyPatch, only: str) -> list[str]:
    line = ["--only", *only.split(";")] if only else []
    return [run.name for run in flags_runs(folder, monkeypatch, *line)]


def flags_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, world: int = 2
) -> list[Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    import bench_length

    measured: list[Any] = []
    monkeypatch.setattr(bench_length, "_tried", lambda _, args, run: measured.append(run))
    line = ["flags", "--smoke", "--device", "cpu", "--out", str(folder), *flags]
    monkeypatch.setattr(sys, "argv", ["bench_length.py", *line])
    bench_length.flags(SimpleNamespace(rank=0, world=world, print0=print), bench_length.parse())
    return measured


class FakeTraining:
    """Notes the tokens of its steps; more than a hundred run out of memory."""

    engine, loss = None, 0.5

    def __init__(self, steps: list[int]) -> None:
        self._steps = steps

    def step(self, batch: dict[str, torch.Tensor], report: bool = False) -> None:
        self._steps.append(batch["input_ids"].shape[1])
        if self._steps[-1] > 100:
            raise torch.OutOfMemoryError


def test_every_measured_step_of_alst_has_moments_of_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import length_longest

    steps: list[int] = []
    cpu = torch.device("cpu")
    session = SimpleNamespace(
        device=cpu, on_gpu=False, synchronize=lambda: None, all_reduced=lambda x, _: x
    )
    monkeypatch.setattr(length_longest, "register_window", lambda _: None)
    monkeypatch.setattr(length_longest, "alst_case", lambda *_, **__: FakeTraining(steps))
    monkeypatch.setattr(length_longest, "free_engine", lambda _: None)
    trial = length_longest.ALSTTrial(session, "tiny/2", 16, 8)
    trial(32)
    trial(64)
    with pytest.raises(torch.OutOfMemoryError):
        trial(128)
    trial(96)
    assert steps == [8, 32, 64, 128, 8, 96]
