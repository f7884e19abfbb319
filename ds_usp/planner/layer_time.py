"""How long one layer takes, part by part and direction by direction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ds_usp.planner.attention_time import AttentionTime, attention_s
from ds_usp.planner.formulas import layer_bytes
from ds_usp.planner.hardware import Cluster, at
from ds_usp.planner.launch_overhead import NOTHING, Job
from ds_usp.planner.parallel_config import Split, Workload
from ds_usp.planner.profile_rows import host_seconds, layer_rows, nearest_tp, seconds_at
from ds_usp.planner.topology import COLLECTIVE, exchange_s, group_of
from ds_usp.planner.traffic import layer_traffic

_PRODUCTS = 4  # of a layer: queries, keys and values; output; both of the MLP. A launch each
_HBM_SHARE = 0.8  # of the bandwidth that elementwise kernels reach


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer and one micro batch, forward and backward together.

    Args:
        matrices: matrix products.
        attention: kernels of the attention core.
        elementwise: norms, activation functions, sums over blocks.
        tp, sp: exchanges that nothing hides.
        recompute: what is computed again.
        forward: both directions' times again, and what the host takes to launch them.
        backward: with what is computed again.
        measured: all but the attention is from a profile, and is in ``matrices``.
    """

    matrices: float
    attention: float
    elementwise: float
    tp: float
    sp: float
    recompute: float
    forward: Job
    backward: Job
    measured: bool = False

    @property
    def total(self) -> float:
        """All of it."""
        parts = self.matrices + self.attention + self.elementwise + self.tp + self.sp
        return parts + self.recompute


def layer_time(cluster: Cluster, work: Workload, split: Split) -> LayerTime:
    """Forward, twice the products backward, 2.5 times the attention, and what is done again.

    All but the attention core comes from the cluster's profile if such a layer is in it. Of a layer
    that was measured at another tensor-parallel degree the formula is multiplied by what it took
    there over what the formula says: guesses must not look faster than what is known.
    """
    core, core_back, outside = _once(cluster, work, split.but(recompute="none"))
    attention, attention_back = (
        Job(each.total, each.host).cut(each.parts) for each in (core, core_back)
    )
    if not (attention.host_s and outside.forward.host_s):
        attention, attention_back = attention.unknown(), attention_back.unknown()
        outside = outside.of_unknown_host()
    forward = outside.before(attention)
    again = NOTHING
    if split.recompute == "full":
        again = forward
    elif split.recompute == "attention":
        again = outside.forward.cut(_PRODUCTS)
    elif split.recompute == "attention-only":
        again = attention
    elif split.recompute == "gemm-last":
        plain = layer_bytes(work, split.but(recompute="none", fused_activation=True))
        again = Job(passes_s(cluster, 2 * max(plain - layer_bytes(work, split), 0.0)))
    return LayerTime(
        matrices=outside.matrices,
        attention=core.kernel + core_back.kernel,
        elementwise=outside.elementwise + core.merge + core_back.merge,
        tp=outside.tp,
        sp=core.exposed + core_back.exposed,
        recompute=again.device_s,
        forward=forward,
        backward=again + outside.after(attention_back),
        measured=outside.measured,
    )


@lru_cache(maxsize=1024)
def _once(
    cluster: Cluster, work: Workload, split: Split
) -> tuple[AttentionTime, AttentionTime, _Outside]:
    """Attention forward and backward, and the rest: the same whatever is computed again."""
    there, back = (attention_s(cluster, work, split, backward=each) for each in (False, True))
    outside = _measured_outside(cluster, work, split) or _scaled_outside(cluster, work, split)
    return there, back, outside


@dataclass(frozen=True, slots=True)
class _Outside:
    """A layer but for its attention core, part by part and direction by direction."""

    matrices: float
    elementwise: float
    tp: float
    forward: Job
    backward: Job
    measured: bool

    @property
    def device_s(self) -> float:
        """Of the GPU, both directions."""
        return self.forward.device_s + self.backward.device_s

    def before(self, core: Job) -> Job:
        """Forward of the whole layer: one of four products, attention, the others."""
        product = self.forward.part(_PRODUCTS)
        return product + core + product * (_PRODUCTS - 1)

    def after(self, core: Job) -> Job:
        """Backward of the whole layer."""
        product = self.backward.part(_PRODUCTS)
        return product * (_PRODUCTS - 1) + core + product

    def of_unknown_host(self) -> _Outside:
        """The same of a host that is not known."""
        return replace(self, forward=self.forward.unknown(), backward=self.backward.unknown())


def _measured_outside(cluster: Cluster, work: Workload, split: Split) -> _Outside | None:
    rows = layer_rows(cluster.layers, work.model, split.tp)
    if not rows:
        return None
    tokens = split.micro_batch * work.seq_len / split.sp
    forward = seconds_at(rows, lambda row: row.tokens, lambda row: row.forward_s, tokens)
    backward = seconds_at(rows, lambda row: row.tokens, lambda row: row.backward_s, tokens)
    there = host_seconds([(row.tokens, row.forward_host_s) for row in rows], tokens)
    back = host_seconds([(row.tokens, row.backward_host_s) for row in rows], tokens)
    jobs = Job(forward, there), Job(backward, back)
    return _Outside(forward + backward, 0.0, 0.0, *jobs, True)


def _scaled_outside(cluster: Cluster, work: Workload, split: Split) -> _Outside:
    found, tp = _outside(cluster, work, split), nearest_tp(cluster.layers, work.model, split.tp)
    if tp is None:
        return found
    there = split.but(tp=tp)
    measured, formula = _measured_outside(cluster, work, there), _outside(cluster, work, there)
    if measured is None:
        return found
    forward = found.forward.scaled(measured.forward, formula.forward)
    backward = found.backward.scaled(measured.backward, formula.backward)
    ratio = (forward.device_s + backward.device_s) / found.device_s
    times = (ratio * found.matrices, ratio * found.elementwise, ratio * found.tp)
    return _Outside(*times, forward, backward, False)


def _outside(cluster: Cluster, work: Workload, split: Split) -> _Outside:
    tokens = split.micro_batch * work.seq_len / split.sp
    products = product_s(cluster, tokens, tokens * work.model.matrix_elements / split.tp)
    plain = layer_bytes(work, split.but(recompute="none", fused_activation=True))
    passes = passes_s(cluster, 2 * plain)
    traffic, group = layer_traffic(work, split), group_of(split, "tp")
    tp_forward = exchange_s(cluster, group, traffic.tp_forward, COLLECTIVE, 4)
    tp_backward = exchange_s(cluster, group, traffic.tp_backward, COLLECTIVE, 6)
    there = Job(products + passes + tp_forward)
    back = Job(2 * products + 2 * passes + tp_backward)
    return _Outside(3 * products, 3 * passes, tp_forward + tp_backward, there, back, False)


def passes_s(cluster: Cluster, moved_bytes: float) -> float:
    """Elementwise kernels that read and write so much."""
    return moved_bytes / (_HBM_SHARE * cluster.hbm_bytes_per_s)


def product_s(cluster: Cluster, tokens: float, multiplications: float) -> float:
    """Products of so many tokens: ``2 m n k / (F eta(m))``."""
    return 2 * multiplications / (cluster.peak_flop_per_s * at(cluster.gemm_efficiency, tokens))
