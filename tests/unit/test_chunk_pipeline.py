"""In which order attention's belt sends parts of the heads, computes them and takes them home."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ds_usp.attention.pipeline import _ChunkPipeline, _InflightChunk
from ds_usp.comm.uniform_all_to_all import PendingExchange


def orders(*, rings: bool, local_heads: bool, backward: bool, parts: int) -> list[str]:
    """What is done for each part, one line from a part's computation to the next one's."""
    lines: list[list[str]] = [[]]

    def trip(name: str, part: int) -> PendingExchange:
        lines[-1].append(f"{name}{part}")
        return PendingExchange(lambda: (part,))

    def walk(part: int, chunk: PendingExchange) -> Any:
        assert chunk.wait() == (part,)
        lines[-1].append(f"keys{part}")
        return SimpleNamespace(close=lambda: None)

    def compute(part: int, chunk: _InflightChunk) -> None:
        assert chunk.exchange.wait() == (part,)
        lines.append([f"{part}:"])
        if rings:
            belt.mid_chunk()
        lines[-1].append("|")
        belt.return_chunk(partial(trip, "home", part))

    call: Any = SimpleNamespace(has_ring=rings, local_heads=local_heads)
    belt = _ChunkPipeline(call, range(parts), partial(trip, "heads"), walk, backward=backward)
    with contextlib.closing(belt):
        belt.run(compute)
    return [" ".join(line) for line in lines]


# What stands before | is done in the middle of a part.
ORDERS = {
    "Ulysses": (
        {"rings": False, "local_heads": False, "backward": False},
        [
            "heads0 heads1 keys0",
            "0: | home0 heads2 keys1",
            "1: | home1 heads3 keys2",
            "2: | home2 heads4 keys3",
            "3: | home3 keys4",
            "4: | home4",
        ],
    ),
    "ring": (
        {"rings": True, "local_heads": True, "backward": False},
        [
            "heads0 heads1 keys0 keys1",
            "0: | home0 heads2 keys2",
            "1: | home1 heads3 keys3",
            "2: | home2 heads4 keys4",
            "3: | home3",
            "4: | home4",
        ],
    ),
    "both": (
        {"rings": True, "local_heads": False, "backward": False},
        [
            "heads0 heads1 keys0 heads2",
            "0: keys1 | home0 heads3",
            "1: keys2 | home1 heads4 keys3",
            "2: | home2 keys4",
            "3: | home3",
            "4: | home4",
        ],
    ),
    "both, backward": (
        {"rings": True, "local_heads": False, "backward": True},
        [
            "heads0 heads1 keys0 keys1",
            "0: | heads2 keys2",
            "1: home0 | heads3 keys3",
            "2: home1 | heads4 keys4",
            "3: home2 |",
            "4: home3 | home4",
        ],
    ),
}


@pytest.mark.parametrize(("way", "expected"), ORDERS.values(), ids=ORDERS)
def test_parts_set_out_ahead_and_go_home_in_order(
    way: dict[str, bool], expected: list[str]
) -> None:
    assert orders(**way, parts=5) == expected


def test_one_part_is_sent_computed_and_taken_home() -> None:
    for way, _ in ORDERS.values():
        assert orders(**way, parts=1) == ["heads0 keys0", "0: | home0"]
