"""How long an exchange takes: groups of ranks on domains of GPUs on links.

All groups of an axis exchange at the same time, so what counts is what a whole domain (a socket, a
node) sends out of itself, and what its busiest GPU does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from ds_usp.planner.hardware import Cluster
from ds_usp.planner.parallel_config import Split
from ds_usp.planner.profile_rows import MeasuredExchange, exchange_rows, seconds_at

DIRECT, RELAY, COLLECTIVE = "direct", "relay", "collective"
_COLLECTIVES: Mapping[str, str] = MappingProxyType(
    {DIRECT: "all_to_all", RELAY: "p2p", COLLECTIVE: "all_gather"}
)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks ``0, stride, 2 stride, ...``, and all groups beside them."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """How groups lie on one level's domains, for each byte that every rank sends.

    Args:
        domain: bytes that leave a domain, all its ranks together.
        busiest: bytes that leave it from its busiest rank.
        even: as many ranks of a group in each domain that it touches.
        inside: the group lies in one domain.
    """

    domain: float
    busiest: float
    even: bool
    inside: bool


def group_of(split: Split, axis: str) -> Group:
    """The group of an axis; ranks lie in the order tp, (ulysses, ring), dp, pp.

    Args:
        axis: tp | ulysses | ring | dp | pp, or ``zero``, which is dp x sp.
    """
    return _GROUPS[axis](split)


def _within(split: Split, first: str, degree: int) -> int:
    """Ranks from one to the next of an axis of sequence parallelism."""
    return split.tp * (1 if split.order.startswith(first) else degree)


_GROUPS: Mapping[str, Callable[[Split], Group]] = MappingProxyType(
    {
        "tp": lambda split: Group(split.tp, 1),
        "ulysses": lambda split: Group(split.ulysses, _within(split, "ulysses", split.ring)),
        "ring": lambda split: Group(split.ring, _within(split, "ring", split.ulysses)),
        "dp": lambda split: Group(split.dp, split.tp * split.sp),
        "zero": lambda split: Group(split.zero_ranks, split.tp),
        "pp": lambda split: Group(split.pp, split.tp * split.sp * split.dp),
    }
)


def ring_ranks_of_a_node(cluster: Cluster, split: Split) -> int:
    """Ranks of a ring in a row on one node; all of them where nodes do not hold as many each."""
    ring = group_of(split, "ring")
    here, rest = divmod(cluster.gpus_per_node, ring.stride)
    even = not rest and ring.size * ring.stride % cluster.gpus_per_node == 0
    return here if even else ring.size


@lru_cache(maxsize=65536)
def crossing(group: Group, domain: int, pattern: str) -> Crossing:
    """How much of an exchange leaves the domains of so many GPUs.

    ``direct``: everyone to everyone, equally. ``relay``: each rank to the next one. ``collective``:
    a ring through the group that leaves each domain once.
    """
    block = group.size * group.stride
    if block <= domain and domain % block == 0:
        return Crossing(0.0, 0.0, True, True)
    busiest, loads, counts = 0.0, dict[int, float](), set[int]()
    for first in range(0, math.lcm(block, domain), block):
        for offset in range(min(group.stride, domain)):
            places = [
                (first + offset + index * group.stride) // domain for index in range(group.size)
            ]
            here = Counter(places)
            counts.update(here.values())
            for index, place in enumerate(places):
                out = 0.0
                if pattern == DIRECT:
                    out = (group.size - here[place]) / (group.size - 1)
                elif places[(index + 1) % group.size] != place:
                    out = 1.0
                busiest = max(busiest, out)
                loads[place] = loads.get(place, 0.0) + out
    even = len(counts) == 1
    return Crossing(max(loads.values()), busiest, even, max(loads.values()) == 0)


def exchange_s(
    cluster: Cluster, group: Group, sent_bytes: float, pattern: str, messages: float = 1
) -> float:
    """Seconds of an exchange in which every rank of every such group sends so much.

    Inside a node from the cluster's profile, if it has measured groups of that size.

    Args:
        messages: exchanges into which it is cut; each costs a latency.
    """
    if group.size == 1 or sent_bytes <= 0:
        return 0.0
    rows = _measured(cluster, group, pattern)
    if rows:
        one = seconds_at(
            rows, lambda row: row.sent_bytes, lambda row: row.seconds, sent_bytes / messages
        )
        return messages * one
    return sent_bytes * _seconds_per_byte(cluster, group, pattern) + messages * _latency_s(
        cluster, group
    )


@lru_cache(maxsize=65536)
def _measured(cluster: Cluster, group: Group, pattern: str) -> tuple[MeasuredExchange, ...]:
    if not crossing(group, cluster.gpus_per_node, RELAY).inside:
        return ()
    return exchange_rows(cluster.exchanges, _COLLECTIVES[pattern], group.size)


@lru_cache(maxsize=65536)
def _seconds_per_byte(cluster: Cluster, group: Group, pattern: str) -> float:
    slowest = 0.0
    for level in cluster.levels:
        found = crossing(group, level.gpus, pattern)
        slowest = max(slowest, 1 / level.port_bytes_per_s if found.inside else 0.0)
        if found.inside:
            break
        if level.uplink_bytes_per_s:
            slowest = max(slowest, found.domain / level.uplink_bytes_per_s)
        if level is cluster.node:
            nic = cluster.nic_bytes_per_s
            # Rings that lie unevenly on nodes get one NIC each; others leave by all they own.
            alone = found.busiest if pattern != COLLECTIVE or not found.even else 0.0
            slowest = max(slowest, alone / nic, 1 / level.port_bytes_per_s / 2)
    return slowest


@lru_cache(maxsize=65536)
def _latency_s(cluster: Cluster, group: Group) -> float:
    for level in cluster.levels:
        if crossing(group, level.gpus, RELAY).inside:
            return level.latency_s
    return cluster.network_latency_s


def straddles(cluster: Cluster, group: Group) -> bool:
    """Whether the group's ranks lie unevenly on the nodes."""
    return not crossing(group, cluster.gpus_per_node, COLLECTIVE).even
