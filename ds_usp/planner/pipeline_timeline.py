"""When each instruction of a rank's schedule runs: a simulation on given seconds.

Lanes: ``compute``, the current stream, and one for each kind of channel. The rules:

- Instructions are issued in order. A post starts when the compute lane reaches it; a wait blocks
  the compute lane until the exchange is done, as a stream wait does.
- Exchanges of one kind run one after the other, in the order of their posts, beside the compute
  lane and beside other kinds.
- Exchanges of different kinds that are in flight at once on one link share it equally.
- While any exchange is in flight, the compute lane runs at ``1 - contention`` of its speed: it
  loses that fraction of each hidden exchange's time.
- Other ranks post when this one does. What a rank waits for a slower one is not simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from ds_usp.geometry.pipeline_schedule import CHANNELS, Instr, Schedule

COMPUTE = "compute"
CONTENTION = "contention"  # exposed seconds that no single wait has


class Cost(NamedTuple):
    """Seconds of one instruction.

    Attributes:
        compute: on the compute lane: a kernel call, a merge, packing before an exchange.
        exchange: of the exchange that a post starts, alone on its link.
    """

    compute: float = 0.0
    exchange: float = 0.0


class Event(NamedTuple):
    """One bar of a timeline: seconds from ``start`` to ``stop``.

    Attributes:
        lane: ``compute`` or a kind of channel.
        instr: on the compute lane also a wait, while it blocks the lane.
    """

    lane: str
    instr: Instr
    start: float
    stop: float

    @property
    def is_wait(self) -> bool:
        """Whether the compute lane is blocked."""
        return self.lane == COMPUTE and self.instr.op.is_wait


@dataclass(frozen=True)
class Timeline:
    """One pass of one rank.

    Args:
        events: in the order of their starts on each lane; none of 0 seconds.
        compute: seconds of the compute lane's work, had nothing else been in flight.
        exposed: the seconds beyond, by what they are spent on: a wait for a kind of channel,
            ``contention`` (slower kernels while exchanges are in flight).
        alone: seconds of the exchanges of each kind, had each been alone on its link.
    """

    events: tuple[Event, ...]
    compute: float
    exposed: Mapping[str, float]
    alone: Mapping[str, float]

    @property
    def total(self) -> float:
        return self.compute + sum(self.exposed.values())

    def busy(self, lane: str) -> float:
        """Seconds in which a lane works; of the compute lane without waits."""
        of_lane = (event for event in self.events if event.lane == lane and not event.is_wait)
        return sum(event.stop - event.start for event in of_lane)


def simulate(
    schedule: Schedule,
    cost: Callable[[Instr], Cost],
    *,
    contention: float = 0.0,
    links: Mapping[str, str] | None = None,
) -> Timeline:
    """Run one rank's schedule on given seconds.

    Args:
        cost: of each instruction.
        contention: 0 to 1, what the compute lane loses of its speed while exchanges are in flight.
        links: the link of a kind of channel; kinds that are not named share one.

    Raises:
        ValueError: a wait for what was not posted.
    """
    clock = _Clock(contention, links or {})
    for instr in schedule:
        if instr.op.is_wait:
            clock.wait(instr)
        compute, exchange = cost(instr)
        clock.compute(instr, compute)
        if instr.op.is_post:
            clock.post(instr, exchange)
    exposed, alone = MappingProxyType(clock.exposed), MappingProxyType(clock.alone)
    return Timeline(tuple(clock.events), clock.work, exposed, alone)


class _Clock:
    """The compute lane's time, and the exchanges in flight, which are advanced with it."""

    def __init__(self, contention: float, links: Mapping[str, str]) -> None:
        self._contention, self._links = contention, links
        self._now = self.work = 0.0
        self._queues: dict[str, deque[tuple[Instr, float]]] = {}  # instruction, seconds
        self._left: dict[str, float] = {}  # seconds that the first exchange of a kind needs alone
        self._started: dict[str, float] = {}
        self._in_flight: set[Instr] = set()
        self._posted: set[Instr] = set()
        self.events: list[Event] = []
        self.exposed: dict[str, float] = {}
        self.alone = dict.fromkeys(CHANNELS, 0.0)

    def post(self, instr: Instr, seconds: float) -> None:
        kind = instr.op.channel
        self._posted.add(instr)
        self.alone[kind] += seconds
        if seconds <= 0 and kind not in self._left:
            return
        self._in_flight.add(instr)
        self._queues.setdefault(kind, deque()).append((instr, seconds))
        if kind not in self._left:
            self._left[kind], self._started[kind] = seconds, self._now

    def wait(self, wait: Instr) -> None:
        post = wait._replace(op=type(wait.op)(wait.op.value[:-1]))
        start = self._now
        if post not in self._posted:
            raise ValueError(f"{wait} waits for {post}, which was not posted before it")
        while post in self._in_flight:
            self._advance_to(self._next_finish())
        if self._now > start:
            self._expose(wait.op.channel, self._now - start)
            self.events.append(Event(COMPUTE, wait, start, self._now))

    def compute(self, instr: Instr, seconds: float) -> None:
        start, left = self._now, seconds
        while left > 0:
            lost = self._contention if self._left else 0.0
            done = self._now + left / (1.0 - lost) if lost < 1 else inf
            stop = min(done, self._next_finish())
            if lost and stop > self._now:
                self._expose(CONTENTION, (stop - self._now) * lost)
            left = 0.0 if stop == done else left - (stop - self._now) * (1.0 - lost)
            self._advance_to(stop)
        self.work += seconds
        if self._now > start:
            self.events.append(Event(COMPUTE, instr, start, self._now))

    def _expose(self, reason: str, seconds: float) -> None:
        self.exposed[reason] = self.exposed.get(reason, 0.0) + seconds

    def _sharers(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for kind in self._left:
            link = self._links.get(kind, "")
            counts[link] = counts.get(link, 0) + 1
        return counts

    def _next_finish(self) -> float:
        sharers, links = self._sharers(), self._links
        seconds = (left * sharers[links.get(kind, "")] for kind, left in self._left.items())
        return self._now + min(seconds, default=inf)

    def _advance_to(self, second: float) -> None:
        while self._left:
            stop = min(self._next_finish(), second)
            sharers = self._sharers()
            for kind in list(self._left):
                shared_by = sharers[self._links.get(kind, "")]
                # What is done now is compared as it was computed: rounding must not leave a rest.
                is_done = self._now + self._left[kind] * shared_by <= stop
                self._left[kind] -= (stop - self._now) / shared_by
                if is_done:
                    self._finish(kind, stop)
            self._now = stop
            if stop == second:
                break
        self._now = second

    def _finish(self, kind: str, now: float) -> None:
        """End the exchange that is first of its kind, and begin the next one."""
        queue = self._queues[kind]
        instr, _ = queue.popleft()
        self._in_flight.discard(instr)
        if now > self._started[kind]:
            self.events.append(Event(kind, instr, self._started[kind], now))
        del self._left[kind]
        if queue:
            self._left[kind], self._started[kind] = queue[0][1], now
