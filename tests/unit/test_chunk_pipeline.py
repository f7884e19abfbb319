"""The order in which the chunk pipeline posts exchanges, computes chunks and returns them."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ds_usp.attention.pipeline import _ChunkPipeline, _InflightChunk
from ds_usp.comm.channel import PendingExchange


def events(*, ring: bool, local_heads: bool, backward: bool, chunks: int) -> list[str]:
    """What is posted and started for each chunk, a line from one computation to the next."""
    lines: list[list[str]] = [[]]

    def post(name: str, index: int) -> PendingExchange:
        lines[-1].append(f"{name}{index}")
        return PendingExchange(lambda: (index,))

    def start_kv(index: int, exchange: PendingExchange) -> Any:
        assert exchange.wait() == (index,)
        lines[-1].append(f"keys{index}")
        return SimpleNamespace(close=lambda: None)

    def compute(index: int, chunk: _InflightChunk) -> None:
        assert chunk.exchange.wait() == (index,)
        lines.append([f"{index}:"])
        if ring:
            pipeline.mid_chunk()
        lines[-1].append("|")
        pipeline.return_chunk(partial(post, "return", index))

    plan: Any = SimpleNamespace(has_ring=ring, local_heads=local_heads)
    order, exchange = range(chunks), partial(post, "heads")
    pipeline = _ChunkPipeline(plan, order, exchange, start_kv, backward=backward)
    with contextlib.closing(pipeline):
        pipeline.run(compute)
    return [" ".join(line) for line in lines]


# What is left of | is done mid-chunk.
ORDERS = {
    "Ulysses": (
        {"ring": False, "local_heads": False, "backward": False},
        [
            "heads0 heads1 keys0",
            "0: | return0 heads2 keys1",
            "1: | return1 heads3 keys2",
            "2: | return2 heads4 keys3",
            "3: | return3 keys4",
            "4: | return4",
        ],
    ),
    "ring": (
        {"ring": True, "local_heads": True, "backward": False},
        [
            "heads0 heads1 keys0 keys1",
            "0: | return0 heads2 keys2",
            "1: | return1 heads3 keys3",
            "2: | return2 heads4 keys4",
            "3: | return3",
            "4: | return4",
        ],
    ),
    "both": (
        {"ring": True, "local_heads": False, "backward": False},
        [
            "heads0 heads1 keys0 heads2",
            "0: keys1 | return0 heads3",
            "1: keys2 | return1 heads4 keys3",
            "2: | return2 keys4",
            "3: | return3",
            "4: | return4",
        ],
    ),
    "both, backward": (
        {"ring": True, "local_heads": False, "backward": True},
        [
            "heads0 heads1 keys0 keys1",
            "0: | heads2 keys2",
            "1: return0 | heads3 keys3",
            "2: return1 | heads4 keys4",
            "3: return2 |",
            "4: return3 | return4",
        ],
    ),
}


@pytest.mark.parametrize(("mode", "expected"), ORDERS.values(), ids=ORDERS)
def test_chunks_are_posted_ahead_and_returned_in_order(
    mode: dict[str, bool], expected: list[str]
) -> None:
    assert events(**mode, chunks=5) == expected
    assert events(**mode, chunks=1) == ["heads0 keys0", "0: | return0"]
