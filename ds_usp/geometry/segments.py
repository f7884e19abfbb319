"""Token segments: runs of global positions, in which a rank's shard of the sequence is written;
layouts and tiles compute on them. And which rows ranges share, for ``kernels/merge.py``."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

Span = tuple[int, int]  # half-open, of a shard's tokens: its rows
Runs = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions ``start, start + stride, ...``, ``length`` of them, ascending."""

    start: int
    length: int
    stride: int = 1

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.length * self.stride, self.stride)

    def slice(self, begin: int, end: int) -> Segment:
        """The segment of this one's tokens ``begin : end``."""
        return Segment(self.start + begin * self.stride, end - begin, self.stride)

    def continues(self, other: Segment) -> bool:
        """``other`` follows this segment without a gap."""
        return other.stride == self.stride and other.start == self.positions.stop


# The segments of a shard, each with the index of its first token in the shard.
Shard = tuple[tuple[Segment, int], ...]


def coalesce(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The segments' positions in the same order, in as few segments as possible, none empty."""
    joined: list[Segment] = []
    for segment in segments:
        if not segment.length:
            continue
        if joined and joined[-1].continues(segment):
            last = joined.pop()
            segment = Segment(last.start, last.length + segment.length, last.stride)
        joined.append(segment)
    return tuple(joined)


def slice_segments(segments: Iterable[Segment], begin: int, end: int) -> tuple[Segment, ...]:
    """Tokens ``begin : end`` of the concatenated segments."""
    return tuple(
        segment.slice(max(begin - offset, 0), min(end - offset, segment.length))
        for segment, offset in with_offsets(segments)
        if max(begin, offset) < min(end, offset + segment.length)
    )


def with_offsets(segments: Iterable[Segment]) -> Shard:
    """Each segment with the index of its first token among all."""
    offset, shard = 0, []
    for segment in segments:
        shard.append((segment, offset))
        offset += segment.length
    return tuple(shard)


class ShardIndex:
    """Finds the tokens of a shard at some positions. Its segments, none empty, may be in any order,
    as in a buffer of several ranks' keys, and segments with a stride may interleave."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._shard = sorted(with_offsets(segments), key=lambda placed: placed[0].start)
        self._starts = [segment.start for segment, _ in self._shard]
        # For each segment the last stop of all up to it, so that the stops ascend.
        self._stops = list(accumulate((x.positions[-1] + 1 for x, _ in self._shard), max))

    def between(self, start: int, stop: int) -> list[tuple[Segment, int]]:
        """The tokens at the positions ``start : stop``: segments, each with the index of its
        first token in the shard, in the order of these indices."""
        first = bisect_right(self._stops, start)
        if first == len(self._starts) or self._starts[first] >= stop:
            return []
        parts = []
        for segment, offset in self._shard[first : bisect_left(self._starts, stop)]:
            origin, stride = segment.start, segment.stride
            begin = max(0, -((origin - start) // stride))  # both divisions round up
            end = min(segment.length, -((origin - stop) // stride))
            if begin < end:
                parts.append((segment.slice(begin, end), offset + begin))
        return parts if len(parts) == 1 else sorted(parts, key=itemgetter(1))


def even_split(total: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open bounds of part ``index``; the first parts get one more each where ``total`` does
    not divide, as DeepSpeed splits heads."""
    size, rest = divmod(total, parts)
    begin = index * size + min(index, rest)
    return begin, begin + size + (index < rest)


# Kernel calls of a shard cover overlapping ranges of its rows. To merge them in one pass
# (kernels/merge.py), rows are cut where any range begins or ends; the same calls have a run's rows:
#
#     call 0   [-----------------]
#     call 1          [------]
#     call 2          [----------]
#     runs     |  0   | 0 1 2 | 0 2 |
class CoverageRun(NamedTuple):
    """Rows that the same spans cover.

    Args:
        rows: which, counted from the first row of all runs; None: all rows.
        spans: the index of each span that covers them, in order, and which of the span's own rows
            they are; None: all of them. Empty where no span does.
    """

    rows: slice | None
    spans: tuple[tuple[int, slice | None], ...]


@lru_cache(maxsize=1024)
def coverage_runs(spans: tuple[Span, ...], first: int, last: int) -> tuple[CoverageRun, ...]:
    """Runs of the rows ``first : last``, ascending, and which spans cover each of them."""
    edges = {min(max(edge, first), last) for edge in (first, last, *(e for s in spans for e in s))}
    runs = []
    for start, stop in pairwise(sorted(edges)):
        covering = tuple(
            (index, _slice_of(start - span_start, stop - span_start, span_stop - span_start))
            for index, (span_start, span_stop) in enumerate(spans)
            if span_start <= start and stop <= span_stop
        )
        runs.append(CoverageRun(_slice_of(start - first, stop - first, last - first), covering))
    return tuple(runs)


def _slice_of(start: int, stop: int, total: int) -> slice | None:
    """``start : stop`` of ``total`` rows; None: all of them."""
    return None if stop - start == total else slice(start, stop)


@lru_cache(maxsize=1024)
def max_overlap(spans: tuple[Span, ...]) -> int:
    """The largest number of spans that cover one row."""
    return max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=0)


def split_at_documents(segments: Sequence[Segment], borders: Sequence[int]) -> dict[int, Shard]:
    """The segments of a shard by the document that they are in, split where documents begin.

    Args:
        borders: cumulative sequence lengths (``cu_seqlens``); empty: all is document -1.
    """
    documents: dict[int, list[tuple[Segment, int]]] = {}
    for segment, offset in with_offsets(segments):
        begin, document = 0, bisect_right(borders, segment.start) - 1
        while begin < segment.length:
            end = segment.length
            if borders:
                position = segment.start + begin * segment.stride
                if borders[document + 1] <= position:  # a stride may step over documents
                    document = bisect_right(borders, position) - 1
                # Tokens of the segment before the document's end: the division rounds up.
                end = min(end, -(-(borders[document + 1] - segment.start) // segment.stride))
            shard = documents.setdefault(document, [])
            shard.append((segment.slice(begin, end), offset + begin))
            begin = end
    return {document: tuple(shard) for document, shard in documents.items()}
