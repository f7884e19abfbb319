"""The planner on runs of 4 H200 that its profile has not seen, as docs/planner.md has them."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

from planner_cases import FITTED, read  # noqa: E402
from planner_validation import Evaluated, evaluate, summary, workloads  # noqa: E402

from ds_usp.planner import load_cluster  # noqa: E402
from ds_usp.planner.memory import memory  # noqa: E402

RESULTS = BENCH / "results"


@pytest.fixture(scope="module")
def evaluated() -> list[Evaluated]:
    cluster = load_cluster(str(RESULTS / "planner_profile.json"))
    return evaluate(cluster, read(RESULTS / "planner_runs.csv"))


def test_time_memory_and_the_fastest(evaluated: list[Evaluated]) -> None:
    assert len(evaluated) == 19
    times = [abs(each.time_error) for each in evaluated]
    assert fmean(times) < 0.03
    assert sum(error <= 0.05 for error in times) / len(times) >= 0.9
    assert max(abs(each.memory_error or 1) for each in evaluated) < 0.03
    for runs in workloads(evaluated).values():
        assert min(runs, key=lambda each: each.run.seconds).predicted_position <= 3


def test_memory_without_what_was_fitted(evaluated: list[Evaluated]) -> None:
    for each in evaluated:
        formula = memory(*each.run.case.plan()).formula
        assert formula == pytest.approx(each.run.memory_bytes, rel=0.002)


def test_the_table_is_what_is_predicted(evaluated: list[Evaluated]) -> None:
    table = (RESULTS / "planner_validation.csv").read_text(encoding="utf-8").splitlines()
    assert [line[2:] for line in table if line.startswith("# ")][1:] == summary(evaluated)
    page = (BENCH.parents[1] / "docs" / "planner.md").read_text(encoding="utf-8")
    times = [abs(each.time_error) for each in evaluated]
    close = sum(error <= 0.05 for error in times)
    text = " ".join(page.split())
    assert f"time {100 * fmean(times):.1f} % off in the mean" in text
    assert f"{close} of 19 within 5 %, the worst {100 * max(times):.1f} %" in text


def test_no_length_is_in_the_profile(evaluated: list[Evaluated]) -> None:
    cluster = load_cluster(str(RESULTS / "planner_profile.json"))
    fitted = list(read(RESULTS / "planner_fitted.csv"))
    assert {run.case for run in fitted} == set(FITTED)
    measured = {row.seq_len for row in cluster.calls} | {run.case.seq_len for run in fitted}
    assert measured.isdisjoint(each.run.case.seq_len for each in evaluated)
