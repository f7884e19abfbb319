"""How long attention takes on a mesh of ulysses x ring: kernels, exchanges, what hides what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log

from ds_usp.geometry.chunking import inner_ring_size, num_head_chunks, should_all_gather_kv
from ds_usp.geometry.heads import exposed_fraction
from ds_usp.planner.formulas import attention_flop_per_token
from ds_usp.planner.hardware import Cluster, interpolate_curve
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.profile_rows import MeasuredAttention, interpolate, launch_seconds
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
        relay: blocks go around the ring from neighbour to neighbour, whole.
        parts: heads come part by part, so that exchanges hide under the kernels.
        merge_bytes: of memory traffic for each element of the output in a sum over blocks.
    """

    name: str
    relayed_ring: bool
    chunks: bool
    merge_bytes_per_element: float


# One fused pass: out and the block's share read, out written, in fp32.
DS_USP = AttentionImpl("ds_usp", False, True, 12.0)
# What yunchang 0.6 does: a dozen passes of elementwise torch in fp32 over three quarters of the
# rows in the mean (its later chunks see only half of the blocks).
YUNCHANG = AttentionImpl("yunchang", True, False, 0.75 * 46.0)


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Seconds of one direction on one rank.

    Args:
        kernel: what the kernels take alone.
        merge: sums over blocks.
        exposed: exchanges that nothing hides, and what hidden ones take from the kernels.
        ulysses, ring: the exchanges alone, hidden or not.
        host: what the host takes to launch the call; 0: not known.
        parts: of the heads, one after the other.
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
        """What the call takes."""
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

    Where the cluster's profile has calls on this pair of degrees, the formula is multiplied by what
    they took over what it says of them, between calls of fewer and of more FLOP, and the host takes
    as long as theirs. Of another pair by what calls on the nearest one took: what is guessed must
    not look faster than what is known.
    """
    predicted = _predicted(cluster, work, config, backward, impl)
    pair = _closest_profiled_degrees(cluster, config.ulysses, config.ring)
    if impl is not DS_USP or pair is None:
        return predicted
    flop = _rank_flop(work, config)
    points = _measured_over_formula(cluster, *pair, backward)
    ratio = interpolate([(size, ratio) for size, ratio, _ in points], flop)
    launching = _closest_profiled_degrees(
        cluster, config.ulysses, config.ring, with_launch_time=True
    )
    points = _measured_over_formula(cluster, *launching, backward) if launching else ()
    launch_s = (
        launch_seconds([(size, launch_s) for size, _, launch_s in points], flop) if points else 0.0
    )
    times = {name: ratio * getattr(predicted, name) for name in _SCALED}
    return replace(predicted, **times, launch_s=launch_s)


_SCALED = ("kernel", "merge", "exposed", "ulysses", "ring")


@lru_cache(maxsize=256)
def _closest_profiled_degrees(
    cluster: Cluster, ulysses: int, ring: int, with_launch_time: bool = False
) -> tuple[int, int] | None:
    """The pair of degrees with calls in the profile that is nearest to one, inside of a node."""
    degrees = ulysses, ring
    pairs = {(row.ulysses, row.ring) for row in _calls_within_node(cluster)}
    if with_launch_time:
        unknown = (row for row in cluster.calls if not (row.forward_host_s and row.backward_host_s))
        pairs -= {(row.ulysses, row.ring) for row in unknown}
    if max(degrees) > 1 and len(pairs) > 1:
        pairs.discard((1, 1))  # it exchanges nothing

    def distance(pair: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        return sum(abs(log(mine / other)) for mine, other in zip(degrees, pair, strict=True)), pair

    return min(pairs, key=distance, default=None)


def _calls_within_node(cluster: Cluster) -> Iterator[MeasuredAttention]:
    """Calls that the cluster's nodes hold: it may have been given smaller ones than the profile's,
    and then the others were not measured on links like these."""
    return (row for row in cluster.calls if row.ulysses * row.ring <= cluster.gpus_per_node)


@lru_cache(maxsize=256)
def _measured_over_formula(
    cluster: Cluster, ulysses: int, ring: int, backward: bool
) -> tuple[tuple[float, float, float], ...]:
    """(forward FLOP of a rank, measured over predicted seconds, the host's seconds), the fewest
    FLOP first."""
    points = {}
    for row in _calls_within_node(cluster):
        if (row.ulysses, row.ring) != (ulysses, ring):
            continue
        width = row.heads * row.head_dim
        shape = ModelShape("call", 1, width, width, row.heads, row.kv_heads, 1, row.head_dim)
        work, config = Workload(shape, row.seq_len), ParallelConfig(ulysses=ulysses, ring=ring)
        predicted = _predicted(cluster, work, config, backward, DS_USP).total
        measured = row.backward_s if backward else row.forward_s
        launch_s = row.backward_host_s if backward else row.forward_host_s
        points[_rank_flop(work, config)] = measured / predicted, launch_s
    return tuple((flop, *point) for flop, point in sorted(points.items()))


def _rank_flop(work: Workload, config: ParallelConfig) -> float:
    """Forward FLOP of one rank in one call."""
    tokens = config.micro_batch * work.seq_len / config.sp
    return tokens * attention_flop_per_token(work.model, work.seq_len, work.documents) / config.tp


def _predicted(
    cluster: Cluster, work: Workload, config: ParallelConfig, backward: bool, impl: AttentionImpl
) -> AttentionTime:
    traffic = layer_traffic(work, config, impl.relayed_ring)
    tokens = config.micro_batch * work.seq_len / config.sp
    # A zigzag's kernel calls are as long as its chunks, of which a rank holds two.
    length = work.seq_len / (2 * config.ring if config.ring > 1 else 1)
    efficiency = interpolate_curve(cluster.attention_efficiency, length)
    flop = _rank_flop(work, config) * (2.5 if backward else 1.0)
    kernel = flop / (cluster.peak_flop_per_s * efficiency)
    chunks = _num_chunks(work, config) if impl.chunks else 1
    inner = double_ring(cluster, work, config) if impl.chunks else None
    steps = config.ring - 1
    if impl.chunks and steps and _all_gathers_kv(work, config, chunks, inner):
        # Of a double ring's later windows what a rank holds itself is a step too.
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
    # Of the kernels' time a relay can use all but the last step's, block after block.
    overlap = kernel * (steps / (steps + 1) if impl.relayed_ring else 1.0)
    exposed = ulysses * end_fraction + max(0.0, hideable - overlap)
    exposed += cluster.contention * min(hideable, overlap)
    return AttentionTime(kernel, merge_s, exposed, ulysses, ring, chunks=chunks)


def _num_chunks(work: Workload, config: ParallelConfig) -> int:
    model = work.model
    most = max(1, int(model.kv_heads / config.tp / config.ulysses))
    if config.sp == 1:
        return 1
    return num_head_chunks(_rank_flop(work, config), most, config.ulysses)


def _all_gathers_kv(work: Workload, config: ParallelConfig, chunks: int, inner: int | None) -> bool:
    inner_ranks = inner or config.ring
    return should_all_gather_kv(
        _kv_bytes(work, config) * inner_ranks // config.ring, chunks, inner_ranks
    )


def _kv_bytes(work: Workload, config: ParallelConfig) -> int:
    """Keys and values of the whole ring, of one rank's heads."""
    kv = max(work.model.kv_heads / config.tp / config.ulysses, 1.0) * work.model.head_dim
    return int(work.seq_len * 2 * config.micro_batch * kv * config.param_bytes)


def double_ring(cluster: Cluster, work: Workload, config: ParallelConfig) -> int | None:
    """Ranks of the inner ring where ``Tuning`` takes a double one; None where blocks go straight
    to their users."""
    ranks_per_node = ring_ranks_per_node(cluster, config)
    return inner_ring_size(
        config.ring, ranks_per_node, _kv_bytes(work, config) // _num_chunks(work, config)
    )


def _double_ring_s(
    cluster: Cluster, config: ParallelConfig, inner: int, sent_bytes: float, steps: int, chunks: int
) -> float:
    """Seconds of a double ring: what crosses the network goes beside what stays inside nodes."""
    outer, stride = config.ring // inner, group_of(config, "ring").stride
    inter_node_bytes = sent_bytes * (outer - 1) / (config.ring - 1)
    inter_node = RankGroup(outer, stride * inner), inter_node_bytes, (outer - 1) * chunks
    intra_node = (
        RankGroup(inner, stride),
        sent_bytes - inter_node_bytes,
        (steps - (outer - 1)) * chunks,
    )
    return max(
        exchange_s(cluster, group, size, DIRECT, messages)
        for group, size, messages in (inter_node, intra_node)
    )
