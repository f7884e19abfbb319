"""Peak bytes of one GPU (``max_memory_allocated``), by component; asked for each configuration of a
search and each length of ``max-length``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from ds_usp.geometry.heads import HeadSplit
from ds_usp.planner.arguments import Components
from ds_usp.planner.formulas import (
    SCAN_CHUNK,
    bucket_elements,
    head_elements,
    input_bytes,
    layer_bytes,
    mlp_backward_bytes,
    saved_virtual_stages,
    stage_elements,
)
from ds_usp.planner.models import layer_matrices
from ds_usp.planner.parallel_config import ParallelConfig, Workload, exchanges_shards_again
from ds_usp.planner.traffic import call_size, kv_features, layer_traffic

# Of DeepSpeed's buffered_allreduce_fallback, which no setting changes; a larger tensor goes alone,
# as it lies.
_BUCKET_ELEMENTS = 500_000_000


@dataclass(frozen=True)
class Memory(Components):
    """Bytes on one rank of one pipeline stage at its peak.

    Args:
        weights, gradients, optimizer: ZeRO's shards; gradients with the bucket of ZeRO-3, and the
            copies of the step, where that is the peak.
        activations: saved for backward, less what is offloaded.
        logits: of the last stage, and their gradient's fp32; of a loss in chunks what its backward
            has; 0 where a layer's backward is worse.
        exchange: buffers of one attention call.
        transient: what lives while one layer is computed: gradients in its MLP, a recomputed layer,
            gathered weights; where the loss is worse, these alone, and no exchange.
        workspace: what no formula counts.
        stage: which pipeline stage it is.
        offloaded: bytes of activations in host memory, not part of the total.
        host_states: bytes of optimizer states there, all the time, nor part of it.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    exchange: float
    transient: float
    workspace: float
    stage: int
    offloaded: float
    host_states: float = 0.0

    apart: ClassVar = ("stage", "offloaded", "host_states")

    @property
    def host(self) -> float:
        return self.offloaded + self.host_states

    @property
    def formula(self) -> float:
        """Bytes that have a formula: the total without the workspace, the one fitted number."""
        return self.total - self.workspace


@dataclass(frozen=True, slots=True)
class ModelWideBytes:
    """Counts what every stage has in common, in bytes, whatever is offloaded."""

    per_layer: float
    layer_input: float
    logits: float
    exchange: float
    transient: float
    gathered_at_loss: float
    bucket: float


def model_wide_bytes(work: Workload, config: ParallelConfig) -> ModelWideBytes:
    """The bytes of :func:`memory` that do not depend on the offload ratio."""
    logits = logits_bytes(work, config)
    exchange, transient = _recomputed_layer_bytes(work, config)
    return ModelWideBytes(
        per_layer=layer_bytes(work, config),
        layer_input=input_bytes(work, config),
        logits=logits,
        exchange=exchange,
        transient=transient + gathered_bytes(work, config, at_loss=False),
        gathered_at_loss=gathered_bytes(work, config, at_loss=True) if logits else 0.0,
        bucket=bucket_bytes(work, config),
    )


def _recomputed_layer_bytes(work: Workload, config: ParallelConfig) -> tuple[float, float]:
    """Buffers of exchanges, and what else lives in the backward pass of one layer beside what
    layers save, at the worse moment: that of the MLP or of a recurrence or, where layers are
    recomputed, of attention; of layers of several kinds, those of the worst.
    """
    if work.model.kinds:
        return max((_recomputed_layer_bytes(part, config) for part in work.parts), key=sum)
    exchange, transient = exchange_bytes(work, config), 0.0
    if config.recompute in ("full", "attention"):  # what these save is counted already
        transient = layer_bytes(work, config.replace(recompute="none")) - layer_bytes(work, config)
    at_mlp = transient + max(mlp_backward_bytes(work, config), recurrent_peak(work, config))
    if config.recompute not in ("full", "attention"):
        # An exchange and the MLP's backward pass are not at the same time.
        return exchange, max(0.0, at_mlp - exchange)
    if not work.model.attention:
        return 0.0, at_mlp
    peak = attention_peak(work, config)
    kept = 0.0
    if config.recompute == "attention":
        kept = layer_bytes(work, config) - input_bytes(work, config)
    at_attention = peak.held + peak.kernel + peak.buffers - kept
    at_norm = eager_norm_peak(work, config) - kept
    if max(at_mlp, at_norm) > at_attention:
        return 0.0, max(at_mlp, at_norm)
    return peak.buffers, at_attention - peak.buffers


def memory(
    work: Workload,
    config: ParallelConfig,
    workspace_bytes: float = 0.0,
    shared: ModelWideBytes | None = None,
) -> Memory:
    """Memory of the fullest pipeline stage; of host memory, that of the stage that takes the most.

    Args:
        shared: where it is known: :func:`model_wide_bytes`.
    """
    shared = shared or model_wide_bytes(work, config)
    stages = [stage_memory(work, config, x, workspace_bytes, shared) for x in _stages(config)]
    fullest = max(stages, key=lambda needed: needed.total)
    most = max(stages, key=lambda needed: needed.host)
    if most.host == fullest.host:
        return fullest
    return replace(fullest, offloaded=most.offloaded, host_states=most.host_states)


def _stages(config: ParallelConfig) -> tuple[int, ...]:
    """The pipeline stages that can need the most: most in flight, embedding, head."""
    return tuple(sorted({0, min(1, config.pp - 1), config.pp - 1}))


def stage_memory(
    work: Workload,
    config: ParallelConfig,
    stage: int,
    workspace_bytes: float = 0.0,
    shared: ModelWideBytes | None = None,
) -> Memory:
    """Memory of one pipeline stage: the larger of its peaks in backward and at the step.

    States: 2 bytes a weight, ``grad_bytes`` a gradient, 12 for fp32 weight and Adam's moments; ZeRO
    shards them over dp x sp (Rajbhandari et al., 1910.02054). Offload of a fraction ``a`` leaves
    ``n (1 - a) + min(4, n) a`` of n chunks: the current one, the one in offload and the two in
    prefetch stay (it reproduces Megatron-Kwai's figure 7); of layers two stay, the current one and
    the one in transfer (``ds_usp.memory.Offload``, counted in ``tests/unit/test_offload.py``).

    Args:
        shared: where it is known: :func:`model_wide_bytes`.
    """
    # The peak is at the loss or in a layer's backward: the logits are freed before a layer's
    # exchange buffers and recomputed activations are allocated, so only the larger of the two
    # counts. Or it is at the step, when activations are freed, gradients are copied, and states are
    # back that wait in host memory else: a later step, as the first has no moments of Adam yet.
    shared = shared or model_wide_bytes(work, config)
    elements = stage_elements(work, config, stage)
    weights, gradients, optimizer = states_bytes(elements, config)
    saved, stays, on_host = _saved_bytes(work, config, stage, shared)
    resident = saved * (1 - config.offload_ratio) + stays * config.offload_ratio
    offloaded = on_host * config.offload_ratio
    host_states = optimizer if config.states_on_host else 0.0
    logits = shared.logits if stage == config.pp - 1 else 0.0
    gradients += shared.bucket
    accumulated = gradients
    if config.fsdp2 and config.micro_batches(work.global_batch) == 1:
        accumulated = 0.0  # none is there when the backward pass begins
    copies = step_bytes(work, elements, config)
    if config.unsharded_grad_reduce and config.zero == 1 and config.zero_ranks > 1:
        # Of all gradients while they are all-reduced: in the parameters' dtype, and as one flat
        # tensor, which DeepSpeed makes of what one of its buckets holds.
        flat = config.grad_bytes if elements <= _BUCKET_ELEMENTS else 0
        copies = elements * (config.param_bytes + flat) + copies
    at_layer, at_loss = shared.exchange + shared.transient, logits + shared.gathered_at_loss
    at_end = fsdp2_root_bytes(work, config)
    if gradients + at_end > accumulated + resident + max(at_loss, at_layer):
        nothing = (0.0, 0.0, 0.0, at_end)
        states = (weights, gradients, optimizer)
        return Memory(*states, *nothing, workspace_bytes, stage, offloaded, host_states)
    if copies + host_states > resident + max(at_loss, at_layer):
        states = (weights, gradients + copies, optimizer)
        nothing = (0.0, 0.0, 0.0, 0.0)
        return Memory(*states, *nothing, workspace_bytes, stage, offloaded, host_states)
    peak_at_loss = at_loss > at_layer
    return Memory(
        weights=weights,
        gradients=accumulated,
        optimizer=optimizer - host_states,
        activations=resident,
        logits=logits if peak_at_loss else 0.0,
        exchange=0.0 if peak_at_loss else shared.exchange,
        transient=shared.gathered_at_loss if peak_at_loss else shared.transient,
        workspace=workspace_bytes,
        stage=stage,
        offloaded=offloaded,
        host_states=host_states,
    )


def _saved_bytes(
    work: Workload, config: ParallelConfig, stage: int, shared: ModelWideBytes
) -> tuple[float, float, float]:
    """Activations that are saved at the peak; those of them that stay on the GPU if all are
    offloaded; and the most that are then in host memory, blocks in transfer too.

    With K layers a checkpoint the inputs of groups of K are saved, and in a group's backward pass
    those of its other layers (``ds_usp.memory.LayerMemory``).
    """
    # layers: of a virtual stage; saved: virtual stages of micro batches in flight.
    layers, saved = config.chunk_layers(work.model), saved_virtual_stages(work, config, stage)
    group = min(config.checkpoint_layers, layers)
    if group > 1:
        groups = saved * math.ceil(layers / group)
        inputs, kept = shared.layer_input, shared.per_layer - shared.layer_input
        everything = (groups + group - 1) * inputs + saved * layers * kept
        # What attention has stored comes back for a whole group at once.
        stays = (min(2, groups) + min(2, group - 1)) * inputs + group * kept
        offloaded = _offloaded_inputs(layers, group, saved) * inputs
        # At the end of the forward pass all layers' results of attention but the last one's are
        # on the host; when a group's inputs are computed again, its own are back.
        at_the_end = (groups - (layers % group == 1)) * inputs + (saved * layers - 1) * kept
        in_backward = offloaded + (saved * layers - group) * kept
        return everything, stays, max(at_the_end, in_backward)
    if config.offload_unit == "chunk":
        units, resident, unit_bytes = saved, min(4, saved), layers * shared.per_layer
        offloaded = units - resident
    else:
        units, unit_bytes = saved * layers, shared.per_layer
        resident, offloaded = min(2, units), units - 1
    return units * unit_bytes, resident * unit_bytes, offloaded * unit_bytes


def _offloaded_inputs(layers: int, group: int, saved: int) -> int:
    """Inputs of layers in host memory, at most: those of all groups when the forward pass ends; or
    those of the groups before the one in backward, with the inputs of its own layers but three
    (``tests/unit/test_recomputation.py``).

    Args:
        group: layers of a checkpoint, at least two.
        saved: micro batches in flight.
    """
    groups = math.ceil(layers / group)
    last = layers - (groups - 1) * group
    before = saved * groups
    at_the_end = before - (last == 1)  # the last layer's input is not copied
    in_backward = before - 1 + max(0, last - 3)
    in_a_whole_group = before - 2 + max(0, group - 3) if groups > 1 else 0
    return max(at_the_end, in_backward, in_a_whole_group)


def states_bytes(elements: float, config: ParallelConfig) -> tuple[float, float, float]:
    """Weights, gradients and optimizer states of so many elements on one rank, after they are
    sharded; FSDP2 updates its shards of the weights and has no copy of them."""
    ranks = config.zero_ranks
    if config.fsdp2:
        shard = elements * (2 if config.bf16_states else 4) / ranks
        return shard, shard, 2 * shard
    return (
        elements * config.param_bytes / (ranks if config.zero == 3 else 1),
        elements * config.grad_bytes / (ranks if config.zero >= 2 else 1),
        elements * 12 / (ranks if config.zero >= 1 else 1),
    )


def logits_bytes(work: Workload, config: ParallelConfig) -> float:
    """Count what the loss holds, tokens sharded by sp and the vocabulary by tp: logits in bf16, the
    loss's copy in fp32, and the saved inputs of the last norm and the head.

    With the loss in chunks there are no logits, but the gradient of the head: in fp32, the same
    times the gradient of the loss, and that in bf16; the input of the last norm, its output's
    gradient, and this times the gradient of the loss. A chunk's logits are before that, and less.
    """
    # In chunks, measured on 2 H100, 65,536 tokens a rank: 6.46 GiB, the formula says 6.39.
    model, tokens = work.model, work.rank_tokens(config)
    table = model.padded_vocab(config.tp) / config.tp
    inputs = tokens * model.hidden * config.param_bytes / (config.tp if config.tp_sequence else 1)
    if config.fused_loss:
        return table * model.hidden * (4 + 4 + config.param_bytes) + 3 * inputs
    return tokens * table * (config.param_bytes + 4) + 2 * inputs


def exchange_bytes(work: Workload, config: ParallelConfig) -> float:
    """Buffers of one attention call with one head chunk.

    Ulysses: send and receive buffers of q, k, v. Ring: K/V send buffer, two K/V receive buffers,
    dK/dV send and receive buffers. Layers with a state: send and receive buffers of states, halos.
    """
    model, e = work.model, config.param_bytes
    sequence = config.micro_batch * work.seq_len
    q, kv = model.q_width / config.tp, kv_features(work, config)
    total = 0.0
    if config.ulysses > 1:
        total += 2 * sequence / config.ring * (q / config.ulysses + 2 * kv) * e
    if config.ring > 1:
        total += 5 * 2 * sequence / config.ring * kv * e
    sent = layer_traffic(work, config)
    return total + 2 * (sent.states + sent.halo)


def offload_needed(
    work: Workload,
    config: ParallelConfig,
    budget_bytes: float,
    workspace: float,
    shared: ModelWideBytes | None = None,
) -> float:
    """The smallest offload ratio with which all fits into ``budget_bytes`` of a GPU, ``workspace``
    bytes among them, in closed form; more than 1: none does.

    Activations are linear in the ratio, so the worst of the stages decides. What the optimizer's
    step needs no ratio changes.
    """
    worst, plain = 0.0, config.replace(offload_ratio=0.0)
    shared = shared or model_wide_bytes(work, config)
    for stage in _stages(config):
        over = stage_memory(work, plain, stage, workspace, shared).total - budget_bytes
        if over > 0:
            saved, stays, _ = _saved_bytes(work, config, stage, shared)
            # 2, more than 1: nothing can be offloaded, or with all offloaded it does not fit.
            worst = max(worst, over / (saved - stays) if saved > stays else 2.0)
            offloaded = config.replace(offload_ratio=1.0)
            if stage_memory(work, offloaded, stage, workspace, shared).total > budget_bytes:
                worst = max(worst, 2.0)
    return worst


def with_offload(
    work: Workload,
    config: ParallelConfig,
    budget_bytes: float,
    workspace: float,
    shared: ModelWideBytes | None = None,
) -> tuple[ParallelConfig, bool]:
    """The config with the ratio of :func:`offload_needed`, 0 or 1 % to 1, and whether it fits."""
    ratio = offload_needed(work, config, budget_bytes, workspace, shared)
    rounded = max(0.01, math.ceil(ratio * 1000) / 1000) if ratio else 0.0
    return config.replace(offload_ratio=min(1.0, rounded)), ratio <= 1


# ------------------------------------------------------------------ attention's peak
# What lives in the backward pass of attention, of a layer that is recomputed.


class AttentionPeak(NamedTuple):
    """Bytes on one rank, of one micro batch.

    Attributes:
        held: what a layer has during all of it: the gradients of its output and of what attention's
            branch is added to; the norm's output; the attention output with its log-sum-exp and its
            gradient; without Ulysses queries, keys and values that a layer saves; on one rank their
            gradients, too.
        buffers: of exchanges, and partial gradients.
        kernel: sums in fp32 of FlashAttention's backward kernel: dQ, and with grouped heads dK and
            dV (``dq_accum`` in its sources, versions 2 to 4). Other kernels have none.
    """

    held: float
    buffers: float
    kernel: float


def attention_peak(work: Workload, config: ParallelConfig) -> AttentionPeak:
    """The backward pass of a layer's attention whose forward pass has run again.

    Letters of comments: h hidden, q and k features of all queries and all keys; a and e those of
    the largest head chunk: of its queries, and of its keys and values; b and f those of the largest
    of the others; of a token on one rank. A call has as many chunks as ``Tuning`` takes by default,
    on links of a node.
    """
    # Counted on a layer of Megatron, operator by operator, with Ulysses and on one rank
    # (`tests/megatron/test_trainer_peak.py` at commit 99ef262f); the ring's numbers are fitted to
    # such counts: up to 4 % too high. Where both degrees are above 1 the whole is 7 to 8 % too high
    # in two counts. Where backward exchanges shards again: counted by the allocator on CPUs, 2 and
    # 4 Ulysses ranks, 8 and 16 heads in 1 to 4 chunks: 13 % too low to 9 % too high.
    model, tp = work.model, config.tp
    hidden = input_bytes(work, config) / config.param_bytes
    tokens = work.rank_tokens(config)
    copies = max(1.0, config.ulysses * tp / model.kv_heads)
    q, kv = model.q_width / tp, 2 * model.kv_width / tp
    parts = _chunk_parts(work, config)
    (a, e), *others = ((part_q * q, part_kv * kv * copies) for part_q, part_kv in parts)
    b, f = others[0] if others else (0.0, 0.0)
    if config.ulysses > 1:
        features = 2 * q  # the output and its gradient
        if exchanges_shards_again(config):
            # Recomputed, and while a chunk returns results; its gradients, sent, received; the next
            # chunk's tensors, sent, received; returns. Or the first chunk's tensors arrive.
            next_chunk = 2 * (3 * b + f) + (2 if len(parts) > 2 else 1) * (b + f)
            buffers = q + kv + max(q + kv + 3 * (a + e) + next_chunk, 2 * (3 * a + e))
        else:
            # Saved, results; the kernel's gradients, sent, received; a return.
            buffers = 2 * (q + kv * copies) + 3 * (a + e) + b + f
        buffers += 3 * kv * copies if config.ring > 1 else 0.0
    else:
        # A copy of grouped queries, beside the projection's output that they are a part of.
        features = 3 * q + kv + (q if model.kv_heads < model.heads else 0.0)
        gradients = q + kv
        if config.ring > 1:  # sums of what ranks return
            in_flight = 2 * a + 3.5 * e + (2 * b + 3.5 * f) * (0.5 if len(parts) == 2 else 1)
            buffers = gradients + in_flight
        else:
            features, buffers = features + gradients, 0.0
    kernel = 4 * tokens * (a + (e if model.kv_heads < model.heads else 0.0))
    lse = 4.0 * model.heads / tp
    return AttentionPeak(
        (3 * hidden + tokens * features) * config.param_bytes + tokens * lse,
        tokens * buffers * config.param_bytes,
        kernel,
    )


def eager_norm_peak(work: Workload, config: ParallelConfig) -> float:
    """Bytes that live in the backward pass of the norm before attention, operator by operator in
    fp32, of a layer that is recomputed: the last of the layer, with what a checkpoint has not
    released. 0 where norms are fused.
    """
    # Listed at the peak of a step of Qwen3 on 2 CPU ranks: seven tensors of hidden features in fp32
    # (the input, its square, the gradients of what is made of them), two in bf16; queries and keys
    # of their norms in fp32 and bf16; attention's output by heads and by tokens; with Ulysses what
    # its first exchange has received.
    model, tokens = work.model, work.rank_tokens(config)
    if not config.eager_norms or model.biases or not model.attention:
        return 0.0
    hidden, q, kv = model.hidden, model.q_width, 2 * model.kv_width
    features: float = 7 * 4 * hidden + 2 * 2 * hidden + 2 * 2 * q
    features += (4 + 2) * (q + kv / 2) if model.qk_norm else 0
    features += 2 * (q + kv) if config.ulysses > 1 else 0
    return tokens * features


def recurrent_peak(work: Workload, config: ParallelConfig) -> float:
    """Bytes that live in the backward pass of a recurrent mixer, beside what the layer saves: the
    gradients of its output, of what its product and its convolution made; the states before its
    chunks, computed again, and their gradients (flash-linear-attention, mamba_ssm). Not measured.
    """
    mixer, tokens = work.model.recurrent, work.rank_tokens(config)
    if mixer is None:
        return 0.0
    of_chunks = 2 * mixer.state_elements / SCAN_CHUNK
    features = mixer.into + mixer.channels + 2 * mixer.out + of_chunks
    return 2 * input_bytes(work, config) + tokens * features * config.param_bytes


def _chunk_parts(work: Workload, config: ParallelConfig) -> list[tuple[float, float]]:
    """Return the fractions of all ranks' query heads and of their key/value heads (with copies) in
    each head chunk, the largest first."""
    model = work.model
    split = HeadSplit(model.heads // config.tp, model.kv_heads // config.tp, config.ulysses)
    # Links between nodes are slower, and might have more chunks: this has no cluster to ask.
    count = call_size(work, config, split, True).num_chunks() if config.sp > 1 else 1
    chunks = [split.chunk(count, index) for index in range(count)]

    def heads(of_ranks: tuple[tuple[int, int], ...]) -> int:
        return sum(stop - first for first, stop in of_ranks)

    keys = max(split.kv_heads, config.ulysses)
    parts = [(heads(x.queries) / split.heads, heads(x.keys) / keys) for x in chunks]
    return sorted(parts, reverse=True)


# ------------------------------------------------------------------ ZeRO-3
# What DeepSpeed (0.19.8, `runtime/zero/stage3.py`) holds on a GPU beside its shards. Counted on
# H200s by the stacks that allocated what was alive at a step's peak, and on CPUs
# (`tests/megatron/test_trainer_zero3.py` at commit 99ef262f).


LIVE_ELEMENTS = 1_000_000_000  # its stage3_max_live_parameters
SUB_GROUP_ELEMENTS = 1_000_000_000  # its sub_group_size, of a rank's shards


def bucket_bytes(work: Workload, config: ParallelConfig) -> float:
    """The buffer in which gradients are reduced, which is there all the time; they are reduced in
    fp32 where a sequence is on several ranks, else in the parameters' dtype. 0 but in ZeRO-3."""
    if config.zero != 3 or config.fsdp2:
        return 0.0
    element = 4 if config.sp > 1 else config.param_bytes
    return float(element * bucket_elements(work.model, config.tp, config.zero))


def gathered_bytes(work: Workload, config: ParallelConfig, *, at_loss: bool) -> float:
    """Bytes of gathered parameters, ``at_loss`` or in a layer's backward pass, of a step but the
    first one, which gathers none ahead. 0 but in ZeRO-3, and on one rank.
    """
    # Ahead of their use they are gathered until LIVE_ELEMENTS are there, the last one whole; when a
    # layer runs backward the output projection's are gone, and a gradient that waits for its
    # reduction is where its parameter was.
    if config.zero != 3 or config.zero_ranks == 1:
        return 0.0
    if config.fsdp2:
        return _gathered_by_fsdp2(work, config, at_loss=at_loss)
    elements = stage_elements(work, config, 0)
    if not at_loss:
        elements -= head_elements(work, config)
    matrices = max(max(layer_matrices(part)) for part in work.model.parts) / config.tp
    largest = max(_table_elements(work, config), matrices)
    return min(elements, LIVE_ELEMENTS + largest) * config.param_bytes


def _gathered_by_fsdp2(work: Workload, config: ParallelConfig, *, at_loss: bool) -> float:
    """Return the bytes that are whole on a rank in bf16 under FSDP2, with a unit a layer: the
    tables of the model from the first pass to the last, and a layer. In a layer's backward pass
    also the next one, which is gathered ahead, the layer's gradients, and the head's, which wait
    for the model's."""
    table = _table_elements(work, config)
    layer = max(sum(layer_matrices(part)) for part in work.model.parts)
    tables = table * (1 if work.model.tied else 2)
    whole = tables + layer if at_loss else tables + 3 * layer + table
    return whole * config.param_bytes


def fsdp2_root_bytes(work: Workload, config: ParallelConfig) -> float:
    """Return the bytes that live at the end of the backward pass under FSDP2: whole tables, their
    gradients in bf16, and these once more in the dtype of the reduction. 0 elsewhere."""
    if not config.fsdp2:
        return 0.0
    tables = _table_elements(work, config) * (1 if work.model.tied else 2)
    return tables * (2 * config.param_bytes + (2 if config.bf16_states else 4))


def step_bytes(work: Workload, elements: float, config: ParallelConfig) -> float:
    """The optimizer's step, one sub-group after another: a copy of the gradients in fp32 as one
    flat tensor. A fused optimizer allocates nothing; torch's AdamW that is not fused as much again.
    0 but in ZeRO-3. Parameters join a sub-group until it has :data:`SUB_GROUP_ELEMENTS`, the last
    one whole; the largest sub-group counts.

    Args:
        elements: of the parameters of a stage, before they are sharded.
    """
    if config.zero != 3 or config.fsdp2:
        return 0.0
    shard = elements / config.zero_ranks
    if shard <= SUB_GROUP_ELEMENTS:
        return 4.0 * shard
    largest = group = 0.0
    for size in _matrices(work, config):
        group += size / config.zero_ranks
        if group >= SUB_GROUP_ELEMENTS:
            largest, group = max(largest, group), 0.0
    return 4.0 * max(largest, group)


def _matrices(work: Workload, config: ParallelConfig) -> Iterator[float]:
    """Elements of the matrices of a stage on one tensor-parallel rank, in the order of
    megatron-core's ``parameters()``, in which a layer's output projection is the first."""
    yield _table_elements(work, config)
    for part in work.model.parts:
        qkv, out, fc1, fc2 = layer_matrices(part)
        for _ in range(config.layers_per_stage(part)):
            yield from (size / config.tp for size in (out, qkv, fc1, fc2))
    if not work.model.tied:
        yield _table_elements(work, config)


def _table_elements(work: Workload, config: ParallelConfig) -> float:
    """Count the elements of an embedding on one tensor-parallel rank."""
    return work.model.padded_vocab(config.tp) * work.model.hidden / config.tp
