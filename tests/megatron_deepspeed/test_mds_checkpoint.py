"""A run that was interrupted goes on as if it had not been, in another split of sequences too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mds_runs import HERE, TrainingServer, flags, losses_of, relative_difference, reported_kinds

ADAM = "--optimizer adam --lr 1e-3 --clip-grad 1.0"
SAVED, STEPS = 3, 6
CONVERT = """
import runpy, sys
from pathlib import Path
import megatron_patches
megatron_patches.prepare("megatron_deepspeed", Path(sys.argv.pop(1)))
runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")
"""


def train(
    server: TrainingServer, world: int, folder: Path, more: str, **degrees: Any
) -> list[float]:
    """Losses of an uninterrupted run that leaves a checkpoint."""
    save = f"{ADAM} --train-iters {STEPS} --save {folder} --save-interval {SAVED} {more}"
    losses = losses_of(server.run(world, flags(more=save, **degrees)))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    (folder / "latest").write_text(f"global_step{SAVED}")
    return losses


def resume(
    server: TrainingServer, world: int, folder: Path, more: str, **degrees: Any
) -> list[float]:
    load = f"{ADAM} --train-iters {STEPS} --load {folder} {more}"
    return losses_of(server.run(world, flags(more=load, **degrees)))


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, {"sp": 2, "u": 1, "zero": 0}),
        (2, {"sp": 2, "u": 1, "zero": 3}),
        (4, {"sp": 2, "u": 2, "tp": 2, "zero": 2}),
        (4, {"sp": 2, "u": 1, "pp": 2, "zero": 1}),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one(
    server: TrainingServer, tmp_path: Path, world: int, degrees: dict[str, Any]
) -> None:
    dropout = "--hidden-dropout 0.1"
    report = "--usp-report-communication 2"
    uninterrupted = train(server, world, tmp_path, f"{dropout} {report}", **degrees)
    kinds = {"ring" if degrees["u"] == 1 else "all-to-all", "gradient reduction"}
    kinds |= {"parameter gather"} if degrees["zero"] else set()
    kinds |= {"tensor parallel"} if "tp" in degrees else set()
    kinds |= {"pipeline"} if "pp" in degrees else set()
    assert reported_kinds(tmp_path, world) == kinds
    assert resume(server, world, tmp_path, dropout, **degrees) == uninterrupted[SAVED:]


@pytest.mark.parametrize(
    ("zero", "degrees", "other"),
    [
        (1, {"sp": 4, "u": 4}, {"sp": 4, "u": 1, "more": "--usp-layout contiguous"}),
        (2, {"sp": 4, "u": 2}, {"sp": 2, "u": 1, "more": "--micro-batch-size 1"}),
        (3, {"sp": 2, "u": 2, "more": "--micro-batch-size 1"}, {"sp": 4, "u": 1}),
    ],
    ids=str,
)
def test_a_run_is_resumed_in_another_split(
    server: TrainingServer,
    tmp_path: Path,
    zero: int,
    degrees: dict[str, Any],
    other: dict[str, Any],
) -> None:
    uninterrupted = train(server, 4, tmp_path, degrees.pop("more", ""), zero=zero, **degrees)
    resumed = resume(server, 4, tmp_path, other.pop("more", ""), zero=zero, **other)
    assert relative_difference(resumed, uninterrupted[SAVED:]) < 1e-5


def test_a_universal_checkpoint_goes_to_other_layouts(
    server: TrainingServer, tmp_path: Path
) -> None:
    unpadded = "--make-vocab-size-divisible-by 1"  # the converter resets rows of padding
    uninterrupted = train(server, 4, tmp_path, unpadded, sp=2, u=1, pp=2, zero=1)
    script = tmp_path / "convert.py"
    script.write_text(CONVERT)
    folders = ("--input_folder", tmp_path / f"global_step{SAVED}")
    folders += ("--output_folder", tmp_path / "universal")
    workers = ("--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state")
    subprocess.run(
        [sys.executable, script, server.checkout, *folders, *workers],
        check=True,
        capture_output=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(HERE.parents[1])},
    )
    (tmp_path / "latest_universal").write_text("universal")
    (tmp_path / "latest").write_text("universal")
    more = f"{unpadded} --universal-checkpoint"
    for world, degrees in (
        (2, {"pp": 2}),
        (4, {"sp": 4, "u": 2, "pipe": True}),
        (4, {"sp": 2, "u": 2, "pp": 2}),
    ):
        resumed = resume(server, world, tmp_path, more, zero=1, **degrees)
        assert relative_difference(resumed, uninterrupted[SAVED:]) < 1e-5
