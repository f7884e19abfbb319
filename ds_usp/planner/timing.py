"""How long one layer and one step take, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_usp.planner.attention_time import attention_s
from ds_usp.planner.formulas import layer_bytes, mfu, model_flop_per_token, stage_elements
from ds_usp.planner.hardware import Cluster, at
from ds_usp.planner.host_time import NOTHING, Job
from ds_usp.planner.links import COLLECTIVE, DIRECT, exchange_s, groups
from ds_usp.planner.measured import (
    ends_rows,
    host_seconds,
    layer_rows,
    nearest_step,
    nearest_tp,
    seconds_at,
    step_rows,
)
from ds_usp.planner.split import Split, Workload
from ds_usp.planner.traffic import layer_traffic, stage_boundary_bytes, step_traffic

_PRODUCTS = 4  # of a layer: queries, keys and values; output; both of the MLP. A launch each
_HBM_SHARE = 0.8  # of the bandwidth that elementwise kernels reach
# Read and written for each logit by Megatron's cross entropy: to fp32, maximum, difference,
# exponential, sum, quotient, and in backward the product and back to bf16.
_LOSS_BYTES = 6 + 4 + 8 + 8 + 4 + 8 + 8 + 6


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
    core, core_back = (
        attention_s(cluster, work, split, backward=direction) for direction in (False, True)
    )
    outside = _measured_outside(cluster, work, split) or _scaled_outside(cluster, work, split)
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
        plain = layer_bytes(work, replace(split, recompute="none", fused_activation=True))
        again = Job(_passes_s(cluster, 2 * max(plain - layer_bytes(work, split), 0.0)))
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
    there = replace(split, tp=tp)
    measured, formula = _measured_outside(cluster, work, there), _outside(cluster, work, there)
    if measured is None:
        return found
    forward = _scaled(found.forward, measured.forward, formula.forward)
    backward = _scaled(found.backward, measured.backward, formula.backward)
    ratio = (forward.device_s + backward.device_s) / found.device_s
    times = (ratio * found.matrices, ratio * found.elementwise, ratio * found.tp)
    return _Outside(*times, forward, backward, False)


def _scaled(job: Job, measured: Job, formula: Job) -> Job:
    """A job by what is known of another one; the host launches as much."""
    return Job(job.device_s * measured.device_s / formula.device_s, measured.host_s)


def _outside(cluster: Cluster, work: Workload, split: Split) -> _Outside:
    tokens = split.micro_batch * work.seq_len / split.sp
    products = _product_s(cluster, tokens, tokens * work.model.matrix_elements / split.tp)
    plain = layer_bytes(work, replace(split, recompute="none", fused_activation=True))
    passes = _passes_s(cluster, 2 * plain)
    traffic, group = layer_traffic(work, split), groups(split)["tp"]
    tp_forward = exchange_s(cluster, group, traffic.tp_forward, COLLECTIVE, 4)
    tp_backward = exchange_s(cluster, group, traffic.tp_backward, COLLECTIVE, 6)
    there = Job(products + passes + tp_forward)
    back = Job(2 * products + 2 * passes + tp_backward)
    return _Outside(3 * products, 3 * passes, tp_forward + tp_backward, there, back, False)


def _passes_s(cluster: Cluster, moved_bytes: float) -> float:
    """Elementwise kernels that read and write so much."""
    return moved_bytes / (_HBM_SHARE * cluster.hbm_bytes_per_s)


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
        host: waiting for the host, which launches slower than the GPU computes.
        bubble: waiting for the pipeline to fill and to drain.
        pipeline: activations between stages that nothing hides.
        gradients: exchange of gradients and parameters that nothing hides.
        offload: waiting for host memory.
        optimizer: Adam; from a profile the exchange is part of it.
    """

    layers: float
    head: float
    host: float
    bubble: float
    pipeline: float
    gradients: float
    offload: float
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        work = self.layers + self.head + self.host + self.bubble + self.offload
        return work + self.pipeline + self.gradients + self.optimizer

    def parts(self) -> dict[str, float]:
        """Name -> seconds, in the order in which they are told."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def head_layers(work: Workload) -> float:
    """The output head's products as a part of a layer's: ``h V / P``."""
    return work.model.hidden * work.model.vocab / work.model.matrix_elements


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one micro batch is made of: a layer, each direction, and the output head, both."""

    forward: Job
    backward: Job
    head: Job

    @property
    def layer_s(self) -> float:
        """The GPU's seconds of a layer, both directions."""
        return self.forward.device_s + self.backward.device_s

    def waiting_s(self, micro_batches: int, layers: int) -> float:
        """What the GPU waits for its host in so many micro batches of so many layers."""
        one = self.forward * layers + self.head + self.backward * layers
        return (one * micro_batches).wait_s


def micro_batch_time(cluster: Cluster, work: Workload, split: Split) -> MicroBatch:
    """Predicted; the same for any dp, pp and ZeRO."""
    layer = layer_time(cluster, work, split)
    return MicroBatch(layer.forward, layer.backward, head_time(cluster, work, split))


def head_time(cluster: Cluster, work: Workload, split: Split) -> Job:
    """The output head for one micro batch, forward and backward.

    From a profile the embedding, the last norm and the loss are part of it.
    """
    measured = _measured_head(cluster, work, split)
    if measured is not None:
        return measured
    found, tp = _head(cluster, work, split), nearest_tp(cluster.ends, work.model, split.tp)
    if tp is None:
        return found
    there = replace(split, tp=tp)
    known = _measured_head(cluster, work, there) or Job(0.0)
    return _scaled(found, known, _head(cluster, work, there))


def _measured_head(cluster: Cluster, work: Workload, split: Split) -> Job | None:
    rows = ends_rows(cluster.ends, work.model, split.tp)
    if not rows:
        return None
    tokens = split.micro_batch * work.seq_len / split.sp
    seconds = seconds_at(rows, lambda row: row.tokens, lambda row: row.seconds, tokens)
    return Job(seconds, host_seconds([(row.tokens, row.host_s) for row in rows], tokens))


def _head(cluster: Cluster, work: Workload, split: Split) -> Job:
    tokens = split.micro_batch * work.seq_len / split.sp
    logits = tokens * work.model.vocab / split.tp
    passes = 0.0 if split.fused_loss else _passes_s(cluster, logits * _LOSS_BYTES)
    return Job(3 * _product_s(cluster, tokens, logits * work.model.hidden) + passes)


def step_time(
    cluster: Cluster, work: Workload, split: Split, one: MicroBatch | None = None
) -> StepTime:
    """``(m + (p-1)/v) v`` slots of the slowest stage, and what sticks out of them.

    Args:
        one: micro batch; None: :func:`micro_batch_time`.
    """
    model, m = work.model, split.micro_batches(work.global_batch)
    one = one or micro_batch_time(cluster, work, split)
    layer_s = one.layer_s
    stage_layers, chunk_layers = split.layers_per_stage(model), split.chunk_layers(model)
    layers = m * stage_layers * layer_s
    bubble = (split.pp - 1) * chunk_layers * layer_s
    boundary = exchange_s(
        cluster, groups(split)["pp"], stage_boundary_bytes(work, split), DIRECT, 1
    )
    gradients, optimizer = _step_s(cluster, work, split, layers)
    return StepTime(
        layers=layers,
        head=m * one.head.device_s,
        host=one.waiting_s(m, stage_layers),
        bubble=bubble,
        pipeline=2 * (split.pp - 1) * boundary,
        gradients=gradients,
        offload=_offload_s(cluster, work, split, layers),
        optimizer=optimizer,
    )


def _step_s(cluster: Cluster, work: Workload, split: Split, layers_s: float) -> tuple[float, float]:
    """Gradients' exchange and optimizer: measured (all in the second), or the formulas', scaled by
    what is known of another stage or number of ranks."""
    measured = _measured_step(cluster, work, split)
    if measured is not None:
        return 0.0, measured
    gradients = _gradients_s(cluster, work, split, layers_s)
    optimizer = _optimizer_s(cluster, work, split)
    known = nearest_step(cluster.steps, split.zero, split.zero_ranks)
    if known is None:
        return gradients, optimizer
    zero, ranks = known
    there = replace(split, zero=zero, ulysses=1, ring=ranks, dp=1)
    formula = _gradients_s(cluster, work, there, layers_s) + _optimizer_s(cluster, work, there)
    ratio = (_measured_step(cluster, work, there) or 0.0) / formula
    return ratio * gradients, ratio * optimizer


def _measured_step(cluster: Cluster, work: Workload, split: Split) -> float | None:
    rows = step_rows(cluster.steps, split.zero, split.zero_ranks)
    if not rows:
        return None
    elements = stage_elements(work, split, 0)
    return seconds_at(rows, lambda row: row.elements, lambda row: row.seconds, elements)


def _gradients_s(cluster: Cluster, work: Workload, split: Split, layers_s: float) -> float:
    """ZeRO-3 fetches under the layers; the others reduce at the end, or under the last micro
    batch's backward, and gather parameters then. DeepSpeed's bf16 optimizer always does at the
    end."""
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
    at_the_end = split.whole_reduction and split.zero == 1
    if split.overlap_gradients and not at_the_end:
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
