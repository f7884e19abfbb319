"""The known name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name with the fewest edits to ``name``; None if it takes more than a third of it.

    A name that is the beginning of exactly one known name is taken for that one.
    """
    plain = name.replace("_", "-")
    names = list(known)
    longer = [other for other in names if other.replace("_", "-").startswith(plain)]
    if len(longer) == 1 and len(plain) > 4:
        return longer[0]
    distances = [(edits(plain, other.replace("_", "-")), other) for other in names]
    count, best = min(distances, default=(len(name), ""))
    return best if count <= max(1, len(name.strip("-")) // 3) else None


def edits(a: str, b: str) -> int:
    """Letters inserted, removed, replaced, or swapped with a neighbour (optimal string alignment)
    to make ``b`` of ``a``."""
    before, row = [], list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, y in enumerate(b, 1):
            count = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                count = min(count, last[j - 2] + 1)
            row.append(count)
    return row[-1]
