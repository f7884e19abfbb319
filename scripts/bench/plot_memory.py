"""Memory over one step, by where it is, for each policy: one SVG from bench_memory.py --moments.

    python scripts/bench/plot_memory.py moments.csv --out memory.svg

A panel a policy, all on one scale: forward on the left, backward on the right of the middle.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from plot import Look, line, read, text

KINDS = (("device_gib", "on the device", "#1558d6"), ("host_gib", "on the host", "#f0a35e"))
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 280, 200, 3
TOP, LEFT, ABOVE, BELOW = 84, 52, 26, 30
Row = dict[str, str]


def panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The moments of each policy, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["policy"], []).append(row)
    return found


def area(lower: Sequence[float], upper: Sequence[float], color: str, at: Place) -> str:
    """What lies between two lines."""
    there = [(at.x(i, len(upper)), at.y(y)) for i, y in enumerate(upper)]
    back = [(at.x(i, len(lower)), at.y(y)) for i, y in enumerate(lower)][::-1]
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*there, *back])
    return f'<polygon points="{corners}" fill="{color}" fill-opacity="0.85"/>'


class Place:
    """From moments and GiB to places in one panel."""

    def __init__(self, index: int, most: float) -> None:
        self.left = LEFT + index % COLUMNS * (PANEL_WIDTH + LEFT)
        self.top = TOP + index // COLUMNS * (PANEL_HEIGHT + ABOVE + BELOW) + ABOVE
        self.most = most

    def x(self, moment: int, count: int) -> float:
        return self.left + moment / max(count - 1, 1) * PANEL_WIDTH

    def y(self, gib: float) -> float:
        return self.top + (1 - gib / self.most) * PANEL_HEIGHT


def panel(title: str, rows: Sequence[Row], at: Place) -> list[str]:
    """One policy: frame, ticks, one area a kind upon the other."""
    parts = [text(at.left, at.top - 8, title, size=13, more='font-weight="bold"')]
    for part in range(5):
        gib = at.most * part / 4
        right = at.left + PANEL_WIDTH
        parts.append(line((at.left, at.y(gib), right, at.y(gib)), Look("#e4e4e4")))
        parts.append(text(at.left - 6, at.y(gib) + 4, f"{gib:.3g}", more='text-anchor="end"'))
    lower = [0.0] * len(rows)
    for name, _, color in KINDS:
        upper = [low + max(float(row[name]), 0.0) for low, row in zip(lower, rows, strict=True)]
        parts.append(area(lower, upper, color, at))
        lower = upper
    most = max(float(row["device_gib"]) for row in rows)
    middle, bottom = at.left + PANEL_WIDTH / 2, at.top + PANEL_HEIGHT
    parts.append(line((middle, at.top, middle, bottom), Look("#888888", 1, "3 3")))
    note = f"forward | backward; most on the device {most:.2f} GiB"
    parts.append(text(middle, bottom + 16, note, size=11, more='text-anchor="middle"'))
    return parts


def svg(head: Sequence[str], shape: str, found: dict[str, list[Row]]) -> str:
    """The whole picture, on white."""
    totals = [sum(float(row[k]) for k, *_ in KINDS) for rows in found.values() for row in rows]
    most = max(*totals, 1e-6) * 1.05
    width = COLUMNS * (PANEL_WIDTH + LEFT) + 24
    height = TOP + math.ceil(len(found) / COLUMNS) * (PANEL_HEIGHT + ABOVE + BELOW) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(20, 28, f"Memory over one step, GiB: {shape}", size=17, more='font-weight="bold"'),
        text(20, 48, head[-1] if head else "", more='fill="#444444"'),
    ]
    for index, (_, name, color) in enumerate(KINDS):
        x = 20 + 150 * index
        parts.append(f'<rect x="{x}" y="58" width="12" height="12" fill="{color}"/>')
        parts.append(text(x + 18, 68, name))
    for index, (policy, rows) in enumerate(found.items()):
        parts += panel(policy, rows, Place(index, most))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Draw the given moments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("moments", type=Path)
    parser.add_argument("--shape", help="as in the file; default: the first row's")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head, rows = read(args.moments)
    shape = args.shape or (rows[0]["shape"] if rows else "")
    drawn = panels([row for row in rows if row["shape"] == shape])
    if not drawn:
        raise SystemExit(f"nothing to draw for shape {shape!r}")
    args.out.write_text(svg(head, shape, drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
