"""What lives in the backward pass of attention, of a layer that is recomputed."""

from __future__ import annotations

from typing import NamedTuple

from ds_usp.geometry.chunking import CallSize
from ds_usp.geometry.heads import HeadSplit
from ds_usp.planner.formulas import attention_flop_per_token, input_bytes
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.traffic import layer_traffic


class AttentionPeak(NamedTuple):
    """Bytes on one rank, of one micro batch.

    Attributes:
        held: what a layer has during all of it: the gradients of its output and of what attention's
            branch is added to; the norm's output; the attention output with its log-sum-exp; its
            gradient, or for heads in chunks those of queries, keys and values; without Ulysses
            queries, keys and values that a layer saves; on one rank their gradients, too.
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
    on links of a node. With ``projection_overlap="recompute"`` a chunk and the next one are there
    at once: with Ulysses 13 a + 7 e; in a ring 8.5 a + 6.5 e and five blocks of keys and values.
    Counted on a trainer's layer, operator by operator (``tests/megatron/test_trainer_peak.py``,
    with Ulysses and on one rank); the ring's numbers are fitted to such counts: up to 4 % too high,
    for heads in chunks up to 15 %. Where both degrees are above 1 the whole is 7 to 8 % too high in
    two counts, for heads in chunks 12 % too low with as many KV heads as heads, and 27 % too high
    with half.
    """
    model, tp = work.model, config.tp
    hidden = input_bytes(work, config) / config.param_bytes
    tokens = work.rank_tokens(config)
    copies = max(1.0, config.ulysses * tp / model.kv_heads)
    q, kv = model.q_width / tp, 2 * model.kv_width / tp
    parts = _chunk_parts(work, config)
    (a, e), *others = ((part_q * q, part_kv * kv * copies) for part_q, part_kv in parts)
    b, f = others[0] if others else (0.0, 0.0)
    if config.heads_in_chunks:
        held = 2 * q + kv  # attention's output; gradients of queries, keys and values
        buffers = 13 * a + 7 * e if config.ulysses > 1 else 8.5 * a + 6.5 * e
        buffers += 5 * e if config.ring > 1 else 0.0
    elif config.ulysses > 1:
        held = 2 * q  # the output and its gradient
        # Saved, results; the kernel's gradients, sent, received; a return.
        buffers = 2 * (q + kv * copies) + 3 * (a + e) + b + f
        buffers += 3 * kv * copies if config.ring > 1 else 0.0
    else:
        # A copy of grouped queries, beside the projection's output that they are a part of.
        held = 3 * q + kv + (q if model.kv_heads < model.heads else 0.0)
        gradients = q + kv
        if config.ring > 1:  # sums of what ranks return
            in_flight = 2 * a + 3.5 * e + (2 * b + 3.5 * f) * (0.5 if len(parts) == 2 else 1)
            buffers = gradients + in_flight
        else:
            held, buffers = held + gradients, 0.0
    kernel = 4 * tokens * (a + (e if model.kv_heads < model.heads else 0.0))
    lse = 4.0 * model.heads / tp
    return AttentionPeak(
        (3 * hidden + tokens * held) * config.param_bytes + tokens * lse,
        tokens * buffers * config.param_bytes,
        kernel,
    )


def _chunk_parts(work: Workload, config: ParallelConfig) -> list[tuple[float, float]]:
    """Of the query heads and of the key/value heads (with copies) of all ranks, the fractions in
    each head chunk, the largest first."""
    model = work.model
    split = HeadSplit(model.heads // config.tp, model.kv_heads // config.tp, config.ulysses)
    if config.heads_in_chunks:
        count = split.memory_chunks(config.ring)
    else:
        count = _call_chunks(work, config, split)
    chunks = [split.chunk(count, index) for index in range(count)]

    def heads(of_ranks: tuple[tuple[int, int], ...]) -> int:
        return sum(stop - first for first, stop in of_ranks)

    keys = max(split.kv_heads, config.ulysses)
    parts = [(heads(x.queries) / split.heads, heads(x.keys) / keys) for x in chunks]
    return sorted(parts, reverse=True)


def _call_chunks(work: Workload, config: ParallelConfig, split: HeadSplit) -> int:
    """Head chunks of a call on GPUs, as ``Tuning`` takes them where all links are a node's."""
    if config.sp == 1:
        return 1
    flop = attention_flop_per_token(work.model, work.seq_len, work.documents)
    flop *= work.rank_tokens(config) / config.tp
    sent = layer_traffic(work, config).ulysses
    return CallSize(split, flop, sent, 0, config.ring).num_chunks()
