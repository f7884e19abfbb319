"""Runs of tokens cut where documents begin."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ds_usp.geometry.segments import Segment

# Runs of one shard, each with the index of its first token there.
Shard = tuple[tuple[Segment, int], ...]


def split_at_documents(segments: Sequence[Segment], borders: Sequence[int]) -> dict[int, Shard]:
    """The runs of a shard by the document that they are in; without borders all are in one.

    Args:
        borders: the first position of every document, ascending, and the end of the sequence.
    """
    found: dict[int, list[tuple[Segment, int]]] = {}
    at = 0
    for segment in segments:
        begin, document = 0, bisect_right(borders, segment.start) - 1
        while begin < segment.length:
            end = segment.length
            if borders:
                position = segment.start + begin * segment.stride
                if borders[document + 1] <= position:  # a stride may step over documents
                    document = bisect_right(borders, position) - 1
                end = min(end, -(-(borders[document + 1] - segment.start) // segment.stride))
            found.setdefault(document, []).append((segment.slice(begin, end), at + begin))
            begin = end
        at += segment.length
    return {document: tuple(runs) for document, runs in found.items()}
