"""Tables of the runs of ``bench_length.py flags``: losses of all settings, time and peak of each.

    python scripts/bench/length_table.py DIR/length.jsonl

The difference of two runs is the largest of all steps, relative, of the loss and of the gradient
norm. Seconds and peak are of the steps after the first, which compiles and pins host memory: the
median, and the largest.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_harness import read_rows

Steps = Sequence[Mapping[str, Any]]
NONE, REPEATED = "none", ("all", "none, other mesh")


def runs_of(rows: Steps) -> dict[str, list[Mapping[str, Any]]]:
    """The steps of each run of the part ``flags`` that has ended, by its name."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["part"] == "flags" and "loss" in row:
            if row["step"] == 1:  # of two runs of one name the later counts
                runs[row["name"]] = []
            runs[row["name"]].append(row)
    return runs


def difference(steps: Steps, others: Steps, key: str) -> float:
    """The largest relative difference of two runs over the steps that both have."""
    pairs = zip(steps, others, strict=False)
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in pairs)


def table(runs: Mapping[str, Steps]) -> list[str]:
    """Markdown: differences from the run without settings, then time and peak of every run."""
    lines = []
    if NONE in runs:
        lines += ["| beside none | steps | loss | gradient norm |", "|---|---|---|---|"]
        for name in REPEATED:
            if name in runs:
                steps, plain = runs[name], runs[NONE]
                parts = (f"{difference(steps, plain, key):.1e}" for key in ("loss", "grad_norm"))
                count = min(len(steps), len(plain))
                lines.append(f"| {name} | {count} | {' | '.join(parts)} |")
    lines += ["", "| setting | s a step | of none | peak GiB | host GiB a GPU | planner GiB |"]
    lines.append("|---|---|---|---|---|---|")
    base = _seconds(runs[NONE]) if NONE in runs else None
    for name, steps in runs.items():
        seconds, last = _seconds(steps), steps[1:] or steps
        peak, host = (max(row[key] for row in last) for key in ("peak_gib", "pinned_gib"))
        host += max(row["states_gib"] for row in last)
        ratio = f"{seconds / base:.2f}" if base else ""
        lines.append(
            f"| {name} | {seconds:.2f} | {ratio} | {peak:.1f} | {host:.1f} | "
            f"{last[-1]['predicted_gib']:.1f} |"
        )
    return lines


def _seconds(steps: Steps) -> float:
    return statistics.median(row["seconds"] for row in steps[1:] or steps)


if __name__ == "__main__":
    print("\n".join(table(runs_of(read_rows(Path(sys.argv[1]))))))
