"""The trainer starts without a launcher, under torchrun and deepspeed, with one result."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from programs import bash, free_port, python
from trainer_runs import (
    PLAIN_SGD,
    TINY,
    TRAINER,
    Numbers,
    degrees,
    relative_difference,
    rows,
    train,
)

SCRIPT = str(TRAINER / "pretrain_gpt_usp.py")
PYTHONPATH = os.pathsep.join([str(TRAINER), str(TRAINER.parents[1])])
FLAGS = TINY.replace("--quiet", "") + PLAIN_SGD
# Undoes what one rank's flags begin with (trainer_runs.TINY) where a script does not set it.
DEFAULTS = """
    --no-swiglu --normalization layernorm --no-untie-embeddings-and-output-weights
    --no-disable-bias-linear --make-vocab-size-divisible-by 128 --ffn-hidden-size 512
"""
KEYS = set("step loss grad_norm lr tokens_per_s memory_bytes seconds".split())  # noqa: SIM905


def command(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return python(*argv, cwd=folder, PYTHONPATH=PYTHONPATH)


def numbers(rows: list[dict[str, Any]]) -> Numbers:
    return [(row["loss"], row["grad_norm"]) for row in rows]


def script(
    folder: Path, *arguments: str, **settings: str
) -> tuple[str, list[dict[str, Any]], Numbers]:
    """Run the tiny script: what it prints, its metrics, and one rank's numbers with its flags."""
    settings |= {"OUTPUT_HOME": str(folder / "out")}
    dry_run = bash("tiny", *arguments, cwd=folder, DRY_RUN="1", **settings)
    words = shlex.split(dry_run.stdout.replace("\\\n", " "))
    flags = words[1 + words.index(SCRIPT) :]
    done = bash("tiny", *arguments, cwd=folder, timeout=300, MASTER_PORT=free_port(), **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = folder.glob("out/*/metrics.jsonl")
    assert (metrics.parent / "loss.png").read_bytes().startswith(b"\x89PNG")
    (log,) = folder.glob("out/log/*.log")
    assert done.stdout in log.read_text()
    one_rank = f"{DEFAULTS} {shlex.join(flags)} {degrees()} --quiet"
    (expected,) = train(1, one_rank, output_dir=folder / "one_rank", steps=3)
    return done.stdout, rows(metrics.parent), expected


def test_the_tiny_script_trains_to_its_end_under_deepspeed(tmp_path):
    printed, steps, expected = script(tmp_path, NUM_GPUS="2", SP_SIZE="2", ULYSSES_DEGREE="2")
    assert relative_difference(numbers(steps[:3]), expected) < 1e-5
    assert [row["step"] for row in steps] == list(range(1, 21))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert steps[0].keys() == KEYS and steps[-1].keys() == KEYS | {"valid_loss"}
    (latest,) = tmp_path.glob("out/checkpoint/*/latest")
    assert latest.read_text() == "step_20\n"
    for text in ("Ulysses 2 x Ring 1", "metrics.jsonl", "loss.png", "step 20/20: loss"):
        assert printed.count(text) == 1, printed


def test_a_blend_under_torchrun(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name}. " * 4000)
    settings = {"SP_SIZE": "2", "NUM_GPUS": "2", "TRAIN_ITERS": "3", "ULYSSES_DEGREE": "1"}
    settings |= {"LAUNCHER": "torchrun", "EVAL_INTERVAL": "3", "SPLIT": "50,50,0"}
    settings |= {"DATA_PATH": f"0.3 {tmp_path}/a.txt 0.7 {tmp_path}/b.txt"}
    printed, steps, expected = script(tmp_path, *FLAGS.split(), **settings)
    assert relative_difference(numbers(steps), expected) < 1e-5
    losses = f"loss {steps[2]['loss']:.3f}, validation loss {steps[2]['valid_loss']:.3f}"
    assert f"step 3/3: {losses}, lr 0.1, gradient norm " in printed
    assert "kernel sdpa (chosen by auto), fp32, head dim 8\n" in printed
    assert "Ulysses 1 x Ring 2 (zigzag)" in printed


def test_an_automatic_degree_and_an_early_exit_without_a_launcher(tmp_path):
    flags = FLAGS + degrees(sp=2).replace("--ulysses-degree 2", "--ulysses-degree auto")
    more = " --train-iters 4 --exit-interval 3 --save saved --output-dir out"
    done = command([SCRIPT, *(flags + more).split()], tmp_path)
    assert done.returncode == 0, done.stderr
    (expected,) = train(1, degrees() + PLAIN_SGD, output_dir=tmp_path, steps=3)
    assert relative_difference(numbers(rows(tmp_path / "out")), expected) < 1e-5
    first, *rest = [line for line in done.stdout.splitlines() if line.startswith("planner: ")]
    assert first.startswith("planner: ulysses 1 x ring 2 on cpu (predicted step") and rest
    assert done.stdout.count("Ulysses 1 x Ring 2 (zigzag)") == 1
    assert done.stdout.count("stopped  at step 3 of 4: --exit-interval 3\n") == 1
    assert (tmp_path / "saved" / "latest").read_text() == "step_3\n"


def test_the_quickstart_proves_itself(tmp_path):
    small = "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --seq-length 128 --train-iters 2"
    done = command([SCRIPT, "--quickstart", *small.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 ranks and one rank agree" in done.stdout, done.stdout
    for name in ("SGD", "Adam"):
        assert f"{name}: loss" in done.stdout
    assert (tmp_path / "usp_output" / "loss.png").is_file()
