"""Seconds of one optimizer step, by component: of a layer, of the exchanges beside it, and of what
layers do not hide. ``search.py`` asks for each configuration, ``answer.py`` for two to compare."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from ds_usp.planner.arguments import Components
from ds_usp.planner.attention_time import AttentionTime, attention_s
from ds_usp.planner.formulas import (
    HiddenExchange,
    bucket_elements,
    chain_traffic,
    elementwise_s,
    exposed,
    full_buckets,
    gemm_s,
    in_buckets,
    input_bytes,
    layer_bytes,
    mlp_share,
    model_flop_per_token,
    recurrent_flop_per_token,
    stage_elements,
    under,
)
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import states_bytes
from ds_usp.planner.models import fc1_width, qkv_width
from ds_usp.planner.parallel_config import ParallelConfig, Workload, exchanges_shards_again
from ds_usp.planner.traffic import (
    COLLECTIVE,
    DIRECT,
    RankGroup,
    exchange_s,
    group_of,
    layer_traffic,
    step_traffic,
)

# ------------------------------------------------------------------ a layer


# Of the peak that kernels of recurrences reach, from a delta layer of Qwen3-Next on one and two
# H100 (scripts/bench/results/recurrence_layer.csv): 115.9 and 67.8 ms at 128K, where 114.3 and 64.0
# were measured; with zigzag 66.5. Other recurrences were not timed.
_RECURRENT_EFFICIENCY = 0.05


@dataclass(frozen=True)
class LayerTime(Components):
    """Seconds of one layer and one micro batch, forward and backward together.

    Args:
        matrices: GEMMs.
        attention, recurrence: kernels of the attention core; of what carries a state instead.
        elementwise: norms, activation functions, merges of partial attention results.
        tp, sp: exposed exchanges.
        recompute: recomputation in backward.
    """

    matrices: float
    attention: float
    recurrence: float
    elementwise: float
    tp: float
    sp: float
    recompute: float


def layer_time(cluster: Cluster, work: Workload, config: ParallelConfig) -> LayerTime:
    """Forward, 2 times its GEMMs and 2.5 times its attention for backward, and recomputation; of
    layers of several kinds their mean."""
    if work.model.kinds:
        parts = [layer_time(cluster, part, config).components().values() for part in work.parts]
        shares = [kind.layers / work.model.layers for kind in work.model.kinds]
        return LayerTime(*(sum(map(mul, shares, each)) for each in zip(*parts, strict=True)))
    not_recomputed = config if exchanges_shards_again(config) else config.replace(recompute="none")
    core, core_backward, rest = _layer_once(cluster, work, not_recomputed)
    scan, scan_backward = (
        _recurrence_s(cluster, work, config, backward=backward) for backward in (False, True)
    )
    mixer_forward = core.total + sum(scan)
    recomputed = 0.0
    if config.recompute == "full":
        recomputed = rest.forward + mixer_forward
    elif config.recompute == "attention":
        recomputed = rest.forward + sum(scan)  # nothing of a recurrence is kept
    elif config.recompute == "attention-only":
        recomputed = mixer_forward
    elif config.recompute == "gemm-last":
        whole = config.replace(mlp_chunks=0)
        saved_less = _unfused_bytes(work, whole) - layer_bytes(work, whole)
        recomputed = elementwise_s(cluster, 2 * max(saved_less, 0.0))
    # The last layer of a group is computed as often as before.
    recomputed *= 2 - 1 / config.checkpoint_layers
    if config.mlp_chunks > 1:
        recomputed += rest.forward * mlp_share(work.model)
    return LayerTime(
        matrices=rest.matrices,
        attention=core.kernel + core_backward.kernel,
        recurrence=scan[0] + scan_backward[0],
        elementwise=rest.elementwise + core.merge + core_backward.merge,
        tp=rest.tp,
        sp=core.exposed + core_backward.exposed + scan[1] + scan_backward[1],
        recompute=recomputed,
    )


def _recurrence_s(
    cluster: Cluster, work: Workload, config: ParallelConfig, *, backward: bool
) -> tuple[float, float]:
    """Return seconds of a layer's recurrent mixer: its kernels, with the maps of pieces on the
    slowest rank, backward 2.5 times as long, as flash kernels; its exchange, hidden by nothing."""
    if work.model.recurrent is None:
        return 0.0, 0.0
    traffic = chain_traffic(work, config)
    flop = recurrent_flop_per_token(work.model, carries=traffic.states > 0)
    flop *= 2.5 if backward else 1
    rate = cluster.peak_flop_per_s * _RECURRENT_EFFICIENCY
    group = RankGroup(config.sp, config.tp)
    states_s = exchange_s(cluster, group, traffic.states, DIRECT, traffic.rounds)
    exchanges_s = states_s + exchange_s(cluster, group, traffic.halo, DIRECT)
    return work.rank_tokens(config) * flop / rate, exchanges_s


@lru_cache(maxsize=1024)
def _layer_once(
    cluster: Cluster, work: Workload, config: ParallelConfig
) -> tuple[AttentionTime, AttentionTime, _NonAttention]:
    """Attention forward and backward, and the rest, without what is recomputed."""
    core = core_backward = AttentionTime(0.0, 0.0, 0.0)
    if work.model.attention:
        core, core_backward = (
            attention_s(cluster, work, config, backward=backward) for backward in (False, True)
        )
    return core, core_backward, _non_attention(cluster, work, config)


class _NonAttention(NamedTuple):
    """Seconds of a layer without its attention core, by component; ``forward``: of them, those of
    the forward pass."""

    matrices: float
    elementwise: float
    tp: float
    forward: float


def _non_attention(cluster: Cluster, work: Workload, config: ParallelConfig) -> _NonAttention:
    """GEMMs (backward has two for each of forward), elementwise kernels, tensor-parallel
    collectives."""
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
    tp, forward = tp_forward.added + tp_backward.added, gemms + elementwise + tp_forward.added
    return _NonAttention(3 * gemms, 3 * elementwise, tp, forward)


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
    reduce-scatters after, forward and backward, and backward gathers once more; all are exposed.
    """
    # Four of these six of backward are posted under products, and count as exposed: layers on 2
    # H200 took 3 to 23 % longer than with all-reduces (`tp_overlap.csv`), by these formulas 7 to 17
    # % if all are exposed and 1 to 4 % if four are hidden; and published throughputs with sharded
    # tokens are 6 % off in the mean, not 10 %.
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


def data_parallel_time(
    cluster: Cluster, work: Workload, config: ParallelConfig, layers_s: float
) -> tuple[HiddenExchange, HiddenExchange]:
    """Return the reduction of gradients and the gathers of parameters in one step.

    ZeRO-3 gathers under the layers, once a direction, and reduces under backward; the other stages
    reduce at the end, or bucket by bucket under backward (ZeRO-2 of every micro batch, else of the
    last), and then gather parameters.

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
        return both * part, parameters
    parameters = exposed(exchange_s(cluster, group, sent.parameters, COLLECTIVE))
    # DeepSpeed's bf16 optimizer, which alone sums gradients of bf16 weights in fp32 under ZeRO-1,
    # reduces all at the end.
    at_end = config.unsharded_grad_reduce and config.zero == 1
    if at_end or not config.overlap_gradients:
        reduce = exchange_s(cluster, group, sent.gradients, COLLECTIVE)
        return exposed(reduce), parameters
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
    return in_buckets(cluster, buckets, one_s) * times, parameters


# ------------------------------------------------------------------ a step


# Bytes that Megatron's cross entropy reads and writes for each logit: to fp32, maximum, difference,
# exponential, sum, quotient, and in backward the product and back to bf16.
_LOSS_BYTES = 6 + 4 + 8 + 8 + 4 + 8 + 8 + 6


@dataclass(frozen=True)
class StepTime(Components):
    """Seconds of one step on the slowest rank. The fields are keys of ``plan --json``.

    Args:
        layers: the layers of all micro batches, recomputation included.
        head: the output head.
        bubble: pipeline fill and drain.
        pipeline: exposed transfers between pipeline stages.
        gradients: exposed exchange of gradients and parameters.
        offload: exposed copies to host memory and back.
        optimizer: Adam.
    """

    layers: float
    head: float
    bubble: float
    pipeline: float
    gradients: float
    offload: float
    optimizer: float


class MicroBatch(NamedTuple):
    """Seconds of one micro batch: a layer forward and backward, and the output head, both."""

    layer: float
    head: float


def micro_batch_time(cluster: Cluster, work: Workload, config: ParallelConfig) -> MicroBatch:
    """Predicted; the same for any dp, pp and ZeRO."""
    layer = layer_time(cluster, work, config).total
    return MicroBatch(layer, head_time(cluster, work, config))


def head_time(cluster: Cluster, work: Workload, config: ParallelConfig) -> float:
    """Seconds of the output head for one micro batch, forward and backward."""
    # A chunked loss takes as long: its additional GEMM costs what fewer passes over the logits save
    # (466.8 ms a step against 466.6, `step_factors.csv`).
    tokens = work.rank_tokens(config)
    logits = tokens * work.model.vocab / config.tp
    loss = elementwise_s(cluster, logits * _LOSS_BYTES)
    return 3 * gemm_s(cluster, tokens, logits * work.model.hidden) + loss


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
    layers_s = m * stage_layers * micro_batch.layer
    # Over a pipeline boundary go hidden states, each direction.
    boundary_s = exchange_s(cluster, group_of(config, "pp"), input_bytes(work, config), DIRECT, 1)
    gradients, parameters = data_parallel_time(cluster, work, config, layers_s)
    return StepTime(
        layers=layers_s,
        head=m * micro_batch.head,
        bubble=(config.pp - 1) * config.chunk_layers(model) * micro_batch.layer,
        pipeline=2 * (config.pp - 1) * boundary_s,
        gradients=gradients.added + parameters.added,
        offload=_offload_s(cluster, work, config, layers_s),
        optimizer=_optimizer_s(cluster, work, config),
    )


def _offload_s(cluster: Cluster, work: Workload, config: ParallelConfig, layers_s: float) -> float:
    """Exposed time of copies to host memory and back, both directions at once. Optimizer states
    that wait there are back before the step, which nothing hides."""
    # Hidden copies cost a quarter of what exchanges do (assumed): memory bandwidth, no SMs.
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
    flop = tokens * model_flop_per_token(work.model, work.seq_len, work.document_lengths)
    return flop / step_s / cluster.peak_flop_per_s
