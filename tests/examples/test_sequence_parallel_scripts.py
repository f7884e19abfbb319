"""The training scripts run by bash: golden commands, refusals, logs. They train in tests/megatron.

``python tests/examples/test_sequence_parallel_scripts.py`` writes the golden files anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import CHECKOUT, FOLDER, GPUS, PROGRAMS, ROOT, SCRIPTS, bash

CASES = [(size, program) for size in SCRIPTS for program in PROGRAMS]


def golden(size: str, program: str) -> Path:
    return Path(__file__).resolve().parent / "golden" / f"{size}.{program}.txt"


def printed(size: str, program: str) -> str:
    settings = {"DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": "", "NUM_GPUS": GPUS[size]}
    done = bash(size, **settings, **PROGRAMS[program])
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace(str(CHECKOUT), "/checkouts/Megatron-DeepSpeed")
    return text.replace(str(ROOT), "$ROOT")


@pytest.mark.parametrize(("size", "program"), CASES)
def test_a_dry_run_prints_the_golden_command(size: str, program: str) -> None:
    assert printed(size, program) == golden(size, program).read_text()


@pytest.mark.parametrize("name", SCRIPTS.values())
def test_scripts_are_settings_only(name: str) -> None:
    *lines, last = (FOLDER / name).read_text().splitlines()
    assert last == '. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"'
    for line in lines:
        assert not line or line.startswith("#") or re.fullmatch(r"[a-z_]+=\S*", line), line


def test_refused_starts_touch_no_folder(tmp_path: Path) -> None:
    """By the settings, and by the trainer's own checks of its arguments."""
    for arguments, settings, message in (
        ((), {"SEQ_LENGHT": "65536"}, "error: SEQ_LENGHT is no setting; did you mean SEQ_LENGTH?"),
        (("--seq-lenght", "64"), {}, "pretrain_gpt_usp.py: error: there is no flag --seq-lenght;"),
    ):
        done = bash("tiny", *arguments, cwd=tmp_path, **settings)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith(message) and done.stderr.count("\n") == 1, done.stderr
        assert list(tmp_path.iterdir()) == []


def test_a_second_start_keeps_the_log_of_the_first(tmp_path: Path) -> None:
    """A stub of torchrun prints when it is started."""
    programs, output = tmp_path / "programs", tmp_path / "output"
    programs.mkdir()
    (programs / "torchrun").write_text('#!/bin/sh\necho "started with $2 node"; exit 7\n')
    (programs / "torchrun").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    for _ in range(2):
        done = bash("tiny", LAUNCHER="torchrun", OUTPUT_HOME=str(output), PATH=path)
        assert done.returncode == 7, done.stderr  # the launcher's
    (log,) = output.glob("log/*.log")
    assert [line[:4] for line in log.read_text().splitlines()] == ["=== ", "star"] * 2


def test_a_task_of_srun_is_a_rank() -> None:
    program = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')))"
    task = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16"}
    done = subprocess.run(
        ["bash", str(FOLDER / "srun_rank.sh"), sys.executable, "-S", "-c", program],
        env={**os.environ, **task},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "9 1 16\n", done.stderr


def test_the_example_job_names_a_script() -> None:
    lines = (FOLDER / "slurm.sbatch").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("bash ")]
    assert line.split()[1] in SCRIPTS.values()


if __name__ == "__main__":
    for case in CASES:
        golden(*case).write_text(printed(*case))
