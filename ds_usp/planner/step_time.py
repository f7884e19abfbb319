"""How long one step takes, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from ds_usp.planner.formulas import layer_bytes, mfu, model_flop_per_token, stage_elements
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.launch_overhead import LaunchedWork
from ds_usp.planner.layer_time import layer_time, passes_s, product_s
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.profile_rows import (
    embedding_head_rows,
    launch_seconds,
    nearest_step,
    nearest_tp,
    seconds_at,
    step_rows,
)
from ds_usp.planner.topology import COLLECTIVE, DIRECT, exchange_s, group_of
from ds_usp.planner.traffic import stage_boundary_bytes, step_traffic

# Read and written for each logit by Megatron's cross entropy: to fp32, maximum, difference,
# exponential, sum, quotient, and in backward the product and back to bf16.
_LOSS_BYTES = 6 + 4 + 8 + 8 + 4 + 8 + 8 + 6


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

    def components(self) -> dict[str, float]:
        """Name -> seconds, in the order in which they are told."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def head_layers(work: Workload) -> float:
    """The output head's products as a part of a layer's: ``h V / P``."""
    return work.model.hidden * work.model.vocab / work.model.matrix_elements


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one micro batch is made of: a layer, each direction, and the output head, both."""

    forward: LaunchedWork
    backward: LaunchedWork
    head: LaunchedWork

    @property
    def layer_s(self) -> float:
        """The GPU's seconds of a layer, both directions."""
        return self.forward.device_s + self.backward.device_s

    def launch_wait_s(self, micro_batches: int, layers: int) -> float:
        """What the GPU waits for its host in so many micro batches of so many layers."""
        micro_batch = self.forward * layers + self.head + self.backward * layers
        return (micro_batch * micro_batches).wait_s


def micro_batch_time(cluster: Cluster, work: Workload, config: ParallelConfig) -> MicroBatch:
    """Predicted; the same for any dp, pp and ZeRO."""
    layer = layer_time(cluster, work, config)
    return MicroBatch(layer.forward, layer.backward, head_time(cluster, work, config))


def head_time(cluster: Cluster, work: Workload, config: ParallelConfig) -> LaunchedWork:
    """The output head for one micro batch, forward and backward.

    From a profile the embedding, the last norm and the loss are part of it. A loss in chunks takes
    as long: its product more is what its fewer passes over logits save (466.8 ms a step against
    466.6, ``step_factors.csv``).
    """
    measured = _measured_head(cluster, work, config)
    if measured is not None:
        return measured
    predicted, tp = (
        _predicted_head(cluster, work, config),
        nearest_tp(cluster.ends, work.model, config.tp),
    )
    if tp is None:
        return predicted
    profiled = config.replace(tp=tp)
    known = _measured_head(cluster, work, profiled) or LaunchedWork(0.0)
    return predicted.scaled(known, _predicted_head(cluster, work, profiled))


def _measured_head(cluster: Cluster, work: Workload, config: ParallelConfig) -> LaunchedWork | None:
    rows = embedding_head_rows(cluster.ends, work.model, config.tp)
    if not rows:
        return None
    tokens = config.micro_batch * work.seq_len / config.sp
    seconds = seconds_at(rows, lambda row: row.tokens, lambda row: row.seconds, tokens)
    return LaunchedWork(seconds, launch_seconds([(row.tokens, row.host_s) for row in rows], tokens))


def _predicted_head(cluster: Cluster, work: Workload, config: ParallelConfig) -> LaunchedWork:
    tokens = config.micro_batch * work.seq_len / config.sp
    logits = tokens * work.model.vocab / config.tp
    passes = passes_s(cluster, logits * _LOSS_BYTES)
    return LaunchedWork(3 * product_s(cluster, tokens, logits * work.model.hidden) + passes)


def step_time(
    cluster: Cluster, work: Workload, config: ParallelConfig, micro_batch: MicroBatch | None = None
) -> StepTime:
    """``(m + (p-1)/v) v`` slots of the slowest stage, and what sticks out of them.

    Args:
        one: micro batch; None: :func:`micro_batch_time`.
    """
    model, m = work.model, config.micro_batches(work.global_batch)
    micro_batch = micro_batch or micro_batch_time(cluster, work, config)
    layer_s = micro_batch.layer_s
    stage_layers, chunk_layers = config.layers_per_stage(model), config.chunk_layers(model)
    layers = m * stage_layers * layer_s
    bubble = (config.pp - 1) * chunk_layers * layer_s
    boundary = exchange_s(
        cluster, group_of(config, "pp"), stage_boundary_bytes(work, config), DIRECT, 1
    )
    gradients, optimizer = _step_s(cluster, work, config, layers)
    return StepTime(
        layers=layers,
        head=m * micro_batch.head.device_s,
        host=micro_batch.launch_wait_s(m, stage_layers),
        bubble=bubble,
        pipeline=2 * (config.pp - 1) * boundary,
        gradients=gradients,
        offload=_offload_s(cluster, work, config, layers),
        optimizer=optimizer,
    )


def _step_s(
    cluster: Cluster, work: Workload, config: ParallelConfig, layers_s: float
) -> tuple[float, float]:
    """Gradients' exchange and optimizer: measured (all in the second), or the formulas', scaled by
    what is known of another stage or number of ranks."""
    measured = _measured_step(cluster, work, config)
    if measured is not None:
        return 0.0, measured
    gradients = _gradients_s(cluster, work, config, layers_s)
    optimizer = _optimizer_s(cluster, work, config)
    known = nearest_step(cluster.steps, config.zero, config.zero_ranks)
    if known is None:
        return gradients, optimizer
    zero, ranks = known
    profiled = config.replace(zero=zero, ulysses=1, ring=ranks, dp=1)
    formula = _gradients_s(cluster, work, profiled, layers_s) + _optimizer_s(
        cluster, work, profiled
    )
    ratio = (_measured_step(cluster, work, profiled) or 0.0) / formula
    return ratio * gradients, ratio * optimizer


def _measured_step(cluster: Cluster, work: Workload, config: ParallelConfig) -> float | None:
    rows = step_rows(cluster.steps, config.zero, config.zero_ranks)
    if not rows:
        return None
    elements = stage_elements(work, config, 0)
    return seconds_at(rows, lambda row: row.elements, lambda row: row.seconds, elements)


def _gradients_s(
    cluster: Cluster, work: Workload, config: ParallelConfig, layers_s: float
) -> float:
    """ZeRO-3 fetches under the layers; the others reduce at the end, or under the last micro
    batch's backward, and gather parameters then. DeepSpeed's bf16 optimizer always does at the
    end."""
    sent, group = step_traffic(work, config), group_of(config, "zero")
    micro_batches = config.micro_batches(work.global_batch)
    if config.zero == 3:
        times = micro_batches * work.model.layers
        gather = exchange_s(cluster, group, sent.parameters / 2, COLLECTIVE, times)
        reduce = exchange_s(cluster, group, sent.gradients, COLLECTIVE, times)
        return _exposed_s(cluster, gather, layers_s / 3) + _exposed_s(
            cluster, gather + reduce, layers_s * 2 / 3
        )
    parameters = exchange_s(cluster, group, sent.parameters, COLLECTIVE)
    reduce = exchange_s(cluster, group, sent.gradients, COLLECTIVE)
    not_overlapped = config.unsharded_grad_reduce and config.zero == 1
    if config.overlap_gradients and not not_overlapped:
        batches = micro_batches if config.zero == 2 else 1
        reduce = _exposed_s(cluster, reduce, layers_s * 2 / 3 / micro_batches * batches)
    return reduce + parameters


def _exposed_s(cluster: Cluster, exchange: float, overlap_s: float) -> float:
    """What an exchange takes of the time when it runs beneath so much computation."""
    return max(0.0, exchange - overlap_s) + cluster.contention * min(exchange, overlap_s)


def _offload_s(cluster: Cluster, work: Workload, config: ParallelConfig, layers_s: float) -> float:
    """What copies to the host, in both directions at once, take beyond the layers.

    Under the layers they take a quarter of what exchanges do (assumed): memory bandwidth, no SMs.
    """
    if not config.offload_ratio:
        return 0.0
    times = config.micro_batches(work.global_batch) * config.layers_per_stage(work.model)
    copied = times * config.offload_ratio * layer_bytes(work, config)
    copy_s = copied / cluster.host_bytes_per_s
    return max(0.0, copy_s - layers_s) + cluster.contention / 4 * min(copy_s, layers_s)


def _optimizer_s(cluster: Cluster, work: Workload, config: ParallelConfig) -> float:
    """Adam reads and writes its 12 bytes, reads a gradient and writes a weight."""
    elements = stage_elements(work, config, 0) / (config.zero_ranks if config.zero else 1)
    moved = elements * (24 + config.grad_bytes + config.param_bytes)
    return passes_s(cluster, moved)


def step_mfu(cluster: Cluster, work: Workload, config: ParallelConfig, step_s: float) -> float:
    """Share of the peak that the model's own FLOP reach."""
    tokens = work.global_batch * work.seq_len / config.gpus
    flop = tokens * model_flop_per_token(work.model, work.seq_len, work.documents)
    return mfu(flop / step_s, cluster.peak_flop_per_s)
