"""Number of head chunks of a call, and how their KV is exchanged: stepwise, all-gathered, or
relayed inside a node."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_schedule import ChunkPosition
from ds_usp.geometry.tiles import Tile

# A chunk should keep a GPU busy for some milliseconds: its launch overhead is a millisecond or two.
# More chunks overlap nothing more but need less memory: at 128K tokens and 32 heads, 4 GPUs then
# need less beside the tensors than one exchange of all heads takes. In a pure ring the local block
# overlaps the receives. Measured on 4 H200 at 32K and 128K tokens.
_CHUNK_FLOP, _RING_CHUNK_FLOP, _MAX_CHUNKS = 1.1e12, 3e12, 16
# Below it a pass takes a GPU less time than the CPU needs to launch it, 1 to 2 ms on 4 H200 with
# copy engines: what counts is the number of calls.
_LAUNCH_BOUND_FLOP = 0.4e12
# KV of a chunk that may be all-gathered whatever the number of chunks.
_GATHER_BYTES = 512 * 2**20

ChunkPositions = tuple[tuple[ChunkPosition, ChunkPosition], ...]

# A block is relayed inside a node, after one message across the network, where that message takes
# longer than its latency: 1 MiB on a NIC of 400 Gbit/s is 20 us. Computed, not measured.
_RELAY_BYTES = 2**20


def num_head_chunks(flop: float, max_chunks: int, ulysses: int) -> int:
    """Number of head chunks of a call.

    Args:
        flop: of forward attention on one rank.
        max_chunks: :attr:`HeadSplit.max_chunks`.
        ulysses: degree.
    """
    chunk_flop = _RING_CHUNK_FLOP if ulysses == 1 else _CHUNK_FLOP
    return max(1, min(max_chunks, _MAX_CHUNKS, round(flop / chunk_flop)))


def is_launch_bound(flop: float) -> bool:
    """Whether CPU launch overhead, not the GPU, decides how long a call of one chunk takes.

    Args:
        flop: of forward attention on one rank.
    """
    return flop < _LAUNCH_BOUND_FLOP


def chunk_positions(sizes: Sequence[int], *, launch_bound: bool = False) -> ChunkPositions:
    """Position of each chunk (see ``ring_schedule``), forward and backward, which takes the chunks
    from the last to the first.

    A chunk overlaps the receive of the next one if it is about as large. Backward no chunk follows
    the first one that would overlap its gradient return.

    Args:
        sizes: key/value heads of the chunks, of the first Ulysses rank; others' may differ by one.
        launch_bound: a single chunk is computed in one call, with little to overlap.
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
    than stepwise, or little.

    Args:
        kv_bytes: of the whole ring and all heads of a rank.
    """
    return chunks >= ring or kv_bytes // chunks <= _GATHER_BYTES


def inner_ring_size(ring: int, ring_per_node: int, kv_bytes: int) -> int | None:
    """Ranks of the inner ring of a double ring; None for a plain ring, which relays nothing.

    Args:
        ring: degree.
        ring_per_node: adjacent ring ranks that share a node.
        kv_bytes: keys and values of the whole ring, of one head chunk.
    """
    spans = 1 < ring_per_node < ring and ring % ring_per_node == 0
    return ring_per_node if spans and kv_bytes // ring >= _RELAY_BYTES else None
