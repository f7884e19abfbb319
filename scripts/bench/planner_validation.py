"""How far the planner's predictions are from runs that its profile has not seen.

    python scripts/bench/planner_validation.py --profile trainer.json --out validation.csv runs.csv

Reads tables of ``planner_runs.py``, asks the planner for the same runs on the profile's cluster and
writes both side by side: seconds of a step, bytes of the fullest GPU, and each config's
position among those of its workload (the same model and length, recomputed or not). No torch.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import fmean

from planner_cases import Case, Measured, read

from ds_usp.planner import Cluster, load_cluster
from ds_usp.planner.memory import memory
from ds_usp.planner.step_time import step_time

GIB = 2.0**30


@dataclass(frozen=True)
class Evaluated:
    """A run and what was said of it; positions count from 1 among the runs of its workload."""

    run: Measured
    seconds: float
    memory_bytes: float
    position: int = 0
    predicted_position: int = 0

    @property
    def time_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """The relative error of the predicted memory; None where none was measured."""
        measured = self.run.memory_bytes
        return self.memory_bytes / measured - 1 if measured else None


def evaluate(cluster: Cluster, runs: Iterable[Measured]) -> list[Evaluated]:
    """The planner's prediction for every run, in the order of the runs."""
    evaluations = []
    for run in runs:
        work, config = run.case.plan()
        small = cluster.with_gpus_per_node(min(config.gpus, cluster.gpus_per_node))
        needs = memory(work, config, small.workspace_bytes).total
        evaluations.append(Evaluated(run, step_time(small, work, config).total, needs))
    return _with_positions(evaluations)


def _with_positions(evaluations: Sequence[Evaluated]) -> list[Evaluated]:
    """Each run with its rank among its workload's runs by measured and by predicted time."""
    groups = workloads(evaluations)
    results = []
    for evaluated in evaluations:
        group = groups[evaluated.run.case.workload]
        position = 1 + sum(rival.run.seconds < evaluated.run.seconds for rival in group)
        predicted = 1 + sum(rival.seconds < evaluated.seconds for rival in group)
        results.append(
            Evaluated(evaluated.run, evaluated.seconds, evaluated.memory_bytes, position, predicted)
        )
    return results


def workloads(evaluations: Iterable[Evaluated]) -> Mapping[tuple[str, int, int], list[Evaluated]]:
    """The runs of each model and length."""
    groups: dict[tuple[str, int, int], list[Evaluated]] = defaultdict(list)
    for evaluated in evaluations:
        groups[evaluated.run.case.workload].append(evaluated)
    return groups


def summary(evaluations: Sequence[Evaluated]) -> list[str]:
    """The errors of time and memory against their limits, and the rank of each fastest run."""
    times = [abs(evaluated.time_error) for evaluated in evaluations]
    close = sum(error <= 0.05 for error in times) / len(times)
    lines = [
        f"{len(evaluations)} held-out runs",
        f"time: error {fmean(times):.1%} in the mean, {max(times):.1%} at most, {close:.0%} within "
        "5 % (wanted: 3 %, 90 %)",
    ]
    sizes = [
        abs(evaluated.memory_error)
        for evaluated in evaluations
        if evaluated.memory_error is not None
    ]
    if sizes:
        within = sum(error <= 0.03 for error in sizes)
        lines.append(
            f"memory: error {fmean(sizes):.1%} in the mean, {max(sizes):.1%} at most, {within} of "
            f"{len(sizes)} within 3 % (wanted: all)"
        )
    for (model, layers, seq_len), group in workloads(evaluations).items():
        fastest = min(group, key=lambda evaluated: evaluated.run.seconds)
        lines.append(
            f"{model} x {layers}, {seq_len} tokens: the fastest of {len(group)} is predicted to be "
            f"number {fastest.predicted_position} (wanted: 3 or better)"
        )
    return lines


COLUMNS = (
    *(f.name for f in fields(Case)),
    *("seconds", "predicted_seconds", "time_error"),
    *("memory_gib", "predicted_memory_gib", "memory_error", "place", "predicted_place"),
)


def write(path: Path, comment: Sequence[str], evaluations: Iterable[Evaluated]) -> None:
    """Write the table of predicted and measured runs, with the summary above it."""
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {line}\n" for line in comment)
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for evaluated in evaluations:
            memory_error = evaluated.memory_error
            table.writerow(
                [
                    *astuple(evaluated.run.case),
                    *(f"{evaluated.run.seconds:.5f}", f"{evaluated.seconds:.5f}"),
                    f"{evaluated.time_error:+.3f}",
                    f"{evaluated.run.memory_bytes / GIB:.3f}",
                    f"{evaluated.memory_bytes / GIB:.3f}",
                    "" if memory_error is None else f"{memory_error:+.3f}",
                    *(evaluated.position, evaluated.predicted_position),
                ]
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate the runs, print the summary, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("runs", type=Path, nargs="+", help="tables of planner_runs.py")
    add("--profile", required=True, help="the cluster that they ran on, with the framework's rows")
    add("--out", type=Path, required=True, help="the table of predicted and measured")
    args = parser.parse_args(argv)
    cluster = load_cluster(args.profile)
    evaluations = evaluate(cluster, [run for path in args.runs for run in read(path)])
    lines = summary(evaluations)
    where = cluster.origins["gpus_per_node"][1]
    sources = [args.profile, *map(str, args.runs)]
    command = f"planner_validation.py --profile {' '.join(Path(x).name for x in sources)}; {where}"
    write(args.out, [command, *lines], evaluations)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
