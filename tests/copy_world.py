"""Copy engines of all ranks on made-up streams: the real ``pack`` and ``start`` fill queues of
operations, one a stream, which ``copy_run`` runs. Some calls are captured in a graph: their queues
run again and again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ds_usp.attention.pipeline import _Belt
from ds_usp.comm import copy_engine
from ds_usp.comm.copy_engine import CopyEngine, slots_of
from ds_usp.comm.driver import WordJob
from ds_usp.comm.even_exchange import Trip

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
        if event.piece == self.piece:  # else it is long ago
            self.operations.append(("after", event.stream, event.count))


class FakeEvent:
    """So many operations of a stream."""

    def record(self, stream: FakeStream) -> None:
        self.stream, self.count, self.piece = stream, len(stream.operations), stream.piece


class FakeWordJobs:
    """Words that are written and waited for."""

    def __init__(self, jobs: Sequence[WordJob]) -> None:
        self.jobs = jobs

    def enqueue(self, stream: FakeStream) -> None:
        for job in self.jobs:
            kind = "wait" if job.waits else "write"
            stream.operations.append((kind, job.address, job.value))


@dataclass
class FakeWords:
    """Addresses that say what they are of; the second half of a rank's are 1 at first."""

    kind: str
    half: int

    def address(self, rank: int, index: int) -> Tag:
        return self.kind, rank, index, index >= self.half


@dataclass(eq=False)
class FakeMemory:
    own: torch.Tensor = field(default_factory=lambda: torch.empty(16 * SLOT, dtype=torch.uint8))


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
        self.slots = slots or {kind: slots_of(kind, ring=True) for kind in KINDS}
        self.current = FakeStream()
        # What each rank's streams do, one piece after the other, and how often.
        self.pieces: list[list[tuple[list[FakeStream], list[list[Tag]], int]]] = [
            [] for _ in range(ranks)
        ]
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
            _packed=FakeEvent(),
            _words=FakeWords(kind, self.slots[kind] * self.ranks),
            _memory=FakeMemory(),
            _captured=[],
            _count=self.slots[kind],
            kind=kind,
        )
        with self.patched():
            engine._begin(SLOT)
        return engine

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        def pull(
            engine: Any, stream: FakeStream, source: int, start: int, place: Place, pitch: int
        ) -> None:
            stream.operations.append(("pull", (engine.kind, source, start), place))

        with (
            mock.patch.object(copy_engine, "WordJobs", FakeWordJobs),
            mock.patch.object(copy_engine, "capture_of", lambda _: self.graph),
            mock.patch.object(CopyEngine, "_pull", pull),
            mock.patch.object(copy_engine, "current_stream", lambda *_: self.current),
        ):
            yield

    def streams(self, rank: int) -> list[FakeStream]:
        engines: list[Any] = [engine._stream for engine in self.engines[rank].values()]
        return [*self.main[rank], *engines]

    def piece(self, graph: int, calls: Callable[[int], None], times: int) -> None:
        """What every rank calls is done so often, as a whole each time: by a graph, where that has
        a number."""
        self.graph = graph
        for rank in range(self.ranks):
            for stream in self.streams(rank):
                stream.operations, stream.piece = [], (len(self.pieces[rank]), graph)
            calls(rank)
            live = [stream for stream in self.streams(rank) if stream.operations]
            waited = {op[1:] for stream in live for op in stream.operations if op[0] == "after"}
            for stream in live[1:] if graph else []:
                end = stream, len(stream.operations)
                assert end in waited, "CUDA ends no capture that has not waited for a stream"
            self.pieces[rank].append((live, [stream.operations for stream in live], times))


class FakeChannel:
    """One exchange in flight, as in CopyChannel."""

    def __init__(self, world: World, rank: int, kind: str) -> None:
        self.world, self.rank, self.engine = world, rank, world.engines[rank][kind]

    def room(self, *name: Any) -> FakeChannel:
        _, self.slot = self.engine.pack((1,), torch.uint8)
        self.name = name
        where = (self.engine.kind, self.rank, self.slot.start)  # type: ignore[attr-defined]
        self.world.current.operations.append(("pack", where, (*name, self.rank)))
        return self

    def post(self, pairs: set[tuple[int, int]], *cell: Any) -> None:
        index = self.slot.index
        sources = sorted(a for a, b in pairs if b == self.rank)  # some take what is their own too
        self.places = [
            Place((self.rank, *cell, source), (*self.name, source)) for source in sources
        ]
        pulls = [(a, index, 0, place, 0) for a, place in zip(sources, self.places, strict=True)]
        users = sorted(b for a, b in pairs if a == self.rank != b)
        self.done = self.engine.start(self.slot, users, pulls)  # type: ignore[arg-type]

    def close(self) -> None:
        pass

    def take(self) -> None:
        self.engine.wait_for(self.done)
        for place in self.places:
            self.world.current.operations.append(("read", place))


def some(
    world: World, draw: random.Random, share: float, *, own: bool = False
) -> set[tuple[int, int]]:
    """Pairs of ranks, the first of which gives something to the second; perhaps to itself."""
    pairs = ((a, b) for a in range(world.ranks) for b in range(world.ranks) if own or a != b)
    return {pair for pair in pairs if draw.random() < share}


class Call:
    """One call of one rank, its parts brought and taken home by attention's own belt.

    ``draw`` is the same on all ranks.
    """

    def __init__(self, world: World, rank: int, draw: random.Random, name: int) -> None:
        self.world, self.rank, self.draw, self.name = world, rank, draw, name
        self.share = draw.choice([0.1, 0.5, 1.0])
        self.with_lse = draw.random() < 0.3
        # Ulysses and a ring, Ulysses alone, a ring alone.
        self.rings_travel, self.stays = draw.choice([(True, False), (False, False), (True, True)])
        self.backward = draw.random() < 0.5

    def run(self, parts: int, steps: int) -> None:
        made = _Belt(self, range(parts), self.send, self.arrive, late=self.backward)  # type: ignore[arg-type]
        with contextlib.closing(made) as belt:
            for part, come in belt:
                home = None
                if not self.rings_travel and self.early(part):
                    home = self.channel("all_to_all", "home", part)
                grads = self.compute(part, come.walk, belt, steps if self.rings_travel else 0)  # type: ignore[arg-type]
                belt.leave(partial(self.leave, part, grads, home))

    def early(self, *what: int) -> bool:
        """Whether a kernel writes where it leaves from, so that room is asked for before it runs;
        ranks may differ."""
        return random.Random(f"{self.rank} {self.name} {what}").random() < 0.5

    def channel(self, kind: str, *name: Any) -> FakeChannel:
        return FakeChannel(self.world, self.rank, kind).room(*name, self.name)

    def trip(self, name: str, part: int, heads: FakeChannel | None = None) -> Trip:
        if self.stays:
            return Trip(tuple)
        heads = heads or self.channel("all_to_all", name, part)
        heads.post(some(self.world, self.draw, 1.0), name, self.name, part)
        return Trip(tuple, heads)  # type: ignore[arg-type]

    def send(self, part: int) -> Trip:
        return self.trip("come", part)

    def arrive(self, part: int, trip: Trip) -> Any:
        if self.backward:  # keys are there already, and travel first
            walk = self.walk(part)
            trip.take()
        else:
            trip.take()
            walk = self.walk(part)
        return SimpleNamespace(walk=walk)

    def walk(self, part: int) -> Any:
        if self.rings_travel:
            keys = self.channel("ring_kv", "keys", part)
            self.post(keys, "keys", part, 0)
            return keys
        return None

    def compute(self, part: int, keys: FakeChannel, belt: _Belt, steps: int) -> FakeChannel | None:
        grads = FakeChannel(self.world, self.rank, "ring_dkv")
        work = self.world.current.operations
        for step in range(steps):
            # Before or after what comes first: ranks differ in what they compute first.
            early = not step and random.Random(f"{self.rank} {self.name} {part}").random() < 0.5
            if early:
                belt.between()
            direct = self.backward and self.early(part, step)
            if direct:
                grads.room("grads", part, step, self.name)
            keys.take()
            work.append(("work",))
            if not step and not early:
                belt.between()
                work.append(("work",))
            if step + 1 < steps:
                self.post(keys, "keys", part, (step + 1) % 2)
            if not self.backward:
                continue
            if step:
                grads.take()
            if not direct:
                grads.room("grads", part, step, self.name)
            self.post(grads, "grads", part)
        if not steps:
            work.append(("work",))
        return grads if steps and self.backward else None

    def leave(self, part: int, grads: FakeChannel | None, home: FakeChannel | None) -> Trip:
        if grads is not None:
            grads.take()
        trip = self.trip("home", part, home)
        if self.with_lse:
            trip.take()
            return self.trip("lse", part)
        return trip

    def post(self, channel: FakeChannel, *cell: Any) -> None:
        own = channel.engine.kind == "ring_kv"  # type: ignore[attr-defined]
        channel.post(some(self.world, self.draw, self.share, own=own), self.name, *cell)
