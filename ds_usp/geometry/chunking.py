"""Number of head chunks of a call, and how their KV is exchanged: stepwise, all-gathered, or
relayed inside a node."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ds_usp.geometry.heads import exposed_fraction
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_schedule import ChunkPosition
from ds_usp.geometry.tiles import Tile

# A chunk should keep a GPU busy for some milliseconds: its launch overhead is a millisecond or two.
# More chunks overlap nothing more but need less memory: at 128K tokens and 32 heads, 4 GPUs then
# need less beside the tensors than one exchange of all heads takes. In a pure ring the local block
# overlaps the receives. Measured on 4 H200 at 32K and 128K tokens.
_CHUNK_FLOP, _RING_CHUNK_FLOP, _MAX_CHUNKS = 1.1e12, 3e12, 16
# A GPU's links: pulls over NVLink, measured at 275 to 364 GB/s on 4 H200; a NIC of 400 Gbit/s. What
# one more chunk costs: launches, and the ends of kernels that do not fill a GPU. A kernel's speed.
_NODE_BYTES_PER_S, _NETWORK_BYTES_PER_S, _CHUNK_S, _FLOP_PER_S = 300e9, 50e9, 0.2e-3, 600e12
# Below it a pass takes a GPU less time than the CPU needs to launch it, 1 to 2 ms on 4 H200 with
# copy engines: what counts is the number of calls.
_LAUNCH_BOUND_FLOP = 0.4e12
# KV of a chunk that may be all-gathered whatever the number of chunks.
_GATHER_BYTES = 512 * 2**20

ChunkPositions = tuple[tuple[ChunkPosition, ChunkPosition], ...]

# A block is relayed inside a node, after one message across the network, where that message takes
# longer than its latency: 1 MiB on a NIC of 400 Gbit/s is 20 us. Computed, not measured.
_RELAY_BYTES = 2**20


def num_head_chunks(
    flop: float,
    max_chunks: int,
    ulysses: int,
    exchange_bytes: float = 0.0,
    max_chunks_in_groups: int = 1,
    *,
    in_node: bool = True,
) -> int:
    """Number of head chunks of a call, from 1 to ``_MAX_CHUNKS``: the larger of two numbers.

    One is the FLOP over ``_CHUNK_FLOP`` (``_RING_CHUNK_FLOP`` in a pure ring), rounded, at most
    ``max_chunks``. The other minimizes the seconds of exchange that no kernel hides plus
    ``_CHUNK_S`` for each chunk; it is 1 without all-to-alls, and at most the larger of
    ``max_chunks`` and ``max_chunks_in_groups``.

    Args:
        flop: FLOP of the forward pass on one rank.
        max_chunks: most chunks of whole KV groups, :attr:`HeadSplit.max_chunks`.
        ulysses: Ulysses degree.
        exchange_bytes: bytes that a rank sends in all all-to-alls of the forward pass.
        max_chunks_in_groups: most chunks if they may be smaller than a KV group,
            :attr:`HeadSplit.max_chunks_in_groups`; a number below ``max_chunks`` has no effect.
        in_node: the all-to-alls stay in a node, at NVLink's bandwidth instead of the network's.
    """
    chunk_flop = _RING_CHUNK_FLOP if ulysses == 1 else _CHUNK_FLOP
    by_flop = min(max_chunks, _MAX_CHUNKS, round(flop / chunk_flop))
    exchange_s = exchange_bytes / (_NODE_BYTES_PER_S if in_node else _NETWORK_BYTES_PER_S)

    def cost_s(chunks: int) -> float:
        exposed_s = max(exposed_fraction(chunks) * exchange_s, exchange_s - flop / _FLOP_PER_S)
        return exposed_s + chunks * _CHUNK_S

    most = min(max(max_chunks, max_chunks_in_groups), _MAX_CHUNKS)
    return max(by_flop, min(range(1, max(most, 1) + 1), key=cost_s))


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
