"""Unions and differences of half-open intervals of time, as integers (nanoseconds)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals: sorted and disjoint, without those of no length."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def total_length(intervals: Iterable[Interval]) -> int:
    """Length of the union of intervals."""
    return sum(stop - start for start, stop in merge_intervals(intervals))


def subtract_intervals(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """What the union of ``first`` holds and that of ``second`` does not, sorted and disjoint."""
    holes = merge_intervals(second)
    left: list[Interval] = []
    index = 0
    for start, stop in merge_intervals(first):
        while index < len(holes) and holes[index][1] <= start:
            index += 1
        at, hole = start, index
        while hole < len(holes) and holes[hole][0] < stop:
            if holes[hole][0] > at:
                left.append((at, holes[hole][0]))
            at = holes[hole][1]
            hole += 1
        if at < stop:
            left.append((at, stop))
    return left


def gaps(intervals: Sequence[Interval]) -> list[Interval]:
    """The intervals between the first start and the last stop of which none is part."""
    if not intervals:
        return []
    whole = min(start for start, _ in intervals), max(stop for _, stop in intervals)
    return subtract_intervals([whole], intervals)
