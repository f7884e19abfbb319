"""Into how many parts of the heads a call on GPUs is cut, and how its blocks come: at once, or
passed on inside a node."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_schedule import Place
from ds_usp.geometry.tiles import Tile

# A part should keep a GPU busy for some milliseconds: each costs the host a millisecond or two, and
# more of them hide nothing more, but they need less memory: at 128K tokens and 32 heads, cut so, 4
# GPUs need less beside the tensors than one exchange of all heads takes. Of a ring alone the own
# block hides what comes. As 4 H200 have it at 32K and 128K tokens.
_FLOP, _RING_FLOP, _MOST_PARTS = 1.1e12, 3e12, 16
# Below it a pass takes a GPU less time than the host needs for it, 1 to 2 ms on 4 H200 with copy
# engines: what counts is the number of calls.
_BRIEF_FLOP = 0.4e12
# Keys and values that may be gathered at once whatever the number of parts.
_GATHER_BYTES = 512 * 2**20

Places = tuple[tuple[Place, Place], ...]

# A block is passed on inside a node, after one message across the network, where that message takes
# longer than its latency: 1 MiB on a NIC of 400 Gbit/s is 20 us. Reckoned, not measured.
_RELAY_BYTES = 2**20


def parts_of_heads(flop: float, most: int, ulysses: int) -> int:
    """The number of parts.

    Args:
        flop: of forward attention on one rank.
        most: as many as a rank has key/value heads to cut.
        ulysses: degree.
    """
    each = _RING_FLOP if ulysses == 1 else _FLOP
    return max(1, min(most, _MOST_PARTS, round(flop / each)))


def is_brief(flop: float) -> bool:
    """Whether the host, not a GPU, decides how long a call of one part takes.

    Args:
        flop: of forward attention on one rank.
    """
    return flop < _BRIEF_FLOP


def places(sizes: Sequence[int], *, brief: bool = False) -> Places:
    """Each part's place, forward and, where they come from the last to the first, backward.

    A part hides the arrival of the next one if it is about as large. Backward nothing comes after
    the first part that would hide its gradients' way home.

    Args:
        sizes: key/value heads of the parts, of the first Ulysses rank; others' may differ by one.
        brief: a single part is computed at once, with little to hide behind.
    """
    if len(sizes) == 1:
        return (("later", "later"),) if brief else (("alone", "alone"),)
    found: list[tuple[Place, Place]] = []
    for at, size in enumerate(sizes):
        before, after = (sizes[i] if 0 <= i < len(sizes) else 0 for i in (at - 1, at + 1))
        there: Place = "later" if 4 * before >= 3 * size else "first"
        back: Place = "later" if 4 * after >= 3 * size else "first"
        found.append((there, back if at else "last"))
    return tuple(found)


def visible_pairs(mask: MaskSpec, queries: int, keys: int) -> float:
    """(query, key) pairs of one sample that attend, of several samples the mean."""

    def inside(rows: int, columns: int) -> int:
        low = 1 - rows if mask.left is None else -mask.left
        high = columns - 1 if mask.right is None else mask.right
        return Tile(0, rows, 0, columns, low, high).pairs

    if mask.documents:
        lengths = (b - a for borders in mask.documents for a, b in pairwise(borders))
        return sum(inside(n, n) for n in lengths) / len(mask.documents)
    beyond = queries * mask.prefix - inside(queries, mask.prefix) if mask.prefix else 0
    return inside(queries, keys) + beyond


def comes_at_once(kv_bytes: int, parts: int, ring: int) -> bool:
    """Whether the keys and values of the whole ring are gathered, where that takes no more memory
    than block by block, or little.

    Args:
        kv_bytes: of the whole ring and all heads of a rank.
    """
    return parts >= ring or kv_bytes // parts <= _GATHER_BYTES


def inner_ring(ring: int, on_a_node: int, kv_bytes: int) -> int | None:
    """Ranks of the inner ring of a double ring; None where blocks go straight to their users.

    Args:
        ring: degree.
        on_a_node: ranks of the ring in a row that share a node.
        kv_bytes: keys and values of the whole ring, of one part of a rank's heads.
    """
    spans = 1 < on_a_node < ring and ring % on_a_node == 0
    return on_a_node if spans and kv_bytes // ring >= _RELAY_BYTES else None
