"""Seconds of each instruction of an attention call's schedule, from a cluster's rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple

from ds_usp.geometry.chunking import chunk_positions
from ds_usp.geometry.heads import HeadChunk, HeadSplit
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.pipeline_schedule import Instr, Op, Operation, Schedule, pipeline_schedule
from ds_usp.geometry.ring_schedule import RingSchedule, ring_schedule
from ds_usp.geometry.ring_traffic import total_length
from ds_usp.planner.hardware import HBM_FRACTION, Cluster
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.pipeline_timeline import Cost, Timeline, simulate
from ds_usp.planner.traffic import DIRECT, RankGroup, exchange_s, group_of, kv_features

# Exchanges across nodes and inside of them use other links.
_LINKS: Mapping[str, str] = MappingProxyType(
    {"ring_kv_outer": "network", "ring_dkv_outer": "network"}
)
# Where the projections around attention are multiplied: before and after it, or chunk by chunk
# under its exchanges, and in backward again (``projection_time.py``).
OFF, RECOMPUTE = PROJECTIONS = ("off", "recompute")
# Ring ranks whose steps are priced one by one. A step of a longer ring stands for several of its
# steps.
_MAX_RING = 16


class SentBytes(NamedTuple):
    """Bytes that a rank sends in one kind of exchange, of all head chunks. Two numbers, as a chunk
    has another fraction of the query heads than of the key/value heads."""

    queries: float = 0.0
    keys: float = 0.0


@dataclass(frozen=True)
class ProductSeconds:
    """Matrix products of all heads in one pass of an attention call with its projections.

    Args:
        queries, keys: of the weights' rows for queries, and for keys and values: each of the
            products with them (forward; the weights' gradient; the input's).
        out: of the output's weight, likewise.
    """

    queries: float = 0.0
    keys: float = 0.0
    out: float = 0.0


@dataclass(frozen=True)
class PassSeconds:
    """What one pass of a call spends on one rank, all its heads and ring steps together.

    Args:
        kernel: seconds of all kernel calls.
        merge: seconds of merging one partial result of all heads.
        pack: seconds for each byte that an all-to-all sends.
        sent: bytes by the operation that posts the exchange.
        exchange: seconds of one exchange: its kind of channel, bytes sent.
        products: of a schedule that has them.
    """

    kernel: float
    merge: float
    pack: float
    sent: Mapping[Operation, SentBytes]
    exchange: Callable[[str, float], float]
    products: ProductSeconds = ProductSeconds()


def pass_seconds(
    cluster: Cluster,
    config: ParallelConfig,
    *,
    kernel: float,
    merge_bytes: float,
    sent: Mapping[Operation, SentBytes],
    inner: int | None = None,
    pattern: str = DIRECT,
    ring_steps: float = 1,
    products: ProductSeconds = ProductSeconds(),
) -> PassSeconds:
    """The seconds of a pass on a cluster.

    Args:
        merge_bytes: memory traffic of merging one partial result of all heads.
        inner: ring ranks of a node in a double ring.
        pattern: of the ring's exchanges.
        ring_steps: that one step of the schedule stands for; each is a message and a merge.
    """
    hbm_bytes_per_s = HBM_FRACTION * cluster.hbm_bytes_per_s
    # Read and written once, also the rank's own slice, which is not sent.
    pack = 2 / hbm_bytes_per_s * config.ulysses / max(1, config.ulysses - 1)
    merge = ring_steps * merge_bytes / cluster.hbm_bytes_per_s

    def exchange(kind: str, sent_bytes: float) -> float:
        if kind == "all_to_all":
            return exchange_s(cluster, group_of(config, "ulysses"), sent_bytes, DIRECT)
        group = group_of(config, "ring")
        if inner and kind.endswith("outer"):
            group = RankGroup(config.ring // inner, group.stride * inner)
        elif inner:
            group = RankGroup(inner, group.stride)
        return exchange_s(cluster, group, sent_bytes, pattern, ring_steps)

    return PassSeconds(kernel, merge, pack, sent, exchange, products)


def sent_by_operation(
    work: Workload,
    config: ParallelConfig,
    *,
    all_to_all: float,
    ring: float,
    ring_outer: float = 0.0,
    backward: bool,
) -> Mapping[Operation, SentBytes]:
    """Bytes of one pass by the operation that posts them.

    Forward sends q, k, v to heads and the output back; backward the output's gradient to heads and
    those of q, k, v back.

    Args:
        all_to_all: of both directions.
        ring, ring_outer: of keys and values; their gradients are as many.
    """
    queries = work.model.q_width / config.tp
    keys = kv_features(work, config) * config.ulysses
    out = all_to_all * queries / (2 * queries + 2 * keys)
    qkv = SentBytes(out, all_to_all - 2 * out)
    return {
        Op.A2A_POST: SentBytes(out) if backward else qkv,
        Op.RETURN_POST: qkv if backward else SentBytes(out),
        **dict.fromkeys((Op.KV_POST, Op.DKV_POST), SentBytes(keys=ring)),
        **dict.fromkeys((Op.OUTER_KV_POST, Op.OUTER_DKV_POST), SentBytes(keys=ring_outer)),
    }


@dataclass(frozen=True)
class RelativeCosts:
    """A rank's schedule of one pass, and the fraction of the pass that each instruction is.

    Fractions have no seconds, so one schedule serves all lengths and clusters (:func:`mean_costs`
    is cached): :meth:`cost` multiplies a :class:`PassSeconds` by them.

    Args:
        heads: fraction of the query heads in each chunk.
        kv_heads: fraction of the key/value heads that are exchanged with each chunk.
        merges: partial results that each chunk merges.
        calls: fraction of its chunk's (query, key) pairs in each kernel call.
        exchanges: fraction of its chunk's tokens of that kind in each ring exchange.
    """

    schedule: Schedule
    heads: tuple[float, ...]
    kv_heads: tuple[float, ...]
    merges: tuple[int, ...]
    calls: Mapping[Instr, float]
    exchanges: Mapping[Instr, float]

    @property
    def mean_merges(self) -> float:
        """Partial results that are merged, in the mean over heads."""
        return sum(x * merges for x, merges in zip(self.heads, self.merges, strict=True))

    def cost(self, instr: Instr, seconds: PassSeconds) -> Cost:
        """Of one instruction."""
        op, fraction = instr.op, self.heads[instr.chunk]
        if op is Op.ATTN:
            return Cost(seconds.kernel * fraction * self.calls[instr])
        if op is Op.END:
            return Cost(seconds.merge * fraction * self.merges[instr.chunk])
        if not op.is_post:
            return Cost()
        queries, keys = seconds.sent.get(op, SentBytes())
        sent = queries * fraction + keys * self.kv_heads[instr.chunk]
        return self.sending(instr, sent * self.exchanges.get(instr, 1.0), seconds)

    def sending(self, instr: Instr, sent_bytes: float, seconds: PassSeconds) -> Cost:
        """Of a post that sends so many bytes: an all-to-all packs them first."""
        kind = instr.op.channel
        pack = seconds.pack * sent_bytes if kind == "all_to_all" else 0.0
        return Cost(pack, seconds.exchange(kind, sent_bytes))

    def simulate(self, seconds: PassSeconds, contention: float) -> Timeline:
        """The pass on these seconds."""
        cost = partial(self.cost, seconds=seconds)
        return simulate(self.schedule, cost, contention=contention, links=_LINKS)


def relative_costs(
    chunks: Sequence[RingSchedule],
    heads: Sequence[HeadChunk],
    *,
    ulysses_rank: int = 0,
    ulysses: bool,
    backward: bool,
    projections: str = OFF,
) -> RelativeCosts:
    """The schedule of one pass of one rank, with the relative costs of its instructions.

    Args:
        chunks: the ring schedule of each head chunk on this rank.
        heads: the heads of each chunk.
        projections: one of :data:`PROJECTIONS`.
    """
    merges: list[int] = []
    calls: dict[Instr, float] = {}
    exchanges: dict[Instr, float] = {}
    for index, chunk in enumerate(chunks):
        steps = chunk.backward_steps if backward else chunk.steps
        pairs = sum(step.pairs for step in steps) or 1
        merges.append(max(0, sum(bool(step.calls) for step in steps) - 1))
        for number, step in enumerate(steps):
            for call, kernel_call in enumerate(step.calls):
                calls[Instr(Op.ATTN, index, number, call)] = kernel_call.pairs / pairs
        received = [
            total_length(kv for kv in step.kv_ranges if kv.rank != chunk.ring_rank)
            for step in steps
            if not step.is_local
        ]
        outer = [step.num_kv_tokens for step in chunk.outer_steps]
        for tokens, ops in (
            (received, (Op.KV_POST, Op.DKV_POST)),
            (outer, (Op.OUTER_KV_POST, Op.OUTER_DKV_POST)),
        ):
            total = sum(tokens) or 1
            for number, count in enumerate(tokens):
                exchanges.update({Instr(op, index, number): count / total for op in ops})
    schedule = pipeline_schedule(
        chunks, ulysses=ulysses, backward=backward, kv_saved=backward and projections == OFF
    )
    queries = [_count(chunk.queries[ulysses_rank]) for chunk in heads]
    keys = [
        _count(chunk.keys[ulysses_rank]) * (chunk.kv_chunk == index)
        for index, chunk in enumerate(heads)
    ]
    fractions, kv_fractions = (
        tuple(count / sum(counts) for count in counts) for counts in (queries, keys)
    )
    costs = RelativeCosts(schedule, fractions, kv_fractions, tuple(merges), calls, exchanges)
    if projections == OFF:
        return costs
    from ds_usp.planner.projection_time import with_projections

    return with_projections(costs, heads, backward=backward)


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
    projections: str = OFF,
) -> tuple[RelativeCosts, float]:
    """A pass whose ring steps all have equal work, as those of a causal zigzag have in the mean
    over ranks; and the number of ring steps that each of them stands for.

    Args:
        heads, kv_heads: of a rank.
        gather: keys and values are all-gathered.
        projections: one of :data:`PROJECTIONS`.
    """
    priced_ring = min(ring, _MAX_RING)
    # A full mask over equal shards has equal steps. Of 2 tokens a rank: where there is one chunk,
    # half of the local block comes first and half last.
    layout = TokenLayout("contiguous", 2 * priced_ring, 1, priced_ring)
    plan = partial(ring_schedule, layout, MaskSpec.full(), 0, gather=gather)
    split = HeadSplit(heads, kv_heads, 1)
    head_chunks = [split.chunk(chunks, index) for index in range(chunks)]
    schedules = []
    # A launch-bound call has other positions, but its time is the CPU's.
    for forward, last_first in chunk_positions([_count(chunk.keys[0]) for chunk in head_chunks]):
        backward_steps = plan(position=last_first).backward_steps
        schedules.append(replace(plan(position=forward), backward_steps=backward_steps))
    costs = relative_costs(
        schedules, head_chunks, ulysses=ulysses, backward=backward, projections=projections
    )
    return costs, 1.0 if gather else ring / priced_ring
