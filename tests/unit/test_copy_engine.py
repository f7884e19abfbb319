"""The words by which copy engines take turns: all ranks on made-up streams, in any order.

The real ``pack`` and ``start`` fill queues of operations, one a stream; then the queues advance at
random. A pull that finds another exchange's data, or a wait that nothing ends, is a defect.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ds_usp.attention.pipeline import _Belt
from ds_usp.comm import copy_engine
from ds_usp.comm.copy_engine import CopyEngine, _Slot, slots_of
from ds_usp.comm.even_exchange import Trip
from ds_usp.errors import MeshError

KINDS = ("all_to_all", "ring_kv", "ring_dkv")
SLOT = 512
Tag = tuple[Any, ...]


@dataclass(eq=False)
class FakeStream:
    """A queue of operations."""

    operations: list[Tag] = field(default_factory=list)
    at: int = 0

    @property
    def cuda_stream(self) -> FakeStream:
        return self

    def wait_stream(self, other: FakeStream) -> None:
        self.operations.append(("after", other, len(other.operations)))

    def record_event(self) -> Tag:
        return self, len(self.operations)

    def wait_event(self, event: Tag) -> None:
        self.operations.append(("after", *event))


@dataclass
class FakeWords:
    """Addresses that say what they are of."""

    kind: str

    def address(self, rank: int, index: int) -> Tag:
        return self.kind, rank, index


@dataclass
class FakeMemory:
    own: torch.Tensor = field(default_factory=lambda: torch.empty(6 * SLOT, dtype=torch.uint8))


@dataclass
class Place:
    """What a pull fills: where, and whose packing of which exchange it should find."""

    cell: Tag
    expected: Tag

    def element_size(self) -> int:
        return 1


class World:
    """All ranks' streams and engines, and which of them computes now."""

    def __init__(self, ranks: int, first: int, slots: dict[str, int] | None = None) -> None:
        self.ranks, self.first = ranks, first
        self.slots = slots or {kind: slots_of(kind, ring=True) for kind in KINDS}
        self.current = FakeStream()
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
            _words=FakeWords(kind),
            _memory=FakeMemory(),
            _exchange=self.first,
            _count=(count := self.slots[kind]),
            kind=kind,
        )
        engine._begin([_Slot(index, index * SLOT) for index in range(count)])
        return engine

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        def tell(stream: FakeStream, *words: list[tuple[Tag, int]]) -> None:
            for kind, each in zip(("write", "wait"), words, strict=True):
                stream.operations += [(kind, where, value & 0xFFFFFFFF) for where, value in each]

        def pull(
            engine: Any, stream: FakeStream, source: int, start: int, place: Place, pitch: int
        ) -> None:
            stream.operations.append(("pull", (engine.kind, source, start), place))

        with (
            mock.patch.object(copy_engine, "tell", tell),
            mock.patch.object(CopyEngine, "_pull", pull),
            mock.patch.object(copy_engine, "current_stream", lambda *_: self.current),
        ):
            yield

    def streams(self) -> list[FakeStream]:
        engines = [engine._stream for each in self.engines for engine in each.values()]
        own = [stream for each in self.main for stream in each]
        every: list[Any] = [*own, *engines]
        return [stream for stream in every if stream.operations]


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
        for step in range(steps):
            # Before or after what comes first: ranks differ in what they compute first.
            early = not step and random.Random(f"{self.rank} {self.name} {part}").random() < 0.5
            if early:
                belt.between()
            direct = self.backward and self.early(part, step)
            if direct:
                grads.room("grads", part, step, self.name)
            keys.take()
            if not step and not early:
                belt.between()
            if step + 1 < steps:
                self.post(keys, "keys", part, (step + 1) % 2)
            if not self.backward:
                continue
            if step:
                grads.take()
            if not direct:
                grads.room("grads", part, step, self.name)
            self.post(grads, "grads", part)
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


def advance(world: World, draw: random.Random) -> tuple[int, bool]:
    """Run all queues in a random order; wrong reads, and whether all ended."""
    words: dict[Tag, int] = {}
    packed: dict[Tag, Tag] = {}
    pulled: dict[Tag, Tag | None] = {}
    wrong, live = 0, world.streams()
    speed = {stream: draw.choice([1, 1, 5, 50]) for stream in live}

    def blocked(stream: FakeStream) -> bool:
        kind, *what = stream.operations[stream.at]
        if kind == "after":
            return bool(what[0].at < what[1])
        if kind == "wait":
            ahead = words.get(what[0], world.first) - what[1]
            return ahead & 0xFFFFFFFF >= 2**31
        return False

    while live:
        ready = [stream for stream in live if not blocked(stream)]
        if not ready:
            return wrong, False
        (stream,) = draw.choices(ready, [speed[each] for each in ready])
        kind, *what = stream.operations[stream.at]
        if kind == "write":
            words[what[0]] = what[1]
        elif kind == "pack":
            packed[what[0]] = what[1]
        elif kind == "pull":
            pulled[what[1].cell] = packed.get(what[0])
            wrong += packed.get(what[0]) != what[1].expected
        elif kind == "read":
            wrong += pulled.get(what[0].cell) != what[0].expected
        stream.at += 1
        if stream.at == len(stream.operations):
            live.remove(stream)
    return wrong, True


def outcome(seed: int) -> tuple[int, bool]:
    draw = random.Random(seed)
    ranks, parts, steps = (draw.randint(low, 4) for low in (2, 1, 1))
    slots = {kind: slots_of(kind, ring=draw.random() < 0.7) for kind in KINDS}
    world = World(ranks, draw.choice([0, 2**31 - 15, 2**32 - 20]), slots)
    with world.patched():
        for rank in range(ranks):
            same = random.Random(seed)
            for name in range(4):
                with world.on(world.main[rank][same.randrange(2)]):
                    Call(world, rank, same, name).run(same.randint(1, parts), steps)
    return advance(world, draw)


@pytest.mark.parametrize("seed", range(200))
def test_nobody_reads_too_early_or_waits_for_ever(seed: int) -> None:
    assert outcome(seed) == (0, True)


def test_the_simulation_sees_a_slot_that_is_filled_too_early() -> None:
    real = CopyEngine.start

    def forgetful(engine: CopyEngine, *given: Any, **more: Any) -> Any:
        engine._users = engine._sources = ()
        return real(engine, *given, **more)

    with mock.patch.object(CopyEngine, "start", forgetful):
        assert sum(outcome(seed)[0] for seed in range(40)) > 0


def test_the_simulation_sees_a_stream_that_packs_without_waiting() -> None:
    real = CopyEngine.pack

    def hasty(engine: CopyEngine, *given: Any) -> Any:
        for slot in engine._slots:
            slot.last = 0
        return real(engine, *given)

    with mock.patch.object(CopyEngine, "pack", hasty):
        assert sum(outcome(seed)[0] for seed in range(40)) > 0


def test_the_simulation_sees_too_few_slots() -> None:
    def few(world: World, kind: str, rank: int, real: Any = World._engine) -> CopyEngine:
        engine: CopyEngine = real(world, kind, rank)
        engine._count = 2
        engine._begin(engine._slots[:2])
        return engine

    with mock.patch.object(World, "_engine", few), pytest.raises(MeshError, match="nobody says"):
        for seed in range(40):
            outcome(seed)
