"""Model of all ranks' copy engines: the real ``acquire_slot`` and ``publish_and_pull`` fill queues
of operations, one for each fake stream, which ``interleavings`` runs. Some calls are captured in a
graph, which may be launched again and again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import torch

from ds_usp.comm import copy_engine
from ds_usp.comm.channel import CommLedger, RecvSpec
from ds_usp.comm.copy_engine import CopyEngine, CopyEngineChannel, FlagOp, num_slots
from ds_usp.geometry.pipeline_schedule import Op, exposed_posts, pipeline_schedule

KINDS = ("all_to_all", "ring_kv", "ring_dkv")
POSTS = {
    Op.A2A_POST: ("all_to_all", "a2a"),
    Op.RETURN_POST: ("all_to_all", "ret"),
    Op.LSE_POST: ("all_to_all", "lse"),
    Op.KV_POST: ("ring_kv", "kv"),
    Op.DKV_POST: ("ring_dkv", "grads"),
}
WAITS = {
    Op.A2A_WAIT: "all_to_all",
    Op.RETURN_WAIT: "all_to_all",
    Op.LSE_WAIT: "all_to_all",
    Op.KV_WAIT: "ring_kv",
    Op.DKV_WAIT: "ring_dkv",
}
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

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
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
        def pull(engine: Any, stream: FakeStream, recv: Any, start: int, itemsize: int) -> None:
            stream.operations.append(("pull", (engine.kind, recv.rank, start), recv.out))

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
        self.name: Tag = ()
        self.block: list[Place] = []

    def acquire_staging(self, *name: Any) -> FakeChannel:
        self.packed = self.real.acquire_staging((1, 1), torch.empty(0), torch.uint8).tensor
        slot = self.engine._slots[self.engine._next]
        self.name = name
        where = (self.engine.kind, self.rank, slot.start)  # type: ignore[attr-defined]
        self.world.current.operations.append(("pack", where, (*name, self.rank)))
        return self

    def post(self, pairs: set[tuple[int, int]], *cell: Any, overlapped: bool = True) -> None:
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
        arriving = [RecvSpec(source, cast(Any, place), 0) for source, place in self.places]
        self.real.post(self.packed, leaving, arriving, overlapped=overlapped)

    def wait(self) -> None:
        self.real.wait()
        self.block = [place for _, place in self.places]
        for place in self.block:
            self.world.current.operations.append(("read", place))


def some(
    world: World, draw: random.Random, share: float, *, own: bool = False
) -> set[tuple[int, int]]:
    """Pairs of ranks, the first of which gives something to the second; perhaps to itself."""
    pairs = ((a, b) for a in range(world.ranks) for b in range(world.ranks) if own or a != b)
    return {pair for pair in pairs if draw.random() < share}


class Call:
    """One pass of one rank, which executes attention's own schedule.

    ``draw`` is the same on all ranks. Kernel calls are each rank's own.
    """

    def __init__(self, world: World, rank: int, draw: random.Random, name: int) -> None:
        self.world, self.rank, self.draw, self.name = world, rank, draw, name
        self.share = draw.choice([0.1, 0.5, 1.0])
        self.return_lse = draw.random() < 0.3
        # Ulysses and a ring, Ulysses alone, a ring alone.
        self.ring, self.ulysses = draw.choice([(True, True), (False, True), (True, False)])
        self.backward = draw.random() < 0.5
        self.open: dict[tuple[str, int], FakeChannel] = {}

    def run(self, chunks: int, steps: int) -> None:
        remote = steps if self.ring else 0
        rings: list[Any] = [self.ring_of(chunk, remote) for chunk in range(chunks)]
        schedule = pipeline_schedule(
            rings,
            ulysses=self.ulysses,
            backward=self.backward,
            return_lse=self.return_lse and not self.backward,
            stage_return=self.backward and not self.ring and self.stages_return(),
            from_shards=self.starts_from_shards(),
        )
        exposed = exposed_posts(schedule)
        for instr in schedule:
            op, chunk, number, call = instr
            if op in POSTS:
                self.post(*POSTS[op], chunk, number, overlapped=instr not in exposed)
            elif op in WAITS:
                self.open[WAITS[op], chunk].wait()
            elif op is Op.RETURN_STAGE:
                self.channel("all_to_all", "ret", chunk, 0)
            elif op is Op.ATTN:
                self.attend(rings[chunk], chunk, number, call)

    def ring_of(self, chunk: int, remote: int) -> Any:
        """Steps of a chunk: the local block, if this rank does not merge it, and those received."""
        local = [] if remote == 1 and self.merges_local(chunk) else [True]
        steps = [
            SimpleNamespace(is_local=is_local, calls=range(self.kernel_calls(chunk, index)))
            for index, is_local in enumerate([*local, *[False] * remote])
        ]
        return SimpleNamespace(steps=steps, backward_steps=steps, ring_degree=2 if self.ring else 1)

    def merges_local(self, chunk: int) -> bool:
        return self.own(chunk, "merged").random() < 0.3

    def kernel_calls(self, chunk: int, step: int) -> int:
        """Of this rank in a ring step."""
        return self.own(chunk, step, "calls").randrange(3)

    def own(self, *what: Any) -> random.Random:
        return random.Random(f"{self.rank} {self.name} {what}")

    def stages_return(self) -> bool:
        """Whether kernels write into the staging buffers of returns; the same on all ranks."""
        return self.draw_for("return").random() < 0.5

    def starts_from_shards(self) -> bool:
        """Whether backward exchanges keys and values again; the same on all ranks."""
        return self.draw_for("shards").random() < 0.5

    def writes_in_place(self, chunk: int, step: int) -> bool:
        """Whether a step's first kernel call writes into the staging buffer of its gradients."""
        return self.own(chunk, step).random() < 0.5

    def attend(self, ring: Any, chunk: int, index: int, call: int) -> None:
        """A kernel call: reads its block, and may write gradients into their staging buffer."""
        remote = [number for number, step in enumerate(ring.steps) if not step.is_local]
        if index in remote:
            number = remote.index(index)
            if self.backward and not call and self.writes_in_place(chunk, index):
                self.channel("ring_dkv", "grads", chunk, number)
            for place in self.open["ring_kv", chunk].block:
                self.world.current.operations.append(("read", place))
        half_steps = 2 if len(ring.steps[index].calls) == 1 else 1
        self.world.current.operations += [("work",)] * half_steps

    def channel(self, kind: str, what: str, chunk: int, number: int) -> FakeChannel:
        """The channel of a chunk, with a staging buffer for one exchange: one for all of KV."""
        if kind == "all_to_all" or (kind, chunk) not in self.open:
            self.open[kind, chunk] = FakeChannel(self.world, self.rank, kind)
        channel = self.open[kind, chunk]
        name = what, chunk, 0 if kind == "ring_kv" else number, self.name
        if channel.name != name:
            channel.acquire_staging(*name)
        return channel

    def post(self, kind: str, what: str, chunk: int, number: int, *, overlapped: bool) -> None:
        staged = self.open.get((kind, chunk))
        if staged is None or staged.name[:1] != (what,) or kind == "ring_dkv":
            staged = self.channel(kind, what, chunk, number)
        share = 1.0 if kind == "all_to_all" else self.share
        cell = number % 2 if kind == "ring_kv" else 0  # two receive buffers of KV
        own = kind == "ring_kv"
        pairs = some(self.world, self.draw_for(kind, what, chunk, number), share, own=own)
        staged.post(pairs, what, self.name, chunk, cell, overlapped=overlapped)

    def draw_for(self, *what: Any) -> random.Random:
        return random.Random(f"{self.name} {self.share} {what}")
