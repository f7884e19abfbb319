"""Writes docs/usage/tree.svg: who sees whom in a tree of segments, and in which kernel call.

python scripts/draw_packed.py       # a test compares the file with what this draws
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from draw_degrees import text  # noqa: E402

from ds_usp import MaskSpec, TokenLayout  # noqa: E402
from ds_usp.geometry.ring_schedule import ring_schedule  # noqa: E402

PICTURE = ROOT / "docs" / "usage" / "tree.svg"
SEGMENTS = (
    ("prompt", 0, 8, None),
    ("answer 1", 8, 12, 0),
    ("answer 2", 12, 16, 0),
    ("turn 2a", 16, 20, 2),
    ("turn 2b", 20, 24, 2),
)
CALLS = (("#9db8e8", "#1f4e9c"), ("#f7c79a", "#9a4d00"), ("#a8d8b0", "#1d6b2f"))  # fill, text
# By the first tile of the call.
NOTES = {
    "q[8:24] k[0:8] full": "answers see the prompt",
    "q[0:8] k[0:8] causal": "each segment sees itself",
    "q[16:24] k[12:16] full": "turns see their answer",
}
CELL, LEFT, TOP = 18, 180, 62


def cells(mask: MaskSpec, layout: TokenLayout) -> Iterator[str]:
    """The pairs that attend, coloured by their kernel call on one rank: those of its tiles."""
    (step,) = ring_schedule(layout, mask, 0).steps
    for (fill, _), call in zip(CALLS, step.calls, strict=True):
        for tile in call.tiles[0]:
            for row in range(tile.q_start, tile.q_stop):
                for column in range(tile.k_start, tile.k_stop):
                    if tile.low <= column - row <= tile.high:
                        x, y = LEFT + column * CELL, TOP + row * CELL
                        yield (
                            f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" '
                            f'fill="{fill}" stroke="#fff"/>'
                        )


def picture() -> str:
    """The file."""
    tokens = SEGMENTS[-1][2]
    mask = MaskSpec.tree([segment[1:] for segment in SEGMENTS])
    layout = TokenLayout("contiguous", tokens)
    side = tokens * CELL
    width, height = LEFT + side + 40, TOP + side + 40 + 24 * len(CALLS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{side}" height="{side}" fill="#f3f3f3"/>',
        *cells(mask, layout),
        text(LEFT - 118, TOP - 14, "queries", 14, "#555"),
        text(LEFT - 24, TOP - 14, "position", 14, "#555"),
        text(LEFT + side / 2, 22, "keys \N{RIGHTWARDS ARROW}", 14, "#555"),
    ]
    for name, start, stop, _ in SEGMENTS:
        middle = (start + stop) / 2 * CELL
        lines.append(text(LEFT + middle, TOP - 14, name, 14))
        lines.append(text(LEFT - 118, TOP + middle + 5, name, 14))
    borders = [0, *(stop for _, _, stop, _ in SEGMENTS)]
    for at in (TOP + border * CELL for border in borders):
        lines.append(f'<path d="M{LEFT} {at}h{side}" stroke="#777"/>')
    for at in (LEFT + border * CELL for border in borders):
        lines.append(f'<path d="M{at} {TOP}v{side}" stroke="#777"/>')
    positions = layout.positions(0, mask=mask)
    for row, (position, after) in enumerate(pairwise([*positions, -1])):
        if row in borders or after != position + 1:  # the first and last of each segment
            lines.append(text(LEFT - 24, TOP + row * CELL + 14, str(position), 13, "#555"))
    (step,) = ring_schedule(layout, mask, 0).steps
    for index, (call, (fill, dark)) in enumerate(zip(step.calls, CALLS, strict=True)):
        y = TOP + side + 22 + 24 * index
        lines.append(f'<rect x="{LEFT}" y="{y}" width="14" height="14" fill="{fill}"/>')
        note = f"kernel call {index + 1}: {NOTES[str(call.tiles[0][0])]}"
        lines.append(text(LEFT + 150, y + 12, note, 14, dark))
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
