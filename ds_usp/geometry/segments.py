"""Runs of global token positions: the unit in which a rank's share of the sequence is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions ``start, start + stride, ...``, ``length`` of them, ascending."""

    start: int
    length: int
    stride: int = 1

    @property
    def positions(self) -> range:
        """The global positions, in order."""
        return range(self.start, self.start + self.length * self.stride, self.stride)

    def slice(self, begin: int, end: int) -> Segment:
        """The part of the run between its tokens ``begin`` and ``end`` (half open)."""
        return Segment(self.start + begin * self.stride, end - begin, self.stride)

    def continues(self, other: Segment) -> bool:
        """True if ``other`` is the run that follows this one without a gap."""
        return other.stride == self.stride and other.start == self.positions.stop


def coalesce(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The same positions in the same order, in as few runs as possible; empty runs vanish."""
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
    """Tokens ``begin`` to ``end`` (half open) of the concatenated runs."""
    parts = []
    offset = 0
    for segment in segments:
        low, high = max(begin - offset, 0), min(end - offset, segment.length)
        if low < high:
            parts.append(segment.slice(low, high))
        offset += segment.length
    return tuple(parts)


def even_split(total: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open bounds of part ``index`` when ``total`` things are cut as evenly as possible.

    The first parts get what does not divide, one each, as DeepSpeed cuts heads.
    """
    each, rest = divmod(total, parts)
    begin = index * each + min(index, rest)
    return begin, begin + each + (index < rest)
