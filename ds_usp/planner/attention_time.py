"""How long attention takes on a mesh of ulysses x ring: kernels, exchanges, what hides what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log

from ds_usp.geometry.chunking import comes_at_once, inner_ring, parts_of_heads
from ds_usp.geometry.heads import bare_share
from ds_usp.planner.formulas import attention_flop_per_token
from ds_usp.planner.hardware import Cluster, at
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import Split, Workload
from ds_usp.planner.profile_rows import MeasuredAttention, between, host_seconds
from ds_usp.planner.topology import (
    DIRECT,
    RELAY,
    Group,
    exchange_s,
    group_of,
    ring_ranks_of_a_node,
)
from ds_usp.planner.traffic import layer_traffic


@dataclass(frozen=True, slots=True)
class Engine:
    """How an implementation runs one attention call.

    Args:
        relay: blocks go around the ring from neighbour to neighbour, whole.
        parts: heads come part by part, so that exchanges hide under the kernels.
        merge_bytes: of memory traffic for each element of the output in a sum over blocks.
    """

    name: str
    relay: bool
    parts: bool
    merge_bytes: float


# One fused pass: out and the block's share read, out written, in fp32.
OURS = Engine("ds_usp", False, True, 12.0)
# What yunchang 0.6 does: a dozen passes of elementwise torch in fp32 over three quarters of the
# rows in the mean (its later chunks see only half of the blocks).
YUNCHANG = Engine("yunchang", True, False, 0.75 * 46.0)


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
    host: float = 0.0
    parts: int = 1

    @property
    def total(self) -> float:
        """What the call takes."""
        return self.kernel + self.merge + self.exposed


def attention_s(
    cluster: Cluster, work: Workload, split: Split, *, backward: bool, engine: Engine = OURS
) -> AttentionTime:
    """Attention of one layer and one micro batch, in one direction, causal zigzag.

    Where the cluster's profile has calls on this pair of degrees, the formula is multiplied by what
    they took over what it says of them, between calls of fewer and of more FLOP, and the host takes
    as long as theirs. Of another pair by what calls on the nearest one took: what is guessed must
    not look faster than what is known.
    """
    found = _formula(cluster, work, split, backward, engine)
    pair = _nearest_pair(cluster, split.ulysses, split.ring)
    if engine is not OURS or pair is None:
        return found
    flop = _rank_flop(work, split)
    points = _measured_over_formula(cluster, *pair, backward)
    ratio = between([(size, ratio) for size, ratio, _ in points], flop)
    launching = _nearest_pair(cluster, split.ulysses, split.ring, of_known_host=True)
    points = _measured_over_formula(cluster, *launching, backward) if launching else ()
    host = host_seconds([(size, host) for size, _, host in points], flop) if points else 0.0
    times = {name: ratio * getattr(found, name) for name in _SCALED}
    return replace(found, **times, host=host)


_SCALED = ("kernel", "merge", "exposed", "ulysses", "ring")


@lru_cache(maxsize=256)
def _nearest_pair(
    cluster: Cluster, ulysses: int, ring: int, of_known_host: bool = False
) -> tuple[int, int] | None:
    """The pair of degrees with calls in the profile that is nearest to one, inside of a node."""
    degrees = ulysses, ring
    pairs = {(row.ulysses, row.ring) for row in _calls(cluster)}
    if of_known_host:
        unknown = (row for row in cluster.calls if not (row.forward_host_s and row.backward_host_s))
        pairs -= {(row.ulysses, row.ring) for row in unknown}
    if max(degrees) > 1 and len(pairs) > 1:
        pairs.discard((1, 1))  # it exchanges nothing

    def distance(pair: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        return sum(abs(log(mine / other)) for mine, other in zip(degrees, pair, strict=True)), pair

    return min(pairs, key=distance, default=None)


def _calls(cluster: Cluster) -> Iterator[MeasuredAttention]:
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
    for row in _calls(cluster):
        if (row.ulysses, row.ring) != (ulysses, ring):
            continue
        width = row.heads * row.head_dim
        shape = ModelShape("call", 1, width, width, row.heads, row.kv_heads, 1, row.head_dim)
        work, split = Workload(shape, row.seq_len), Split(ulysses=ulysses, ring=ring)
        predicted = _formula(cluster, work, split, backward, OURS).total
        measured = row.backward_s if backward else row.forward_s
        host = row.backward_host_s if backward else row.forward_host_s
        points[_rank_flop(work, split)] = measured / predicted, host
    return tuple((flop, *point) for flop, point in sorted(points.items()))


def _rank_flop(work: Workload, split: Split) -> float:
    """Forward FLOP of one rank in one call."""
    tokens = split.micro_batch * work.seq_len / split.sp
    return tokens * attention_flop_per_token(work.model, work.seq_len, work.documents) / split.tp


def _formula(
    cluster: Cluster, work: Workload, split: Split, backward: bool, engine: Engine
) -> AttentionTime:
    traffic = layer_traffic(work, split, engine.relay)
    tokens = split.micro_batch * work.seq_len / split.sp
    # A zigzag's kernel calls are as long as its chunks, of which a rank holds two.
    length = work.seq_len / (2 * split.ring if split.ring > 1 else 1)
    share = at(cluster.attention_efficiency, length)
    flop = _rank_flop(work, split) * (2.5 if backward else 1.0)
    kernel = flop / (cluster.peak_flop_per_s * share)
    parts = _parts(work, split) if engine.parts else 1
    inner = double_ring(cluster, work, split) if engine.parts else None
    steps = split.ring - 1
    if engine.parts and steps and _gathers(work, split, parts, inner):
        # Of a double ring's later windows what a rank holds itself is a step too.
        steps = 1 if inner is None else 2 * (split.ring // inner) - 1
    ulysses = exchange_s(cluster, group_of(split, "ulysses"), traffic.ulysses, DIRECT, 2 * parts)
    sent = traffic.ring_backward if backward else traffic.ring_forward
    if inner is None:
        pattern = RELAY if engine.relay else DIRECT
        ring = exchange_s(cluster, group_of(split, "ring"), sent, pattern, steps * parts)
    else:
        ring = _double_ring_s(cluster, split, inner, sent, steps, parts)
    merge = tokens * work.model.q_width / split.tp * steps * engine.merge_bytes
    merge_s = merge / cluster.hbm_bytes_per_s
    edge = bare_share(parts)
    beneath = ulysses * (1 - edge) + ring
    # Of the kernels' time a relay can use all but the last step's, block after block.
    cover = kernel * (steps / (steps + 1) if engine.relay else 1.0)
    exposed = ulysses * edge + max(0.0, beneath - cover)
    exposed += cluster.contention * min(beneath, cover)
    return AttentionTime(kernel, merge_s, exposed, ulysses, ring, parts=parts)


def _parts(work: Workload, split: Split) -> int:
    model = work.model
    most = max(1, int(model.kv_heads / split.tp / split.ulysses))
    if split.sp == 1:
        return 1
    return parts_of_heads(_rank_flop(work, split), most, split.ulysses)


def _gathers(work: Workload, split: Split, parts: int, inner: int | None) -> bool:
    window = inner or split.ring
    return comes_at_once(_kv_bytes(work, split) * window // split.ring, parts, window)


def _kv_bytes(work: Workload, split: Split) -> int:
    """Keys and values of the whole ring, of one rank's heads."""
    kv = max(work.model.kv_heads / split.tp / split.ulysses, 1.0) * work.model.head_dim
    return int(work.seq_len * 2 * split.micro_batch * kv * split.param_bytes)


def double_ring(cluster: Cluster, work: Workload, split: Split) -> int | None:
    """Ranks of the inner ring where ``Tuning`` takes a double one; None where blocks go straight
    to their users."""
    on_a_node = ring_ranks_of_a_node(cluster, split)
    return inner_ring(split.ring, on_a_node, _kv_bytes(work, split) // _parts(work, split))


def _double_ring_s(
    cluster: Cluster, split: Split, inner: int, sent_bytes: float, steps: int, parts: int
) -> float:
    """Seconds of a double ring: what crosses the network goes beside what stays inside nodes."""
    outer, stride = split.ring // inner, group_of(split, "ring").stride
    far_bytes = sent_bytes * (outer - 1) / (split.ring - 1)
    far = Group(outer, stride * inner), far_bytes, (outer - 1) * parts
    near = Group(inner, stride), sent_bytes - far_bytes, (steps - (outer - 1)) * parts
    return max(
        exchange_s(cluster, group, size, DIRECT, messages) for group, size, messages in (far, near)
    )
