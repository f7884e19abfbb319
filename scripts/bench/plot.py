"""What each split reaches of the single-GPU kernel, by sequence length: one SVG from results.

    python scripts/bench/plot.py scripts/bench/results/attention_*.csv --out attention.svg

Reads what bench_attention.py wrote; where two files have the same contender and length, the later
argument counts. One panel a kernel; the share is of that kernel's own speed on one GPU.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

KERNELS = {
    "flash4": "FlashAttention-4",
    "flash3": "FlashAttention-3",
    "cudnn": "cuDNN",
    "flash2": "FlashAttention-2",
}
USUAL = (8192, 131072)
OURS = "ds_usp "
STRONG = ("#1558d6", "#c2410c", "#15803d", "#7e22ce", "#b91c1c")
GREYS = ("#444444", "#777777", "#a0a0a0")
DASHES = ("none", "6 3", "2 3", "8 3 2 3")
WIDTH, PANEL, TOP, LEFT, RIGHT, ABOVE, BELOW = 920, 300, 64, 64, 290, 34, 44
LABEL = 14  # between the baselines of two labels


@dataclass(frozen=True)
class Point:
    """One line of a results file: the share is 1 where a contender is as fast as the kernel."""

    contender: str
    kernel: str
    heads: str
    seq_len: int
    share: float


@dataclass(frozen=True)
class Look:
    """How a line is drawn; prints as SVG's attributes."""

    color: str
    width: float = 1
    dashes: str = "none"

    def __str__(self) -> str:
        return f'stroke="{self.color}" stroke-width="{self.width}" stroke-dasharray="{self.dashes}"'


@dataclass(frozen=True)
class Axes:
    """From lengths and percentages to places in a panel whose upper edge is at ``top``."""

    lengths: tuple[int, int]
    percents: tuple[int, int]
    top: float = 0.0

    def x(self, seq_len: int) -> float:
        """Logarithmic."""
        first, last = map(math.log2, self.lengths)
        return LEFT + (math.log2(seq_len) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(self, percent: float) -> float:
        """Downwards, as SVG counts."""
        low, high = self.percents
        height = PANEL - ABOVE - BELOW
        return self.top + ABOVE + (high - percent) / (high - low) * height


def read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The lines at the head of a results file, and its rows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = [line[2:] for line in lines if line.startswith("#")]
    return head, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def points(rows: Iterable[dict[str, str]]) -> list[Point]:
    """What there is to draw: the last of each contender and length that has a share."""
    found = {}
    for row in rows:
        name, kernel = row["contender"].rsplit(", ", 1)
        length, heads = row["shape"].split(" ", 1)
        seq_len = int(length[:-1]) * 1024 if length.endswith("K") else int(length)
        share = float(row["share_of_kernel"])
        if math.isnan(share):
            print(f"{row['shape']}  {row['contender']}: left out, its run has no single-GPU line")
        elif name != "one GPU":
            found[name, kernel, heads, seq_len] = Point(name, kernel, heads, seq_len, share)
    return list(found.values())


def axes(drawn: Sequence[Point]) -> Axes:
    """The usual lengths and whatever is beyond; round percentages around all shares."""
    lengths = [*USUAL, *(point.seq_len for point in drawn)]
    percents = [100 * point.share for point in drawn]
    low = math.floor(min([90, *percents]) / 20) * 20
    high = math.ceil(max([100, *percents]) / 10) * 10
    return Axes((min(lengths), max(lengths)), (low, high))


def text(x: float, y: float, content: str, *, size: int = 12, more: str = "") -> str:
    """One line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" {more}>{escape(content)}</text>'


def line(ends: tuple[float, float, float, float], look: Look) -> str:
    """A straight line from x, y to x, y."""
    x1, y1, x2, y2 = (f"{end:.1f}" for end in ends)
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {look}/>'


def frame(at: Axes, title: str) -> list[str]:
    """Title, grid and ticks of a panel."""
    left, right, bottom = LEFT, WIDTH - RIGHT, at.y(at.percents[0])
    parts = [text(left, at.top + ABOVE - 12, title, size=14, more='font-weight="bold"')]
    low, high = at.percents
    step = 10 if high - low <= 60 else 20
    for percent in range(high // step * step, low - 1, -step):
        look = Look("#888888", 1.5) if percent == 100 else Look("#e4e4e4")
        parts.append(line((left, at.y(percent), right, at.y(percent)), look))
        end = 'text-anchor="end"'
        parts.append(text(left - 8, at.y(percent) + 4, f"{percent} %", more=end))
    for power in range(math.ceil(math.log2(at.lengths[0])), int(math.log2(at.lengths[1])) + 1):
        x, length = at.x(2**power), 2**power
        parts.append(line((x, bottom, x, bottom + 5), Look("#888888")))
        name = f"{length // 1024}K" if length >= 1024 else str(length)
        parts.append(text(x, bottom + 19, name, more='text-anchor="middle"'))
    middle = 'text-anchor="middle" fill="#444444"'
    parts.append(text((left + right) / 2, bottom + 36, "tokens in the sequence", more=middle))
    return parts


def spread(places: Sequence[float], low: float, high: float) -> list[float]:
    """Ascending places moved as little as one pass allows, so that labels do not overlap."""
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + LABEL) if found else max(place, low))
    for index in range(len(found) - 1, -1, -1):
        limit = found[index + 1] - LABEL if index + 1 < len(found) else high
        found[index] = min(found[index], limit)
    return found


def looks(contenders: Iterable[str]) -> dict[str, Look]:
    """Ours solid and strong, the others thin and grey, told apart by their dashes."""
    names = list(dict.fromkeys(contenders))
    ours = [name for name in names if name.startswith(OURS)]
    peers = [name for name in names if name not in ours]
    found = {name: Look(STRONG[i % len(STRONG)], 2.6) for i, name in enumerate(ours)}
    for i, name in enumerate(peers):
        grey = GREYS[i // len(DASHES) % len(GREYS)]
        found[name] = Look(grey, 1.3, DASHES[i % len(DASHES)])
    return found


def panel(at: Axes, title: str, drawn: Sequence[Point], look: dict[str, Look]) -> list[str]:
    """One kernel: a line a contender, named beside its right end."""
    parts = frame(at, title)
    lines: dict[str, list[Point]] = {}
    for point in sorted(drawn, key=lambda point: point.seq_len):
        lines.setdefault(point.contender, []).append(point)
    for name in sorted(lines, key=lambda name: name.startswith(OURS)):  # ours above the others
        places = [(at.x(point.seq_len), at.y(100 * point.share)) for point in lines[name]]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{corners}" fill="none" {look[name]}/>')
        color = look[name].color
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in places]
    ends = sorted((lines[name][-1] for name in lines), key=lambda point: -point.share)
    heights = [at.y(100 * point.share) for point in ends]
    labels = spread(heights, at.top + ABOVE, at.y(at.percents[0]) + LABEL)
    for point, height, label in zip(ends, heights, labels, strict=True):
        parts += named(point, (at.x(point.seq_len), height), label, look[point.contender])
    return parts


def named(point: Point, end: tuple[float, float], height: float, look: Look) -> list[str]:
    """The label of a line that ends there: a lead, a sample of the line, the share, the name."""
    right = WIDTH - RIGHT
    bold = ' font-weight="bold"' if point.contender.startswith(OURS) else ""
    more = f'fill="{look.color if bold else GREYS[0]}"{bold}'
    share = f"{100 * point.share:.0f} %"
    return [
        line((end[0] + 4, end[1], right + 14, height), Look("#cccccc", 0.7)),
        line((right + 18, height, right + 46, height), look),
        text(right + 90, height + 4, share, more=f'{more} text-anchor="end"'),
        text(right + 98, height + 4, point.contender, more=more),
    ]


def svg(head: Sequence[str], drawn: Sequence[Point]) -> str:
    """The whole picture, on white, whatever the page around it is."""
    kernels = [kernel for kernel in KERNELS if any(kernel == point.kernel for point in drawn)]
    kernels += sorted({point.kernel for point in drawn} - set(kernels))
    at, height = axes(drawn), TOP + PANEL * len(kernels)
    passes = "forward" if any("--forward" in line for line in head) else "forward + backward"
    title = f"Share of the single-GPU kernel: causal attention, {passes}"
    setting = f"{head[-1].split(';')[0]}; bf16, heads {drawn[0].heads}" if head else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(20, 28, title, size=17, more='font-weight="bold"'),
        text(20, 48, setting, more='fill="#444444"'),
    ]
    look = looks(point.contender for point in drawn)
    for index, kernel in enumerate(kernels):
        place = Axes(at.lengths, at.percents, TOP + PANEL * index)
        mine = [point for point in drawn if point.kernel == kernel]
        parts += panel(place, KERNELS.get(kernel, kernel), mine, look)
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Draw the given results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--heads", help="such as '32/32 d128'; default: those of the first row")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    read_in = [read(path) for path in args.results]
    found = points(row for _, rows in read_in for row in rows)
    heads = args.heads or (found[0].heads if found else None)
    drawn = [point for point in found if point.heads == heads]
    if not drawn:
        raise SystemExit(f"nothing to draw for heads {heads}")
    args.out.write_text(svg(read_in[-1][0], drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
