"""Channels over the copy engines of a mesh, and what is done with all of its engines at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from threading import Thread

import torch

from ds_usp.comm.channel import CommLedger, RecvSpec, SendSlice, StagingBuffer
from ds_usp.comm.copy_engine import CopyEngine, Slot
from ds_usp.comm.profiler_ranges import NO_RANGE, exchange_range, profiler_enabled
from ds_usp.errors import MeshError

_ABORT_TIMEOUT_S = 60.0  # for streams that wait for something else after an error


class CopyEngineChannel:
    """:class:`ds_usp.comm.channel.Channel` by copy engines.

    Args:
        engine: of the group.
        ledger: counts calls and bytes.
        kind: their name in the ledger.
    """

    def __init__(self, engine: CopyEngine, ledger: CommLedger, kind: str) -> None:
        self._engine, self._ledger, self._kind = engine, ledger, kind
        self._slot: Slot | None = None
        self._generation = 0
        self._done: torch.cuda.Event | None = None
        self._recvs: Sequence[RecvSpec] = ()  # keeps their tensors alive
        self.in_flight = False

    def acquire_staging(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> StagingBuffer:
        """See :meth:`ds_usp.comm.channel.P2PChannel.acquire_staging`."""
        buffer, self._slot = self._engine.acquire_slot(shape, dtype)
        self._generation = self._slot.generation
        return buffer

    def post(
        self,
        packed: torch.Tensor,
        sends: Sequence[SendSlice],
        recvs: Sequence[RecvSpec],
        *,
        overlapped: bool = True,
    ) -> None:
        """See :meth:`ds_usp.comm.channel.P2PChannel.post`; ``recvs`` need not be dense."""
        if self.in_flight or self._slot is None:
            why = "before the last one was waited for" if self.in_flight else "without a buffer"
            raise MeshError(f"a {self._kind} exchange was posted {why}")
        if self._generation != self._slot.generation:
            raise MeshError(f"the buffer of a {self._kind} exchange was given to a later one")
        rank, itemsize = self._engine.rank, packed.element_size()
        if len(recvs) > 1:  # ranks do not all pull from one at a time; slices of one together
            recvs = sorted(recvs, key=lambda recv: (recv[0] <= rank, recv[0]))
        self._recvs = recvs
        readers: dict[int, None] = {}  # each once, in order
        rows = 0
        for to, start, stop in sends:
            readers[to] = None
            rows += stop - start
        sent_bytes = rows * packed.stride(0) * itemsize  # it is dense
        with exchange_range(self._kind, sent_bytes) if profiler_enabled() else NO_RANGE:
            self._done = self._engine.publish_and_pull(
                self._slot, list(readers), recvs, itemsize, overlapped=overlapped
            )
        self.in_flight = True
        if sends:
            self._ledger.add(self._kind, sent_bytes)

    def wait(self) -> None:
        """See :meth:`ds_usp.comm.channel.P2PChannel.wait`."""
        if not self.in_flight:
            raise MeshError(f"no {self._kind} exchange was posted")
        if self._done is not None:
            self._engine.wait_for(self._done)
        self._done, self._recvs, self.in_flight = None, (), False

    def drain(self) -> None:
        """See :meth:`ds_usp.comm.channel.P2PChannel.drain`."""
        if self.in_flight:
            self.wait()


def num_exchanges(engines: Mapping[str, CopyEngine]) -> int:
    """Exchanges that the copy engines of a mesh have started."""
    return sum([engine.exchanges for engine in engines.values()])


def note_replay(engines: Mapping[str, CopyEngine]) -> None:
    """The current stream launches a CUDA graph with exchanges of the copy engines of a mesh."""
    for engine in engines.values():
        engine.note_replay()


def abort_waits(engines: Mapping[str, CopyEngine]) -> None:
    """End whatever this rank's streams wait for, from a thread: each exchange in flight waits anew
    when the one before it is done. A process that ends meanwhile waits for it, a minute at most."""
    if engines:
        Thread(target=_abort_until_idle, args=(list(engines.values()),)).start()


def _abort_until_idle(engines: Sequence[CopyEngine]) -> None:
    """End the waits of each exchange in flight until none is left or the time limit has passed."""
    deadline = time.monotonic() + _ABORT_TIMEOUT_S
    with contextlib.suppress(RuntimeError):  # the GPU is lost
        while [engine for engine in engines if engine.abort_waits()]:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.001)
