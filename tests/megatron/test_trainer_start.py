"""One file starts by itself, under torchrun and under the deepspeed launcher, with one result."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_runs import PLAIN_SGD, TINY, TRAINER, Numbers, degrees, relative_difference, train

SCRIPT = str(TRAINER / "pretrain_gpt_usp.py")
FLAGS = TINY.replace("--quiet", "") + degrees(sp=2) + PLAIN_SGD + " --train-iters 3"


def command(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TRAINER), str(TRAINER.parents[1])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def launcher(name: str) -> list[str]:
    if name == "torchrun":
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if name == "deepspeed":
        port = ["--master_port", free_port()]
        return ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", *port]
    return []


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    folder = tmp_path_factory.mktemp("one_rank")
    return train(1, degrees() + PLAIN_SGD, output_dir=folder, steps=3)[0]


@pytest.mark.parametrize("start", ["alone", "torchrun", "deepspeed"])
def test_every_way_to_start_trains_the_same(start: str, one_rank: Numbers, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = [*FLAGS.split(), "--output-dir", str(out)]
    done = command([*launcher(start), SCRIPT, *flags], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert relative_difference([(r["loss"], r["grad_norm"]) for r in rows], one_rank) < 1e-5
    names = "step loss grad_norm lr tokens_per_s memory_bytes seconds"
    assert rows[0].keys() == set(names.split())
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    for text in ("Ulysses 2 x Ring 1 (zigzag)", "metrics.jsonl", "loss.png", "step 3/3: loss"):
        assert done.stdout.count(text) == 1, done.stdout


def test_what_all_ranks_report_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "nothing.txt").touch()
    done = command([SCRIPT, *FLAGS.split(), "--data-path", "nothing.txt"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("nothing.txt is empty (0 bytes)") == 1, done.stderr
    assert "[on all 2 ranks] DataError" in done.stderr
    assert "Traceback" not in done.stderr


def test_auto_asks_the_planner_and_says_why(tmp_path: Path) -> None:
    flags = FLAGS.replace("--ulysses-degree 2", "--ulysses-degree auto")
    flags += " --train-iters 3 --exit-interval 1 --save saved"
    done = command([SCRIPT, *flags.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    first, *rest = [line for line in done.stdout.splitlines() if line.startswith("planner: ")]
    assert first.startswith("planner: ulysses 1 x ring 2 on cpu (predicted step") and rest
    assert done.stdout.count("Ulysses 1 x Ring 2 (zigzag)") == 1
    assert "kernel sdpa (chosen by auto), fp32, head dim 8\n" in done.stdout
    assert done.stdout.count("stopped  at step 1 of 3: --exit-interval 1\n") == 1
    assert (tmp_path / "saved" / "latest").read_text() == "step_1\n"


def test_the_quickstart_proves_itself(tmp_path: Path) -> None:
    small = "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --seq-length 128 --train-iters 2"
    done = command([SCRIPT, "--quickstart", *small.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 ranks and one rank agree" in done.stdout, done.stdout
    for name in ("SGD", "Adam"):
        assert f"{name}: loss" in done.stdout
    assert (tmp_path / "usp_output" / "loss.png").is_file()
