"""Seconds of attention on ulysses x ring: the simulation of its schedule, whose instructions take
what a cluster's rates say. ``step_time.py`` asks for each configuration of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from math import inf
from typing import NamedTuple

from ds_usp.geometry.chunking import chunk_positions
from ds_usp.geometry.heads import HeadSplit
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.pipeline_schedule import Instr, Op, Schedule, pipeline_schedule
from ds_usp.geometry.ring_schedule import ring_schedule
from ds_usp.planner.arguments import Components
from ds_usp.planner.hardware import HBM_FRACTION, Cluster, interpolate_curve
from ds_usp.planner.parallel_config import ParallelConfig, Workload, exchanges_shards_again
from ds_usp.planner.pipeline_timeline import Cost, Timeline, simulate
from ds_usp.planner.traffic import (
    DIRECT,
    call_size,
    exchange_s,
    group_of,
    inside_node,
    kv_features,
    layer_traffic,
    rank_flop,
)

# ------------------------------------------------------------------ instructions of a schedule
# What each is of a pass, and how long it takes on a cluster.

# Ring ranks whose steps are priced one by one. A step of a longer ring stands for several of its
# steps.
_MAX_RING = 16


class SentBytes(NamedTuple):
    """Bytes that a rank sends in one kind of exchange, of all head chunks. Two numbers, as a chunk
    has another fraction of the query heads than of the key/value heads."""

    queries: float = 0.0
    keys: float = 0.0


@dataclass(frozen=True)
class PassSeconds:
    """Holds what one pass of a call spends on one rank, all its heads and ring steps together.

    Args:
        kernel: seconds of all kernel calls.
        merge: seconds of merging one partial result of all heads.
        pack: seconds for each byte that an all-to-all sends.
        sent: bytes by the operation that posts the exchange.
        exchange: seconds of one exchange: its kind of channel, bytes sent.
    """

    kernel: float
    merge: float
    pack: float
    sent: Mapping[Op, SentBytes]
    exchange: Callable[[str, float], float]


def sent_by_operation(
    work: Workload, config: ParallelConfig, *, all_to_all: float, ring: float, backward: bool
) -> Mapping[Op, SentBytes]:
    """Bytes of one pass by the operation that posts them.

    Forward sends q, k, v to heads and the output back; backward the output's gradient to heads, and
    with ``recompute="attention"`` q, k, v and the output; then the gradients of q, k, v back.

    Args:
        all_to_all: of a forward pass, to heads and back (:attr:`LayerBytes.ulysses`).
        ring: of keys and values; their gradients are as many.
    """
    queries = work.model.q_width / config.tp
    keys = kv_features(work, config) * config.ulysses  # of all Ulysses ranks, shared heads repeated
    out = all_to_all * queries / (2 * queries + 2 * keys)
    qkv = SentBytes(out, all_to_all - 2 * out)
    to_heads = qkv
    if backward:
        again = exchanges_shards_again(config)
        to_heads = SentBytes(3 * out, qkv.keys) if again else SentBytes(out)
    return {
        Op.A2A_POST: to_heads,
        Op.RETURN_POST: qkv if backward else SentBytes(out),
        **dict.fromkeys((Op.KV_POST, Op.DKV_POST), SentBytes(keys=ring)),
    }


@dataclass(frozen=True)
class RelativeCosts:
    """A rank's schedule of one pass, and the fraction of the pass that each instruction is.

    Fractions have no seconds, so one schedule serves all lengths and clusters: :meth:`cost`
    multiplies a :class:`PassSeconds` by them.

    Args:
        heads: fraction of the query heads in each chunk.
        kv_heads: fraction of the key/value heads that are exchanged with each chunk, first of those
            that come with its heads, then of those whose gradients return with it.
        merges: partial results that each chunk merges.
        calls: fraction of its chunk's (query, key) pairs in each kernel call.
        exchanges: fraction of its chunk's tokens of that kind in each ring exchange.
    """

    schedule: Schedule
    heads: tuple[float, ...]
    kv_heads: tuple[tuple[float, ...], tuple[float, ...]]
    merges: tuple[int, ...]
    calls: Mapping[Instr, float]
    exchanges: Mapping[Instr, float]

    def cost(self, instr: Instr, seconds: PassSeconds) -> Cost:
        op, fraction = instr.op, self.heads[instr.chunk]
        if op is Op.ATTN:
            return Cost(seconds.kernel * fraction * self.calls[instr])
        if op is Op.END:
            return Cost(seconds.merge * fraction * self.merges[instr.chunk])
        if not op.is_post:
            return Cost()
        queries, keys = seconds.sent.get(op, SentBytes())
        sent = queries * fraction + keys * self.kv_heads[op is Op.RETURN_POST][instr.chunk]
        sent *= self.exchanges.get(instr, 1.0)
        pack = seconds.pack * sent if op.channel == "all_to_all" else 0.0
        return Cost(pack, seconds.exchange(op.channel, sent))

    def simulate(self, seconds: PassSeconds, contention: float) -> Timeline:
        return simulate(self.schedule, partial(self.cost, seconds=seconds), contention)


def _count(heads: tuple[int, int]) -> int:
    return heads[1] - heads[0]


@lru_cache(maxsize=4096)
def mean_costs(
    heads: int,
    kv_heads: int,
    chunks: int,
    ring: int,
    *,
    ulysses: bool,
    gather: bool,
    backward: bool,
    from_shards: bool = False,
) -> tuple[RelativeCosts, float]:
    """A pass whose ring steps all have equal work, as those of a causal zigzag have in the mean
    over ranks; and the number of ring steps that each of them stands for.

    Args:
        heads, kv_heads: of a rank, in so many ``chunks``; ``ring``: its ranks.
        gather: keys and values are all-gathered.
        from_shards: as of :func:`pipeline_schedule`.
    """
    priced_ring = min(ring, _MAX_RING)
    # A full mask over equal shards has equal steps. Of 2 tokens a rank: where there is one chunk,
    # half of the local block comes first and half last.
    layout = TokenLayout("contiguous", 2 * priced_ring, 1, priced_ring)
    plan = partial(ring_schedule, layout, MaskSpec.full(), 0, gather=gather)
    split = HeadSplit(heads, kv_heads, 1)
    head_chunks = [split.chunk(chunks, index) for index in range(chunks)]
    queries = [_count(chunk.queries[0]) for chunk in head_chunks]
    keys = [_count(chunk.keys[0]) for chunk in head_chunks]
    schedules = []
    # A launch-bound call has other positions, but its time is the CPU's.
    for forward, last_first in chunk_positions(keys):
        backward_steps = plan(position=last_first).backward_steps
        schedules.append(replace(plan(position=forward), backward_steps=backward_steps))
    passes = [chunk.backward_steps if backward else chunk.steps for chunk in schedules]
    calls: dict[Instr, float] = {}
    exchanges: dict[Instr, float] = {}
    for index, steps in enumerate(passes):
        pairs = sum(step.pairs for step in steps)
        for number, step in enumerate(steps):
            for call, kernel_call in enumerate(step.calls):
                calls[Instr(Op.ATTN, index, number, call)] = kernel_call.pairs / pairs
        received = [step.num_kv_tokens for step in steps if not step.is_local]
        for op, (number, tokens) in product((Op.KV_POST, Op.DKV_POST), enumerate(received)):
            exchanges[Instr(op, index, number)] = tokens / sum(received)
    groups = [chunk.kv_chunk for chunk in head_chunks]
    counts = [
        count * (group == index)
        for index, (group, count) in enumerate(zip(groups, keys, strict=True))
    ]
    fractions, returned = (tuple(count / sum(each) for count in each) for each in (queries, counts))
    arriving = returned
    if from_shards:  # with the last chunk of a KV group
        is_last = [group not in groups[index + 1 :] for index, group in enumerate(groups)]
        arriving = tuple(returned[x] * last for x, last in zip(groups, is_last, strict=True))
    costs = RelativeCosts(
        pipeline_schedule(schedules, ulysses=ulysses, backward=backward, from_shards=from_shards),
        fractions,
        (arriving, returned),
        tuple(max(0, sum(bool(step.calls) for step in steps) - 1) for steps in passes),
        calls,
        exchanges,
    )
    return costs, 1.0 if gather else ring / priced_ring


# ------------------------------------------------------------------ a call
# In the mean over ranks.


# Bytes of merging one partial output, an element: it and the output read, that written, in fp32.
_MERGE_BYTES = 12.0


@dataclass(frozen=True)
class AttentionTime(Components):
    """Seconds of one direction on one rank.

    Args:
        kernel: the attention kernels alone.
        merge: merges of partial outputs.
        exposed: exchanges that nothing hides, packing, and what hidden ones cost the kernels.
    """

    kernel: float
    merge: float
    exposed: float


def attention_s(
    cluster: Cluster, work: Workload, config: ParallelConfig, *, backward: bool
) -> AttentionTime:
    """Attention of one layer and one micro batch, in one direction, causal zigzag."""
    return _attention_s(cluster, work, config.of_attention(), backward)


@lru_cache(maxsize=4096)
def _attention_s(
    cluster: Cluster, work: Workload, config: ParallelConfig, backward: bool
) -> AttentionTime:
    """See :func:`attention_s`; ``config``: :meth:`ParallelConfig.of_attention`, the cache's key."""
    kernel = _kernel_s(cluster, work, config, backward)
    if config.sp == 1:
        return AttentionTime(kernel, 0.0, 0.0)
    timeline, merge = simulated_pass(cluster, work, config, backward=backward)
    return AttentionTime(kernel, merge, max(0.0, timeline.total - kernel - merge))


def _kernel_s(cluster: Cluster, work: Workload, config: ParallelConfig, backward: bool) -> float:
    """Seconds of the attention kernels in one direction on one rank, mean over ranks."""
    # A zigzag's kernel calls are as long as its chunks, of which a rank holds two; those of a
    # window as long as the window.
    length = min(
        work.seq_len / (2 * config.ring if config.ring > 1 else 1), work.model.window or inf
    )
    efficiency = interpolate_curve(cluster.attention_efficiency, length)
    flop = rank_flop(work, config)
    return flop * (2.5 if backward else 1.0) / (cluster.peak_flop_per_s * efficiency)


def simulated_pass(
    cluster: Cluster, work: Workload, config: ParallelConfig, *, backward: bool
) -> tuple[Timeline, float]:
    """The schedule that the attention executes, on the cluster's rates: one direction of a call on
    one rank, mean over ranks, and the seconds in it of merging partial outputs.

    Args:
        config: of several ranks a sequence.
    """
    heads, kv_heads = _rank_heads(work, config)
    split = HeadSplit(heads * config.ulysses, kv_heads * config.ulysses, config.ulysses)
    size = call_size(work, config, split, inside_node(cluster, group_of(config, "ulysses")))
    chunks = size.num_chunks()
    costs, ring_steps = mean_costs(
        heads,
        kv_heads,
        chunks,
        config.ring,
        ulysses=config.ulysses > 1,
        gather=size.all_gathers_kv(chunks),
        backward=backward,
        from_shards=backward and exchanges_shards_again(config),
    )
    traffic = layer_traffic(work, config)
    # The ranks of a node share its link, and on one of two nodes all are the ring's busiest. Inside
    # a node the mean is closer to what was measured: each rank has links of its own.
    ring_inside = inside_node(cluster, group_of(config, "ring"))
    ring_bytes = traffic.ring_forward if ring_inside else traffic.ring_busiest
    sent = sent_by_operation(
        work, config, all_to_all=traffic.ulysses, ring=ring_bytes, backward=backward
    )
    out_elements = work.rank_tokens(config) * work.model.q_width / config.tp
    merge_bytes = out_elements * _MERGE_BYTES

    def exchange(kind: str, sent_bytes: float) -> float:
        if kind == "all_to_all":
            return exchange_s(cluster, group_of(config, "ulysses"), sent_bytes, DIRECT)
        # Each step that a step of the schedule stands for is a message.
        return exchange_s(cluster, group_of(config, "ring"), sent_bytes, DIRECT, ring_steps)

    # Packing reads and writes once, also the rank's own slice, which is not sent.
    pack = 2 / (HBM_FRACTION * cluster.hbm_bytes_per_s)
    seconds = PassSeconds(
        kernel=_kernel_s(cluster, work, config, backward),
        merge=ring_steps * merge_bytes / cluster.hbm_bytes_per_s,
        pack=pack * config.ulysses / max(1, config.ulysses - 1),
        sent=sent,
        exchange=exchange,
    )
    timeline = costs.simulate(seconds, cluster.contention)
    shares = zip(costs.heads, costs.merges, strict=True)
    return timeline, seconds.merge * sum(heads * merges for heads, merges in shares)


def _rank_heads(work: Workload, config: ParallelConfig) -> tuple[int, int]:
    ranks, model = config.tp * config.ulysses, work.model
    kv_heads = max(1, int(model.kv_heads / ranks))
    return kv_heads * max(1, int(model.heads / ranks / kv_heads)), kv_heads
