"""What lives in the backward pass of attention, of a layer that is recomputed."""

from __future__ import annotations

from typing import NamedTuple

from ds_usp.geometry.heads import HeadSplit
from ds_usp.planner.formulas import input_bytes
from ds_usp.planner.parallel_config import ParallelConfig, Workload


class AttentionPeak(NamedTuple):
    """Bytes on one rank, of one micro batch.

    Attributes:
        held: what a layer has during all of it: the gradients of its output, of what attention's
            branch is added to, and of its queries, keys and values; the norm's output; queries,
            keys, values and the attention output, with their log-sum-exp.
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
    the largest head chunk: of its queries, and of its keys and values; of a token on one rank.
    With ``projection_overlap="recompute"`` a chunk and the next one are there at once: with Ulysses
    13 a + 7 e; in a ring 8.5 a + 6.5 e and five blocks of keys and values. Else there is one chunk.
    Counted on a trainer's layer, operator by operator (``tests/megatron/test_trainer_peak.py``,
    with Ulysses); the ring's numbers are fitted to such counts with equal chunks. Where chunks are
    unequal, share a KV head, or both degrees are above 1, the whole is up to 15 % too high.
    """
    model, tp = work.model, config.tp
    hidden = input_bytes(work, config) / config.param_bytes
    tokens = work.rank_tokens(config)
    copies = max(1.0, config.ulysses * tp / model.kv_heads)
    q, kv = model.q_width / tp, 2 * model.kv_width / tp
    if config.heads_in_chunks:
        part_q, part_kv = _largest_chunk(work, config)
        a, e = part_q * q, part_kv * kv * copies
        held = 2 * q + kv  # attention's output; gradients of queries, keys and values
        buffers = 13 * a + 7 * e if config.ulysses > 1 else 8.5 * a + 6.5 * e
        buffers += 5 * e if config.ring > 1 else 0.0
    else:
        a, e = q, kv * copies
        held, buffers = 2 * q, 0.0  # the output and its gradient
        if config.ulysses > 1:  # saved, the kernel's gradients, sent, received, results
            buffers = 5 * (q + e)
        elif config.ring > 1:
            # A copy of grouped queries, beside the projection's output that they are a part of.
            held += q + kv + (q if model.kv_heads < model.heads else 0.0)
            buffers = 1.5 * q
        buffers += (3 if config.ulysses > 1 else 5.2) * e if config.ring > 1 else 0.0
    kernel = 4 * tokens * (a + (e if model.kv_heads < model.heads else 0.0))
    lse = 4.0 * model.heads / tp
    return AttentionPeak(
        (3 * hidden + tokens * held) * config.param_bytes + tokens * lse,
        tokens * buffers * config.param_bytes,
        kernel,
    )


def _largest_chunk(work: Workload, config: ParallelConfig) -> tuple[float, float]:
    """Of the query heads and of the key/value heads (with copies) of all ranks, the fractions in
    the largest head chunk."""
    model = work.model
    split = HeadSplit(model.heads // config.tp, model.kv_heads // config.tp, config.ulysses)
    count = split.memory_chunks(config.ring)
    chunks = [split.chunk(count, index) for index in range(count)]

    def most(ranges: list[tuple[tuple[int, int], ...]]) -> int:
        return max(sum(stop - first for first, stop in of_chunk) for of_chunk in ranges)

    keys = max(split.kv_heads, config.ulysses)
    return (
        most([x.queries for x in chunks]) / split.heads,
        most([x.keys for x in chunks]) / keys,
    )
