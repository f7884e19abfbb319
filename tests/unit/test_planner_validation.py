"""The planner on runs of 4 H200 that its profile has not seen, as they stand beside the README."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

from planner_cases import FITTED, read  # noqa: E402
from planner_validation import Judged, judge, summary, workloads  # noqa: E402

from ds_usp.planner import load_cluster  # noqa: E402
from ds_usp.planner.memory import memory  # noqa: E402

RESULTS = BENCH / "results"


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    cluster = load_cluster(str(RESULTS / "planner_profile.json"))
    return judge(cluster, read(RESULTS / "planner_runs.csv"))


def test_time_memory_and_the_fastest(judged: list[Judged]) -> None:
    assert len(judged) == 19
    times = [abs(each.time_error) for each in judged]
    assert fmean(times) < 0.03
    assert sum(error <= 0.05 for error in times) / len(times) >= 0.9
    assert max(abs(each.memory_error or 1) for each in judged) < 0.03
    for runs in workloads(judged).values():
        assert min(runs, key=lambda each: each.run.seconds).predicted_place <= 3


def test_memory_without_what_was_fitted(judged: list[Judged]) -> None:
    for each in judged:
        formula = memory(*each.run.case.plan()).formula
        assert formula == pytest.approx(each.run.memory_bytes, rel=0.002)


def test_the_table_is_what_is_predicted(judged: list[Judged]) -> None:
    table = (RESULTS / "planner_validation.csv").read_text(encoding="utf-8").splitlines()
    assert [line[2:] for line in table if line.startswith("# ")][1:] == summary(judged)
    readme = (BENCH.parents[1] / "README.md").read_text(encoding="utf-8")
    times = [abs(each.time_error) for each in judged]
    close = sum(error <= 0.05 for error in times)
    said = " ".join(readme.split())
    assert f"time {100 * fmean(times):.1f} % off in the mean" in said
    assert f"{close} of 19 within 5 %, the worst {100 * max(times):.1f} %" in said


def test_no_length_is_in_the_profile(judged: list[Judged]) -> None:
    cluster = load_cluster(str(RESULTS / "planner_profile.json"))
    fitted = list(read(RESULTS / "planner_fitted.csv"))
    assert {run.case for run in fitted} == set(FITTED)
    measured = {row.seq_len for row in cluster.calls} | {run.case.seq_len for run in fitted}
    assert measured.isdisjoint(each.run.case.seq_len for each in judged)
