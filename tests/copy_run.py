"""Run the queues of ``copy_world``, in any order or by the clock.

A pull that finds another exchange's data, or a wait that nothing ends, is a defect.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from copy_world import FakeStream, Tag, World


class Rank:
    """How far a rank's streams are."""

    def __init__(self, world: World, rank: int) -> None:
        self.runs = [
            (streams, queues) for streams, queues, times in world.pieces[rank] for _ in range(times)
        ]
        self.run = -1
        self.turn()

    def turn(self) -> None:
        """Go on to the next run."""
        self.at: dict[FakeStream, int] = {}
        while not self.at and self.run + 1 < len(self.runs):
            self.run += 1
            self.queues = dict(zip(*self.runs[self.run], strict=True))
            self.at = dict.fromkeys(self.queues, 0)

    def after(self, stream: FakeStream, count: int) -> bool:
        return stream not in self.at or self.at[stream] >= count


class Run:
    """All ranks' queues while they run.

    Attributes:
        wrong: reads that found something else than they should.
    """

    def __init__(self, world: World) -> None:
        self.ranks, self.wrong = [Rank(world, rank) for rank in range(world.ranks)], 0
        self.words: dict[Tag, int] = {}
        self.packed: dict[Tag, Tag] = {}
        self.pulled: dict[Tag, Tag | None] = {}

    def ready(self) -> list[tuple[Rank, FakeStream]]:
        """Whose next operation need not wait."""
        return [
            (rank, each) for rank in self.ranks for each in rank.at if not self.blocked(rank, each)
        ]

    def blocked(self, rank: Rank, stream: FakeStream) -> bool:
        kind, *what = rank.queues[stream][rank.at[stream]]
        if kind == "after":
            return not rank.after(*what)
        return bool(kind == "wait" and self.words.get(what[0], what[0][-1]) < what[1])

    def step(self, rank: Rank, stream: FakeStream) -> str:
        """Perform a stream's next operation; which it was."""
        kind, *what = rank.queues[stream][rank.at[stream]]
        if kind == "write":
            self.words[what[0]] = what[1]
        elif kind == "pack":
            self.packed[what[0]] = (*what[1], rank.run)
        elif kind == "pull":
            self.pulled[what[1].cell] = self.packed.get(what[0])
            self.wrong += self.packed.get(what[0]) != (*what[1].expected, rank.run)
        elif kind == "read":
            self.wrong += self.pulled.get(what[0].cell) != (*what[0].expected, rank.run)
        rank.at[stream] += 1
        if rank.at[stream] == len(rank.queues[stream]):
            del rank.at[stream]
            if not rank.at:
                rank.turn()
        return str(kind)


def advance(world: World, draw: random.Random) -> tuple[int, bool]:
    """Run all queues in a random order; wrong reads, and whether all ended."""
    run, speed = Run(world), dict[FakeStream, int]()
    while any(rank.at for rank in run.ranks):
        ready = run.ready()
        if not ready:
            return run.wrong, False
        weights = [speed.setdefault(each, draw.choice([1, 1, 5, 50])) for _, each in ready]
        run.step(*draw.choices(ready, weights)[0])
    return run.wrong, True


def seconds(world: World, cost: Mapping[str, int]) -> int:
    """How long all queues take, if operations take so long and the others nothing."""
    run, now = Run(world), 0
    until: dict[FakeStream, int] = {}
    while any(rank.at for rank in run.ranks):
        ready = [(rank, each) for rank, each in run.ready() if until.get(each, 0) <= now]
        for rank, stream in ready:
            until[stream] = now + cost.get(run.step(rank, stream), 0)
        if not ready:
            now = min(each for each in until.values() if each > now)
    return max(until.values())
