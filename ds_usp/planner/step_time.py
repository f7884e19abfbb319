"""How long one step takes, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from ds_usp.planner.formulas import layer_bytes, mfu, model_flop_per_token, stage_elements
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.launch_overhead import Job
from ds_usp.planner.layer_time import layer_time, passes_s, product_s
from ds_usp.planner.parallel_config import Split, Workload
from ds_usp.planner.profile_rows import (
    ends_rows,
    host_seconds,
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

    From a profile the embedding, the last norm and the loss are part of it. A loss in chunks takes
    as long: its product more is what its fewer passes over logits save (466.8 ms a step against
    466.6, ``step_factors.csv``).
    """
    measured = _measured_head(cluster, work, split)
    if measured is not None:
        return measured
    found, tp = _head(cluster, work, split), nearest_tp(cluster.ends, work.model, split.tp)
    if tp is None:
        return found
    there = split.but(tp=tp)
    known = _measured_head(cluster, work, there) or Job(0.0)
    return found.scaled(known, _head(cluster, work, there))


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
    passes = passes_s(cluster, logits * _LOSS_BYTES)
    return Job(3 * product_s(cluster, tokens, logits * work.model.hidden) + passes)


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
        cluster, group_of(split, "pp"), stage_boundary_bytes(work, split), DIRECT, 1
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
    there = split.but(zero=zero, ulysses=1, ring=ranks, dp=1)
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
    sent, group = step_traffic(work, split), group_of(split, "zero")
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
    return passes_s(cluster, moved)


def step_mfu(cluster: Cluster, work: Workload, split: Split, step_s: float) -> float:
    """Share of the peak that the model's own FLOP reach."""
    tokens = work.global_batch * work.seq_len / split.gpus
    flop = tokens * model_flop_per_token(work.model, work.seq_len, work.documents)
    return mfu(flop / step_s, cluster.peak_flop_per_s)
