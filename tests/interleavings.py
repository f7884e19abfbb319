"""Run the stream queues of ``copy_engine_model``, in any order or by the clock.

Streams proceed as in CUDA: a graph starts when the earlier work of its launch stream is done,
whatever other streams still do; it has streams of its own; later work of its launch stream waits
for all of it. A pull of another exchange's data, or a wait that nothing ends, is a defect.
"""

import random
from collections.abc import Callable, Hashable, Mapping, Sequence

from copy_engine_model import FakeStream, Tag, World

Queues = dict[Hashable, list[Tag]]


def queues(world: World, rank: int, order: Sequence[int]) -> Queues:
    """What each stream of a rank does when its pieces come in this order: those that are no graphs
    once, as they were made, graphs at any time after."""
    found: Queues = {stream: [] for stream in world.streams(rank)}
    begun: dict[tuple[int, Hashable], int] = {}  # where a piece begins in a stream
    main, other = world.main[rank]
    for run, index in enumerate(order):
        piece = world.pieces[rank][index]
        if not piece.graph:
            begun |= {(index, stream): len(found[stream]) for stream in found}
            for stream, operations in piece.operations.items():
                found[stream] += [
                    _queued(op, run, lambda at, n, begun=begun: (at, begun[n, at]))
                    for op in operations
                ]
            continue
        found[main].append(("after", other, len(found[other])))
        start = len(found[main])
        for stream, operations in piece.operations.items():
            inside = [_queued(op, run, lambda at, _, run=run: ((run, at), 1)) for op in operations]
            found[run, stream] = [("after", main, start), *inside]
        found[main] += [
            ("after", (run, stream), len(each) + 1) for stream, each in piece.operations.items()
        ]
        found[other].append(("after", main, len(found[main])))
    return {stream: each for stream, each in found.items() if each}


def _queued(op: Tag, run: int, locate: Callable[[FakeStream, int], tuple[Hashable, int]]) -> Tag:
    """An operation of a piece in its queue: what it waits for there, and which run it is of."""
    if op[0] != "after":
        return (*op, run) if op[0] in ("pack", "pull", "read") else op
    _, stream, count, piece = op
    key, begin = locate(stream, piece)
    return "after", key, begin + count


class Run:
    """All ranks' queues while they run.

    Attributes:
        at: of each rank, how far its streams are that have something to do.
        wrong: reads that found something else than they should.
    """

    def __init__(self, world: World, order: Sequence[int]) -> None:
        self.queues = [queues(world, rank, order) for rank in range(world.ranks)]
        self.at: list[dict[Hashable, int]] = [dict.fromkeys(each, 0) for each in self.queues]
        self.wrong = 0
        self.flags: dict[Tag, int] = {}
        self.packed: dict[Tag, Tag] = {}
        self.pulled: dict[Tag, Tag | None] = {}

    def ready(self) -> list[tuple[int, Hashable]]:
        """Ranks and streams whose next operation need not wait."""
        return [
            (rank, stream)
            for rank, each in enumerate(self.at)
            for stream in each
            if not self.blocked(rank, stream)
        ]

    def blocked(self, rank: int, stream: Hashable) -> bool:
        at = self.at[rank]
        kind, *what = self.queues[rank][stream][at[stream]]
        if kind == "after":
            return what[0] in at and at[what[0]] < what[1]
        return bool(kind == "wait" and self.flags.get(what[0], what[0][-1]) < what[1])

    def step(self, rank: int, stream: Hashable) -> str:
        """Perform a stream's next operation; which it was."""
        at = self.at[rank]
        kind, *what = self.queues[rank][stream][at[stream]]
        if kind == "write":
            self.flags[what[0]] = what[1]
        elif kind == "pack":
            self.packed[what[0]] = (*what[1], what[2])
        elif kind == "pull":
            self.pulled[what[1].cell] = self.packed.get(what[0])
            self.wrong += self.packed.get(what[0]) != (*what[1].expected, what[2])
        elif kind == "read":
            self.wrong += self.pulled.get(what[0].cell) != (*what[0].expected, what[1])
        at[stream] += 1
        if at[stream] == len(self.queues[rank][stream]):
            del at[stream]
        return str(kind)


def advance(world: World, order: Sequence[int], draw: random.Random) -> tuple[int, bool]:
    """Run all queues in a random order; wrong reads, and whether all ended."""
    run, speed = Run(world, order), dict[object, int]()
    while any(run.at):
        ready = run.ready()
        if not ready:
            return run.wrong, False
        weights = [speed.setdefault(each, draw.choice([1, 1, 5, 50])) for each in ready]
        run.step(*draw.choices(ready, weights)[0])
    return run.wrong, True


def seconds(world: World, cost: Mapping[str, int]) -> int:
    """How long the first piece takes, if operations take so long and the others nothing."""
    run, now = Run(world, [0]), 0
    until: dict[object, int] = {}
    while any(run.at):
        ready = [each for each in run.ready() if until.get(each, 0) <= now]
        for each in ready:
            until[each] = now + cost.get(run.step(*each), 0)
        if not ready:
            now = min(each for each in until.values() if each > now)
    return max(until.values())
