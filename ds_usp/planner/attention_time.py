"""Seconds of attention on ulysses x ring: the simulation of its schedule, or what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import inf, log
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
from ds_usp.geometry.ring_schedule import RingSchedule, ring_schedule
from ds_usp.planner.attention_schedule import (
    OFF,
    ProductSeconds,
    RelativeCosts,
    mean_costs,
    pass_seconds,
    relative_costs,
    sent_by_operation,
)
from ds_usp.planner.formulas import elementwise_s, gemm_s
from ds_usp.planner.hardware import (
    Cluster,
    MeasuredAttention,
    interpolate,
    interpolate_curve,
    launch_seconds,
    select_rows,
)
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.pipeline_timeline import Timeline
from ds_usp.planner.traffic import (
    DIRECT,
    RELAY,
    attention_bytes,
    call_size,
    group_of,
    inside_node,
    layer_traffic,
    rank_flop,
)

# Made chunk by chunk, a product moves so many bytes more for each byte of its queries, keys and
# values: rows of weights and gradients are put together, rotated gradients were copied, products
# are smaller. Fitted once, to the 6 layers on Ulysses 2 of projected.csv together, which were timed
# before rotation in place.
_PARTS_BYTES = 4.0


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
        """Seconds of the call."""
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
    formula, interpolated by FLOP, and the launch time is theirs; for other degrees by the calls on
    the closest ones: an estimate must not look faster than a measurement.
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
    # A zigzag's kernel calls are as long as its chunks, of which a rank holds two.
    length = work.seq_len / (2 * config.ring if config.ring > 1 else 1)
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
    projections: str = OFF,
) -> SimulatedPass:
    """The schedule that the attention executes, on the cluster's rates.

    Args:
        config: of several ranks a sequence.
        projections: one of ``PROJECTIONS``; but for ``off`` the products before and after attention
            are in the schedule, and in its time.
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
        projections=projections,
    )
    traffic = layer_traffic(work, config, impl.relayed_ring)
    sent = sent_by_operation(
        work,
        config,
        all_to_all=traffic.ulysses,
        ring=traffic.ring_forward,
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
        products=product_seconds(cluster, work, config, in_parts=True),
    )
    timeline = costs.simulate(seconds, cluster.contention)
    return SimulatedPass(timeline, seconds.merge * costs.mean_merges, chunks)


def product_seconds(
    cluster: Cluster, work: Workload, config: ParallelConfig, *, in_parts: bool
) -> ProductSeconds:
    """Each of the products around attention.

    Args:
        in_parts: chunk by chunk, as under the exchanges.
    """
    model, tokens = work.model, work.rank_tokens(config)

    def seconds(width: float) -> float:
        return gemm_s(cluster, tokens, tokens * model.hidden * width / config.tp)

    def in_parts_s(width: float) -> float:
        moved = _PARTS_BYTES * tokens * width / config.tp * config.param_bytes if in_parts else 0.0
        return seconds(width) + elementwise_s(cluster, moved)

    queries = float(model.q_width)
    return ProductSeconds(in_parts_s(queries), in_parts_s(2.0 * model.kv_width), seconds(queries))


def _rank_heads(work: Workload, config: ParallelConfig) -> tuple[int, int]:
    """Query and KV heads that every rank computes at least, in whole KV groups."""
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
        projections: where the products before and after it are, one of ``PROJECTIONS``; the model
            is as wide as all heads.

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
    projections: str = OFF

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
        """The heads of each Ulysses rank."""
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
        """Number of head chunks."""
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
        """Whether keys and values are all-gathered."""
        if self.layout.ring == 1 or self.gather is not None:
            return bool(self.gather) and self.layout.ring > 1
        return self._size.all_gathers_kv(self.num_chunks, self.inner_ring)

    @cached_property
    def head_chunks(self) -> tuple[HeadChunk, ...]:
        """The heads of each chunk."""
        return tuple(self.split.chunk(self.num_chunks, i) for i in range(self.num_chunks))

    @cached_property
    def ring_schedules(self) -> tuple[RingSchedule, ...]:
        """The ring schedule of each chunk."""
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
        """The schedule of one pass."""
        return relative_costs(
            self.ring_schedules,
            self.head_chunks,
            ulysses_rank=self.layout.coords(self.rank)[0],
            ulysses=self.layout.ulysses > 1,
            backward=backward,
            projections=self.projections,
        )

    def simulate(self, *, backward: bool) -> Timeline:
        """One pass on the cluster's rates."""
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
            products=product_seconds(cluster, self._work, config, in_parts=True),
        )
        return self.schedule(backward=backward).simulate(seconds, cluster.contention)
