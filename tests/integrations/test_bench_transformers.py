"""Smoke runs of the benchmarks of transformers models: they compare losses and write their rows."""

import json
from pathlib import Path

import pytest
from programs import python

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
CASES = ("ds_usp 1x2, FSDP2", "ALST, ZeRO-3")


@pytest.mark.slow
def test_cases_are_compared_and_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    deep = [f"{kind}:32+2x24+2x8" for kind in ("tree", "each")]
    flags = ("--device", "cpu", "--smoke", "--out", path, "--cases", *CASES)
    flags += ("--workloads", "plain:64", "packed:96", *deep)
    done = python(BENCH / "bench_transformers.py", *flags, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(row["workload"], row["case"]): row for row in rows}
    assert len(found) == len(rows) == 8
    of_tree, of_rows = (found[x, CASES[0]]["loss"] for x in deep)
    assert of_tree == pytest.approx(of_rows, rel=1e-5)
    losses = [found["plain:64", case]["loss"] for case in CASES]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert found["packed:96", CASES[0]]["tokens_per_s_per_gpu"] > 0
    assert found["packed:96", CASES[1]]["refused"] == "not right for packed documents"


@pytest.mark.slow
def test_long_sequences_have_the_first_loss_of_alst(tmp_path):
    path = tmp_path / "rows.jsonl"
    short = ("--device", "cpu", "--layers", 2, "--tokens", 96, "--warm-up", 64, "--mlp-chunks", 2)
    group = ("--case", "GRPO", "--completions", 4, "--prompt", 64)
    for case in (("--case", "ds_usp"), ("--case", "ALST"), group, (*group, "--share-prefixes")):
        flags = (*case, "--out", path, *short)
        done = python(BENCH / "bench_long_context.py", *map(str, flags), CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["case"] for row in rows] == ["ds_usp", "ALST", "GRPO", "GRPO"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    assert rows[2]["grad_norm"] > 0 and rows[2]["tokens_per_s_per_gpu"] > 0
    assert rows[3]["grad_norm"] == pytest.approx(rows[2]["grad_norm"], rel=1e-5)
