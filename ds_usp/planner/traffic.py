"""Bytes that a rank sends, for every axis, and how long their exchange takes; attention's bytes are
those of its ledger, to the byte.

Letters: x tokens of a micro batch, h hidden, q and k widths of queries and keys, t tp, u ulysses,
r ring, e bytes of an element.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ds_usp.geometry.chunking import CallSize
from ds_usp.geometry.heads import HeadSplit
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_schedule import ring_schedule
from ds_usp.planner.formulas import (
    STATE_BYTES,
    attention_flop_per_token,
    chain_traffic,
    document_chains,
    stage_elements,
)
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.models import ModelShape, RecurrentMixer
from ds_usp.planner.parallel_config import ParallelConfig, Workload, exchanges_shards_again


class SentBytes(NamedTuple):
    """Counts what one rank sends in one layer for one micro batch, by the ledger's kinds."""

    forward: Mapping[str, int]
    backward: Mapping[str, int]

    def ledger(self) -> dict[str, int]:
        """Forward and backward together, as ``SequenceMesh.ledger`` counts; no zeros."""
        sums = {kind: self.forward.get(kind, 0) + sent for kind, sent in self.backward.items()}
        return {kind: sent for kind, sent in sums.items() if sent}


def attention_bytes(
    work: Workload,
    config: ParallelConfig,
    rank: int,
    layout: str = "zigzag",
    mask: MaskSpec | None = None,
    gradient_bytes: int = 0,
) -> SentBytes:
    """The bytes that one rank of the sequence-parallel group sends in a layer, as its ledger
    counts.

    Ulysses: q, k and v go to the ranks of their heads (a KV head to each of its users), the output
    returns; gradients do the reverse, and with ``recompute="attention"`` q, k, v and the output go
    to heads again with the output's gradient. Ring: keys and values go directly to the ranks whose
    queries attend to them, forward and backward; their gradients return directly to the owner,
    once.

    Args:
        rank: in the sequence-parallel group.
        mask: that of the model's layers if None: causal, within their window.
        gradient_bytes: of an element of the ring's gradients; 0: as the keys. Kernels that
            return fp32 gradients send 4.
    """
    tokens = TokenLayout(layout, work.seq_len, config.ulysses, config.ring, config.order)
    model = work.model
    heads = HeadSplit(model.heads // config.tp, model.kv_heads // config.tp, config.ulysses)
    ulysses_rank, ring_rank = tokens.coords(rank)
    element = config.micro_batch * model.head_dim * config.param_bytes
    to_heads, to_sequence, queries_to_heads, queries_to_sequence = _exchange(
        tokens, heads, ulysses_rank, ring_rank
    )
    again = to_heads + queries_to_heads if exchanges_shards_again(config) else 0
    ring = _ring_tokens(tokens, mask or layer_mask(model), ring_rank)
    kv_begin, kv_end = heads.kv_range(ulysses_rank)
    token = 2 * (kv_end - kv_begin) * config.micro_batch * model.head_dim
    kv, dkv = token * config.param_bytes, token * (gradient_bytes or config.param_bytes)
    return SentBytes(
        {"all_to_all": (to_heads + queries_to_sequence) * element, "ring_kv": ring.sent * kv},
        {
            "all_to_all": (to_sequence + queries_to_heads + again) * element,
            "ring_kv": ring.sent * kv,
            "ring_dkv": ring.received * dkv,
        },
    )


def layer_mask(model: ModelShape) -> MaskSpec:
    """Return which tokens attend to each other in the layers of a model, which are alike."""
    return MaskSpec.window(model.window - 1) if model.window else MaskSpec.causal()


def recurrent_bytes(
    work: Workload, config: ParallelConfig, rank: int, layout: str, mixer: RecurrentMixer
) -> SentBytes:
    """The bytes that one rank of the sequence-parallel group sends for a recurrent mixer, as its
    ledger counts: of each piece the state and what acts on it, in fp32, to ranks with later pieces
    of its document; the tokens before a piece; backward the gradients of what it has received.

    Args:
        rank: in the sequence-parallel group.

    Raises:
        LayoutError: a layout of tokens that do not follow each other.
    """
    tokens = TokenLayout(layout, work.seq_len, config.ulysses, config.ring, config.order)
    chains = document_chains(tokens, work.document_lengths, config.micro_batch)
    width = max(mixer.taps - 1, 0)
    size, token = (mixer.state_elements, mixer.decay_elements), (mixer.channels, config.param_bytes)
    passes = (
        {
            "states": chains.sent_bytes(rank, *size, STATE_BYTES, backward=backward),
            "halo": chains.halo_bytes(rank, width, *token, backward=backward),
        }
        for backward in (False, True)
    )
    return SentBytes(*passes)


def _exchange(
    tokens: TokenLayout, heads: HeadSplit, ulysses_rank: int, ring_rank: int
) -> tuple[int, int, int, int]:
    """Head vectors sent to the other Ulysses ranks: q, k, v to heads; all to sequence; q; out."""
    to_heads = to_sequence = queries_to_heads = queries_to_sequence = 0
    local_tokens = tokens.length(tokens.sp_rank(ulysses_rank, ring_rank))

    def local_heads(rank: int) -> tuple[int, int]:
        spans = heads.query_range(rank), heads.kv_range(rank)
        return spans[0][1] - spans[0][0], spans[1][1] - spans[1][0]

    local_queries, local_kv = local_heads(ulysses_rank)
    for peer in range(tokens.ulysses):
        if peer == ulysses_rank:
            continue
        peer_tokens = tokens.length(tokens.sp_rank(peer, ring_rank))
        peer_queries, peer_kv = local_heads(peer)
        to_heads += local_tokens * (peer_queries + 2 * peer_kv)
        queries_to_heads += local_tokens * peer_queries
        to_sequence += peer_tokens * (local_queries + 2 * local_kv)
        queries_to_sequence += peer_tokens * local_queries
    return to_heads, to_sequence, queries_to_heads, queries_to_sequence


class _RingTokens(NamedTuple):
    """Tokens sent to other ring ranks and received from them."""

    sent: int
    received: int


@lru_cache(maxsize=4096)
def _ring_tokens(tokens: TokenLayout, mask: MaskSpec, ring_rank: int) -> _RingTokens:
    """Tokens whose keys and values a ring rank sends and receives; in closed form for a zigzag."""
    ring = tokens.ring
    if ring == 1:
        return _RingTokens(0, 0)
    if tokens.kind == "zigzag" and mask.is_causal and tokens.seq_len % (2 * ring) == 0:
        # Ranks after this one see its front chunk, ranks before it both.
        chunk = tokens.seq_len // (2 * ring)
        later, earlier = ring - 1 - ring_rank, ring_rank
        return _RingTokens((later + 2 * earlier) * chunk, (earlier + 2 * later) * chunk)
    steps = [x for x in ring_schedule(tokens, mask, ring_rank).steps if not x.is_local]
    return _RingTokens(
        sum(step.num_sent_tokens for step in steps), sum(step.num_kv_tokens for step in steps)
    )


# ------------------------------------------------------------------ in the mean over ranks


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes that a rank sends in one layer for one micro batch and one direction, mean over ranks;
    ``ulysses``, ``states`` and ``halo`` in either direction, the first of them twice in a backward
    pass that exchanges shards again. ``ring_busiest``: of one exchange of the ring, keys and values
    or their gradients, by the rank that sends most of it."""

    tp_forward: float
    tp_backward: float
    ulysses: float
    ring_forward: float
    ring_backward: float
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
        tokens = TokenLayout("zigzag", work.seq_len, 1, r)
        every = [_ring_tokens(tokens, layer_mask(model), rank).sent for rank in range(r)]
        sent, busiest = sum(every) / r, float(max(every))
    token = 2 * config.micro_batch * kv / u * e
    ring = sent * token
    states, halo, *_ = chain_traffic(work, config)
    tp_backward = tp * (1.5 if config.tp_sequence else 1.0)
    return LayerBytes(tp, tp_backward, ulysses, ring, 2 * ring, busiest * token, states, halo)


def kv_features(work: Workload, config: ParallelConfig) -> float:
    """Key features of one rank, as many of values; a KV head is on one rank at least."""
    if not work.model.attention:
        return 0.0
    return max(work.model.kv_heads / config.tp / config.ulysses, 1.0) * work.model.head_dim


def call_size(
    work: Workload, config: ParallelConfig, split: HeadSplit, ulysses_in_node: bool
) -> CallSize:
    """Return by what ``Tuning`` chooses head chunks and the KV exchange, causal, mean over ranks.

    Args:
        split: the heads of a tensor-parallel rank over its Ulysses ranks.
    """
    kv = int(work.seq_len * 2 * config.micro_batch * kv_features(work, config) * config.param_bytes)
    flop, sent = rank_flop(work, config), layer_traffic(work, config).ulysses
    return CallSize(split, flop, sent, kv, config.ring, ulysses_in_node)


def rank_flop(work: Workload, config: ParallelConfig) -> float:
    """Forward FLOP of one rank in one causal attention call, mean over ranks."""
    tokens = work.rank_tokens(config)
    return (
        tokens
        * attention_flop_per_token(work.model, work.seq_len, work.document_lengths)
        / config.tp
    )


def stage_boundary_bytes(work: Workload, config: ParallelConfig) -> float:
    """Bytes over a pipeline boundary for one micro batch, each direction: ``x h / (t sp)``."""
    tokens = work.rank_tokens(config)
    shards = config.tp if config.tp_sequence else 1
    return tokens * work.model.hidden * config.param_bytes / shards


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Counts what the group of dp x sp sends in one step, per rank of the fullest stage."""

    gradients: float
    parameters: float

    @property
    def total(self) -> float:
        """Bytes of gradients and parameters."""
        return self.gradients + self.parameters


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


DIRECT, RELAY, COLLECTIVE = "direct", "relay", "collective"


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
    if axis == "tp":
        return RankGroup(config.tp, 1)
    if axis == "zero":
        return RankGroup(config.zero_ranks, config.tp)
    if axis in ("ulysses", "ring"):  # the one that the order names first is inside of the other
        inside = 1 if config.order.startswith(axis) else config.sp // getattr(config, axis)
        return RankGroup(getattr(config, axis), config.tp * inside)
    if axis == "dp":
        return RankGroup(config.dp, config.tp * config.sp)
    return RankGroup(config.pp, config.tp * config.sp * config.dp)


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
    return domain_traffic(group, cluster.gpus_per_node, RELAY).inside


def exchange_s(
    cluster: Cluster, group: RankGroup, sent_bytes: float, pattern: str, messages: float = 1
) -> float:
    """Seconds of an exchange in which every rank of every such group sends so much.

    Args:
        messages: number of messages; each costs a latency.
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
        if domain_traffic(group, level.gpus, RELAY).inside:
            return level.latency_s
    return cluster.network_latency_s
