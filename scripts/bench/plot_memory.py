"""Memory over one step, on the device and on the host, for each policy: one SVG.

    python scripts/bench/plot_memory.py moments.csv --out memory.svg

Reads what ``bench_memory.py --moments`` or ``bench_length.py train`` wrote. A panel a policy, all
on one scale: forward on the left, backward on the right of the middle. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from plot import new_figure, read, save_svg

KINDS = (("device_gib", "on the device", "#1558d6"), ("host_gib", "on the host", "#f0a35e"))
COLUMNS = 3
Row = dict[str, str]


def draw(head: Sequence[str], rows: Sequence[Row], out: Path) -> None:
    """Draw stacked areas of device and host bytes over the moments of a step."""
    policies: dict[str, list[Row]] = {}
    for row in rows:
        policies.setdefault(row["policy"], []).append(row)
    count = math.ceil(len(policies) / COLUMNS)
    columns = min(COLUMNS, len(policies))
    figure = new_figure(10, 1 + 2.5 * count)
    title = f"Memory over one step, GiB: {rows[0]['shape']}"
    lines = [title, *(line for text in head[-1:] for line in textwrap.wrap(text, 130))]
    figure.suptitle("\n".join(lines), fontsize="medium")
    panels = figure.subplots(count, columns, sharey=True, squeeze=False).flat
    for (policy, moments), axes in zip(policies.items(), panels, strict=False):
        sizes = [[max(float(row[kind]), 0.0) for row in moments] for kind, *_ in KINDS]
        colors, names = [color for *_, color in KINDS], [name for _, name, _ in KINDS]
        axes.stackplot(range(len(moments)), *sizes, colors=colors, labels=names, alpha=0.85)
        if "peak_gib" in moments[0]:  # what a layer allocates in between
            peaks = [float(row["peak_gib"]) for row in moments]
            axes.plot(peaks, color="#0b2e6f", linewidth=0.9, label="most since the point before")
            sizes[0] = peaks
        axes.axvline((len(moments) - 1) / 2, color="#888888", linestyle=":")
        axes.set_title(policy, loc="left", fontsize="medium", fontweight="bold")
        note = f"forward | backward; most on the device {max(sizes[0]):.2f} GiB"
        axes.set_xlabel(note, fontsize="small")
        axes.set_xticks([])
        axes.grid(axis="y", color="#e4e4e4")
    for axes in panels:  # panels of the last row that have no policy
        axes.set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False)
    save_svg(figure, out)


def main() -> None:
    """Draw the moments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("moments", type=Path)
    parser.add_argument("--shape", help="as in the file; default: the first row's")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head, rows = read(args.moments)
    shape = args.shape or (rows[0]["shape"] if rows else "")
    drawn = [row for row in rows if row["shape"] == shape]
    if not drawn:
        raise SystemExit(f"nothing to draw for shape {shape!r}")
    draw(head, drawn, args.out)


if __name__ == "__main__":
    main()
