"""Writes docs/which-degrees.svg: who computes what in three meshes of the same eight GPUs.

python scripts/draw_degrees.py      # a test compares the file with what this draws
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ds_usp import RankGrid  # noqa: E402

PICTURE = ROOT / "docs" / "which-degrees.svg"
GPUS, PER_NODE = 8, 4
SIDE, GAP, LEFT, TOP = 180, 84, 60, 80  # of a square, heads down and tokens to the right
WIDTH, HEIGHT = LEFT + 3 * SIDE + 2 * GAP + 42, TOP + SIDE + 106
NODES = (("#dbe7fb", "#1f4e9c"), ("#fde3c8", "#9a4d00"))  # fill, text
MESHES = {
    (8, 1): ("at least 8 query heads;", "the all-to-all crosses nodes"),
    (4, 2): ("all-to-alls stay in a node,", "one ring step crosses: take this"),
    (1, 8): ("any number of heads;", "7 ring steps, each crosses nodes"),
}


def text(x: float, y: float, words: str, size: int, fill: str = "#222", extra: str = "") -> str:
    """A line of text, centred."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" '
        f'text-anchor="middle"{extra}>{words}</text>'
    )


def mesh(left: float, ulysses: int, ring: int) -> Iterator[str]:
    """What each GPU of a mesh holds during attention: some heads of some tokens."""
    grid = RankGrid({"ulysses": ulysses, "ring": ring})
    width, height = SIDE / ring, SIDE / ulysses
    for rank in range(GPUS):
        at = grid.coords(rank)
        x, y = left + at["ring"] * width, TOP + at["ulysses"] * height
        fill, dark = NODES[rank // PER_NODE]
        yield (
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'fill="{fill}" stroke="#fff" stroke-width="2"/>'
        )
        name = f"GPU {rank}" if width > 60 else str(rank)
        yield text(x + width / 2, y + height / 2 + 6, name, 16, dark)


def picture() -> str:
    """The file."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for index, ((ulysses, ring), notes) in enumerate(MESHES.items()):
        left = LEFT + index * (SIDE + GAP)
        middle = left + SIDE / 2
        bold = ' font-weight="bold"'
        lines.append(text(middle, 28, f"Ulysses {ulysses} x ring {ring}", 20, extra=bold))
        lines.append(text(middle, TOP - 12, "tokens \N{RIGHTWARDS ARROW}", 16, "#555"))
        turned = f' transform="rotate(-90 {left - 16} {TOP + SIDE / 2:g})"'
        words = "\N{LEFTWARDS ARROW} heads"
        lines.append(text(left - 16, TOP + SIDE / 2, words, 16, "#555", turned))
        lines += mesh(left, ulysses, ring)
        lines += (text(middle, TOP + SIDE + 28 + 21 * i, note, 16) for i, note in enumerate(notes))
    for node, (fill, dark) in enumerate(NODES):
        x, y = WIDTH / 2 - 130 + 160 * node, HEIGHT - 24
        lines.append(f'<rect x="{x:g}" y="{y:g}" width="14" height="14" fill="{fill}"/>')
        lines.append(text(x + 48, y + 13, f"node {node}", 16, dark))
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
