"""How long a rank's schedule takes, and what of it is exposed: a simulation on given seconds, for
``attention_time.py``.

The compute lane is the current stream; each kind of channel has a lane beside it. The rules:

- Instructions are issued in order. A post starts when the compute lane reaches it; a wait blocks
  the compute lane until the exchange is done, as a stream wait does.
- Exchanges of one kind run one after the other, in the order of their posts, beside the compute
  lane and beside other kinds.
- Exchanges of different kinds that are in flight at once share the link equally.
- While any exchange is in flight, the compute lane runs at ``1 - contention`` of its speed.
- Other ranks post when this one does. What a rank waits for a slower one is not simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from ds_usp.geometry.pipeline_schedule import Instr, Schedule

CONTENTION = "contention"  # exposed seconds that no single wait has


class Cost(NamedTuple):
    """Seconds of one instruction.

    Attributes:
        compute: on the compute lane: a kernel call, a merge, packing before an exchange.
        exchange: of the exchange that a post starts, alone on its link.
    """

    compute: float = 0.0
    exchange: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """One pass of one rank.

    Args:
        compute: seconds of the compute lane's work, had nothing else been in flight.
        exposed: the seconds beyond, by what they are spent on: a wait for a kind of channel,
            ``contention``.
    """

    compute: float
    exposed: Mapping[str, float]

    @property
    def total(self) -> float:
        return self.compute + sum(self.exposed.values())


def simulate(
    schedule: Schedule, cost: Callable[[Instr], Cost], contention: float = 0.0
) -> Timeline:
    """Run one rank's schedule on given seconds.

    Args:
        cost: of each instruction.
        contention: 0 to 1, what the compute lane loses of its speed while exchanges are in flight.

    Raises:
        ValueError: a wait for what was not posted.
    """
    clock = _Clock(contention)
    for instr in schedule:
        if instr.op.is_wait:
            clock.wait(instr)
        compute, exchange = cost(instr)
        clock.compute(compute)
        if instr.op.is_post:
            clock.post(instr, exchange)
    return Timeline(clock.work, MappingProxyType(clock.exposed))


class _Clock:
    """The compute lane's time, and the exchanges in flight, which are advanced with it."""

    def __init__(self, contention: float) -> None:
        self._contention = contention
        self._now = self.work = 0.0
        self._queues: dict[str, deque[tuple[Instr, float]]] = {}  # instruction, seconds
        self._left: dict[str, float] = {}  # seconds that the first exchange of a kind needs alone
        self._in_flight: set[Instr] = set()
        self._posted: set[Instr] = set()
        self.exposed: dict[str, float] = {}

    def post(self, instr: Instr, seconds: float) -> None:
        kind = instr.op.channel
        self._posted.add(instr)
        if seconds <= 0 and kind not in self._left:
            return
        self._in_flight.add(instr)
        self._queues.setdefault(kind, deque()).append((instr, seconds))
        self._left.setdefault(kind, seconds)

    def wait(self, wait: Instr) -> None:
        """Let time pass until the exchange is done: exposed seconds."""
        post = wait._replace(op=type(wait.op)(wait.op.value[:-1]))
        start = self._now
        if post not in self._posted:
            raise ValueError(f"{wait} waits for {post}, which was not posted before it")
        while post in self._in_flight:
            self._advance_to(self._next_finish())
        if self._now > start:
            self._expose(wait.op.channel, self._now - start)

    def compute(self, seconds: float) -> None:
        """Run the compute lane for what takes so long alone."""
        left = seconds
        while left > 0:
            lost = self._contention if self._left else 0.0
            done = self._now + left / (1.0 - lost) if lost < 1 else inf
            stop = min(done, self._next_finish())
            if lost and stop > self._now:
                self._expose(CONTENTION, (stop - self._now) * lost)
            left = 0.0 if stop == done else left - (stop - self._now) * (1.0 - lost)
            self._advance_to(stop)
        self.work += seconds

    def _expose(self, reason: str, seconds: float) -> None:
        self.exposed[reason] = self.exposed.get(reason, 0.0) + seconds

    def _next_finish(self) -> float:
        return self._now + min(self._left.values()) * len(self._left) if self._left else inf

    def _advance_to(self, second: float) -> None:
        """Let the exchanges in flight run until then; those that are done leave their queues."""
        while self._left:
            stop, sharers = min(self._next_finish(), second), len(self._left)
            for kind in list(self._left):
                # What is done now is compared as it was computed: rounding must not leave a rest.
                is_done = self._now + self._left[kind] * sharers <= stop
                self._left[kind] -= (stop - self._now) / sharers
                if is_done:
                    self._finish(kind)
            self._now = stop
            if stop == second:
                break
        self._now = second

    def _finish(self, kind: str) -> None:
        """End the exchange that is first of its kind, and begin the next one."""
        queue = self._queues[kind]
        instr, _ = queue.popleft()
        self._in_flight.discard(instr)
        del self._left[kind]
        if queue:
            self._left[kind] = queue[0][1]
