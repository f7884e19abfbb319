"""Speed relative to the single-GPU kernel by sequence length: one SVG from results.

    python scripts/bench/plot.py scripts/bench/results/attention_*.csv --out attention.svg

Reads what bench_attention.py wrote; of two files with the same baseline and length, the later
argument counts. One panel a kernel; 100 % is that kernel's own speed on one GPU. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_usp.planner.plot import new_figure, save_svg

KERNELS = {
    "flash4": "FlashAttention-4",
    "flash3": "FlashAttention-3",
    "cudnn": "cuDNN",
    "flash2": "FlashAttention-2",
}
USUAL_LENGTHS = (8192, 131072)
COLORS = ("#1558d6", "#c2410c", "#15803d", "#7e22ce", "#b91c1c")
PEER_STYLES = tuple(product(("#444444", "#777777", "#a0a0a0"), ("-", "--", ":", "-.")))


@dataclass(frozen=True)
class Point:
    """One row of a results file; percent is 100 where a baseline is as fast as the kernel."""

    name: str
    kernel: str
    heads: str
    seq_len: int
    percent: float


def read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The lines at the head of a results file, and its rows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = [line[2:] for line in lines if line.startswith("#")]
    return head, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def points(rows: Iterable[dict[str, str]]) -> list[Point]:
    """The last row of each baseline and length that has a single-GPU row to compare with."""
    latest = {}
    for row in rows:
        name, kernel = row["contender"].rsplit(", ", 1)
        length, heads = row["shape"].split(" ", 1)
        seq_len = int(length[:-1]) * 1024 if length.endswith("K") else int(length)
        percent = 100 * float(row["share_of_kernel"])
        if math.isnan(percent):
            print(f"{row['shape']}  {row['contender']}: left out, its run has no single-GPU line")
        elif name != "one GPU":
            latest[name, kernel, heads, seq_len] = Point(name, kernel, heads, seq_len, percent)
    return list(latest.values())


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Line style of each baseline: ds_usp wide in color, peers thin in grey with dashes."""
    colors, peers = cycle(COLORS), cycle(PEER_STYLES)
    looks: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(names):
        if name.startswith("ds_usp "):
            looks[name] = {"color": next(colors), "linewidth": 2.6, "zorder": 3}
        else:
            color, dashes = next(peers)
            looks[name] = {"color": color, "linestyle": dashes, "linewidth": 1.3}
    return looks


def draw(head: Sequence[str], drawn: Sequence[Point], out: Path) -> None:
    """Draw one panel for each kernel: percent of the single-GPU kernel over the sequence length;
    legends are ordered by the percentage at the longest sequence."""
    kernels = [kernel for kernel in KERNELS if any(kernel == point.kernel for point in drawn)]
    kernels += sorted({point.kernel for point in drawn} - set(kernels))
    figure = new_figure(9.5, 0.7 + 3.1 * len(kernels))
    passes = "forward" if any("--forward" in line for line in head) else "forward + backward"
    setting = f"{head[-1].split(';')[0]}; bf16, heads {drawn[0].heads}" if head else ""
    title = f"Speed relative to the single-GPU kernel: causal attention, {passes}"
    figure.suptitle(f"{title}\n{setting}", fontsize="medium")
    look = styles(point.name for point in drawn)
    lengths = sorted({*USUAL_LENGTHS, *(point.seq_len for point in drawn)})
    panels = figure.subplots(len(kernels), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, kernel in zip(panels, kernels, strict=True):
        lines: dict[str, list[Point]] = {}
        for point in sorted(drawn, key=lambda point: point.seq_len):
            if point.kernel == kernel:
                lines.setdefault(point.name, []).append(point)
        for name, line in sorted(lines.items(), key=lambda item: -item[1][-1].percent):
            label = f"{line[-1].percent:.0f} %  {name}"
            xs, ys = [point.seq_len for point in line], [point.percent for point in line]
            axes.plot(xs, ys, marker=".", label=label, **look[name])
        axes.axhline(100, color="#888888", linewidth=1)
        axes.set_xscale("log", base=2)
        names = [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths]
        axes.set_xticks(lengths, names, minor=False)
        axes.set_ylim(bottom=min(80.0, *(point.percent - 5 for point in drawn)))
        axes.grid(axis="y", color="#e4e4e4")
        axes.set_title(KERNELS.get(kernel, kernel), loc="left", fontweight="bold")
        axes.set_ylabel("%")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    panels[-1].set_xlabel("tokens in the sequence")
    save_svg(figure, out)


def main() -> None:
    """Draw the results of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--heads", help="such as '32/32 d128'; default: those of the first row")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    files = [read(path) for path in args.results]
    measured = points(row for _, rows in files for row in rows)
    heads = args.heads or (measured[0].heads if measured else None)
    drawn = [point for point in measured if point.heads == heads]
    if not drawn:
        raise SystemExit(f"nothing to draw for heads {heads}")
    draw(files[-1][0], drawn, args.out)


if __name__ == "__main__":
    main()
