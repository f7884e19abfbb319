"""The picture of a dealt step beside groups of all ranks, as an SVG.

    python scripts/dealt_picture.py    # writes docs/usage/dealt.svg anew; a test compares it

Who computes what, and for how long, is dealt by ``ds_usp.geometry.dealing``, by the planner's cost.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "usage" / "dealt.svg"
sys.path.insert(0, str(ROOT))

from ds_usp.geometry.dealing import Dealer, DealtStep  # noqa: E402
from ds_usp.planner import load_cluster, load_model, sample_cost  # noqa: E402

RANKS, MAX_TOKENS, ROW, LEFT, TOP, WIDTH = 8, 12288, 22, 64, 44, 700
LENGTHS = (26000, 11000, 5200, *[2800] * 4, *[1500] * 6, *[500] * 9)
COST = sample_cost(load_cluster("l20"), load_model("llama3-8b"), MAX_TOKENS)
LONG, SHORT, LINE, IDLE = "#f0a35e", "#3b75af", "#444444", "#e8e8e8"


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """One line of text."""
    return f'<text x="{x:g}" y="{y:g}" font-size="12" text-anchor="{anchor}">{words}</text>'


def panel(step: DealtStep, top: float, scale: float) -> Iterator[str]:
    """The ranks as rows, time to the right: a rectangle for each sample of each group."""
    for rank in range(RANKS):
        yield text(LEFT - 8, top + ROW * rank + 15, f"rank {rank}", "end")
    begin = float(LEFT)
    for groups in step.micro_batches:
        width = scale * max(group.seconds for group in groups)
        place = f'x="{begin:.1f}" y="{top:g}" width="{width:.1f}"'
        yield f'<rect {place} height="{ROW * RANKS - 2}" fill="{IDLE}"/>'
        for group in groups:
            size, x = len(group.ranks), begin
            y, height = top + ROW * group.ranks.start, ROW * size - 2
            samples = sorted(group.samples, key=lambda i: -LENGTHS[i])
            for number, i in enumerate(samples):
                # The start of the micro batch is drawn with its first sample.
                seconds = COST(LENGTHS[i], size) - COST(0, size) * (number > 0)
                colour = LONG if LENGTHS[i] > 4096 else SHORT
                place = f'x="{x:.1f}" y="{y:g}" width="{max(seconds * scale - 1, 0.5):.1f}"'
                yield f'<rect {place} height="{height}" fill="{colour}"/>'
                if seconds * scale > 30:
                    label = text(
                        x + seconds * scale / 2, y + height / 2 + 4, f"{LENGTHS[i]}", "middle"
                    )
                    yield label.replace("<text", '<text fill="white"')
                x += seconds * scale
        begin += width + 4


def picture() -> str:
    """The SVG's text."""
    dealer = Dealer(RANKS, MAX_TOKENS, COST)
    dealt = dealer.deal(LENGTHS)
    alike = replace(dealer, sizes=(RANKS,)).deal(LENGTHS)
    scale = (WIDTH - LEFT - 20) / alike.seconds
    below = TOP + ROW * RANKS + 44
    height = below + ROW * RANKS + 12
    head = f"{len(LENGTHS)} samples, {sum(LENGTHS)} tokens, at most {MAX_TOKENS} on a rank"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" fill="{LINE}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(LEFT, 18, f"{head}: Llama 3 8B on {RANKS} L20, by the planner"),
        text(LEFT, TOP - 6, f"dealt: {dealt.seconds:.2f} s"),
        *panel(dealt, TOP, scale),
        text(LEFT, below - 6, f"all samples over {RANKS} ranks: {alike.seconds:.2f} s"),
        *panel(alike, below, scale),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
