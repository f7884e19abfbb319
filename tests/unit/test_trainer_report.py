"""The quickstart's verdict, the plot and the metrics, without ranks."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

TRAINER = Path(__file__).resolve().parents[2] / "examples_deepspeed" / "sequence_parallel"
sys.path.insert(0, str(TRAINER))

from usp_trainer import quickstart, report  # noqa: E402
from usp_trainer.arguments import parse  # noqa: E402
from usp_trainer.checks import check, replica_size  # noqa: E402


@pytest.mark.parametrize(
    ("error", "code", "verdict"),
    [
        (0.9e-5, 0, "4 ranks and one rank agree"),
        (1.1e-5, 1, "4 ranks and one rank DO NOT AGREE"),
        (float("nan"), 1, "4 ranks and one rank DO NOT AGREE"),
    ],
)
def test_the_proof_fails_above_its_limit(
    error: float,
    code: int,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def run_forked(main: Any, args: Namespace, processes: int) -> int:
        assert processes == replica_size(args)
        factor = 1.0 + error if processes == 1 and args.optimizer == "sgd" else 1.0
        rows = [json.dumps({"loss": loss * factor}) for loss in (3.0, 2.0)]
        (Path(args.output_dir) / report.METRICS).write_text("\n".join(rows))
        return 0

    monkeypatch.setattr(quickstart, "run_forked", run_forked)
    args = parse(["--quickstart", "--output-dir", str(tmp_path)])
    assert quickstart.quickstart(args, print) == code
    assert verdict in capsys.readouterr().out


def test_a_failed_run_fails_the_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "run_forked", lambda main, args, processes: 1)
    assert quickstart.quickstart(parse(["--quickstart"]), print) == 1


def row(step: int) -> dict[str, float]:
    return {
        "step": step,
        "loss": 3.0 / step,
        "tokens_per_s": 10.0,
        "seconds": 1.0,
        "memory_bytes": 1,
    }


def test_a_resumed_run_goes_on_after_the_steps_it_has_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--output-dir", str(tmp_path), "--train-iters", "3"]
    first = report.Reporter(check(parse(argv), 1), 0)
    for step in (1, 2, 3):
        first.step(row(step))
    resumed = report.Reporter(check(parse([*argv, "--load", "somewhere"]), 1), 1)
    resumed.step(row(2) | {"loss": 9.0})
    resumed.finish()
    rows = [json.loads(line) for line in (tmp_path / report.METRICS).read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in rows] == [(1, 3.0), (2, 9.0)]
    assert (tmp_path / report.PLOT).read_bytes().startswith(b"\x89PNG")
    assert "step 1/3: loss 3.000, 10 tokens/s" in capsys.readouterr().out


def test_smoothing_is_centred() -> None:
    line = [float(i) for i in range(20)]
    assert report.smoothed(line) == pytest.approx(line)
    assert report.smoothed([0.0, 3.0, 0.0], reach=9) == pytest.approx([0.0, 1.0, 0.0])
