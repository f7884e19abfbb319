"""The benchmark of gradient reduction: a smoke run, and what it calls wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.append(str(BENCH))


def test_stages_are_timed_on_the_same_losses(tmp_path: Path) -> None:
    import bench_zero

    path = tmp_path / "zero.jsonl"
    flags = ["--device", "cpu", "--smoke", "--steps", "7", "--cases", "ZeRO-1", "ZeRO-2, 4 CTAs"]
    with mock.patch.object(sys, "argv", [str(BENCH / "bench_zero.py"), *flags, "--out", str(path)]):
        assert bench_zero.main() == 0
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["losses"] == pytest.approx(second["losses"], rel=1e-6)
    assert first["ms"] > 0 and len(first["grad_norms"]) == 7
    assert "gradient reduction" in first["busy_ms"]
    assert not bench_zero.differs(second, first)
    norms = [0.9 * first["grad_norms"][0], *first["grad_norms"][1:]]
    assert bench_zero.differs(second | {"grad_norms": norms}, first)
