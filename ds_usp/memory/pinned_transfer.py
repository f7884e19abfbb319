"""Copies between a device and pinned host memory, overlapped with the computing stream."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

_BLOCK_BYTES = 1 << 26  # a power of two: torch rounds pinned memory up to one

CopyEvent = torch.cuda.Event | None  # None: the copies are done


class PinnedBlockPool:
    """Host memory in blocks of one size, reused: to pin memory takes longer than to fill it.

    Args:
        pinned: page-locked, for copies of a GPU.
    """

    def __init__(self, pinned: bool, block_bytes: int = _BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self.num_blocks = 0

    def allocate(self, size: int) -> PinnedAllocation:
        """Blocks for so many bytes; they return to the pool when the allocation is freed."""
        count = -(-size // self.block_bytes)
        blocks = [self._free.pop() if self._free else self._new() for _ in range(count)]
        allocation = PinnedAllocation(tuple(blocks), self.block_bytes)
        weakref.finalize(allocation, self._free.extend, blocks)
        return allocation

    @property
    def num_free(self) -> int:
        """Blocks that no allocation uses."""
        return len(self._free)

    def _new(self) -> torch.Tensor:
        self.num_blocks += 1
        return torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._pinned)


class PinnedAllocation:
    """Blocks that are addressed as one run of bytes."""

    def __init__(self, blocks: tuple[torch.Tensor, ...], block_bytes: int) -> None:
        self._blocks, self._size = blocks, block_bytes

    def slices(self, start: int, stop: int) -> list[torch.Tensor]:
        """The bytes from start to stop, a slice a block."""
        slices = []
        for index in range(start // self._size, -(-stop // self._size)):
            first = index * self._size
            block = self._blocks[index]
            slices.append(block[max(start - first, 0) : min(stop - first, self._size)])
        return slices


class HostDeviceCopier:
    """Asynchronous copies, each direction on its own stream; on a CPU synchronous.

    Ordered by events alone: copies start after all work queued so far on the current stream, and
    the caller keeps their sources and destinations alive until the current stream has waited for
    them. So the caching allocator, which tracks the current stream only, is never wrong.

    Args:
        device: where tensors are when they are not on the host.
    """

    def __init__(self, device: torch.device, block_bytes: int = _BLOCK_BYTES) -> None:
        on_gpu = device.type == "cuda"
        self.pool = PinnedBlockPool(on_gpu, block_bytes)
        self.device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else []

    def to_host(self, data: Sequence[torch.Tensor]) -> tuple[PinnedAllocation, CopyEvent]:
        """Copy runs of bytes (uint8, 1-D) to the host, concatenated."""
        allocation = self.pool.allocate(sum(map(len, data)))
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        offset = 0
        for x in data:
            slices = allocation.slices(offset, offset + len(x))
            pairs += zip(slices, x.split([len(block) for block in slices]), strict=True)
            offset += len(x)
        return allocation, self._run(0, pairs)

    def to_device(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyEvent:
        """Copy for each pair (destination, source)."""
        return self._run(1, pairs)

    def wait(self, event: CopyEvent) -> None:
        """Let the current stream wait for copies."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _run(self, direction: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyEvent:
        """Copy pairs (destination, source) on the stream of a direction, after the current one.

        Args:
            direction: index of the stream: 0 to CPU memory, 1 to the device.

        Returns:
            The event after the copies; None without streams, where copies are synchronous.
        """
        if not self._streams:
            for dst, src in pairs:
                dst.copy_(src)
            return None
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for dst, src in pairs:
                dst.copy_(src, non_blocking=True)
            return stream.record_event()
