"""Which tokens of other ring ranks a ring rank's queries see: what has to travel."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ds_usp.geometry.documents import split_at_documents
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.tiles import visible_columns

# A gap between two runs that are seen stays away if it is this part of what its owner holds:
# below, another message costs more than the tokens do.
_MIN_GAP_FRACTION = 32

Runs = tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def visible_runs(
    layout: TokenLayout, mask: MaskSpec, kv_layout: TokenLayout | None = None
) -> tuple[tuple[Runs, ...], ...]:
    """Half-open runs of the owner's tokens that the user's queries see, by user and owner.

    Tokens that nobody sees are among them where the gap that they make is short. Of several
    samples, what any of them sees.
    """
    ranks = range(layout.ring)
    kv_layout = kv_layout or layout
    segments, kv_segments = ([x.ring_segments(r) for r in ranks] for x in (layout, kv_layout))
    seen: list[list[list[tuple[int, int]]]] = [[[] for _ in ranks] for _ in ranks]
    for borders in mask.documents or ((),):
        shards, kv_shards = (
            [split_at_documents(each, borders) for each in x] for x in (segments, kv_segments)
        )
        for user in ranks:
            for owner in ranks:
                queries, keys, runs = shards[user], kv_shards[owner], seen[user][owner]
                for document in queries.keys() & keys.keys():
                    runs += visible_columns(queries[document], keys[document], mask)
    gaps = [min_gap(kv_layout.ring_length(owner)) for owner in ranks]
    return tuple(
        tuple(merge_runs(runs, gap) for runs, gap in zip(row, gaps, strict=True)) for row in seen
    )


def min_gap(owned: int) -> int:
    """Tokens nobody sees that stay away, of so many that their owner holds."""
    return max(1, -(-owned // _MIN_GAP_FRACTION))


def merge_runs(runs: Iterable[tuple[int, int]], gap: int) -> Runs:
    """The union of runs, with the gaps that are shorter."""
    merge_runs: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if merge_runs and start - merge_runs[-1][1] < gap:
            before = merge_runs.pop()
            start, stop = before[0], max(before[1], stop)
        merge_runs.append((start, stop))
    return tuple(merge_runs)
