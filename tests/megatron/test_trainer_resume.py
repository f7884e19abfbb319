"""A resumed run continues exactly, on other splits and numbers of ranks too, or is refused; what
ends a run early saves it."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness import RankContext, RankError, fork_world
from trainer_runs import (
    ADAM,
    degrees,
    numbers_of,
    patched,
    pretrain,
    pretrain_on_rank,
    relative_difference,
)

from ds_usp import CheckpointError

STEPS, SAVED_AT = 4, 2
KINDS = {
    "zero0": " --zero-stage 0",
    "zero1": " --zero-stage 1 --no-untie-embeddings-and-output-weights --no-disable-bias-linear",
    "zero2": " --zero-stage 2 --usp-states-on-host",
    "zero3": " --zero-stage 3",
    "bf16": " --zero-stage 1 --bf16",
}
# In bf16 other degrees round otherwise.
LIMITS = dict.fromkeys(KINDS, 1e-6) | {"bf16": 1e-3}
SPLITS = {"same": (4, 2), "u4": (4, 4), "dp2": (2, 1)}
# CI trains the first of them. By the names of fixtures.
GROUPS = {"saved": ("zero0", "zero1", "zero3"), "saved_more": ("zero2", "bf16")}


def run(kind: str, folder: Path, sp: int = 4, u: int = 2) -> str:
    return f"{degrees(sp=sp, u=u)}{ADAM}{KINDS[kind]} --train-iters {STEPS} --output-dir {folder}"


def convert(ctx: RankContext, *, folders: list[str]) -> None:
    """Run DeepSpeed's converter on a checkpoint of each rank; ranks have no processes below."""
    from deepspeed.checkpoint import ds_to_universal

    folder = folders[ctx.rank]
    flags = ["--input_folder", folder, "--output_folder", f"{folder}_universal"]
    flags += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    with mock.patch.object(sys, "argv", ["ds_to_universal", *flags]):
        ds_to_universal.main(ds_to_universal.parse_arguments())


def trained(base: Path, kinds: Sequence[str]) -> Path:
    """For each kind a folder with the metrics of an unbroken run, and those and the checkpoint of
    one that ended after its second step, which is converted but for ZeRO-0."""
    stop = f" --exit-interval {SAVED_AT}"
    runs = [run(kind, base / kind / "whole") for kind in kinds]
    runs += [
        run(kind, base / kind / "part") + f"{stop} --save {base / kind / 'save'}" for kind in kinds
    ]
    for outcomes in pretrain(4, *runs):
        assert all((error, code) == (None, 0) for error, _, code in outcomes), outcomes
    converted = [kind for kind in kinds if kind != "zero0"]
    folders = [str(base / kind / "save" / f"step_{SAVED_AT}") for kind in converted]
    fork_world(convert, len(folders), folders=folders)
    return base


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("saved"), GROUPS["saved"])


@pytest.fixture(scope="module")
def saved_more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("saved"), GROUPS["saved_more"])


def difference(base: Path, kind: str, folder: str) -> float:
    """Of a resumed run's steps from the unbroken run's."""
    resumed = numbers_of(base / kind / folder)[-(STEPS - SAVED_AT) :]
    return relative_difference(resumed, numbers_of(base / kind / "whole")[SAVED_AT:])


@pytest.mark.parametrize("group", GROUPS)
def test_resuming_is_exact_on_every_split_of_as_many_ranks(group, request):
    saved, kinds = request.getfixturevalue(group), GROUPS[group]
    for kind in kinds:
        shutil.copytree(saved / kind / "part", saved / kind / "same")
    runs = [
        run(kind, saved / kind / split, *SPLITS[split]) + f" --load {saved / kind / 'save'}"
        for kind in kinds
        for split in SPLITS
    ]
    outcomes = pretrain(4, *runs)
    assert all(error is None for ranks in outcomes for error, _, _ in ranks), outcomes
    for kind in kinds:
        assert difference(saved, kind, "same") == 0.0, kind
        assert len(numbers_of(saved / kind / "same")) == STEPS  # goes on in the same file
        for split in ("u4", "dp2"):
            assert difference(saved, kind, split) < LIMITS[kind], (kind, split)


@pytest.mark.parametrize("group", GROUPS)
def test_resuming_is_exact_on_another_number_of_ranks(group, request):
    """ZeRO-0's checkpoint as it is, the others converted."""
    saved, kinds = request.getfixturevalue(group), GROUPS[group]
    runs = []
    for kind in kinds:
        load = f" --load {saved / kind / 'save'}"
        load += "" if kind == "zero0" else " --universal-checkpoint"
        runs.append(run(kind, saved / kind / "two", 2, 2) + load)
    outcomes = pretrain(2, *runs)
    assert all(error is None for ranks in outcomes for error, _, _ in ranks), outcomes
    for kind in kinds:
        assert difference(saved, kind, "two") < LIMITS[kind], kind


def test_the_flags_of_the_resuming_run_count(saved, tmp_path):
    """Weight decay 0.01 was saved; at 100 the weights fall apart."""
    flags = run("zero1", tmp_path) + f" --weight-decay 100 --load {saved / 'zero1' / 'save'}"
    assert pretrain(4, flags)[0][0][0] is None
    first, second = numbers_of(tmp_path)
    expected = numbers_of(saved / "zero1" / "whole")
    assert relative_difference([first], expected[2:3]) < 1e-6
    assert relative_difference([second], expected[3:]) > 1e-3


def broken(source: Path, target: Path) -> None:
    """A copy of a file of which the end is missing."""
    target.write_bytes(source.read_bytes()[:-100])


def test_what_cannot_be_resumed_is_refused_on_every_rank(saved, tmp_path):
    """By the name of the file or the flag, before anything is loaded."""
    step, save = f"step_{SAVED_AT}", saved / "zero1" / "save"
    shards = "bf16_zero_pp_rank_3", "zero_pp_rank_1"
    copies = {name: tmp_path / name for name in ("unlisted", "list", "short", "lost", "weight")}
    for copy in copies.values():
        shutil.copytree(save, copy)
    (copies["unlisted"] / step / "trainer.json").unlink()
    (copies["list"] / step / "trainer.json").write_text("[]")
    shard = f"{shards[1]}_mp_rank_00_optim_states.pt"
    broken(save / step / shard, copies["short"] / step / shard)
    (copies["lost"] / step / "mp_rank_00_model_states.pt").unlink()
    weight = f"{step}_universal/zero/layers.1.mlp.up.weight/exp_avg.pt"
    broken(save / weight, copies["weight"] / weight)
    universal = " --universal-checkpoint"
    cases = {
        f" --load {copies['unlisted']}": (step, "trainer.json"),
        f" --load {copies['list']}": (step, "cannot be read: TypeError"),
        f" --load {copies['short']}": (shard, "bytes"),
        f" --load {copies['lost']}": ("mp_rank_00_model_states.pt", "has 0 bytes"),
        f" --load {copies['weight']}{universal}": ("layers.1.mlp.up.weight/exp_avg.pt",),
        f" --load {save} --num-layers 3": ("num_layers 2 in the checkpoint, 3 now",),
        f" --load {save} --zero-stage 3": ("zero_stage 1 in the checkpoint, 3 now",),
        f" --load {tmp_path}": ("latest", "Leave --load out"),
    }
    runs = [run("zero1", tmp_path) + flags for flags in cases]
    for texts, ranks in zip(cases.values(), pretrain(4, *runs), strict=True):
        for error, _, _ in ranks:
            assert isinstance(error, CheckpointError), (texts, error)
            assert all(text in str(error) for text in texts), error
    for error, _, _ in pretrain(2, run("zero1", tmp_path, 2, 2) + f" --load {save}")[0]:
        assert isinstance(error, CheckpointError) and "is of 4 ranks, and here are 2" in str(error)
        assert "ds_to_universal" in str(error) and "--universal-checkpoint" in str(error)


def signalled(ctx: RankContext, *, flags: str, at: int) -> Any:
    """A run of which rank 1 gets a signal in step ``at``."""
    from usp_trainer.step import Trainer

    train, steps = Trainer.train, []

    def train_and_signal(self: Any, *args: Any) -> Any:
        steps.append(0)
        if ctx.rank == 1 and len(steps) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return train(self, *args)

    with patched({"usp_trainer.step.Trainer.train": train_and_signal}):
        return pretrain_on_rank(ctx, runs=[flags])[0], len(steps)


def test_a_signal_to_one_rank_saves_and_ends_all_after_a_step(tmp_path):
    flags = f"{degrees(sp=2, zero=1)} --train-iters 9 --save {tmp_path} --output-dir {tmp_path}"
    ends = fork_world(signalled, 2, flags=flags, at=3)
    (steps,) = {steps for _, steps in ends}
    assert [code for (_, _, code), _ in ends] == [75, 75] and steps in (3, 4)
    assert (tmp_path / "latest").read_text() == f"step_{steps}"
    assert len(numbers_of(tmp_path)) == steps
    (outcome, _) = pretrain(2, f"{flags} --load {tmp_path}")[0]
    assert outcome[2] == 0 and len(numbers_of(tmp_path)) == 9


def die_while_saving(ctx: RankContext, *, flags: str) -> Any:
    from deepspeed.runtime.engine import DeepSpeedEngine

    save = DeepSpeedEngine.save_checkpoint

    def dying(engine: Any, folder: str, tag: str, **kwargs: Any) -> None:
        if ctx.rank == 1 and tag == "step_2":
            raise OSError("no space left on device")
        save(engine, folder, tag, **kwargs)

    with patched({"deepspeed.runtime.engine.DeepSpeedEngine.save_checkpoint": dying}):
        return pretrain_on_rank(ctx, runs=[flags])


def test_a_rank_that_dies_while_saving_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.GRACE_S", 1.0)  # the other rank waits for the dead one
    flags = f"{degrees(sp=2, zero=1)} --save {tmp_path} --output-dir {tmp_path} --save-interval 1"
    with pytest.raises(RankError, match="no space left"):
        fork_world(die_while_saving, 2, flags=f"{flags} --train-iters 3")
    assert (tmp_path / "latest").read_text() == "step_1"
    (outcome, _) = pretrain(2, f"{flags} --train-iters 2 --load {tmp_path}")[0]
    assert outcome[0] is None
    listed = json.loads((tmp_path / "step_2" / "trainer.json").read_text())
    assert listed["step"] == 2 and len(listed["files"]) == 3
