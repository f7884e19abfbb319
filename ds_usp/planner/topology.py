"""How long an exchange takes: groups of ranks on domains of GPUs on links.

All groups of an axis exchange at the same time, so the bounds are what a domain (a socket, a node)
sends out of itself, and what its busiest GPU sends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from ds_usp.planner.hardware import Cluster
from ds_usp.planner.parallel_config import ParallelConfig
from ds_usp.planner.profile_rows import MeasuredExchange, seconds_at, select_rows

DIRECT, RELAY, COLLECTIVE = "direct", "relay", "collective"
_COLLECTIVES: Mapping[str, str] = MappingProxyType(
    {DIRECT: "all_to_all", RELAY: "p2p", COLLECTIVE: "all_gather"}
)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks ``0, stride, 2 stride, ...``, and all groups beside them."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class DomainTraffic:
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


def group_of(config: ParallelConfig, axis: str) -> RankGroup:
    """The group of an axis; ranks lie in the order tp, (ulysses, ring), dp, pp.

    Args:
        axis: tp | ulysses | ring | dp | pp, or ``zero``, which is dp x sp.
    """
    return _GROUPS[axis](config)


def _within(config: ParallelConfig, first: str, degree: int) -> int:
    """Ranks from one to the next of an axis of sequence parallelism."""
    return config.tp * (1 if config.order.startswith(first) else degree)


_GROUPS: Mapping[str, Callable[[ParallelConfig], RankGroup]] = MappingProxyType(
    {
        "tp": lambda config: RankGroup(config.tp, 1),
        "ulysses": lambda config: RankGroup(
            config.ulysses, _within(config, "ulysses", config.ring)
        ),
        "ring": lambda config: RankGroup(config.ring, _within(config, "ring", config.ulysses)),
        "dp": lambda config: RankGroup(config.dp, config.tp * config.sp),
        "zero": lambda config: RankGroup(config.zero_ranks, config.tp),
        "pp": lambda config: RankGroup(config.pp, config.tp * config.sp * config.dp),
    }
)


@lru_cache(maxsize=65536)
def domain_traffic(group: RankGroup, domain: int, pattern: str) -> DomainTraffic:
    """How much of an exchange leaves the domains of so many GPUs.

    ``direct``: everyone to everyone, equally. ``relay``: each rank to the next one. ``collective``:
    a ring through the group that leaves each domain once.
    """
    block = group.size * group.stride
    if block <= domain and domain % block == 0:
        return DomainTraffic(0.0, 0.0, True, True)
    busiest, loads, counts = 0.0, dict[int, float](), set[int]()
    for first in range(0, math.lcm(block, domain), block):
        for offset in range(min(group.stride, domain)):
            domains = [
                (first + offset + index * group.stride) // domain for index in range(group.size)
            ]
            ranks_in_domain = Counter(domains)
            counts.update(ranks_in_domain.values())
            for index, domain_index in enumerate(domains):
                leaving = 0.0
                if pattern == DIRECT:
                    leaving = (group.size - ranks_in_domain[domain_index]) / (group.size - 1)
                elif domains[(index + 1) % group.size] != domain_index:
                    leaving = 1.0
                busiest = max(busiest, leaving)
                loads[domain_index] = loads.get(domain_index, 0.0) + leaving
    even = len(counts) == 1
    return DomainTraffic(max(loads.values()), busiest, even, max(loads.values()) == 0)


def inside_node(cluster: Cluster, group: RankGroup) -> bool:
    """Whether every such group lies in one node."""
    return domain_traffic(group, cluster.gpus_per_node, RELAY).inside


def exchange_s(
    cluster: Cluster, group: RankGroup, sent_bytes: float, pattern: str, messages: float = 1
) -> float:
    """Seconds of an exchange in which every rank of every such group sends so much.

    Inside a node from the cluster's profile, if it has measured groups of that size.

    Args:
        messages: number of messages; each costs a latency.
    """
    if group.size == 1 or sent_bytes <= 0:
        return 0.0
    rows = _measured(cluster, group, pattern)
    if rows:
        return messages * seconds_at(rows, "sent_bytes", "seconds", sent_bytes / messages)
    return sent_bytes * _seconds_per_byte(cluster, group, pattern) + messages * _latency_s(
        cluster, group
    )


@lru_cache(maxsize=65536)
def _measured(cluster: Cluster, group: RankGroup, pattern: str) -> tuple[MeasuredExchange, ...]:
    """The profiled exchanges of a group of this size; none for a group over several nodes."""
    if not inside_node(cluster, group):
        return ()
    kind, ranks = _COLLECTIVES[pattern], group.size
    return tuple(select_rows(cluster.exchanges, "sent_bytes", collective=kind, ranks=ranks))


@lru_cache(maxsize=65536)
def _seconds_per_byte(cluster: Cluster, group: RankGroup, pattern: str) -> float:
    """Seconds of the busiest link for each byte that a rank sends: a port, a domain's uplink, or a
    NIC."""
    slowest = 0.0
    for level in cluster.levels:
        traffic = domain_traffic(group, level.gpus, pattern)
        slowest = max(slowest, 1 / level.port_bytes_per_s if traffic.inside else 0.0)
        if traffic.inside:
            break
        if level.uplink_bytes_per_s:
            slowest = max(slowest, traffic.domain / level.uplink_bytes_per_s)
        if level is cluster.node:
            nic = cluster.nic_bytes_per_s
            # A ring unevenly over nodes gets one NIC; other groups use the NICs of all their ranks.
            busiest = traffic.busiest if pattern != COLLECTIVE or not traffic.even else 0.0
            slowest = max(slowest, busiest / nic, 1 / level.port_bytes_per_s / 2)
    return slowest


@lru_cache(maxsize=65536)
def _latency_s(cluster: Cluster, group: RankGroup) -> float:
    """The latency of the smallest domain that holds the group, else of the network."""
    for level in cluster.levels:
        if domain_traffic(group, level.gpus, RELAY).inside:
            return level.latency_s
    return cluster.network_latency_s
