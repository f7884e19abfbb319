"""Exchanges under computation: what of them is hidden, and what they add to its time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ds_usp.planner.hardware import Cluster


@dataclass(frozen=True, slots=True)
class HiddenExchange:
    """Exchanges of one rank, and the computation beside them.

    Args:
        seconds: of the exchanges alone.
        exposed: of them, those in which no kernel runs.
        slower: that kernels take longer while exchanges are in flight.
    """

    seconds: float = 0.0
    exposed: float = 0.0
    slower: float = 0.0

    @property
    def added(self) -> float:
        """Seconds that they add to the computation."""
        return self.exposed + self.slower

    def __add__(self, other: HiddenExchange) -> HiddenExchange:
        return HiddenExchange(
            self.seconds + other.seconds, self.exposed + other.exposed, self.slower + other.slower
        )

    def __mul__(self, times: float) -> HiddenExchange:
        return HiddenExchange(times * self.seconds, times * self.exposed, times * self.slower)


def exposed(seconds: float) -> HiddenExchange:
    """Under nothing."""
    return HiddenExchange(seconds, seconds)


def under(cluster: Cluster, seconds: float, computation_s: float) -> HiddenExchange:
    """One exchange under so many seconds of computation."""
    hidden = min(seconds, computation_s)
    return HiddenExchange(seconds, seconds - hidden, cluster.contention * hidden)


def in_buckets(
    cluster: Cluster, buckets: Iterable[tuple[float, float]], computation_s: float
) -> HiddenExchange:
    """Exchanges one after the other, each posted when its bucket is full and the one before is
    done, for which the computation waits: there is one bucket that is filled, and one in flight.

    Args:
        buckets: (second of the computation at which it is full, seconds of its exchange).
    """
    total = waited = free = 0.0
    for full, seconds in buckets:
        start = max(full + waited, free)
        waited = start - full
        total, free = total + seconds, start + seconds
    waited = max(waited, free - computation_s)
    return HiddenExchange(total, waited, cluster.contention * max(0.0, total - waited))
