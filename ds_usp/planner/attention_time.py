"""Seconds of attention on ulysses x ring: kernels, exchanges, and how much of them overlaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log

from ds_usp.geometry.chunking import inner_ring_size, num_head_chunks, should_all_gather_kv
from ds_usp.geometry.heads import exposed_fraction
from ds_usp.planner.formulas import attention_flop_per_token
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import kv_features
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.profile_rows import (
    MeasuredAttention,
    interpolate,
    interpolate_curve,
    launch_seconds,
    select_rows,
)
from ds_usp.planner.topology import (
    DIRECT,
    RELAY,
    RankGroup,
    exchange_s,
    group_of,
    ring_ranks_per_node,
)
from ds_usp.planner.traffic import layer_traffic


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
        exposed: exchanges that nothing hides, and what hidden ones cost the kernels.
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
    predicted = _predicted(cluster, work, config, backward, impl)
    degrees = _closest_profiled_degrees(cluster, config.ulysses, config.ring)
    if impl is not DS_USP or degrees is None:
        return predicted
    flop = _rank_flop(work, config)
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
    """The (ulysses, ring) with profiled calls that is closest to one, inside of a node."""
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
        ratio = (
            getattr(row, f"{direction}_s")
            / _predicted(cluster, work, config, backward, DS_USP).total
        )
        points[_rank_flop(work, config)] = ratio, getattr(row, f"{direction}_host_s")
    return tuple((flop, *point) for flop, point in sorted(points.items()))


def _rank_flop(work: Workload, config: ParallelConfig) -> float:
    """Forward FLOP of one rank in one call."""
    tokens = work.rank_tokens(config)
    return tokens * attention_flop_per_token(work.model, work.seq_len, work.documents) / config.tp


def _predicted(
    cluster: Cluster, work: Workload, config: ParallelConfig, backward: bool, impl: AttentionImpl
) -> AttentionTime:
    """One direction of a call, from the cluster's rates alone, without its measured calls."""
    traffic = layer_traffic(work, config, impl.relayed_ring)
    tokens = work.rank_tokens(config)
    # A zigzag's kernel calls are as long as its chunks, of which a rank holds two.
    length = work.seq_len / (2 * config.ring if config.ring > 1 else 1)
    efficiency = interpolate_curve(cluster.attention_efficiency, length)
    flop = _rank_flop(work, config) * (2.5 if backward else 1.0)
    kernel = flop / (cluster.peak_flop_per_s * efficiency)
    chunks = _num_chunks(work, config) if impl.chunks else 1
    inner = double_ring(cluster, work, config) if impl.chunks else None
    steps = config.ring - 1
    if impl.chunks and steps and _all_gathers_kv(work, config, chunks, inner):
        # In a double ring's later outer steps the relayed local block is a step too.
        steps = 1 if inner is None else 2 * (config.ring // inner) - 1
    ulysses = exchange_s(cluster, group_of(config, "ulysses"), traffic.ulysses, DIRECT, 2 * chunks)
    sent = traffic.ring_backward if backward else traffic.ring_forward
    if inner is None:
        pattern = RELAY if impl.relayed_ring else DIRECT
        ring = exchange_s(cluster, group_of(config, "ring"), sent, pattern, steps * chunks)
    else:
        ring = _double_ring_s(cluster, config, inner, sent, steps, chunks)
    merge = tokens * work.model.q_width / config.tp * steps * impl.merge_bytes_per_element
    merge_s = merge / cluster.hbm_bytes_per_s
    end_fraction = exposed_fraction(chunks)
    hideable = ulysses * (1 - end_fraction) + ring
    # A relayed ring overlaps all steps but the last one, block after block.
    overlap = kernel * (steps / (steps + 1) if impl.relayed_ring else 1.0)
    exposed = ulysses * end_fraction + max(0.0, hideable - overlap)
    exposed += cluster.contention * min(hideable, overlap)
    return AttentionTime(kernel, merge_s, exposed, ulysses, ring, chunks=chunks)


def _num_chunks(work: Workload, config: ParallelConfig) -> int:
    """Head chunks of the pipeline, by the rule that ``usp_attention`` uses; 1 without a group."""
    if config.sp == 1:
        return 1
    max_chunks = max(1, int(work.model.kv_heads / config.tp / config.ulysses))
    return num_head_chunks(_rank_flop(work, config), max_chunks, config.ulysses)


def _all_gathers_kv(work: Workload, config: ParallelConfig, chunks: int, inner: int | None) -> bool:
    ranks = inner or config.ring
    return should_all_gather_kv(_kv_bytes(work, config) * ranks // config.ring, chunks, ranks)


def _kv_bytes(work: Workload, config: ParallelConfig) -> int:
    """Keys and values of all ring ranks, of one rank's heads."""
    kv = kv_features(work, config)
    return int(work.seq_len * 2 * config.micro_batch * kv * config.param_bytes)


def double_ring(cluster: Cluster, work: Workload, config: ParallelConfig) -> int | None:
    """Ranks of the inner ring where ``Tuning`` takes a double ring, else None."""
    block_bytes = _kv_bytes(work, config) // _num_chunks(work, config)
    return inner_ring_size(config.ring, ring_ranks_per_node(cluster, config), block_bytes)


def _double_ring_s(
    cluster: Cluster, config: ParallelConfig, inner: int, sent_bytes: float, steps: int, chunks: int
) -> float:
    """Seconds of a double ring: inter-node and intra-node transfers run in parallel."""
    outer, stride = config.ring // inner, group_of(config, "ring").stride
    inter_bytes = sent_bytes * (outer - 1) / (config.ring - 1)
    inter_messages = (outer - 1) * chunks
    inter_group, intra_group = RankGroup(outer, stride * inner), RankGroup(inner, stride)
    return max(
        exchange_s(cluster, inter_group, inter_bytes, DIRECT, inter_messages),
        exchange_s(
            cluster, intra_group, sent_bytes - inter_bytes, DIRECT, steps * chunks - inter_messages
        ),
    )
