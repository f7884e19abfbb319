"""Suggestions for misspelt names, by edit distance."""

from __future__ import annotations

from collections.abc import Iterable


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name with the smallest edit distance; None if that is above a third of ``name``.

    A name that is a prefix of exactly one known name is completed to it.
    """
    dashed = name.replace("_", "-")
    names = list(known)
    completions = [
        candidate for candidate in names if candidate.replace("_", "-").startswith(dashed)
    ]
    if len(completions) == 1 and len(dashed) > 4:
        return completions[0]
    distances = [
        (edit_distance(dashed, candidate.replace("_", "-")), candidate) for candidate in names
    ]
    count, best = min(distances, default=(len(name), ""))
    return best if count <= max(1, len(name.strip("-")) // 3) else None


def edit_distance(a: str, b: str) -> int:
    """Edit distance (optimal string alignment): letters inserted, removed, replaced, or swapped
    with a neighbour to turn ``a`` into ``b``."""
    previous_row, row = [], list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous_row, row_before_previous, row = row, previous_row, [i]
        for j, y in enumerate(b, 1):
            count = min(previous_row[j] + 1, row[j - 1] + 1, previous_row[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                count = min(count, row_before_previous[j - 2] + 1)
            row.append(count)
    return row[-1]
