"""Seconds of one transformer layer, by component and direction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ds_usp.planner.attention_time import AttentionTime, attention_s
from ds_usp.planner.formulas import layer_bytes, mlp_share, qkv_share
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.kernel_time import elementwise_s, gemm_s
from ds_usp.planner.launch_overhead import NOTHING, LaunchedWork
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.profile_rows import layer_rows, nearest_tp
from ds_usp.planner.tensor_parallel_time import tensor_parallel_time

_GEMMS = 4  # of a layer: QKV projection, output projection, both of the MLP; a launch each
COMPONENTS = ("matrices", "attention", "elementwise", "tp", "sp", "recompute")


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer and one micro batch, forward and backward together.

    Args:
        matrices: GEMMs.
        attention: kernels of the attention core.
        elementwise: norms, activation functions, merges of partial attention results.
        tp, sp: exposed exchanges.
        recompute: recomputation in backward.
        forward, backward: each direction's time, with the time to launch it; backward with what is
            recomputed.
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
        """Seconds of all components."""
        return sum(self.components().values())

    def components(self) -> dict[str, float]:
        """Name -> seconds."""
        return {name: getattr(self, name) for name in COMPONENTS}


def layer_time(cluster: Cluster, work: Workload, config: ParallelConfig) -> LayerTime:
    """Forward, 2 times its GEMMs and 2.5 times its attention for backward, and recomputation.

    All but the attention core comes from the cluster's profile if such a layer is in it. For a
    layer that was measured at another tensor-parallel degree, the formula is scaled by measured /
    formula at that degree: an estimate must not look faster than a measurement.
    """
    core, core_backward, rest = _layer_once(cluster, work, config.replace(recompute="none"))
    attention, attention_backward = (
        LaunchedWork(time.total, time.launch_s).in_launches(time.chunks)
        for time in (core, core_backward)
    )
    if not (attention.launch_s and rest.forward.launch_s):
        attention = attention.without_launch_time()
        attention_backward = attention_backward.without_launch_time()
        rest = rest.without_launch_time()
    forward = rest.forward_with(attention)
    recomputed = NOTHING
    if config.recompute == "full":
        recomputed = forward
    elif config.recompute == "attention":
        recomputed = rest.forward.in_launches(_GEMMS)
    elif config.recompute == "attention-only":
        recomputed = attention
    elif config.recompute == "gemm-last":
        whole = config.replace(mlp_chunks=0)
        saved_less = _unfused_bytes(work, whole) - layer_bytes(work, whole)
        recomputed = LaunchedWork(elementwise_s(cluster, 2 * max(saved_less, 0.0)))
    if config.checkpoint_layers > 1:  # the last layer of a group is computed as often as before
        recomputed += recomputed.part(1 - 1 / config.checkpoint_layers)
    if config.heads_in_chunks:  # their exchange runs under attention of other chunks
        recomputed += rest.forward.part(qkv_share(work.model))
    if config.mlp_chunks > 1:
        recomputed += rest.forward.part(mlp_share(work.model))
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
    """Attention forward and backward, and the rest: independent of the recomputation."""
    core, core_backward = (
        attention_s(cluster, work, config, backward=backward) for backward in (False, True)
    )
    rest = _measured_rest(cluster, work, config) or _scaled_rest(cluster, work, config)
    return core, core_backward, rest


@dataclass(frozen=True, slots=True)
class _NonAttention:
    """A layer without its attention core, by component and direction."""

    matrices: float
    elementwise: float
    tp: float
    forward: LaunchedWork
    backward: LaunchedWork
    measured: bool

    def forward_with(self, core: LaunchedWork) -> LaunchedWork:
        """Forward of the layer: one of four GEMMs, attention, the other GEMMs."""
        gemm = self.forward.fraction(_GEMMS)
        return gemm + core + gemm * (_GEMMS - 1)

    def backward_with(self, core: LaunchedWork) -> LaunchedWork:
        """Backward of the layer."""
        gemm = self.backward.fraction(_GEMMS)
        return gemm * (_GEMMS - 1) + core + gemm

    def without_launch_time(self) -> _NonAttention:
        """These times with all launch times not known."""
        forward, backward = self.forward, self.backward
        return replace(
            self,
            forward=forward.without_launch_time(),
            backward=backward.without_launch_time(),
        )


def _measured_rest(
    cluster: Cluster, work: Workload, config: ParallelConfig
) -> _NonAttention | None:
    """Times of a layer but for attention, from the profile; None without rows of it."""
    rows = layer_rows(cluster.layers, work.model, config.tp)
    if not rows:
        return None
    tokens = work.rank_tokens(config)
    forward, backward = (
        LaunchedWork.from_rows(rows, tokens, "tokens", f"{direction}_s", f"{direction}_host_s")
        for direction in ("forward", "backward")
    )
    total = forward.device_s + backward.device_s
    return _NonAttention(total, 0.0, 0.0, forward, backward, True)


def _scaled_rest(cluster: Cluster, work: Workload, config: ParallelConfig) -> _NonAttention:
    """The formula, scaled by measured / formula at the closest profiled tensor-parallel degree."""
    predicted = _predicted_rest(cluster, work, config)
    tp = nearest_tp(layer_rows(cluster.layers, work.model), config.tp)
    profiled = config.replace(tp=tp or config.tp)
    measured = _measured_rest(cluster, work, profiled)
    if measured is None:
        return predicted
    formula = _predicted_rest(cluster, work, profiled)
    forward = predicted.forward.scaled(measured.forward, formula.forward)
    backward = predicted.backward.scaled(measured.backward, formula.backward)
    ratio = (forward.device_s + backward.device_s) / (
        predicted.forward.device_s + predicted.backward.device_s
    )
    times = (ratio * predicted.matrices, ratio * predicted.elementwise, ratio * predicted.tp)
    return _NonAttention(*times, forward, backward, False)


def _predicted_rest(cluster: Cluster, work: Workload, config: ParallelConfig) -> _NonAttention:
    """Times of a layer but for attention by formula: GEMMs (backward has two for each of forward),
    elementwise kernels, tensor-parallel collectives."""
    tokens = work.rank_tokens(config)
    gemms = gemm_s(cluster, tokens, tokens * work.model.matrix_elements / config.tp)
    elementwise = elementwise_s(cluster, 2 * _unfused_bytes(work, config))
    tp_forward, tp_backward = tensor_parallel_time(cluster, work, config)
    forward = LaunchedWork(gemms + elementwise + tp_forward.added)
    backward = LaunchedWork(2 * gemms + 2 * elementwise + tp_backward.added)
    tp = tp_forward.added + tp_backward.added
    return _NonAttention(3 * gemms, 3 * elementwise, tp, forward, backward, False)


def _unfused_bytes(work: Workload, config: ParallelConfig) -> float:
    """Activations without recomputation: about what elementwise kernels write."""
    whole = config.replace(recompute="none", mlp_chunks=0, fused_activation=True)
    return layer_bytes(work, whole)
