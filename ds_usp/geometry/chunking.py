"""Into how many parts of the heads a call on GPUs is cut, and how its blocks come: at once, or
passed on inside a node."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_schedule import ChunkPosition
from ds_usp.geometry.tiles import Tile

# A part should keep a GPU busy for some milliseconds: each costs the host a millisecond or two, and
# more of them hide nothing more, but they need less memory: at 128K tokens and 32 heads, cut so, 4
# GPUs need less beside the tensors than one exchange of all heads takes. Of a ring alone the own
# block hides what comes. As 4 H200 have it at 32K and 128K tokens.
_CHUNK_FLOP, _RING_CHUNK_FLOP, _MAX_CHUNKS = 1.1e12, 3e12, 16
# Below it a pass takes a GPU less time than the host needs for it, 1 to 2 ms on 4 H200 with copy
# engines: what counts is the number of calls.
_LAUNCH_BOUND_FLOP = 0.4e12
# Keys and values that may be gathered at once whatever the number of parts.
_GATHER_BYTES = 512 * 2**20

ChunkPositions = tuple[tuple[ChunkPosition, ChunkPosition], ...]

# A block is passed on inside a node, after one message across the network, where that message takes
# longer than its latency: 1 MiB on a NIC of 400 Gbit/s is 20 us. Reckoned, not measured.
_RELAY_BYTES = 2**20


def num_head_chunks(flop: float, max_chunks: int, ulysses: int) -> int:
    """The number of parts.

    Args:
        flop: of forward attention on one rank.
        most: as many as a rank has key/value heads to cut.
        ulysses: degree.
    """
    chunk_flop = _RING_CHUNK_FLOP if ulysses == 1 else _CHUNK_FLOP
    return max(1, min(max_chunks, _MAX_CHUNKS, round(flop / chunk_flop)))


def is_launch_bound(flop: float) -> bool:
    """Whether the host, not a GPU, decides how long a call of one part takes.

    Args:
        flop: of forward attention on one rank.
    """
    return flop < _LAUNCH_BOUND_FLOP


def chunk_positions(sizes: Sequence[int], *, launch_bound: bool = False) -> ChunkPositions:
    """Each part's place, forward and, where they come from the last to the first, backward.

    A part hides the arrival of the next one if it is about as large. Backward nothing comes after
    the first part that would hide its gradients' way home.

    Args:
        sizes: key/value heads of the parts, of the first Ulysses rank; others' may differ by one.
        brief: a single part is computed at once, with little to hide behind.
    """
    if len(sizes) == 1:
        return (("local_merged", "local_merged"),) if launch_bound else (("only", "only"),)
    positions: list[tuple[ChunkPosition, ChunkPosition]] = []
    for index, size in enumerate(sizes):
        previous, following = (
            sizes[i] if 0 <= i < len(sizes) else 0 for i in (index - 1, index + 1)
        )
        forward_position: ChunkPosition = (
            "local_merged" if 4 * previous >= 3 * size else "local_first"
        )
        backward_position: ChunkPosition = (
            "local_merged" if 4 * following >= 3 * size else "local_first"
        )
        positions.append((forward_position, backward_position if index else "local_last"))
    return tuple(positions)


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


def should_all_gather_kv(kv_bytes: int, chunks: int, ring: int) -> bool:
    """Whether the keys and values of the whole ring are gathered, where that takes no more memory
    than block by block, or little.

    Args:
        kv_bytes: of the whole ring and all heads of a rank.
    """
    return chunks >= ring or kv_bytes // chunks <= _GATHER_BYTES


def inner_ring_size(ring: int, ring_per_node: int, kv_bytes: int) -> int | None:
    """Ranks of the inner ring of a double ring; None where blocks go straight to their users.

    Args:
        ring: degree.
        on_a_node: ranks of the ring in a row that share a node.
        kv_bytes: keys and values of the whole ring, of one part of a rank's heads.
    """
    spans = 1 < ring_per_node < ring and ring % ring_per_node == 0
    return ring_per_node if spans and kv_bytes // ring >= _RELAY_BYTES else None
