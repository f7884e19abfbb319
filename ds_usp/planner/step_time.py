"""Seconds of one optimizer step, by component."""

from __future__ import annotations

from dataclasses import dataclass

from ds_usp.planner.data_parallel_time import data_parallel_time
from ds_usp.planner.formulas import (
    layer_bytes,
    mfu,
    model_flop_per_token,
    stage_elements,
)
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.kernel_time import elementwise_s, gemm_s
from ds_usp.planner.launch_overhead import LaunchedWork
from ds_usp.planner.layer_time import layer_time
from ds_usp.planner.memory import states_bytes
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.profile_rows import (
    embedding_head_rows,
    nearest_step,
    nearest_tp,
    seconds_at,
    select_rows,
)
from ds_usp.planner.topology import DIRECT, exchange_s, group_of
from ds_usp.planner.traffic import stage_boundary_bytes

# Bytes that Megatron's cross entropy reads and writes for each logit: to fp32, maximum, difference,
# exponential, sum, quotient, and in backward the product and back to bf16.
_LOSS_BYTES = 6 + 4 + 8 + 8 + 4 + 8 + 8 + 6


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step on the slowest rank. The fields are keys of ``plan --json``.

    Args:
        layers: the layers of all micro batches, recomputation included.
        head: the output head.
        host: GPU idle time while the CPU launches kernels (launch-bound work).
        bubble: pipeline fill and drain.
        pipeline: exposed transfers between pipeline stages.
        gradients: exposed exchange of gradients and parameters.
        offload: exposed copies to host memory and back.
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
        """Seconds of the step."""
        return sum(self.components().values())

    def components(self) -> dict[str, float]:
        """Name -> seconds."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Times of one micro batch: a layer forward and backward, and the output head, both."""

    forward: LaunchedWork
    backward: LaunchedWork
    head: LaunchedWork

    @property
    def layer_s(self) -> float:
        """GPU seconds of a layer, both directions."""
        return self.forward.device_s + self.backward.device_s

    def launch_wait_s(self, micro_batches: int, layers: int) -> float:
        """GPU idle time on kernel launches in so many micro batches of so many layers."""
        micro_batch = self.forward * layers + self.head + self.backward * layers
        return (micro_batch * micro_batches).wait_s


def micro_batch_time(cluster: Cluster, work: Workload, config: ParallelConfig) -> MicroBatch:
    """Predicted; the same for any dp, pp and ZeRO."""
    layer = layer_time(cluster, work, config)
    return MicroBatch(layer.forward, layer.backward, head_time(cluster, work, config))


def head_time(cluster: Cluster, work: Workload, config: ParallelConfig) -> LaunchedWork:
    """The output head for one micro batch, forward and backward.

    From a profile the embedding, the last norm and the loss are part of it; a head profiled at
    another tensor-parallel degree scales the formula. A chunked loss takes as long: its additional
    GEMM costs what fewer passes over the logits save (466.8 ms a step against 466.6,
    ``step_factors.csv``).
    """
    measured = _measured_head(cluster, work, config)
    if measured is not None:
        return measured
    predicted = _predicted_head(cluster, work, config)
    tp = nearest_tp(embedding_head_rows(cluster.embedding_heads, work.model), config.tp)
    profiled = config.replace(tp=tp or config.tp)
    measured = _measured_head(cluster, work, profiled)
    if measured is None:
        return predicted
    return predicted.scaled(measured, _predicted_head(cluster, work, profiled))


def _measured_head(cluster: Cluster, work: Workload, config: ParallelConfig) -> LaunchedWork | None:
    """Embedding, output projection and loss from the profile; None without one of this shape."""
    rows = embedding_head_rows(cluster.embedding_heads, work.model, config.tp)
    if not rows:
        return None
    return LaunchedWork.from_rows(rows, work.rank_tokens(config), "tokens", "seconds", "host_s")


def _predicted_head(cluster: Cluster, work: Workload, config: ParallelConfig) -> LaunchedWork:
    """The output projection's three GEMMs and the loss, by the formula."""
    tokens = work.rank_tokens(config)
    logits = tokens * work.model.vocab / config.tp
    loss = elementwise_s(cluster, logits * _LOSS_BYTES)
    return LaunchedWork(3 * gemm_s(cluster, tokens, logits * work.model.hidden) + loss)


def step_time(
    cluster: Cluster, work: Workload, config: ParallelConfig, micro_batch: MicroBatch | None = None
) -> StepTime:
    """``(m + (p-1)/v) v`` slots of the slowest stage, and what they do not hide.

    Args:
        micro_batch: where it is known; None: :func:`micro_batch_time`.
    """
    model, m = work.model, config.micro_batches(work.global_batch)
    micro_batch = micro_batch or micro_batch_time(cluster, work, config)
    stage_layers = config.layers_per_stage(model)
    layers_s = m * stage_layers * micro_batch.layer_s
    boundary_bytes = stage_boundary_bytes(work, config)
    boundary_s = exchange_s(cluster, group_of(config, "pp"), boundary_bytes, DIRECT, 1)
    gradients, optimizer = _gradients_and_optimizer_s(cluster, work, config, layers_s)
    return StepTime(
        layers=layers_s,
        head=m * micro_batch.head.device_s,
        host=micro_batch.launch_wait_s(m, stage_layers),
        bubble=(config.pp - 1) * config.chunk_layers(model) * micro_batch.layer_s,
        pipeline=2 * (config.pp - 1) * boundary_s,
        gradients=gradients,
        offload=_offload_s(cluster, work, config, layers_s),
        optimizer=optimizer,
    )


def _gradients_and_optimizer_s(
    cluster: Cluster, work: Workload, config: ParallelConfig, layers_s: float
) -> tuple[float, float]:
    """Gradient exchange and optimizer: measured (all in the second), or the formulas, scaled by
    measured / formula of the closest ZeRO stage and number of ranks."""
    measured = _measured_step(cluster, work, config)
    if measured is not None:
        return 0.0, measured
    gradients = _gradients_s(cluster, work, config, layers_s)
    optimizer = _optimizer_s(cluster, work, config)
    nearest = nearest_step(cluster.steps, config.zero, config.zero_ranks)
    if nearest is None:
        return gradients, optimizer
    zero, ranks = nearest
    profiled = config.replace(zero=zero, ulysses=1, ring=ranks, dp=1)
    formula = _gradients_s(cluster, work, profiled, layers_s)
    formula += _optimizer_s(cluster, work, profiled)
    ratio = (_measured_step(cluster, work, profiled) or 0.0) / formula
    return ratio * gradients, ratio * optimizer


def _measured_step(cluster: Cluster, work: Workload, config: ParallelConfig) -> float | None:
    """Seconds of the optimizer step from the profile; None without one of this ZeRO group."""
    rows = select_rows(cluster.steps, "elements", zero=config.zero, zero_ranks=config.zero_ranks)
    if not rows:
        return None
    return seconds_at(rows, "elements", "seconds", stage_elements(work, config, 0))


def _gradients_s(
    cluster: Cluster, work: Workload, config: ParallelConfig, layers_s: float
) -> float:
    """What the exchange of gradients and parameters adds to the step."""
    return sum(x.added for x in data_parallel_time(cluster, work, config, layers_s))


def _offload_s(cluster: Cluster, work: Workload, config: ParallelConfig, layers_s: float) -> float:
    """Exposed time of copies to host memory and back, both directions at once.

    Hidden copies cost a quarter of what exchanges do (assumed): memory bandwidth, no SMs. Optimizer
    states that wait there are back before the step, which nothing hides.
    """
    states_s = 0.0
    if config.states_on_host:
        states_s = states_bytes(stage_elements(work, config, 0), config)[2]
        states_s /= cluster.host_bytes_per_s
    if not config.offload_ratio:
        return states_s
    layers = config.micro_batches(work.global_batch) * config.layers_per_stage(work.model)
    copied = layers * config.offload_ratio * layer_bytes(work, config)
    copy_s = copied / cluster.host_bytes_per_s
    hidden_s = min(copy_s, layers_s)
    return states_s + max(0.0, copy_s - layers_s) + cluster.contention / 4 * hidden_s


def _optimizer_s(cluster: Cluster, work: Workload, config: ParallelConfig) -> float:
    """Adam reads and writes its 12 bytes, reads a gradient and writes a weight."""
    elements = stage_elements(work, config, 0) / (config.zero_ranks if config.zero else 1)
    return elementwise_s(cluster, elements * (24 + config.grad_bytes + config.param_bytes))


def step_mfu(cluster: Cluster, work: Workload, config: ParallelConfig, step_s: float) -> float:
    """Fraction of the peak that the model's own FLOP reach."""
    tokens = work.global_batch * work.seq_len / config.gpus
    flop = tokens * model_flop_per_token(work.model, work.seq_len, work.documents)
    return mfu(flop / step_s, cluster.peak_flop_per_s)
