"""Seconds of one optimizer step, by component: of a layer, of the exchanges beside it, and of what
layers do not hide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from ds_usp.planner.attention_time import AttentionTime, attention_s, simulated_pass
from ds_usp.planner.formulas import (
    NOTHING,
    HiddenExchange,
    LaunchedWork,
    bucket_elements,
    chain_traffic,
    elementwise_s,
    exposed,
    full_buckets,
    gemm_s,
    in_buckets,
    layer_bytes,
    mlp_share,
    model_flop_per_token,
    recurrent_flop_per_token,
    stage_elements,
    under,
)
from ds_usp.planner.hardware import (
    Cluster,
    embedding_head_rows,
    layer_rows,
    nearest_step,
    nearest_tp,
    seconds_at,
    select_rows,
)
from ds_usp.planner.memory import states_bytes
from ds_usp.planner.models import fc1_width, qkv_width
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.traffic import (
    COLLECTIVE,
    DIRECT,
    RankGroup,
    exchange_s,
    group_of,
    layer_traffic,
    stage_boundary_bytes,
    step_traffic,
)

# ------------------------------------------------------------------ a layer


_GEMMS = 4  # of a layer: QKV projection, output projection, both of the MLP; a launch each
COMPONENTS = ("matrices", "attention", "recurrence", "elementwise", "tp", "sp", "recompute")
# Of the peak that kernels of recurrences reach, from a delta layer of Qwen3-Next on one and two
# H100 (scripts/bench/results/recurrence_layer.csv): 115.9 and 67.8 ms at 128K, where 114.3 and 64.0
# were measured; with zigzag 66.5. Other recurrences were not timed.
_RECURRENT_EFFICIENCY = 0.05


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer and one micro batch, forward and backward together.

    Args:
        matrices: GEMMs.
        attention, recurrence: kernels of the attention core; of what carries a state instead.
        elementwise: norms, activation functions, merges of partial attention results.
        tp, sp: exposed exchanges.
        recompute: recomputation in backward.
        forward, backward: each direction's time, with the time to launch it; backward with what is
            recomputed.
        measured: all but the attention is from a profile, and is in ``matrices``.
    """

    matrices: float
    attention: float
    recurrence: float
    elementwise: float
    tp: float
    sp: float
    recompute: float
    forward: LaunchedWork
    backward: LaunchedWork
    measured: bool = False

    @property
    def total(self) -> float:
        return sum(self.components().values())

    def components(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in COMPONENTS}


def layer_time(cluster: Cluster, work: Workload, config: ParallelConfig) -> LayerTime:
    """Forward, 2 times its GEMMs and 2.5 times its attention for backward, and recomputation.

    All but the attention core comes from the cluster's profile if such a layer is in it. For a
    layer that was measured at another tensor-parallel degree, the formula is scaled by measured /
    formula at that degree: an estimate must not look faster than a measurement. Of layers of
    several kinds it is the mean, without launch times, which no profile has of them.
    """
    if work.model.kinds:
        parts = [layer_time(cluster, part, config) for part in work.parts]
        shares = [part.layers / work.model.layers for part in work.model.kinds]

        def mean(values: Iterable[float]) -> float:
            return sum(share * value for share, value in zip(shares, values, strict=True))

        components: Any = {name: mean(getattr(x, name) for x in parts) for name in COMPONENTS}
        return LayerTime(
            **components,
            forward=LaunchedWork(mean(part.forward.device_s for part in parts)),
            backward=LaunchedWork(mean(part.backward.device_s for part in parts)),
        )
    core, core_backward, rest = _layer_once(cluster, work, config.replace(recompute="none"))
    attention, attention_backward = (
        LaunchedWork(time.total, time.launch_s).in_launches(time.chunks)
        for time in (core, core_backward)
    )
    if not (attention.launch_s and rest.forward.launch_s):
        attention = attention.without_launch_time()
        attention_backward = attention_backward.without_launch_time()
        rest = rest.without_launch_time()
    scans = [_recurrence_s(cluster, work, config, backward=way) for way in (False, True)]
    if work.model.recurrent:
        attention += LaunchedWork(sum(scans[0]))
        attention_backward += LaunchedWork(sum(scans[1]))
    gemm, gemm_backward = rest.forward.fraction(_GEMMS), rest.backward.fraction(_GEMMS)
    forward = gemm + attention + gemm * (_GEMMS - 1)
    recomputed = NOTHING
    if config.recompute == "full":
        recomputed = forward
    elif config.recompute == "attention":
        recomputed = rest.forward.in_launches(_GEMMS)
        recomputed += LaunchedWork(sum(scans[0]))  # of which nothing is kept
    elif config.recompute == "attention-only":
        recomputed = attention
    elif config.recompute == "gemm-last":
        whole = config.replace(mlp_chunks=0)
        saved_less = _unfused_bytes(work, whole) - layer_bytes(work, whole)
        recomputed = LaunchedWork(elementwise_s(cluster, 2 * max(saved_less, 0.0)))
    if config.checkpoint_layers > 1:  # the last layer of a group is computed as often as before
        recomputed += recomputed.part(1 - 1 / config.checkpoint_layers)
    if config.mlp_chunks > 1:
        recomputed += rest.forward.part(mlp_share(work.model))
    return LayerTime(
        matrices=rest.matrices,
        attention=core.kernel + core_backward.kernel,
        recurrence=scans[0][0] + scans[1][0],
        elementwise=rest.elementwise + core.merge + core_backward.merge,
        tp=rest.tp,
        sp=core.exposed + core_backward.exposed + scans[0][1] + scans[1][1],
        recompute=recomputed.device_s,
        forward=forward,
        backward=recomputed + (gemm_backward * (_GEMMS - 1) + attention_backward + gemm_backward),
        measured=rest.measured,
    )


def _recurrence_s(
    cluster: Cluster, work: Workload, config: ParallelConfig, *, backward: bool
) -> tuple[float, float]:
    """Of a layer's recurrent mixer: its kernels, with the maps of pieces on the slowest rank,
    backward 2.5 times as long, as flash kernels; its exchange, under which nothing runs."""
    if work.model.recurrent is None:
        return 0.0, 0.0
    carries = chain_traffic(work, config).states > 0
    flop = recurrent_flop_per_token(work.model, carries=carries) * (2.5 if backward else 1)
    rate = cluster.peak_flop_per_s * _RECURRENT_EFFICIENCY
    kernels = work.rank_tokens(config) * flop / rate
    return kernels, _chain_exchange_s(cluster, work, config)


def _chain_exchange_s(cluster: Cluster, work: Workload, config: ParallelConfig) -> float:
    sent, group = layer_traffic(work, config), RankGroup(config.sp, config.tp)
    rounds = chain_traffic(work, config).rounds
    states = exchange_s(cluster, group, sent.states, DIRECT, rounds)
    return states + exchange_s(cluster, group, sent.halo, DIRECT)


@lru_cache(maxsize=1024)
def _layer_once(
    cluster: Cluster, work: Workload, config: ParallelConfig
) -> tuple[AttentionTime, AttentionTime, _NonAttention]:
    """Attention forward and backward, and the rest: independent of the recomputation."""
    core = core_backward = AttentionTime(0.0, 0.0, 0.0, 0.0, 0.0)
    if work.model.attention:
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

    def without_launch_time(self) -> _NonAttention:
        forward, backward = self.forward, self.backward
        return replace(
            self, forward=forward.without_launch_time(), backward=backward.without_launch_time()
        )


def _measured_rest(
    cluster: Cluster, work: Workload, config: ParallelConfig
) -> _NonAttention | None:
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
    tokens, model = work.rank_tokens(config), work.model
    alone = model.matrix_elements
    gemms = 0.0
    if experts := model.experts:  # each has its part of the tokens, as if they were divided evenly
        of_experts = experts.per_token * model.expert_elements
        alone -= of_experts
        gemms = gemm_s(cluster, tokens * experts.per_token / experts.count, tokens * of_experts)
    gemms += gemm_s(cluster, tokens, tokens * alone / config.tp)
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


# ------------------------------------------------------------------ tensor parallelism
# The exchanges of a layer, and what its products hide of them.


def tensor_parallel_time(
    cluster: Cluster, work: Workload, config: ParallelConfig
) -> tuple[HiddenExchange, HiddenExchange]:
    """Forward and backward of one layer and one micro batch.

    Each of the two pairs of linear layers all-reduces once a direction; in backward under the
    product of the first layer's weight gradient, as megatron-core and Megatron-DeepSpeed have it.

    With sharded tokens (Megatron's ``--sequence-parallel``) each pair all-gathers before and
    reduce-scatters after, forward and backward, and backward gathers once more. Four of these six
    of backward are posted under products, and count as exposed: layers on 2 H200 took 3 to 23 %
    longer than with all-reduces (``tp_overlap.csv``), by these formulas 7 to 17 % if all are
    exposed and 1 to 4 % if four are hidden; and published throughputs with sharded tokens are 6 %
    off in the mean, not 10 %.
    """
    if config.tp == 1:
        return HiddenExchange(), HiddenExchange()
    traffic, group = layer_traffic(work, config), group_of(config, "tp")
    if config.tp_sequence:
        forward = exchange_s(cluster, group, traffic.tp_forward, COLLECTIVE, 4)
        backward = exchange_s(cluster, group, traffic.tp_backward, COLLECTIVE, 6)
        return exposed(forward), exposed(backward)
    tokens, model = work.rank_tokens(config), work.model
    one = exchange_s(cluster, group, traffic.tp_forward / 2, COLLECTIVE, 2)
    hidden = HiddenExchange()
    for width in (qkv_width(model), fc1_width(model)):
        product = gemm_s(cluster, tokens, tokens * model.hidden * width / config.tp)
        hidden += under(cluster, one, product)
    return exposed(2 * one), hidden


# ------------------------------------------------------------------ data parallelism
# The exchange of gradients and parameters, and what the layers hide of it.


class DataParallelTime(NamedTuple):
    """Of one step.

    Attributes:
        gradients: their reduction.
        parameters: their all-gathers.
    """

    gradients: HiddenExchange
    parameters: HiddenExchange


def reduces_under_backward(config: ParallelConfig) -> bool:
    """Whether gradients are reduced under backward, not at its end. DeepSpeed's bf16 optimizer,
    which alone sums gradients of bf16 weights in fp32 under ZeRO-1, reduces all at the end."""
    at_end = config.unsharded_grad_reduce and config.zero == 1
    return config.zero == 3 or (config.overlap_gradients and not at_end)


def data_parallel_time(
    cluster: Cluster, work: Workload, config: ParallelConfig, layers_s: float
) -> DataParallelTime:
    """ZeRO-3 gathers under the layers, once a direction, and reduces under backward; the other
    stages reduce at the end, or bucket by bucket under backward (ZeRO-2 of every micro batch, else
    of the last), and then gather parameters.

    Args:
        layers_s: of all micro batches, both directions.
    """
    sent, group = step_traffic(work, config), group_of(config, "zero")
    micro_batches = config.micro_batches(work.global_batch)
    backward_s = layers_s * 2 / 3
    if config.zero == 3:
        messages = micro_batches * work.model.layers
        gather = exchange_s(cluster, group, sent.parameters / 2, COLLECTIVE, messages)
        reduce = exchange_s(cluster, group, sent.gradients, COLLECTIVE, messages)
        both = under(cluster, gather + reduce, backward_s)
        part = reduce / (gather + reduce) if reduce else 0.0
        parameters = under(cluster, gather, layers_s / 3) + both * (1 - part)
        return DataParallelTime(both * part, parameters)
    parameters = exposed(exchange_s(cluster, group, sent.parameters, COLLECTIVE))
    if not reduces_under_backward(config):
        reduce = exchange_s(cluster, group, sent.gradients, COLLECTIVE)
        return DataParallelTime(exposed(reduce), parameters)
    model, layers = work.model, config.layers_per_stage(work.model)
    elements = bucket_elements(model, config.tp, config.zero)
    filled = full_buckets(model, config.tp, layers, elements)
    times = micro_batches if config.zero == 2 else 1
    bytes_each = sent.gradients / times / sum(elements for _, elements in filled)
    one_s = backward_s / micro_batches
    buckets = (
        (part * one_s, exchange_s(cluster, group, elements * bytes_each, COLLECTIVE))
        for part, elements in filled
    )
    return DataParallelTime(in_buckets(cluster, buckets, one_s) * times, parameters)


# ------------------------------------------------------------------ a step


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
        return sum(self.components().values())

    def components(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Times of one micro batch: a layer forward and backward, and the output head, both."""

    forward: LaunchedWork
    backward: LaunchedWork
    head: LaunchedWork

    @property
    def layer_s(self) -> float:
        return self.forward.device_s + self.backward.device_s


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
    rows = embedding_head_rows(cluster.embedding_heads, work.model, config.tp)
    if not rows:
        return None
    return LaunchedWork.from_rows(rows, work.rank_tokens(config), "tokens", "seconds", "host_s")


def _predicted_head(cluster: Cluster, work: Workload, config: ParallelConfig) -> LaunchedWork:
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
    launched = micro_batch.forward * stage_layers + micro_batch.head
    launched += micro_batch.backward * stage_layers
    boundary_bytes = stage_boundary_bytes(work, config)
    boundary_s = exchange_s(cluster, group_of(config, "pp"), boundary_bytes, DIRECT, 1)
    gradients, optimizer = _gradients_and_optimizer_s(cluster, work, config, layers_s)
    return StepTime(
        layers=layers_s,
        head=m * micro_batch.head.device_s,
        host=(launched * m).wait_s,
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
    rows = select_rows(cluster.steps, "elements", zero=config.zero, zero_ranks=config.zero_ranks)
    if not rows:
        return None
    return seconds_at(rows, "elements", "seconds", stage_elements(work, config, 0))


def _gradients_s(
    cluster: Cluster, work: Workload, config: ParallelConfig, layers_s: float
) -> float:
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
    return flop / step_s / cluster.peak_flop_per_s


# ------------------------------------------------------------------ communication of a step
# By kind: its bytes and seconds, and what of these no kernel hides.


# Recomputations whose backward exchanges again what forward of attention, of the products did.
_ATTENTION_AGAIN = ("attention-only", "full")
_PRODUCTS_AGAIN = ("attention", "full")
_RING = ("ring_kv", "ring_dkv", "ring_kv_outer", "ring_dkv_outer")


@dataclass(frozen=True, slots=True)
class StepExchange:
    """One kind of communication in one step, on one rank in the mean.

    Args:
        kind: as ``--usp-report-communication`` names it.
        sent_bytes: to other ranks, or to host memory and back.
        seconds: in which one is in flight.
        exposed: of these, those in which no kernel runs.
    """

    kind: str
    sent_bytes: float
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        return max(0.0, self.seconds - self.exposed)


def step_communication(
    cluster: Cluster, work: Workload, config: ParallelConfig, step: StepTime
) -> tuple[StepExchange, ...]:
    """The kinds that a step has, of the formulas that price it.

    Args:
        step: its time.
    """
    layers = config.micro_batches(work.global_batch) * config.layers_per_stage(work.model)
    rows = [*_attention(cluster, work, config)]
    sent = step_traffic(work, config)
    reduction, gather = data_parallel_time(cluster, work, config, step.layers)
    rows += [
        _row("gradient reduction", sent.gradients, reduction),
        _row("parameter gather", sent.parameters, gather),
    ]
    traffic = layer_traffic(work, config)
    forward, backward = tensor_parallel_time(cluster, work, config)
    times = 2 if config.recompute in _PRODUCTS_AGAIN else 1
    both = (forward * times + backward) * layers
    rows.append(
        _row("tensor parallel", layers * (times * traffic.tp_forward + traffic.tp_backward), both)
    )
    if config.pp > 1:
        boundary = stage_boundary_bytes(work, config)
        transfers = 2 * config.micro_batches(work.global_batch) * config.virtual_stages(work.model)
        one = exchange_s(cluster, group_of(config, "pp"), boundary, DIRECT, 1)
        exposed = min(step.pipeline, transfers * one)
        rows.append(StepExchange("pipeline", transfers * boundary, transfers * one, exposed))
    if config.offload_ratio:
        copied = layers * config.offload_ratio * layer_bytes(work, config)
        seconds = copied / cluster.host_bytes_per_s
        exposed = max(0.0, seconds - step.layers)
        rows.append(StepExchange("copies to and from the host", 2 * copied, seconds, exposed))
    return tuple(row for row in rows if row.seconds > 0)


def _row(kind: str, sent_bytes: float, time: HiddenExchange) -> StepExchange:
    return StepExchange(kind, sent_bytes, time.seconds, time.exposed)


def _attention(cluster: Cluster, work: Workload, config: ParallelConfig) -> Iterator[StepExchange]:
    """All-to-alls and the ring's exchanges, as the simulation of the schedule has them; where a
    profile has calls, as much slower as these are; of layers that carry a state its exchange."""
    if config.sp == 1:
        return
    of_kinds = [
        row
        for part in work.parts
        for row in (
            *_attention_of_layers(cluster, part, config),
            *_states_of_layers(cluster, part, config),
        )
    ]
    for kind in dict.fromkeys(row.kind for row in of_kinds):
        rows = [row for row in of_kinds if row.kind == kind]
        sums = (sum(map(attrgetter(n), rows)) for n in ("sent_bytes", "seconds", "exposed"))
        yield StepExchange(kind, *sums)


def _states_of_layers(
    cluster: Cluster, work: Workload, config: ParallelConfig
) -> Iterator[StepExchange]:
    if work.model.recurrent is None:
        return
    times = config.micro_batches(work.global_batch) * work.model.layers
    times *= 3 if config.recompute in _PRODUCTS_AGAIN else 2  # forward, backward, and again
    traffic, seconds = layer_traffic(work, config), _chain_exchange_s(cluster, work, config)
    sent = traffic.states + traffic.halo
    yield StepExchange("states and halos", times * sent, times * seconds, times * seconds)


def _attention_of_layers(
    cluster: Cluster, work: Workload, config: ParallelConfig
) -> Iterator[StepExchange]:
    if not work.model.attention:
        return
    layers = config.micro_batches(work.global_batch) * config.layers_per_stage(work.model)
    traffic, again = layer_traffic(work, config), 2 if config.recompute in _ATTENTION_AGAIN else 1
    sums = {"all-to-all": [0.0, 0.0], "ring": [0.0, 0.0]}
    for backward, times in ((False, again), (True, 1)):
        timeline = simulated_pass(cluster, work, config, backward=backward).timeline
        total_s = attention_s(cluster, work, config, backward=backward).total
        slower = times * total_s / timeline.total
        for kind, of_kind in (("all-to-all", ("all_to_all",)), ("ring", _RING)):
            sums[kind][0] += slower * sum(map(timeline.busy, of_kind))
            sums[kind][1] += slower * sum(timeline.exposed.get(x, 0.0) for x in of_kind)
    ulysses = traffic.ulysses * (again + 1)
    ring = traffic.ring_forward * again + traffic.ring_backward
    for kind, sent in (("all-to-all", ulysses), ("ring", ring)):
        seconds, exposed = sums[kind]
        yield StepExchange(kind, layers * sent, layers * seconds, layers * exposed)
