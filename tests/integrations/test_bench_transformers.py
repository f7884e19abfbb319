"""A smoke run of the benchmark of transformers models: it compares losses and writes its rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
CASES = ("ds_usp 1x2, FSDP2", "ALST, ZeRO-3")


@pytest.mark.slow
def test_cases_are_compared_and_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, str(BENCH / "bench_transformers.py"), "--device", "cpu", "--smoke"]
    done = subprocess.run(
        [*command, "--out", str(path), "--cases", *CASES],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(row["workload"], row["case"]): row for row in rows}
    assert len(found) == len(rows) == 4
    losses = [found["plain:64", case]["loss"] for case in CASES]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert found["packed:96", CASES[0]]["tokens_per_s_per_gpu"] > 0
    assert found["packed:96", CASES[1]]["refused"] == "not right for packed documents"
