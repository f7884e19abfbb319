"""How long one layer and one step take, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_usp.planner.attention_time import attention_s
from ds_usp.planner.formulas import layer_bytes, mfu, model_flop_per_token, stage_elements
from ds_usp.planner.hardware import Cluster, at
from ds_usp.planner.links import COLLECTIVE, DIRECT, exchange_s, groups
from ds_usp.planner.split import Split, Workload
from ds_usp.planner.traffic import layer_traffic, stage_boundary_bytes, step_traffic

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
        measured: taken from a profile; then all of it is in ``matrices``.
    """

    matrices: float
    attention: float
    elementwise: float
    tp: float
    sp: float
    recompute: float
    measured: bool = False

    @property
    def total(self) -> float:
        """All of it."""
        parts = self.matrices + self.attention + self.elementwise + self.tp + self.sp
        return parts + self.recompute


def layer_time(cluster: Cluster, work: Workload, split: Split) -> LayerTime:
    """A layer from the cluster's profile if it was measured there, else from formulas."""
    for known in cluster.layers:
        asked = (work.model.name, work.seq_len, split.tp, split.ulysses, split.ring)
        how = (split.recompute, split.micro_batch)
        here = (known.model, known.seq_len, known.tp, known.ulysses, known.ring)
        if (asked, how) == (here, (known.recompute, known.micro_batch)):
            return LayerTime(known.layer_s, 0.0, 0.0, 0.0, 0.0, 0.0, True)
    return _layer_time(cluster, work, split)


def _layer_time(cluster: Cluster, work: Workload, split: Split) -> LayerTime:
    """Forward, twice the products backward, 2.5 times the attention, and what is done again."""
    tokens = split.micro_batch * work.seq_len / split.sp
    products = _product_s(cluster, tokens, tokens * work.model.matrix_elements / split.tp)
    forward, backward = (
        attention_s(cluster, work, split, backward=direction) for direction in (False, True)
    )
    plain = layer_bytes(work, replace(split, recompute="none", fused_activation=True))
    passes = 2 * plain / (_HBM_SHARE * cluster.hbm_bytes_per_s)
    traffic, group = layer_traffic(work, split), groups(split)["tp"]
    tp_forward = exchange_s(cluster, group, traffic.tp_forward, COLLECTIVE, 4)
    tp_backward = exchange_s(cluster, group, traffic.tp_backward, COLLECTIVE, 6)
    again = 0.0
    if split.recompute == "full":
        again = products + forward.total + passes + tp_forward
    elif split.recompute == "attention":
        again = products + passes + tp_forward
    elif split.recompute == "attention-only":
        again = forward.total
    elif split.recompute == "gemm-last":
        dropped = plain - layer_bytes(work, split)
        again = 2 * max(dropped, 0.0) / (_HBM_SHARE * cluster.hbm_bytes_per_s)
    return LayerTime(
        matrices=3 * products,
        attention=forward.kernel + backward.kernel,
        elementwise=3 * passes + forward.merge + backward.merge,
        tp=tp_forward + tp_backward,
        sp=forward.exposed + backward.exposed,
        recompute=again,
    )


def _product_s(cluster: Cluster, tokens: float, multiplications: float) -> float:
    """Products of so many tokens: ``2 m n k / (F eta(m))``."""
    return 2 * multiplications / (cluster.peak_flop_per_s * at(cluster.gemm_efficiency, tokens))


# ------------------------------------------------------------------ a step


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step on the slowest rank.

    Args:
        layers: the layers of all micro batches, recomputation included.
        head: the output head.
        bubble: waiting for the pipeline to fill and to drain.
        pipeline: activations between stages that nothing hides.
        gradients: exchange of gradients and parameters that nothing hides.
        offload: waiting for host memory.
        optimizer: Adam.
    """

    layers: float
    head: float
    bubble: float
    pipeline: float
    gradients: float
    offload: float
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        work = self.layers + self.head + self.bubble + self.offload
        return work + self.pipeline + self.gradients + self.optimizer

    def parts(self) -> dict[str, float]:
        """Name -> seconds, in the order in which they are told."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def head_layers(work: Workload) -> float:
    """The output head's products as a part of a layer's: ``h V / P``."""
    return work.model.hidden * work.model.vocab / work.model.matrix_elements


def head_time(cluster: Cluster, work: Workload, split: Split) -> float:
    """Seconds of the output head for one micro batch, forward and backward."""
    tokens = split.micro_batch * work.seq_len / split.sp
    width = work.model.hidden * work.model.vocab / split.tp
    return 3 * _product_s(cluster, tokens, tokens * width)


def step_time(
    cluster: Cluster,
    work: Workload,
    split: Split,
    layer_s: float | None = None,
    head_s: float | None = None,
) -> StepTime:
    """``(m + (p-1)/v) v`` slots of the slowest stage, and what sticks out of them.

    Args:
        layer_s: of one layer, forward and backward; None: :func:`layer_time`.
        head_s: of the output head for one micro batch; None: as a part of a layer.
    """
    model, m = work.model, split.micro_batches(work.global_batch)
    if layer_s is None:
        layer_s, head_s = layer_time(cluster, work, split).total, head_time(cluster, work, split)
    head = layer_s * head_layers(work) if head_s is None else head_s
    stage_layers, chunk_layers = split.layers_per_stage(model), split.chunk_layers(model)
    layers = m * stage_layers * layer_s
    bubble = (split.pp - 1) * chunk_layers * layer_s
    boundary = exchange_s(
        cluster, groups(split)["pp"], stage_boundary_bytes(work, split), DIRECT, 1
    )
    return StepTime(
        layers=layers,
        head=m * head,
        bubble=bubble,
        pipeline=2 * (split.pp - 1) * boundary,
        gradients=_gradients_s(cluster, work, split, layers),
        offload=_offload_s(cluster, work, split, layers),
        optimizer=_optimizer_s(cluster, work, split),
    )


def _gradients_s(cluster: Cluster, work: Workload, split: Split, layers_s: float) -> float:
    """ZeRO-3 fetches under the layers; the others reduce at the end, or under the last micro
    batch's backward, and gather parameters then."""
    sent, group = step_traffic(work, split), groups(split)["zero"]
    micro_batches = split.micro_batches(work.global_batch)
    if split.zero == 3:
        times = micro_batches * work.model.layers
        gather = exchange_s(cluster, group, sent.parameters / 2, COLLECTIVE, times)
        reduce = exchange_s(cluster, group, sent.gradients, COLLECTIVE, times)
        return _beneath(cluster, gather, layers_s / 3) + _beneath(
            cluster, gather + reduce, layers_s * 2 / 3
        )
    parameters = exchange_s(cluster, group, sent.parameters, COLLECTIVE)
    reduce = exchange_s(cluster, group, sent.gradients, COLLECTIVE)
    if split.overlap_gradients:
        batches = micro_batches if split.zero == 2 else 1
        reduce = _beneath(cluster, reduce, layers_s * 2 / 3 / micro_batches * batches)
    return reduce + parameters


def _beneath(cluster: Cluster, exchange: float, window_s: float) -> float:
    """What an exchange takes of the time when it runs beneath so much computation."""
    return max(0.0, exchange - window_s) + cluster.contention * min(exchange, window_s)


def _offload_s(cluster: Cluster, work: Workload, split: Split, layers_s: float) -> float:
    """What copies to the host, in both directions at once, take beyond the layers.

    Under the layers they take a quarter of what exchanges do (assumed): memory bandwidth, no SMs.
    """
    if not split.offload_ratio:
        return 0.0
    times = split.micro_batches(work.global_batch) * split.layers_per_stage(work.model)
    copied = times * split.offload_ratio * layer_bytes(work, split)
    alone = copied / cluster.host_bytes_per_s
    return max(0.0, alone - layers_s) + cluster.contention / 4 * min(alone, layers_s)


def _optimizer_s(cluster: Cluster, work: Workload, split: Split) -> float:
    """Adam reads and writes its 12 bytes, reads a gradient and writes a weight."""
    elements = stage_elements(work, split, 0) / (split.zero_ranks if split.zero else 1)
    moved = elements * (24 + split.grad_bytes + split.param_bytes)
    return moved / (_HBM_SHARE * cluster.hbm_bytes_per_s)


def step_mfu(cluster: Cluster, work: Workload, split: Split, step_s: float) -> float:
    """Share of the peak that the model's own FLOP reach."""
    tokens = work.global_batch * work.seq_len / split.gpus
    flop = tokens * model_flop_per_token(work.model, work.seq_len, work.documents)
    return mfu(flop / step_s, cluster.peak_flop_per_s)
