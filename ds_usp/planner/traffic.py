"""Bytes that a rank sends, for every axis, and how long their exchange takes; attention's bytes are
those that ledgers count, in the mean over ranks. ``memory``, ``attention_time`` and ``step_time``
ask for each configuration of a search.

Letters: x tokens of a micro batch, h hidden, q and k widths of queries and keys, t tp, u ulysses,
r ring, e bytes of an element.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from ds_usp.geometry.chunking import CallSize
from ds_usp.geometry.heads import HeadSplit
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_schedule import ring_schedule
from ds_usp.planner.formulas import attention_flop_per_token, chain_traffic, stage_elements
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.parallel_config import ParallelConfig, Workload


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes that a rank sends in one layer for one micro batch and one direction, mean over ranks;
    ``ulysses``, ``states`` and ``halo`` in either direction. A backward pass sends ``ring_forward``
    twice, and ``ulysses`` twice if it exchanges shards again. ``ring_busiest``: of one exchange of
    the ring, keys and values or, without a window, their gradients, by the rank that sends most."""

    tp_forward: float
    tp_backward: float
    ulysses: float
    ring_forward: float
    ring_busiest: float
    states: float = 0.0
    halo: float = 0.0


def layer_traffic(work: Workload, config: ParallelConfig) -> LayerBytes:
    """Bytes that a rank sends in one layer for one micro batch, mean over ranks, in closed form:
    for lengths and heads that divide. In elements, each times e bytes:

    * tp: 2 all-reduces a direction, ``4 (t-1)/t x/(u r) h``; with Megatron's sequence parallelism
      2 all-gathers and 2 reduce-scatters forward, as many bytes, and 1.5 times that backward.
    * ulysses, either direction: ``(u-1)/u x/(u r) (2 q + 2 k')/t``, k' the width of the keys with
      a copy for each Ulysses rank that uses a KV head.
    * ring, causal zigzag: blocks go straight to the ranks whose queries see them, 3/4 of all:
      ``3/4 (r-1)/r 2 x k'/(u t)``; backward twice, for keys and values and for their gradients. Of
      a window the tokens that the ring's schedules send.
    * states and halo of a layer that carries a state: :func:`chain_traffic`, whatever the tokens.
    """
    model, e, t = work.model, config.param_bytes, config.tp
    x = config.micro_batch * work.seq_len
    u, r = config.ulysses, config.ring
    tp = 4 * (t - 1) / t * x / config.sp * model.hidden * e
    q, kv = model.q_width / t, kv_features(work, config) * u  # of all Ulysses ranks together
    ulysses = (u - 1) / u * x / config.sp * (2 * q + 2 * kv) * e
    # The last rank's both chunks are seen by all ranks, of the first rank's only the front one.
    busiest = (r - 1) / r * work.seq_len
    sent = 0.75 * busiest
    if model.window:
        every = _sent_in_a_window(model.window, TokenLayout("zigzag", work.seq_len, 1, r))
        sent, busiest = sum(every) / r, float(max(every))
    token = 2 * config.micro_batch * kv / u * e
    ring = sent * token
    states, halo, *_ = chain_traffic(work, config)
    tp_backward = tp * (1.5 if config.tp_sequence else 1.0)
    return LayerBytes(tp, tp_backward, ulysses, ring, busiest * token, states, halo)


@lru_cache(maxsize=4096)
def _sent_in_a_window(window: int, tokens: TokenLayout) -> list[int]:
    """Tokens whose keys and values each ring rank sends in layers with a sliding window."""
    rings = (ring_schedule(tokens, MaskSpec.window(window - 1), r) for r in range(tokens.ring))
    return [sum(step.num_sent_tokens for step in x.steps if not step.is_local) for x in rings]


def kv_features(work: Workload, config: ParallelConfig) -> float:
    """Key features of one rank, as many of values; a KV head is on one rank at least."""
    if not work.model.attention:
        return 0.0
    return max(work.model.kv_heads / config.tp / config.ulysses, 1.0) * work.model.head_dim


def call_size(
    work: Workload, config: ParallelConfig, split: HeadSplit, ulysses_in_node: bool
) -> CallSize:
    """Return by what ``Tuning`` chooses head chunks and the KV exchange, causal, mean over ranks:
    what ``_call_size`` of ``attention/tuning.py`` makes of tensors.

    Args:
        split: the heads of a tensor-parallel rank over its Ulysses ranks.
    """
    kv = int(work.seq_len * 2 * config.micro_batch * kv_features(work, config) * config.param_bytes)
    flop, sent = rank_flop(work, config), layer_traffic(work, config).ulysses
    return CallSize(split, flop, sent, kv, config.ring, ulysses_in_node)


def rank_flop(work: Workload, config: ParallelConfig) -> float:
    """Forward FLOP of one rank in one causal attention call, mean over ranks."""
    flop = attention_flop_per_token(work.model, work.seq_len, work.document_lengths)
    return work.rank_tokens(config) * flop / config.tp


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Counts what the group of dp x sp sends in one step, per rank of the fullest stage."""

    gradients: float
    parameters: float


def step_traffic(work: Workload, config: ParallelConfig) -> StepBytes:
    """Gradients and parameters over dp x sp of z ranks, per step.

    ZeRO-0: all-reduce, ``2 w_g P (z-1)/z``. ZeRO-1: reduce-scatter of gradients and all-gather of
    parameters. ZeRO-2: the same, DeepSpeed at every micro batch (m times). DeepSpeed all-reduces
    gradients in both (``unsharded_grad_reduce``: its bf16 optimizer, and ZeRO-2's default
    ``use_multi_rank_bucket_allreduce``). ZeRO-3: two all-gathers and a reduce-scatter, m times.
    """
    z, m = config.zero_ranks, config.micro_batches(work.global_batch)
    if z == 1:
        return StepBytes(0.0, 0.0)
    # The fullest stage: the first has the embedding, the last one the head.
    elements = max(stage_elements(work, config, stage) for stage in {0, config.pp - 1})
    once = elements * (z - 1) / z
    gradients, parameters = once * config.grad_bytes, once * config.param_bytes
    if config.zero == 0:
        return StepBytes(2 * gradients, 0.0)
    if config.zero < 3:
        times = m if config.zero == 2 else 1
        return StepBytes(gradients * times * (1 + config.unsharded_grad_reduce), parameters)
    return StepBytes(gradients * m, 2 * parameters * m)


# ------------------------------------------------------------------ seconds of an exchange
# All groups of an axis exchange at the same time, so the bounds are what a domain of GPUs (a
# socket, a node) sends out of itself, and what its busiest GPU sends.


DIRECT, COLLECTIVE = "direct", "collective"


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
    """The group of an axis; ranks lie in the ``DEFAULT_ORDER`` of ``geometry/ranks.py``.

    Args:
        axis: tp | ulysses | ring | dp | pp, or ``zero``, which is dp x sp.
    """
    if axis == "tp":
        return RankGroup(config.tp, 1)
    if axis == "zero":
        return RankGroup(config.zero_ranks, config.tp)
    if axis == "ulysses":
        return RankGroup(config.ulysses, config.tp)
    if axis == "ring":
        return RankGroup(config.ring, config.tp * config.ulysses)
    if axis == "dp":
        return RankGroup(config.dp, config.tp * config.sp)
    return RankGroup(config.pp, config.tp * config.sp * config.dp)


@lru_cache(maxsize=65536)
def domain_traffic(group: RankGroup, domain: int, pattern: str) -> DomainTraffic:
    """How much of an exchange leaves the domains of so many GPUs.

    ``direct``: everyone to everyone, equally. ``collective``: a ring through the group, each rank
    to the next one.
    """
    block = group.size * group.stride
    if block <= domain and domain % block == 0:
        return DomainTraffic(0.0, 0.0, True, True)
    busiest, loads, counts = 0.0, dict[int, float](), set[int]()
    # Where blocks of a group do not fill domains, these repeat after lcm(block, domain) ranks.
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
    return domain_traffic(group, cluster.gpus_per_node, COLLECTIVE).inside


def exchange_s(
    cluster: Cluster, group: RankGroup, sent_bytes: float, pattern: str, messages: float = 1
) -> float:
    """Seconds of an exchange in which every rank of every such group sends so much.

    Args:
        pattern: ``DIRECT`` or ``COLLECTIVE``, as of :func:`domain_traffic`.
        messages: each costs a latency.
    """
    if group.size == 1 or sent_bytes <= 0:
        return 0.0
    return sent_bytes * _seconds_per_byte(cluster, group, pattern) + messages * _latency_s(
        cluster, group
    )


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
        if domain_traffic(group, level.gpus, COLLECTIVE).inside:
            return level.latency_s
    return cluster.network_latency_s
