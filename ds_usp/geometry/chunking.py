"""Number of head chunks of a call, and how their KV is exchanged: stepwise or all-gathered. Each
rank asks while a call is planned (``Tuning.resolve``), for equal answers; so does the planner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import ceil
from typing import NamedTuple

from ds_usp.geometry.heads import HeadSplit, exposed_fraction
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_schedule import ChunkPosition
from ds_usp.geometry.tiles import Tile

# A chunk should keep a GPU busy for some milliseconds: its launch overhead is a millisecond or two.
# More chunks overlap nothing more but need less memory: at 128K tokens and 32 heads, 4 GPUs then
# need less beside the tensors than one exchange of all heads takes. In a pure ring the local block
# overlaps the receives. Measured on 4 H200 at 32K and 128K tokens.
_CHUNK_FLOP, _RING_CHUNK_FLOP, _MAX_CHUNKS = 1.1e12, 3e12, 16
# Without a backward pass little memory is at stake, and the last blocks of every chunk leave a GPU
# partly idle: of 75,600 tokens and 40 heads (cuDNN, 2 H200) 16 chunks take 110.5 ms, 4 take 107.0.
_MAX_FORWARD_CHUNKS = 4
# Pulls over NVLink, at 275 to 364 GB/s on 4 H200; a NIC of 400 Gbit/s. Then what one more chunk
# costs: launches, and the ends of kernels that do not fill a GPU (with 7 documents, each a call of
# cuDNN, 4.2 ms forward and backward at 32K tokens on 2 H200). Last the speed of a kernel.
_NODE_BYTES_PER_S, _NETWORK_BYTES_PER_S, _CHUNK_S, _FLOP_PER_S = 300e9, 50e9, 0.2e-3, 600e12
# Where all thread blocks of a kernel take equally long (full masks), a last wave that does not fill
# the GPU costs as much as one that does: 40 heads of 75,600 tokens on 2 x 1 (cuDNN, 2 H100) take
# 399 ms in 16 chunks, 386 in 10; a step of Wan's transformer at 720p takes 2.2 % less in 11 chunks.
# Query rows of a block, Hopper's multiprocessors, and the gain that is worth larger buffers: one of
# 1 % (1 x 2, forward) was not measurable.
_BLOCK_ROWS, _MULTIPROCESSORS, _LEAST_GAIN = 128, 132, 0.02
# A pass of fewer FLOP takes a GPU less time than the CPU needs to launch it, 1 to 2 ms on 4 H200
# with copy engines: what counts is the number of calls.
_LAUNCH_BOUND_FLOP = 0.4e12
# KV of a chunk that may be all-gathered whatever the number of chunks.
_GATHER_BYTES = 512 * 2**20

ChunkPositions = tuple[tuple[ChunkPosition, ChunkPosition], ...]


# The number of chunks weighs four costs: exchanges that nothing hides (fewer with more chunks),
# launches and kernel ends (more with more chunks), buffers of a chunk (smaller with more chunks),
# and multiprocessors without a block in a kernel's last wave (more with more chunks):
#
#     132 SMs, 150 blocks:  wave 1 [132 busy]  wave 2 [18 busy, 114 idle]
#
# Under a causal mask blocks differ in length and the next one fills the gap, so waves count for
# full masks alone. The constants above were fitted to Hopper with NVLink; Tuning overrides them.
class CallSize(NamedTuple):
    """Sizes of a call by which ``Tuning`` and the planner choose defaults; the same on every rank.

    Attributes:
        split: how heads are divided among the Ulysses ranks.
        flop: FLOP of the forward pass on one rank; 0: nothing can be overlapped.
        exchange_bytes: bytes that a rank sends in all all-to-alls of the forward pass.
        kv_bytes: keys and values of the whole ring, of one rank's heads.
        ring: its degree.
        ulysses_in_node: the all-to-alls stay in a node.
        backward: the call has a backward pass.
        kernel_calls: of one chunk on one rank: one, or one for each document (without varlen).
        head_blocks: equal thread blocks of one query head (:func:`equal_blocks`); 0: not equal.
    """

    split: HeadSplit
    flop: float
    exchange_bytes: float
    kv_bytes: int
    ring: int
    ulysses_in_node: bool = True
    backward: bool = True
    kernel_calls: int = 1
    head_blocks: int = 0

    def num_chunks(self) -> int:
        """Number of head chunks: at most what the heads allow and ``_MAX_CHUNKS``. The larger of
        two: as many as leave each kernel call ``_CHUNK_FLOP``, in whole KV groups; and the number
        with the least exposed exchange plus ``_CHUNK_S`` a kernel call, which may cut groups
        (:meth:`HeadSplit.chunk_limit`). Where thread blocks are equal, fewer, down to half of that,
        if they save ``_LEAST_GAIN`` of the kernels' time in last waves."""
        flop, kv_groups = self.flop, self.split.max_chunks
        limit = _MAX_CHUNKS if self.backward else _MAX_FORWARD_CHUNKS
        chunk_flop = _RING_CHUNK_FLOP if self.split.ulysses == 1 else _CHUNK_FLOP
        by_flop = min(kv_groups, limit, round(flop / chunk_flop / self.kernel_calls))
        bandwidth = _NODE_BYTES_PER_S if self.ulysses_in_node else _NETWORK_BYTES_PER_S
        exchange_s = self.exchange_bytes / bandwidth

        # At least what an exchange takes longer than all computation.
        def exposed_s(chunks: int) -> float:
            return max(exposed_fraction(chunks) * exchange_s, exchange_s - flop / _FLOP_PER_S)

        def cost_s(chunks: int) -> float:
            return exposed_s(chunks) + chunks * self.kernel_calls * _CHUNK_S

        max_chunks = min(self.split.chunk_limit(self.ring), limit)
        usual = max(by_flop, min(range(1, max_chunks + 1), key=cost_s))
        if not self.head_blocks:
            return usual
        kernel_s = flop / _FLOP_PER_S

        def lost_s(chunks: int) -> float:
            return exposed_s(chunks) + self._idle_fraction(chunks) * kernel_s

        best = min(range(usual, ceil(usual / 2) - 1, -1), key=lost_s)
        return best if lost_s(usual) - lost_s(best) > _LEAST_GAIN * kernel_s else usual

    def _idle_fraction(self, chunks: int) -> float:
        """Idle multiprocessors in the last waves, over all that compute; thread blocks are
        equal."""
        heads = (self.split.chunk(chunks, index).queries[0] for index in range(chunks))
        waves = [(end - begin) * self.head_blocks / _MULTIPROCESSORS for begin, end in heads]
        return sum(map(ceil, waves)) / sum(waves) - 1

    def all_gathers_kv(self, chunks: int) -> bool:
        """Whether the KV of a ring are all-gathered: where that takes no more memory than stepwise,
        or little."""
        return chunks >= self.ring or self.kv_bytes // chunks <= _GATHER_BYTES


def attention_flop(mask: MaskSpec, queries: int, keys: int, width: int) -> float:
    """FLOP of a forward pass on all ranks, of so many tokens a sample; ``width``: features of all
    query heads of all samples."""
    return 4 * width * visible_pairs(mask, queries, keys)


def equal_blocks(mask: MaskSpec, batch: int, queries: int) -> int:
    """Thread blocks of a kernel for one query head of ``batch`` samples of ``queries`` tokens; 0
    where blocks do not take equally long."""
    return batch * ceil(queries / _BLOCK_ROWS) if mask.is_full else 0


def is_launch_bound(flop: float) -> bool:
    """Whether CPU launch overhead, not the GPU, decides how long a call of one chunk takes, by the
    FLOP of its forward pass on one rank."""
    return flop < _LAUNCH_BOUND_FLOP


def chunk_positions(sizes: Sequence[int], *, launch_bound: bool = False) -> ChunkPositions:
    """Each chunk's position forward and backward (see ``ring_schedule.py``); the same on all ranks.

    Args:
        sizes: key/value heads of the chunks, of the first Ulysses rank; others' may differ by one.
        launch_bound: a single chunk is computed in one call, with little to overlap.
    """
    if len(sizes) == 1:
        return (("local_merged", "local_merged"),) if launch_bound else (("only", "only"),)

    # A chunk overlaps the receive of the next one if it is about as large.
    def position(size: int, computed_before: int) -> ChunkPosition:
        return "local_merged" if 4 * computed_before >= 3 * size else "local_first"

    forward = map(position, sizes, [0, *sizes[:-1]])
    # Backward goes from the last chunk to chunk 0, which none follows to overlap its dK/dV.
    backward: list[ChunkPosition] = ["local_last", *map(position, sizes[1:], [*sizes[2:], 0])]
    return tuple(zip(forward, backward, strict=True))


def visible_pairs(mask: MaskSpec, queries: int, keys: int) -> float:
    """(query, key) pairs of one sample that attend; the mean over several samples."""
    samples, pairs = max(1, len(mask.documents)), 0
    for area in chain.from_iterable(chain.from_iterable(map(mask.areas_of, range(samples)))):
        rows, columns = min(area.q_stop, queries), min(area.k_stop, keys)
        low = area.k_start - rows if area.left is None else -area.left
        high = columns if area.right is None else area.right
        pairs += Tile(area.q_start, rows, area.k_start, columns, low, high).pairs
    return pairs / samples
