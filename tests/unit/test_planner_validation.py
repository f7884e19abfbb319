"""The planner on runs of 4 H200 that its profile has not seen, as docs/planner.md has them."""

import csv
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import pytest

from ds_usp.planner import ParallelConfig, Workload, framework_caps, load_cluster, load_model
from ds_usp.planner.memory import memory
from ds_usp.planner.parallel_config import require_feasible
from ds_usp.planner.step_time import step_time

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results"
Named = tuple[str, int, int]  # model, layers and tokens: a workload, whose meshes are compared


@dataclass(frozen=True)
class Run:
    """A measured training run (one sequence a step, ZeRO-1, bf16), and what is said of it."""

    named: Named
    work: Workload
    config: ParallelConfig
    seconds: float
    memory_bytes: int
    predicted_s: float
    predicted_bytes: float

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.seconds - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.memory_bytes - 1


def rows(name: str) -> list[dict[str, str]]:
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def named(row: dict[str, str]) -> Named:
    return row["model"], int(row["layers"]), int(row["seq_len"])


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    cluster = load_cluster(str(RESULTS / "planner_profile.json"))
    found = []
    for row in rows("planner_runs.csv"):
        model, layers, seq_len = named(row)
        work = Workload(replace(load_model(model), layers=layers), seq_len)
        config = ParallelConfig(
            tp=int(row["tp"]),
            ulysses=int(row["ulysses"]),
            ring=int(row["ring"]),
            recompute=row["recompute"],
            tp_sequence=False,
            unsharded_grad_reduce=framework_caps("megatron-deepspeed").unsharded_grad_reduce,
        )
        used = cluster.with_gpus_per_node(min(config.gpus, cluster.gpus_per_node))
        predicted_s = step_time(used, work, config).total
        needs = memory(work, config, used.workspace_bytes).total
        measured = float(row["seconds"]), int(row["memory_bytes"])
        found.append(Run(named(row), work, config, *measured, predicted_s, needs))
    return found


def fastest(runs: list[Run]) -> dict[Named, tuple[int, int]]:
    """Of each workload: the number of its runs, and the predicted place of the fastest."""
    groups = defaultdict(list)
    for run in runs:
        groups[run.named].append(run)
    places = {}
    for name, group in groups.items():
        best = min(group, key=lambda run: run.seconds)
        places[name] = len(group), 1 + sum(r.predicted_s < best.predicted_s for r in group)
    return places


def test_time_memory_and_the_fastest(runs):
    assert len(runs) == 19
    times = [abs(run.time_error) for run in runs]
    assert fmean(times) < 0.03
    assert sum(error <= 0.05 for error in times) / len(times) >= 0.9
    assert max(abs(run.memory_error) for run in runs) < 0.03
    assert all(place <= 3 for _, place in fastest(runs).values())


def test_memory_without_what_was_fitted(runs):
    for run in runs:
        formula = memory(run.work, run.config).formula
        assert formula == pytest.approx(run.memory_bytes, rel=0.002)


def test_the_table_is_what_is_predicted(runs):
    times, sizes = ([abs(getattr(r, f"{x}_error")) for r in runs] for x in ("time", "memory"))
    close, worst = sum(error <= 0.05 for error in times), max(times)
    fitting = sum(error <= 0.03 for error in sizes)
    expected = [
        f"{len(runs)} held-out runs",
        f"time: error {fmean(times):.1%} in the mean, {worst:.1%} at most, "
        f"{close / len(runs):.0%} within 5 % (wanted: 3 %, 90 %)",
        f"memory: error {fmean(sizes):.1%} in the mean, {max(sizes):.1%} at most, {fitting} of "
        f"{len(sizes)} within 3 % (wanted: all)",
        *(
            f"{model} x {layers}, {seq_len} tokens: the fastest of {count} is predicted to be "
            f"number {place} (wanted: 3 or better)"
            for (model, layers, seq_len), (count, place) in fastest(runs).items()
        ),
    ]
    table = (RESULTS / "planner_validation.csv").read_text(encoding="utf-8").splitlines()
    assert [line[2:] for line in table if line.startswith("# ")][1:] == expected
    text = " ".join((ROOT / "docs" / "planner.md").read_text(encoding="utf-8").split())
    assert f"time {100 * fmean(times):.1f} % off in the mean" in text
    assert f"{close} of 19 within 5 %, the worst {100 * worst:.1f} %" in text


def test_the_runs_are_possible_and_held_out(runs):
    """No length is in the profile; what a step costs is, for every tensor-parallel degree."""
    for run in runs:
        require_feasible(run.work, run.config, 4)
    assert len({(run.named, run.config) for run in runs}) == len(runs)
    assert {run.work.seq_len for run in runs} == {16384, 32768, 65536, 131072}
    assert {run.config.recompute for run in runs} == {"none", "full"}
    cluster = load_cluster(str(RESULTS / "planner_profile.json"))
    fitted = rows("planner_fitted.csv")
    measured = {row.seq_len for row in cluster.calls} | {int(row["seq_len"]) for row in fitted}
    assert measured.isdisjoint(run.work.seq_len for run in runs)
    assert {int(row["tp"]) for row in fitted} == {run.config.tp for run in runs} == {1, 2}
