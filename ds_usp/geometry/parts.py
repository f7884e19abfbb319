"""Into how many parts of the heads a call on GPUs is cut, and whether its blocks come at once."""

from __future__ import annotations

# A part should keep a GPU busy for about a millisecond: smaller kernels are slower, and more parts
# hide nothing more. Of a ring alone the own block hides what comes, so its parts only save memory.
_PART_FLOP, _RING_PART_FLOP, _MOST_PARTS = 7e11, 3e12, 16
# Keys and values that may be gathered at once whatever the number of parts.
_GATHER_BYTES = 512 * 2**20


def parts_of_heads(product_flop: float, most: int, ulysses: int) -> int:
    """The number of parts.

    Args:
        product_flop: of one of the two matrix products of forward attention on one rank, all pairs
            counted.
        most: as many as a rank has key/value heads to cut.
        ulysses: the Ulysses degree.
    """
    each = _RING_PART_FLOP if ulysses == 1 else _PART_FLOP
    return max(1, min(most, _MOST_PARTS, round(product_flop / each)))


def comes_at_once(kv_bytes: int, parts: int, ring: int) -> bool:
    """Whether the keys and values of the whole ring are gathered, where that takes no more memory
    than block by block, or little.

    Args:
        kv_bytes: of the whole ring and all heads of a rank.
    """
    return parts >= ring or kv_bytes // parts <= _GATHER_BYTES
