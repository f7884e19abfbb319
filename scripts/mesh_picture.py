"""README's picture: what each rank of Ulysses 2 x ring 4 holds, as an SVG.

    python scripts/mesh_picture.py    # writes docs/mesh.svg anew; a test compares it

Ranks, tokens and heads are those of ``ds_usp.geometry``, so that the picture cannot show others
than the code computes with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "mesh.svg"
sys.path.insert(0, str(ROOT))

from ds_usp.geometry.heads import HeadSplit  # noqa: E402
from ds_usp.geometry.layout import TokenLayout  # noqa: E402
from ds_usp.geometry.ranks import RankGrid  # noqa: E402

ULYSSES, RING, NODES, BLOCKS, HEADS = 2, 4, 2, 16, 4
CELL, GAP, TOP = 5, 24, 58  # pixels: of a block of tokens; between ranks; above the tokens held
WIDTH, HEIGHT = 872, 226
BOX = CELL * BLOCKS
HELD, COMPUTED, EMPTY, LINE = "#f0a35e", "#3b75af", "#e8e8e8", "#444444"


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "middle") -> str:
    """One line of text; its middle, or its start, is at x."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def cells(x: float, y: float, rows: int, used: set[tuple[int, int]], colour: str) -> Iterator[str]:
    """A table of heads x blocks of tokens, with the used ones in a colour."""
    yield f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{2 * CELL * rows}" fill="{EMPTY}"/>'
    for row, block in sorted(used):
        place = f'x="{x + CELL * block:g}" y="{y + 2 * CELL * row:g}"'
        yield f'<rect {place} width="{CELL - 0.6:g}" height="{2 * CELL - 1}" fill="{colour}"/>'


def left(rank: int) -> float:
    """Where a rank's box begins; nodes have a wider gap between them."""
    return 20 + rank * (BOX + GAP) + (rank // (ULYSSES * RING // NODES)) * 16


def arrow(points: str, both: bool = False) -> str:
    """A line with a head at its end, or at both."""
    start = ' marker-start="url(#head)"' if both else ""
    return f'<path d="{points}" fill="none" stroke="{LINE}" marker-end="url(#head)"{start}/>'


def picture() -> str:
    """The SVG's text."""
    grid = RankGrid({"ulysses": ULYSSES, "ring": RING})
    layout = TokenLayout("zigzag", BLOCKS, ULYSSES, RING)
    split = HeadSplit(HEADS, HEADS, ULYSSES)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" fill="#222222">',
        '<defs><marker id="head" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" '
        f'markerHeight="6" orient="auto-start-reverse"><path d="M0 0L6 3L0 6z" fill="{LINE}"/>',
        "</marker></defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
    ]
    in_node = grid.world_size // NODES
    for node in range(NODES):
        x, width = left(node * in_node) - 10, in_node * (BOX + GAP) - 4
        parts.append(
            f'<rect x="{x:g}" y="8" width="{width}" height="{HEIGHT - 42}" rx="6" fill="none" '
            f'stroke="#bbbbbb"/>{text(x + 8, 24, f"node {node}", 12, "start")}'
        )
    for rank in range(grid.world_size):
        at, x = grid.coords(rank), left(rank)
        first, last = split.query_range(at["ulysses"])
        held = {(0, block) for block in layout.positions(rank)}
        ring = layout.ring_positions(at["ring"])
        computed = {(row, block) for row in range(first, last) for block in ring}
        parts += [text(x + BOX / 2, TOP - 14, f"GPU {rank}")]
        parts += cells(x, TOP - 8, 1, held, HELD)
        parts += cells(x, TOP + 40, HEADS, computed, COMPUTED)
    for pair in grid.groups("ulysses"):
        a, b = left(pair[0]), left(pair[-1]) + BOX
        parts += [arrow(f"M{a + BOX:g} {TOP + 21}H{b - BOX:g}", both=True)]
        parts += [text((a + b) / 2, TOP + 36, "all-to-", 9), text((a + b) / 2, TOP + 46, "all", 9)]
        for rank in pair:
            parts += [arrow(f"M{left(rank) + BOX / 2:g} {TOP + 6}V{TOP + 36}", both=True)]
    for index, ring in enumerate(grid.groups("ring")):
        y = TOP + 94 + 10 * index
        for one, other in pairwise(ring):
            start, end = left(one) + BOX / 2 + 3, left(other) + BOX / 2 - 3
            foot = TOP + 83
            parts += [arrow(f"M{start:g} {foot}V{y}H{end:g}V{foot}")]
    for x, colour, words in (
        (20, HELD, "tokens that a GPU holds, all heads: of every layer but attention"),
        (462, COMPUTED, "attention: half of the heads (rows), tokens of both; KV by a ring"),
    ):
        y = HEIGHT - 14
        parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{colour}"/>')
        parts.append(text(x + 18, y, words, 12, "start"))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
