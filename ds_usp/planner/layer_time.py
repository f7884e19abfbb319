"""How long one layer takes, part by part and direction by direction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ds_usp.planner.attention_time import AttentionTime, attention_s
from ds_usp.planner.formulas import layer_bytes
from ds_usp.planner.hardware import Cluster, interpolate_curve
from ds_usp.planner.launch_overhead import NOTHING, LaunchedWork
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.profile_rows import launch_seconds, layer_rows, nearest_tp, seconds_at
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
    forward: LaunchedWork
    backward: LaunchedWork
    measured: bool = False

    @property
    def total(self) -> float:
        """All of it."""
        parts = self.matrices + self.attention + self.elementwise + self.tp + self.sp
        return parts + self.recompute


def layer_time(cluster: Cluster, work: Workload, config: ParallelConfig) -> LayerTime:
    """Forward, twice the products backward, 2.5 times the attention, and what is done again.

    All but the attention core comes from the cluster's profile if such a layer is in it. Of a layer
    that was measured at another tensor-parallel degree the formula is multiplied by what it took
    there over what the formula says: guesses must not look faster than what is known.
    """
    core, core_backward, rest = _layer_once(cluster, work, config.replace(recompute="none"))
    attention, attention_backward = (
        LaunchedWork(each.total, each.launch_s).in_launches(each.chunks)
        for each in (core, core_backward)
    )
    if not (attention.launch_s and rest.forward.launch_s):
        attention, attention_backward = (
            attention.without_launch_time(),
            attention_backward.without_launch_time(),
        )
        rest = rest.without_launch_time()
    forward = rest.forward_with(attention)
    recomputed = NOTHING
    if config.recompute == "full":
        recomputed = forward
    elif config.recompute == "attention":
        recomputed = rest.forward.in_launches(_PRODUCTS)
    elif config.recompute == "attention-only":
        recomputed = attention
    elif config.recompute == "gemm-last":
        plain = layer_bytes(work, config.replace(recompute="none", fused_activation=True))
        recomputed = LaunchedWork(
            passes_s(cluster, 2 * max(plain - layer_bytes(work, config), 0.0))
        )
    return LayerTime(
        matrices=rest.matrices,
        attention=core.kernel + core_backward.kernel,
        elementwise=rest.elementwise + core.merge + core_backward.merge,
        tp=rest.tp,
        sp=core.exposed + core_backward.exposed,
        recompute=recomputed.device_s,
        forward=forward,
        backward=recomputed + rest.backward_with(attention_backward),
        measured=rest.measured,
    )


@lru_cache(maxsize=1024)
def _layer_once(
    cluster: Cluster, work: Workload, config: ParallelConfig
) -> tuple[AttentionTime, AttentionTime, _NonAttention]:
    """Attention forward and backward, and the rest: the same whatever is computed again."""
    forward, backward = (
        attention_s(cluster, work, config, backward=direction) for direction in (False, True)
    )
    rest = _measured_rest(cluster, work, config) or _scaled_rest(cluster, work, config)
    return forward, backward, rest


@dataclass(frozen=True, slots=True)
class _NonAttention:
    """A layer but for its attention core, part by part and direction by direction."""

    matrices: float
    elementwise: float
    tp: float
    forward: LaunchedWork
    backward: LaunchedWork
    measured: bool

    @property
    def device_s(self) -> float:
        """Of the GPU, both directions."""
        return self.forward.device_s + self.backward.device_s

    def forward_with(self, core: LaunchedWork) -> LaunchedWork:
        """Forward of the whole layer: one of four products, attention, the others."""
        product = self.forward.fraction(_PRODUCTS)
        return product + core + product * (_PRODUCTS - 1)

    def backward_with(self, core: LaunchedWork) -> LaunchedWork:
        """Backward of the whole layer."""
        product = self.backward.fraction(_PRODUCTS)
        return product * (_PRODUCTS - 1) + core + product

    def without_launch_time(self) -> _NonAttention:
        """The same of a host that is not known."""
        return replace(
            self,
            forward=self.forward.without_launch_time(),
            backward=self.backward.without_launch_time(),
        )


def _measured_rest(
    cluster: Cluster, work: Workload, config: ParallelConfig
) -> _NonAttention | None:
    rows = layer_rows(cluster.layers, work.model, config.tp)
    if not rows:
        return None
    tokens = config.micro_batch * work.seq_len / config.sp
    forward = seconds_at(rows, lambda row: row.tokens, lambda row: row.forward_s, tokens)
    backward = seconds_at(rows, lambda row: row.tokens, lambda row: row.backward_s, tokens)
    forward_launch_s = launch_seconds([(row.tokens, row.forward_host_s) for row in rows], tokens)
    backward_launch_s = launch_seconds([(row.tokens, row.backward_host_s) for row in rows], tokens)
    directions = LaunchedWork(forward, forward_launch_s), LaunchedWork(backward, backward_launch_s)
    return _NonAttention(forward + backward, 0.0, 0.0, *directions, True)


def _scaled_rest(cluster: Cluster, work: Workload, config: ParallelConfig) -> _NonAttention:
    predicted, tp = (
        _predicted_rest(cluster, work, config),
        nearest_tp(cluster.layers, work.model, config.tp),
    )
    if tp is None:
        return predicted
    profiled = config.replace(tp=tp)
    measured, formula = (
        _measured_rest(cluster, work, profiled),
        _predicted_rest(cluster, work, profiled),
    )
    if measured is None:
        return predicted
    forward = predicted.forward.scaled(measured.forward, formula.forward)
    backward = predicted.backward.scaled(measured.backward, formula.backward)
    ratio = (forward.device_s + backward.device_s) / predicted.device_s
    times = (ratio * predicted.matrices, ratio * predicted.elementwise, ratio * predicted.tp)
    return _NonAttention(*times, forward, backward, False)


def _predicted_rest(cluster: Cluster, work: Workload, config: ParallelConfig) -> _NonAttention:
    tokens = config.micro_batch * work.seq_len / config.sp
    products = product_s(cluster, tokens, tokens * work.model.matrix_elements / config.tp)
    plain = layer_bytes(work, config.replace(recompute="none", fused_activation=True))
    passes = passes_s(cluster, 2 * plain)
    traffic, group = layer_traffic(work, config), group_of(config, "tp")
    tp_forward = exchange_s(cluster, group, traffic.tp_forward, COLLECTIVE, 4)
    tp_backward = exchange_s(cluster, group, traffic.tp_backward, COLLECTIVE, 6)
    forward = LaunchedWork(products + passes + tp_forward)
    backward = LaunchedWork(2 * products + 2 * passes + tp_backward)
    return _NonAttention(
        3 * products, 3 * passes, tp_forward + tp_backward, forward, backward, False
    )


def passes_s(cluster: Cluster, moved_bytes: float) -> float:
    """Elementwise kernels that read and write so much."""
    return moved_bytes / (_HBM_SHARE * cluster.hbm_bytes_per_s)


def product_s(cluster: Cluster, tokens: float, multiplications: float) -> float:
    """Products of so many tokens: ``2 m n k / (F eta(m))``."""
    return (
        2
        * multiplications
        / (cluster.peak_flop_per_s * interpolate_curve(cluster.gemm_efficiency, tokens))
    )
