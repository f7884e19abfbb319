"""One attention call on one rank: its chunks, ring schedules, and both passes simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

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
from ds_usp.geometry.pipeline_timeline import Timeline
from ds_usp.geometry.ring_schedule import RingSchedule, ring_schedule
from ds_usp.planner.attention_schedule import (
    OFF,
    RelativeCosts,
    pass_seconds,
    relative_costs,
    sent_by_operation,
)
from ds_usp.planner.attention_time import DS_USP, product_seconds
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.profile_rows import interpolate_curve
from ds_usp.planner.topology import group_of, inside_node
from ds_usp.planner.traffic import attention_bytes, layer_traffic


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
        # Of a zigzag a kernel call is as long as a chunk; what a window hides is not in it.
        length = self.layout.seq_len / (2 * ring if ring > 1 else 1)
        window = inf if self.mask.left is None else self.mask.left + 1 + (self.mask.right or 0)
        efficiency = interpolate_curve(cluster.attention_efficiency, min(length, window))
        flop = 4 * queries * self.ring_schedules[0].pairs * (2.5 if backward else 1.0)
        sent = attention_bytes(
            self._work,
            config,
            self.rank,
            self.layout.kind,
            self.mask,
            inner_ring=self.inner_ring,
        )
        # Of what a rank sends and what it receives, the more takes the time.
        outer = max(sent.ring_kv_outer, sent.ring_dkv_outer)
        seconds = pass_seconds(
            cluster,
            config,
            kernel=flop / (cluster.peak_flop_per_s * efficiency),
            merge_bytes=queries
            * self.layout.ring_length(ring_rank)
            * DS_USP.merge_bytes_per_element,
            sent=sent_by_operation(
                self._work,
                config,
                all_to_all=sent.all_to_all_forward,
                ring=max(sent.ring_kv_forward, sent.ring_dkv_backward),
                ring_outer=outer,
                backward=backward,
            ),
            inner=self.inner_ring,
            products=product_seconds(cluster, self._work, config, in_parts=True),
        )
        return self.schedule(backward=backward).simulate(seconds, cluster.contention)
