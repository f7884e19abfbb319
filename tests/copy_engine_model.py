"""Model of all ranks' copy engines: the real ``acquire_slot`` and ``publish_and_pull`` fill queues
of operations, one for each fake stream, which ``interleavings`` runs. Some calls are captured in a
graph, which may be launched again and again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from ds_usp.attention.pipeline import _ChunkPipeline
from ds_usp.comm import copy_engine
from ds_usp.comm.channel import PendingExchange
from ds_usp.comm.copy_engine import CopyEngine, num_slots
from ds_usp.comm.copy_engine_channel import CopyEngineChannel
from ds_usp.comm.cuda_driver import FlagOp
from ds_usp.comm.ledger import CommLedger

KINDS = ("all_to_all", "ring_kv", "ring_dkv")
SLOT = 512
Tag = tuple[Any, ...]


@dataclass(eq=False)
class FakeStream:
    """A queue of operations, and the piece that they are of: its number, and its graph's or 0."""

    operations: list[Tag] = field(default_factory=list)
    piece: tuple[int, int] = (0, 0)

    @property
    def cuda_stream(self) -> FakeStream:
        return self

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        assert event.piece[1] == self.piece[1], "CUDA refuses an event of another graph"
        self.operations.append(("after", event.stream, event.count, event.piece[0]))


class FakeEvent:
    """So many operations of a stream."""

    def record(self, stream: FakeStream) -> None:
        self.stream, self.count, self.piece = stream, len(stream.operations), stream.piece


class FakeFlagOpBatch:
    """Flags that are written and waited for."""

    def __init__(self, jobs: Sequence[FlagOp]) -> None:
        self.jobs = jobs

    def enqueue(self, stream: FakeStream) -> None:
        for job in self.jobs:
            kind = "wait" if job.is_wait else "write"
            stream.operations.append((kind, job.address, job.value))


@dataclass
class FakeFlags:
    """Flag addresses as tuples (kind, rank, index, free?); free flags are 1 at first."""

    kind: str
    half: int

    def address(self, rank: int, index: int) -> Tag:
        return self.kind, rank, index, index >= self.half


@dataclass(eq=False)
class FakeMemory:
    local: torch.Tensor = field(default_factory=lambda: torch.empty(16 * SLOT, dtype=torch.uint8))


@dataclass
class Place:
    """What a pull fills: where, and whose packing of which exchange it should find."""

    cell: Tag
    expected: Tag

    def element_size(self) -> int:
        return 1


class World:
    """All ranks' streams and engines, which of them computes now, and which graph captures it."""

    def __init__(self, ranks: int, slots: dict[str, int] | None = None) -> None:
        self.ranks, self.graph = ranks, 0
        self.slots = slots or {kind: num_slots(kind, ring=True) for kind in KINDS}
        self.current = FakeStream()
        self.pieces: list[list[Piece]] = [[] for _ in range(ranks)]
        # Two streams that compute: calls need not all be on one.
        self.main = [[FakeStream(), FakeStream()] for _ in range(ranks)]
        self.engines = [{kind: self._engine(kind, r) for kind in KINDS} for r in range(ranks)]

    def _engine(self, kind: str, rank: int) -> CopyEngine:
        engine = CopyEngine.__new__(CopyEngine)
        engine.__dict__.update(
            _group=None,
            _device=None,
            rank=rank,
            _world=self.ranks,
            _stream=FakeStream(),
            _current=None,
            _abort_stream=None,
            exchanges=0,
            _packed_event=FakeEvent(),
            _flags=FakeFlags(kind, self.slots[kind] * self.ranks),
            _memory=FakeMemory(),
            _captured=[],
            _num_slots=self.slots[kind],
            kind=kind,
        )
        with self.patched():
            engine._reset(SLOT)
        return engine

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        def pull(
            engine: Any, stream: FakeStream, source: int, start: int, place: Place, row_bytes: int
        ) -> None:
            stream.operations.append(("pull", (engine.kind, source, start), place))

        with (
            mock.patch.object(copy_engine, "FlagOpBatch", FakeFlagOpBatch),
            mock.patch.object(copy_engine, "graph_capture_id", lambda _: self.graph),
            mock.patch.object(CopyEngine, "_pull", pull),
            mock.patch.object(copy_engine, "current_stream", lambda *_: self.current),
        ):
            yield

    def streams(self, rank: int) -> list[FakeStream]:
        engines: list[Any] = [engine._stream for engine in self.engines[rank].values()]
        return [*self.main[rank], *engines]

    def piece(self, graph: int, calls: Callable[[int], None]) -> None:
        """Another piece of every rank's work: of calls, or of those that a graph with this number
        captures."""
        self.graph = graph
        for rank in range(self.ranks):
            for stream in self.streams(rank):
                stream.operations, stream.piece = [], (len(self.pieces[rank]), graph)
            calls(rank)
            live = {each: each.operations for each in self.streams(rank) if each.operations}
            if graph:
                waited = {op[1:3] for each in live.values() for op in each if op[0] == "after"}
                for stream, operations in live.items():
                    alone = stream in self.main[rank] or (stream, len(operations)) in waited
                    assert alone, "CUDA ends no capture that has not waited for a stream"
            self.pieces[rank].append(Piece(graph, live))


class Piece(NamedTuple):
    """What a rank's streams do, by a graph or not."""

    graph: int
    operations: dict[FakeStream, list[Tag]]


class FakeChannel:
    """The real CopyChannel, which fills made-up places. A rank gives another several pieces."""

    most = 3

    def __init__(self, world: World, rank: int, kind: str) -> None:
        self.world, self.rank, self.engine = world, rank, world.engines[rank][kind]
        self.real = CopyEngineChannel(self.engine, CommLedger(), kind)

    def acquire_staging(self, *name: Any) -> FakeChannel:
        self.packed = self.real.acquire_staging((1, 1), torch.empty(0), torch.uint8).tensor
        slot = self.engine._slots[self.engine._next]
        self.name = name
        where = (self.engine.kind, self.rank, slot.start)  # type: ignore[attr-defined]
        self.world.current.operations.append(("pack", where, (*name, self.rank)))
        return self

    def post(self, pairs: set[tuple[int, int]], *cell: Any) -> None:
        def pieces(pair: tuple[int, int]) -> range:
            return range(random.Random(f"{pair} {self.name} {cell}").randint(1, self.most))

        own_pairs = [pair for pair in sorted(pairs) if pair[1] == self.rank]
        self.places = [
            (pair[0], Place((self.rank, *cell, pair[0], piece), (*self.name, pair[0])))
            for pair in own_pairs  # some take what is their own too
            for piece in pieces(pair)
        ]
        others = [pair for pair in sorted(pairs) if pair[0] == self.rank != pair[1]]
        leaving = [(pair[1], 0, 1) for pair in others for _ in pieces(pair)]
        arriving: Any = [(source, place, 0, 0) for source, place in self.places]
        self.real.post(self.packed, leaving, arriving)

    def close(self) -> None:
        pass

    def wait(self) -> None:
        self.real.wait()
        for _, place in self.places:
            self.world.current.operations.append(("read", place))


def some(
    world: World, draw: random.Random, share: float, *, own: bool = False
) -> set[tuple[int, int]]:
    """Pairs of ranks, the first of which gives something to the second; perhaps to itself."""
    pairs = ((a, b) for a in range(world.ranks) for b in range(world.ranks) if own or a != b)
    return {pair for pair in pairs if draw.random() < share}


class Call:
    """One call of one rank, its chunks exchanged by attention's own pipeline.

    ``draw`` is the same on all ranks.
    """

    def __init__(self, world: World, rank: int, draw: random.Random, name: int) -> None:
        self.world, self.rank, self.draw, self.name = world, rank, draw, name
        self.share = draw.choice([0.1, 0.5, 1.0])
        self.return_lse = draw.random() < 0.3
        # Ulysses and a ring, Ulysses alone, a ring alone.
        self.has_ring, self.local_heads = draw.choice([(True, False), (False, False), (True, True)])
        self.backward = draw.random() < 0.5
        self.sent: dict[int, PendingExchange] = {}

    def run(self, parts: int, steps: int) -> None:
        made = _ChunkPipeline(self, range(parts), self.send, self.kv_stream, backward=self.backward)  # type: ignore[arg-type]

        def compute(part: int, chunk: Any) -> None:
            assert chunk.exchange is self.sent[part], "another chunk's exchange"
            chunk.exchange.wait()
            home = None
            if not self.has_ring and self.early(part):
                home = self.channel("all_to_all", "home", part)
            grads = self.compute(part, chunk.kv_stream, pipeline, steps if self.has_ring else 0)
            pipeline.return_chunk(partial(self.return_chunk, part, grads, home))

        with contextlib.closing(made) as pipeline:
            pipeline.run(compute)

    def early(self, *what: int) -> bool:
        """Whether a kernel writes where it leaves from, so that staging is acquired before it runs;
        ranks may differ."""
        return random.Random(f"{self.rank} {self.name} {what}").random() < 0.5

    def middle(self, part: int) -> int:
        """When a part's is, in halves of its first step; ranks differ. Of one kernel at its end."""
        return random.Random(f"{self.rank} {self.name} {part}").randrange(3)

    def channel(self, kind: str, *name: Any) -> FakeChannel:
        return FakeChannel(self.world, self.rank, kind).acquire_staging(*name, self.name)

    def exchange(self, name: str, part: int, heads: FakeChannel | None = None) -> PendingExchange:
        if self.local_heads:
            return PendingExchange(tuple)
        heads = heads or self.channel("all_to_all", name, part)
        heads.post(some(self.world, self.draw, 1.0), name, self.name, part)
        return PendingExchange(tuple, heads)  # type: ignore[arg-type]

    def send(self, part: int) -> PendingExchange:
        self.sent[part] = self.exchange("come", part)
        return self.sent[part]

    def kv_stream(self, part: int, pending: PendingExchange) -> Any:
        if not self.backward:  # else keys are there already
            pending.wait()
        if self.has_ring:
            keys = self.channel("ring_kv", "keys", part)
            self.post(keys, "keys", part, 0)
            return keys
        return None

    def compute(
        self, part: int, keys: FakeChannel, pipeline: _ChunkPipeline, steps: int
    ) -> FakeChannel | None:
        grads = FakeChannel(self.world, self.rank, "ring_dkv")
        work = self.world.current.operations
        middle = self.middle(part)
        for step in range(steps):
            if not step and not middle:
                pipeline.mid_chunk()
            direct = self.backward and self.early(part, step)
            if direct:
                grads.acquire_staging("grads", part, step, self.name)
            keys.wait()
            for half in (1, 2):
                work.append(("work",))
                if not step and middle == half:
                    pipeline.mid_chunk()
            if step + 1 < steps:
                self.post(keys, "keys", part, (step + 1) % 2)
            if not self.backward:
                continue
            if step:
                grads.wait()
            if not direct:
                grads.acquire_staging("grads", part, step, self.name)
            self.post(grads, "grads", part)
        if not steps:
            work.append(("work",))
        return grads if steps and self.backward else None

    def return_chunk(
        self, part: int, grads: FakeChannel | None, home: FakeChannel | None
    ) -> PendingExchange:
        if grads is not None:
            grads.wait()
        pending = self.exchange("home", part, home)
        if self.return_lse:
            pending.wait()
            return self.exchange("lse", part)
        return pending

    def post(self, channel: FakeChannel, *cell: Any) -> None:
        own = channel.engine.kind == "ring_kv"  # type: ignore[attr-defined]
        channel.post(some(self.world, self.draw, self.share, own=own), self.name, *cell)
