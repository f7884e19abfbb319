"""The trainer as its users start it: one command, a launcher, one line where something is wrong."""

import json
import re

import programs
from trainer_runs import TINY, TRAINER

PROGRAM = TRAINER / "pretrain_gpt_usp.py"


def test_the_quickstart_trains_and_proves(tmp_path):
    """Four ranks that it starts itself, then one process; with one step it takes seconds."""
    flags = ("--quickstart", "--train-iters", "2", "--output-dir", tmp_path, "--seq-length", "256")
    done = programs.python(PROGRAM, *flags)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Ulysses 2 x ring 2.*ZeRO-1", done.stdout)
    differences = [
        float(x)
        for x in re.findall(r"(?:difference|norms) (\S+?),?(?= |\n)", done.stdout)
        if "e" in x
    ]
    assert len(differences) == 4 and max(differences) < 1e-5, done.stdout
    assert "4 ranks and one agree" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] < rows[0]["loss"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_wrong_is_one_line(tmp_path):
    """Without a launcher, and of one of two ranks of torchrun."""
    alone = programs.python(PROGRAM, "--train-iters", "1")
    assert alone.returncode == 1 and "torchrun --nproc-per-node" in alone.stderr
    wrong = programs.torchrun(
        2, PROGRAM, *TINY.split(), "--output-dir", tmp_path, "--pipeline-model-parallel-size", "2"
    )
    assert wrong.returncode != 0
    assert wrong.stderr.count("ConfigError:") == 1 and "MEGATRON_DEEPSPEED_PATH" in wrong.stderr
    assert not any(tmp_path.iterdir())
