"""Seconds of attention on ulysses x ring: the simulation of its schedule, whose instructions take
what a cluster's rates say, or what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import inf, log
from types import MappingProxyType
from typing import NamedTuple

from ds_usp.errors import ConfigError
from ds_usp.geometry.chunking import (
    CallSize,
    attention_flop,
    chunk_positions,
    equal_blocks,
    is_launch_bound,
)
from ds_usp.geometry.heads import HeadChunk, HeadSplit
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.pipeline_schedule import Instr, Op, Schedule, pipeline_schedule
from ds_usp.geometry.ring_schedule import RingSchedule, ring_schedule
from ds_usp.geometry.ring_traffic import total_length
from ds_usp.planner.hardware import (
    HBM_FRACTION,
    Cluster,
    MeasuredAttention,
    interpolate,
    interpolate_curve,
    launch_seconds,
    select_rows,
)
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.pipeline_timeline import Cost, Timeline, simulate
from ds_usp.planner.traffic import (
    DIRECT,
    RELAY,
    RankGroup,
    attention_bytes,
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

# Exchanges across nodes and inside of them use other links.
_LINKS: Mapping[str, str] = MappingProxyType(
    {"ring_kv_outer": "network", "ring_dkv_outer": "network"}
)
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
    """What one pass of a call spends on one rank, all its heads and ring steps together.

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


def pass_seconds(
    cluster: Cluster,
    config: ParallelConfig,
    *,
    kernel: float,
    merge_bytes: float,
    sent: Mapping[Op, SentBytes],
    inner: int | None = None,
    pattern: str = DIRECT,
    ring_steps: float = 1,
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

    return PassSeconds(kernel, merge, pack, sent, exchange)


def sent_by_operation(
    work: Workload,
    config: ParallelConfig,
    *,
    all_to_all: float,
    ring: float,
    ring_outer: float = 0.0,
    backward: bool,
) -> Mapping[Op, SentBytes]:
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
        return sum(x * merges for x, merges in zip(self.heads, self.merges, strict=True))

    def cost(self, instr: Instr, seconds: PassSeconds) -> Cost:
        op, fraction = instr.op, self.heads[instr.chunk]
        if op is Op.ATTN:
            return Cost(seconds.kernel * fraction * self.calls[instr])
        if op is Op.END:
            return Cost(seconds.merge * fraction * self.merges[instr.chunk])
        if not op.is_post:
            return Cost()
        queries, keys = seconds.sent.get(op, SentBytes())
        sent = queries * fraction + keys * self.kv_heads[instr.chunk]
        sent *= self.exchanges.get(instr, 1.0)
        pack = seconds.pack * sent if op.channel == "all_to_all" else 0.0
        return Cost(pack, seconds.exchange(op.channel, sent))

    def simulate(self, seconds: PassSeconds, contention: float) -> Timeline:
        cost = partial(self.cost, seconds=seconds)
        return simulate(self.schedule, cost, contention=contention, links=_LINKS)


def relative_costs(
    chunks: Sequence[RingSchedule],
    heads: Sequence[HeadChunk],
    *,
    ulysses_rank: int = 0,
    ulysses: bool,
    backward: bool,
) -> RelativeCosts:
    """The schedule of one pass of one rank, with the relative costs of its instructions.

    Args:
        chunks: the ring schedule of each head chunk on this rank.
        heads: the heads of each chunk.
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
    schedule = pipeline_schedule(chunks, ulysses=ulysses, backward=backward)
    queries = [_count(chunk.queries[ulysses_rank]) for chunk in heads]
    keys = [
        _count(chunk.keys[ulysses_rank]) * (chunk.kv_chunk == index)
        for index, chunk in enumerate(heads)
    ]
    fractions, kv_fractions = (
        tuple(count / sum(counts) for count in counts) for counts in (queries, keys)
    )
    return RelativeCosts(schedule, fractions, kv_fractions, tuple(merges), calls, exchanges)


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
) -> tuple[RelativeCosts, float]:
    """A pass whose ring steps all have equal work, as those of a causal zigzag have in the mean
    over ranks; and the number of ring steps that each of them stands for.

    Args:
        heads, kv_heads: of a rank.
        gather: keys and values are all-gathered.
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
    costs = relative_costs(schedules, head_chunks, ulysses=ulysses, backward=backward)
    return costs, 1.0 if gather else ring / priced_ring


# ------------------------------------------------------------------ a call
# In the mean over ranks.


@dataclass(frozen=True, slots=True)
class AttentionImpl:
    """How an implementation runs one attention call.

    Args:
        relayed_ring: blocks are relayed around the ring from neighbour to neighbour, complete.
        chunks: head chunks are pipelined, so that exchanges overlap kernels.
        merge_bytes_per_element: memory traffic of merging one partial output.
    """

    name: str
    relayed_ring: bool
    chunks: bool
    merge_bytes_per_element: float


# One fused pass: out and the partial output read, out written, in fp32.
DS_USP = AttentionImpl("ds_usp", False, True, 12.0)
# yunchang 0.6: a dozen passes of elementwise torch in fp32 over three quarters of the rows in the
# mean (its later chunks see only half of the blocks).
YUNCHANG = AttentionImpl("yunchang", True, False, 0.75 * 46.0)


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Seconds of one direction on one rank.

    Args:
        kernel: the attention kernels alone.
        merge: merges of partial outputs.
        exposed: exchanges that nothing hides, packing, and what hidden ones cost the kernels.
        ulysses, ring: the exchanges alone, hidden or not.
        launch_s: of the CPU to launch the call; 0: not known.
        chunks: head chunks.
    """

    kernel: float
    merge: float
    exposed: float
    ulysses: float
    ring: float
    launch_s: float = 0.0
    chunks: int = 1

    @property
    def total(self) -> float:
        return self.kernel + self.merge + self.exposed


def attention_s(
    cluster: Cluster,
    work: Workload,
    config: ParallelConfig,
    *,
    backward: bool,
    impl: AttentionImpl = DS_USP,
) -> AttentionTime:
    """Attention of one layer and one micro batch, in one direction, causal zigzag.

    Where the cluster's profile has calls on these degrees, the formula is scaled by measured /
    formula, interpolated by FLOP, and the launch time is the measured one; for other degrees by the
    calls on the closest ones: an estimate must not look faster than a measurement.
    """
    predicted = _predicted(cluster, work, config.of_attention(), backward, impl)
    degrees = _closest_profiled_degrees(cluster, config.ulysses, config.ring)
    if impl is not DS_USP or degrees is None:
        return predicted
    flop = rank_flop(work, config)
    points = _measured_over_formula(cluster, *degrees, backward)
    ratio = interpolate([(size, ratio) for size, ratio, _ in points], flop)
    degrees = _closest_profiled_degrees(cluster, config.ulysses, config.ring, launch_known=True)
    points = _measured_over_formula(cluster, *degrees, backward) if degrees else ()
    launches = [(size, seconds) for size, _, seconds in points]
    scaled = ("kernel", "merge", "exposed", "ulysses", "ring")
    return replace(
        predicted,
        **{name: ratio * getattr(predicted, name) for name in scaled},
        launch_s=launch_seconds(launches, flop) if launches else 0.0,
    )


@lru_cache(maxsize=256)
def _closest_profiled_degrees(
    cluster: Cluster, ulysses: int, ring: int, launch_known: bool = False
) -> tuple[int, int] | None:
    """Of the pairs (ulysses, ring) with profiled calls inside a node, the closest to these degrees
    by the sum of ``|log(ratio)|``; (1, 1) only if it is asked for or there is no other.

    Args:
        launch_known: pairs all of whose rows have host times.
    """
    degrees = ulysses, ring
    pairs = {(row.ulysses, row.ring) for row in _calls_within_node(cluster)}
    if launch_known:
        unknown = (row for row in cluster.calls if not (row.forward_host_s and row.backward_host_s))
        pairs -= {(row.ulysses, row.ring) for row in unknown}
    if max(degrees) > 1 and len(pairs) > 1:
        pairs.discard((1, 1))  # it exchanges nothing

    def distance(pair: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        return sum(abs(log(a / b)) for a, b in zip(degrees, pair, strict=True)), pair

    return min(pairs, key=distance, default=None)


def _calls_within_node(cluster: Cluster) -> Iterator[MeasuredAttention]:
    """Calls that fit into a node: with fewer GPUs in a node than were profiled, the larger groups
    were measured on other links."""
    return (row for row in cluster.calls if row.ulysses * row.ring <= cluster.gpus_per_node)


@lru_cache(maxsize=256)
def _measured_over_formula(
    cluster: Cluster, ulysses: int, ring: int, backward: bool
) -> tuple[tuple[float, float, float], ...]:
    """(forward FLOP of a rank, measured / predicted seconds, launch seconds), by FLOP."""
    direction, points = "backward" if backward else "forward", {}
    for row in select_rows(_calls_within_node(cluster), "seq_len", ulysses=ulysses, ring=ring):
        width = row.heads * row.head_dim
        shape = ModelShape("call", 1, width, width, row.heads, row.kv_heads, 1, row.head_dim)
        work, config = Workload(shape, row.seq_len), ParallelConfig(ulysses=ulysses, ring=ring)
        predicted = _predicted(cluster, work, config.of_attention(), backward, DS_USP)
        ratio = getattr(row, f"{direction}_s") / predicted.total
        points[rank_flop(work, config)] = ratio, getattr(row, f"{direction}_host_s")
    return tuple((flop, *point) for flop, point in sorted(points.items()))


@lru_cache(maxsize=4096)
def _predicted(
    cluster: Cluster, work: Workload, config: ParallelConfig, backward: bool, impl: AttentionImpl
) -> AttentionTime:
    """One direction of a call, from the cluster's rates alone, without its measured calls.

    Args:
        config: :meth:`ParallelConfig.of_attention`, so that a search that varies what no attention
            call depends on finds the simulation in the cache.
    """
    kernel = _kernel_s(cluster, work, config, backward)
    if config.sp == 1:
        return AttentionTime(kernel, 0.0, 0.0, 0.0, 0.0)
    run = simulated_pass(cluster, work, config, backward=backward, impl=impl)
    alone = run.timeline.alone
    ring = alone["ring_kv"] + alone["ring_dkv"]
    exposed = max(0.0, run.timeline.total - kernel - run.merge)
    return AttentionTime(kernel, run.merge, exposed, alone["all_to_all"], ring, chunks=run.chunks)


def _kernel_s(cluster: Cluster, work: Workload, config: ParallelConfig, backward: bool) -> float:
    # A zigzag's kernel calls are as long as its chunks, of which a rank holds two; those of a
    # window as long as the window.
    length = min(
        work.seq_len / (2 * config.ring if config.ring > 1 else 1), work.model.window or inf
    )
    efficiency = interpolate_curve(cluster.attention_efficiency, length)
    flop = rank_flop(work, config)
    return flop * (2.5 if backward else 1.0) / (cluster.peak_flop_per_s * efficiency)


class SimulatedPass(NamedTuple):
    """One direction of a call on one rank, mean over ranks.

    Attributes:
        merge: seconds of merging partial outputs.
        chunks: head chunks.
    """

    timeline: Timeline
    merge: float
    chunks: int


def simulated_pass(
    cluster: Cluster,
    work: Workload,
    config: ParallelConfig,
    *,
    backward: bool,
    impl: AttentionImpl = DS_USP,
) -> SimulatedPass:
    """The schedule that the attention executes, on the cluster's rates.

    Args:
        config: of several ranks a sequence.
    """
    heads, kv_heads = _rank_heads(work, config)
    split = HeadSplit(heads * config.ulysses, kv_heads * config.ulysses, config.ulysses)
    size = call_size(work, config, split, inside_node(cluster, group_of(config, "ulysses")))
    chunks = size.num_chunks() if impl.chunks else 1
    costs, ring_steps = mean_costs(
        heads,
        kv_heads,
        chunks,
        config.ring,
        ulysses=config.ulysses > 1,
        gather=impl.chunks and size.all_gathers_kv(chunks, None),
        backward=backward,
    )
    traffic = layer_traffic(work, config, impl.relayed_ring)
    # The ranks of a node share its link, and on one of two nodes all are the ring's busiest. Inside
    # a node the mean is closer to what was measured: each rank has links of its own.
    ring_inside = inside_node(cluster, group_of(config, "ring"))
    sent = sent_by_operation(
        work,
        config,
        all_to_all=traffic.ulysses,
        ring=traffic.ring_forward if ring_inside else traffic.ring_busiest,
        backward=backward,
    )
    out_elements = work.rank_tokens(config) * work.model.q_width / config.tp
    seconds = pass_seconds(
        cluster,
        config,
        kernel=_kernel_s(cluster, work, config, backward),
        merge_bytes=out_elements * impl.merge_bytes_per_element,
        sent=sent,
        pattern=RELAY if impl.relayed_ring else DIRECT,
        ring_steps=ring_steps,
    )
    timeline = costs.simulate(seconds, cluster.contention)
    return SimulatedPass(timeline, seconds.merge * costs.mean_merges, chunks)


def _rank_heads(work: Workload, config: ParallelConfig) -> tuple[int, int]:
    ranks, model = config.tp * config.ulysses, work.model
    kv_heads = max(1, int(model.kv_heads / ranks))
    return kv_heads * max(1, int(model.heads / ranks / kv_heads)), kv_heads


# ------------------------------------------------------------------ one call on one rank
# With its mask, layout and heads, where the above is a mean over ranks; for `ds-usp explain`.


@dataclass(frozen=True)
class AttentionCall:
    """A call of ``usp_attention`` on GPUs of a cluster, as one rank executes it.

    Args:
        mask: of one sequence, without documents.
        config: for the degrees, their order, the batch and the bytes of an element.
        rank: of the sequence-parallel group.
        chunks: head chunks; None: as the call chooses them.
        gather: keys and values are all-gathered; None: as the call chooses.
        inner: ring ranks of a node in a double ring (experimental); None: a plain ring.

    Raises:
        ConfigError: heads that do not fit, no such rank, too many chunks, or an inner ring that
            does not divide the ring.
        LayoutError: a layout that does not take this length.
    """

    cluster: Cluster
    layout: TokenLayout
    mask: MaskSpec
    heads: int
    kv_heads: int
    head_dim: int
    config: ParallelConfig
    rank: int = 0
    chunks: int | None = None
    gather: bool | None = None
    inner: int | None = None

    def __post_init__(self) -> None:
        layout = self.layout
        if not 0 <= self.rank < layout.degree:
            raise ConfigError(
                f"rank {self.rank} is outside the {layout.degree} ranks of ulysses "
                f"{layout.ulysses} x ring {layout.ring}. Use 0 to {layout.degree - 1}"
            )
        if self.chunks is not None:
            self.split.check_chunks(self.chunks, layout.ring)
        _ = self.inner_ring  # refused where it does not divide

    @cached_property
    def split(self) -> HeadSplit:
        return HeadSplit(self.heads, self.kv_heads, self.layout.ulysses)

    @cached_property
    def _work(self) -> Workload:
        width = self.heads * self.head_dim
        model = ModelShape("call", 1, width, width, self.heads, self.kv_heads, 1, self.head_dim)
        return Workload(model, self.layout.seq_len)

    @cached_property
    def _size(self) -> CallSize:
        layout, config = self.layout, self.config
        batch_width = config.micro_batch * self.head_dim
        flop = attention_flop(self.mask, layout.seq_len, layout.seq_len, batch_width * self.heads)
        kv_heads = max(self.kv_heads // layout.ulysses, 1)
        return CallSize(
            self.split,
            flop / layout.degree if layout.degree > 1 else 0.0,
            layer_traffic(self._work, config).ulysses,
            2 * layout.seq_len * batch_width * config.param_bytes * kv_heads,
            layout.ring,
            inside_node(self.cluster, group_of(config, "ulysses")),
            head_blocks=equal_blocks(self.mask, config.micro_batch, layout.seq_len // layout.ring),
        )

    @cached_property
    def num_chunks(self) -> int:
        return self._size.num_chunks() if self.chunks is None else self.chunks

    @cached_property
    def inner_ring(self) -> int | None:
        """Ring ranks of a node in a double ring; None in a plain ring."""
        if self.inner is None:
            return None
        from ds_usp.experimental.double_ring import validate_inner_ring

        return validate_inner_ring(self.layout.ring, self.inner)

    @cached_property
    def gathers_kv(self) -> bool:
        if self.layout.ring == 1 or self.gather is not None:
            return bool(self.gather) and self.layout.ring > 1
        return self._size.all_gathers_kv(self.num_chunks, self.inner_ring)

    @cached_property
    def head_chunks(self) -> tuple[HeadChunk, ...]:
        return tuple(self.split.chunk(self.num_chunks, i) for i in range(self.num_chunks))

    @cached_property
    def ring_schedules(self) -> tuple[RingSchedule, ...]:
        planner: Callable[..., RingSchedule] = ring_schedule
        if self.inner_ring is not None:
            from ds_usp.experimental.double_ring import double_ring_schedule

            planner = partial(double_ring_schedule, inner=self.inner_ring)
        ring_rank = self.layout.coords(self.rank)[1]
        plan = partial(planner, self.layout, self.mask, ring_rank, gather=self.gathers_kv)
        sizes = [stop - start for chunk in self.head_chunks for start, stop in chunk.keys[:1]]
        ranks = self.config.tp * self.config.sp
        copy_engines = self.inner_ring is None and ranks <= self.cluster.gpus_per_node
        launch_bound = copy_engines and is_launch_bound(self._size.flop)
        return tuple(
            replace(plan(position=forward), backward_steps=plan(position=backward).backward_steps)
            for forward, backward in chunk_positions(sizes, launch_bound=launch_bound)
        )

    def schedule(self, *, backward: bool) -> RelativeCosts:
        return relative_costs(
            self.ring_schedules,
            self.head_chunks,
            ulysses_rank=self.layout.coords(self.rank)[0],
            ulysses=self.layout.ulysses > 1,
            backward=backward,
        )

    def simulate(self, *, backward: bool) -> Timeline:
        cluster, config, ring = self.cluster, self.config, self.layout.ring
        ulysses_rank, ring_rank = self.layout.coords(self.rank)
        start, stop = self.split.query_range(ulysses_rank)
        queries = (stop - start) * self.head_dim * config.micro_batch
        out_elements = queries * self.layout.ring_length(ring_rank)
        # Of a zigzag a kernel call is as long as a chunk; what a window hides is not in it.
        length = self.layout.seq_len / (2 * ring if ring > 1 else 1)
        window = inf if self.mask.left is None else self.mask.left + 1 + (self.mask.right or 0)
        efficiency = interpolate_curve(cluster.attention_efficiency, min(length, window))
        flop = 4 * queries * self.ring_schedules[0].pairs * (2.5 if backward else 1.0)
        sent = attention_bytes(
            self._work, config, self.rank, self.layout.kind, self.mask, inner_ring=self.inner_ring
        )
        seconds = pass_seconds(
            cluster,
            config,
            kernel=flop / (cluster.peak_flop_per_s * efficiency),
            merge_bytes=out_elements * DS_USP.merge_bytes_per_element,
            # dK/dV return against the direction of keys and values: their bytes are what this rank
            # receives of these, and the larger of the two takes the time.
            sent=sent_by_operation(
                self._work,
                config,
                all_to_all=sent.all_to_all_forward,
                ring=max(sent.ring_kv_forward, sent.ring_dkv_backward),
                ring_outer=max(sent.ring_kv_outer, sent.ring_dkv_outer),
                backward=backward,
            ),
            inner=self.inner_ring,
        )
        return self.schedule(backward=backward).simulate(seconds, cluster.contention)
