"""FLOPs, parameters and saved activations of a model, each formula with its source; seconds of
kernels and of exchanges under computation.

Letters: h hidden, f MLP width, q and k widths of the queries and of the keys, s sequence, V
vocabulary, L layers. A multiplication and an addition are 2 FLOP. ``memory``, ``traffic`` and
``step_time`` ask for each configuration of a search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.state_chains import state_chains
from ds_usp.planner.hardware import HBM_FRACTION, Cluster, interpolate_curve
from ds_usp.planner.models import ModelShape, RecurrentMixer, layer_matrices
from ds_usp.planner.parallel_config import CHECKPOINTED, ParallelConfig, Workload

# Tokens of a chunk of flash-linear-attention's kernels; Mamba-2's are of 128 and 256.
SCAN_CHUNK = 64
# A multiprocessor makes an exponential in the time of about 32 FLOP: one for each element of
# Mamba-1's state, and its products.
_ELEMENT_FLOP = 40.0
STATE_BYTES = 4  # of an element of a state, which is in fp32 whatever the model's dtype


def attention_flop_per_token(
    model: ModelShape, seq_len: int, document_lengths: Sequence[int] = ()
) -> float:
    """Forward FLOP of one layer's scores and their product with the values, causal half.

    Two products of q features, of all heads, for each visible key: ``4 q s/2``; backward costs
    twice as much, and flash kernels 2.5 times, because they compute the scores again
    (FlashAttention-2, 2307.08691). Of a window of w tokens ``w - w ** 2 / 2 s`` keys are visible in
    the mean: w of all queries but the first. Packed documents cost what each does alone.
    """
    if not document_lengths:
        return 4 * model.q_width * _visible_keys(seq_len, model.window)
    pairs = sum(n * _visible_keys(n, model.window) for n in document_lengths)
    return 4 * model.q_width * pairs / sum(document_lengths)


def _visible_keys(tokens: int, window: int) -> float:
    return window - window**2 / (2 * tokens) if 0 < window < tokens else tokens / 2


def recurrent_flop_per_token(model: ModelShape, *, carries: bool = False) -> float:
    """Forward FLOP of one layer's recurrence, in chunks of C tokens: what tokens read of the state
    and add to it, ``4 k v`` a head, and each other's part, ``2 C (k + v)``; a delta rule also what
    it takes from the state, ``2 k v``, and the inverse of its chunk, ``2 C (2 k + v)`` (Yang et
    al., 2412.06464). Mamba-1 has no products, but an exponential an element.

    Args:
        carries: a state comes in or goes out: with what a piece adds to the state, computed
            before the kernel runs, of a delta rule also what it takes from it; of Mamba-1 the
            response to the state that comes in.
    """
    mixer = model.recurrent
    if mixer is None or not mixer.heads:
        return 0.0
    key, value = mixer.key, mixer.value
    if mixer.decay == "element":
        return mixer.state_elements * _ELEMENT_FLOP * (2 if carries else 1)
    piece = 2.0 * key * value if carries else 0.0
    if mixer.decay == "head":
        return mixer.heads * (4 * key * value + 2 * SCAN_CHUNK * (key + value) + piece)
    return mixer.heads * (6 * key * value + 2 * SCAN_CHUNK * (3 * key + 2 * value) + 2 * piece)


def model_flop_per_token(
    model: ModelShape, seq_len: int, document_lengths: Sequence[int] = ()
) -> float:
    """FLOP that the model needs for one token, forward and backward: what MFU counts.

    ``6 (L P + h V) + 6 L q s``, P the elements of a layer's matrices (PaLM's appendix B with the
    causal half; so count Kuaishou's tables, ATC 24). Recomputation is not in it.
    """
    matrices, mixers = model.hidden * model.vocab, 0.0
    for part in model.parts:
        matrices += part.layers * part.matrix_elements
        mixers += part.layers * attention_flop_per_token(part, seq_len, document_lengths)
        mixers += part.layers * recurrent_flop_per_token(part)
    return 6 * matrices + 3 * mixers


def mlp_share(model: ModelShape) -> float:
    """The MLP's part of the matrix products of a layer without experts."""
    return (layer_matrices(model).fc1 + layer_matrices(model).fc2) / model.matrix_elements


# ------------------------------------------------------------------ parameters


def head_elements(work: Workload, config: ParallelConfig) -> int:
    """Elements of the output head and of the last norm on one tensor-parallel rank."""
    model = work.model
    table = model.padded_vocab(config.tp) * model.hidden // config.tp
    shared = model.tied and config.pp == 1
    return model.hidden + (0 if shared else table)


def stage_elements(work: Workload, config: ParallelConfig, stage: int) -> int:
    """Elements of the parameters of one rank of a pipeline stage, before ZeRO shards them.

    Tensor parallelism shards matrices, and replicates vectors. The first stage has the embedding
    and learned positions, the last one the head; tied ones are held twice under pp.
    """
    model, tp = work.model, config.tp
    total = sum(
        config.layers_per_stage(part) * (sum(layer_matrices(part)) // tp + part.vector_elements)
        for part in model.parts
    )
    if stage == 0:
        total += model.padded_vocab(tp) * model.hidden // tp
        total += work.seq_len * model.hidden if model.learned_positions else 0
    if stage == config.pp - 1:
        total += head_elements(work, config)
    return total


# ------------------------------------------------------------------ activations


def saved_elements(model: ModelShape, config: ParallelConfig) -> tuple[float, float]:
    """Count what one layer saves for backward, in elements per token: sharded by tp, replicated.

    ``none``: norm 1 in and out 2h, queries q, keys and values 2k, attention's output q, norm 2 in
    and out 2h, MLP 4f (fc1 2f, sigmoid branch f, product f; 3f where the activation is fused; 2f
    without a gate). ``gemm-last`` saves neither norm outputs nor what follows fc1. With Ulysses
    the attention's output is saved twice, before and after the exchange, unless the core is
    recomputed; a KV head with several users is saved by each. ``full`` saves the layer's input.
    ``attention`` saves that and attention's output, on any mesh. An MLP in chunks saves the input
    of norm 2 and nothing behind it.

    Norms of transformers' models save their input in fp32, what they make of it in bf16 and their
    output: ``4 h``, and those of queries and keys as much without the output, which attention
    saves; with Ulysses their queries are saved once more; chunks are of the MLP alone.

    Without Megatron's sequence parallelism tp does not shard what the norms save. Of a gated output
    gate and product are saved; of each of a token's experts also its input and its output, as
    transformers' ``grouped_mm`` sorts copies of tokens by expert.
    """
    # Of eager norms counted on CPUs with Qwen3: 28.6 h a layer on 2 x 1 (formula 28.3), 26.6 on
    # 1 x 2 (26.3), with the MLP in chunks 16.6 (16.3).
    h, f, q, k = model.hidden, model.mlp_width, model.q_width, model.kv_width
    if config.recompute == "full":
        return (h, 0.0) if config.tp_sequence else (0.0, h)
    kv_copies = max(1.0, config.ulysses * config.tp / model.kv_heads)
    if config.recompute == "attention":
        return (h + q, 0.0) if config.tp_sequence else (q, h)
    attention = 2 * q + 2 * k * (1 if config.recompute == "attention-only" else kv_copies)
    if config.ulysses > 1 and config.recompute != "attention-only":
        attention += q
    attention += 2 * q if model.output_gate else 0
    attention += recurrent_elements(model, config)
    eager = config.eager_norms and not model.biases
    attention += 3 * (q + k) if eager and model.qk_norm else 0
    attention += q if eager and config.ulysses > 1 else 0
    of_norm = 4 * h if eager else 2 * h
    norms, mlp = of_norm * (bool(attention) + bool(f)), 4 * f if model.gated else 2 * f
    mlp += 2 * h * model.experts.per_token if model.experts else 0
    if model.gated and config.fused_activation:
        mlp = 3 * f
    if config.recompute == "gemm-last":
        norms, mlp = 2 * h, 2 * f if model.gated else f
    if config.mlp_chunks > 1 and f:
        norms, mlp = norms - (0 if eager or config.recompute == "gemm-last" else h), 0
    if config.tp_sequence:
        return norms + attention + mlp, 0.0
    return attention + mlp, norms


def recurrent_elements(model: ModelShape, config: ParallelConfig) -> float:
    """Count what a recurrent mixer saves, in elements per token: what product and convolution make,
    its output before and after the norm; a delta rule its keys and queries for each head of
    the values, and the inverse of its chunk. Where a state is carried on, a delta rule's kernels
    save no more; other recurrences what makes the states of pieces, their product and decays.
    Read off what flash-linear-attention's and mamba_ssm's functions save; not measured.
    """
    mixer = model.recurrent
    if mixer is None:
        return 0.0
    elements = mixer.into + mixer.channels + 2 * mixer.out
    if mixer.decay == "matrix" and mixer.heads:
        return elements + mixer.heads * (2 * mixer.key + SCAN_CHUNK)
    carries = config.sp > 1 and mixer.heads > 0
    return elements + (2 * mixer.out if carries else 0)


def statistics_bytes(model: ModelShape, config: ParallelConfig) -> float:
    """Bytes per token of one layer that tp x sp ranks save together in fp32: log-sum-exp, norms."""
    if config.recompute == "full":
        return 0.0
    norms = 0.0 if config.recompute == "attention" else 8.0 * (2 if model.biases else 1)
    norms /= 2 if config.mlp_chunks > 1 else 1
    lse = 4.0 * model.heads if model.attention and config.recompute != "attention-only" else 0.0
    return lse + norms * (1 if config.tp_sequence else config.tp)


class ChainTraffic(NamedTuple):
    """Counts what a layer's recurrent mixer exchanges in one direction, mean over ranks.

    Attributes:
        states, halo: bytes that a rank sends.
        kept: bytes of the maps (A, B) that it saves: of its own pieces and those it has received.
        rounds: exchanges of states.
    """

    states: float = 0.0
    halo: float = 0.0
    kept: float = 0.0
    rounds: int = 0


def chain_traffic(work: Workload, config: ParallelConfig) -> ChainTraffic:
    """The mean over ranks of :meth:`StateChains.sent_bytes` and ``halo_bytes``; the latter as if no
    piece were shorter than a halo."""
    mixer, rows = work.model.recurrent, config.micro_batch
    tokens = TokenLayout("zigzag", work.seq_len, config.ulysses, config.ring)
    if mixer is None or config.sp == 1:
        return ChainTraffic()
    return _chain_traffic(tokens, work.document_lengths, rows, mixer, config.param_bytes)


@lru_cache(maxsize=1024)
def _chain_traffic(
    tokens: TokenLayout,
    document_lengths: tuple[int, ...],
    rows: int,
    mixer: RecurrentMixer,
    itemsize: int,
) -> ChainTraffic:
    borders = (tuple(accumulate(document_lengths, initial=0)),) if document_lengths else ()
    chains, ranks = state_chains(tokens, borders, rows), tokens.degree  # rows are packed alike
    width, state, decay = max(mixer.taps - 1, 0), mixer.state_elements, mixer.decay_elements
    moves = [move for moves in chains.rounds for move in moves if move.crosses]
    sent = sum(state + decay * move.transition for move in moves)
    maps = sum(map(len, chains.chains)) * (state + decay) if moves else 0
    halo = sum(
        min(width, piece.start - piece.first)
        for chain in chains.chains
        for before, piece in pairwise(chain)
        if before.rank != piece.rank
    )
    states = STATE_BYTES * rows / ranks
    halo_bytes = rows * halo * mixer.channels * itemsize / ranks
    return ChainTraffic(states * sent, halo_bytes, states * (sent + maps), len(chains.rounds))


def layer_bytes(work: Workload, config: ParallelConfig) -> float:
    """Bytes that one layer saves of one micro batch on one rank (activations of 2 bytes), in the
    mean over the model's."""
    model = work.model
    if model.kinds:
        sizes = (part.model.layers * layer_bytes(part, config) for part in work.parts)
        return sum(sizes) / model.layers
    tokens = work.rank_tokens(config)
    sharded, replicated = saved_elements(model, config)
    elements = sharded / config.tp + replicated
    size = tokens * (elements * config.param_bytes + statistics_bytes(model, config) / config.tp)
    if model.recurrent and config.recompute not in CHECKPOINTED:
        size += chain_traffic(work, config).kept
    return size


def input_bytes(work: Workload, config: ParallelConfig) -> float:
    """Bytes of the hidden states of one micro batch on one rank: what goes into a layer."""
    size = work.rank_tokens(config) * work.model.hidden * config.param_bytes
    return size / (config.tp if config.tp_sequence else 1)


def mlp_backward_bytes(work: Workload, config: ParallelConfig) -> float:
    """Bytes that live in the backward pass of an MLP, beside what the layer saves.

    The gradient of its output, and those of what follows fc1, where most of them are there: with a
    gate when their product's gradient is divided between its factors, f elements a token and tensor
    of a width f. What ``gemm-last`` recomputes is there, too.

    In chunks (``ds_usp.memory.in_chunks``): the gradients of its output and of its input, of all
    tokens, and those and all that one chunk saves when it is computed again.
    """
    model, tokens = work.model, work.rank_tokens(config)
    width = tokens * model.mlp_width / config.tp * config.param_bytes
    inside = width * ((2 if model.gated else 1) + (config.recompute == "gemm-last"))
    if model.experts:  # the gradients of the copies that its experts have made
        inside += tokens * model.experts.per_token * model.hidden * config.param_bytes
    if config.mlp_chunks <= 1:
        return input_bytes(work, config) + inside
    chunked = config.replace(recompute="none")
    inside += layer_bytes(work, chunked.replace(mlp_chunks=0)) - layer_bytes(work, chunked)
    return 2 * input_bytes(work, config) + inside / config.mlp_chunks


def saved_virtual_stages(work: Workload, config: ParallelConfig, stage: int) -> int:
    """Peak number of virtual stages whose activations one rank of a pipeline stage has saved, each
    counted once for each micro batch that has passed it forward and not yet backward.

    p pipeline stages, m micro batches of a step, v virtual stages on a rank; 1 without a pipeline.
    1F1B: ``min(p - stage, m)``; interleaved, where v > 1: ``min(m v, 2 (p - stage - 1) +
    (v - 1) p + 1)`` (Megatron's warm-up and one more); DeepSpeed: ``max(2, min(p - stage, m))``
    (its pipe buffers).

    Args:
        stage: index of the pipeline stage, from 0.
    """
    p, m, v = config.pp, config.micro_batches(work.global_batch), config.virtual_stages(work.model)
    if p == 1:
        return 1
    if v > 1:
        return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1)
    return max(2, min(p - stage, m)) if config.schedule == "deepspeed" else min(p - stage, m)


# ------------------------------------------------------------------ seconds of kernels
# Matrix products and elementwise kernels, from a cluster's rates.


def elementwise_s(cluster: Cluster, moved_bytes: float) -> float:
    """Elementwise kernels that read and write so much."""
    return moved_bytes / (HBM_FRACTION * cluster.hbm_bytes_per_s)


def gemm_s(cluster: Cluster, tokens: float, multiplications: float) -> float:
    """GEMMs over so many tokens: ``2 m n k / (F eta(m))``."""
    efficiency = interpolate_curve(cluster.gemm_efficiency, tokens)
    return 2 * multiplications / (cluster.peak_flop_per_s * efficiency)


# ------------------------------------------------------------------ exchanges under computation
# What of them is hidden, and what they add to its time.


@dataclass(frozen=True, slots=True)
class HiddenExchange:
    """Exchanges of one rank, and the computation beside them.

    Args:
        seconds: of the exchanges alone.
        exposed: of them, those in which no kernel runs.
        slower: that kernels take longer while exchanges are in flight.
    """

    seconds: float = 0.0
    exposed: float = 0.0
    slower: float = 0.0

    @property
    def added(self) -> float:
        return self.exposed + self.slower

    def __add__(self, other: HiddenExchange) -> HiddenExchange:
        return HiddenExchange(
            self.seconds + other.seconds, self.exposed + other.exposed, self.slower + other.slower
        )

    def __mul__(self, times: float) -> HiddenExchange:
        return HiddenExchange(times * self.seconds, times * self.exposed, times * self.slower)


def exposed(seconds: float) -> HiddenExchange:
    """Return an exchange that nothing hides."""
    return HiddenExchange(seconds, seconds)


def under(cluster: Cluster, seconds: float, computation_s: float) -> HiddenExchange:
    """One exchange under so many seconds of computation."""
    hidden = min(seconds, computation_s)
    return HiddenExchange(seconds, seconds - hidden, cluster.contention * hidden)


def in_buckets(
    cluster: Cluster, buckets: Iterable[tuple[float, float]], computation_s: float
) -> HiddenExchange:
    """Exchanges one after the other, each posted when its bucket is full and the one before is
    done, for which the computation waits: there is one bucket that is filled, and one in flight.

    Args:
        buckets: (second of the computation at which it is full, seconds of its exchange).
    """
    total = waited = free = 0.0  # waited: by the computation so far; free: when the link is
    for full, seconds in buckets:
        start = max(full + waited, free)
        waited = start - full
        total, free = total + seconds, start + seconds
    waited = max(waited, free - computation_s)
    return HiddenExchange(total, waited, cluster.contention * max(0.0, total - waited))


# ------------------------------------------------------------------ gradient buckets
# Buckets in which gradients are reduced under backward: their size, and when each is full.


Bucket = tuple[float, float]  # done part of the layers' backward, elements
# Large for a link; two such buckets are small beside what a GPU holds.
LEAST_BUCKET_ELEMENTS = 40_000_000


def bucket_elements(model: ModelShape, tp: int, zero: int) -> int:
    """Elements of a bucket of gradients that is reduced under backward: at least those of two of a
    layer's largest matrices, under ZeRO-2 also of the embedding. ``emit.py`` and the trainer write
    it into DeepSpeed's configuration; the formulas of time and memory count with it."""
    # ZeRO-3 allocates a bucket for good, in fp32 where sequences are sharded (2 GB with DeepSpeed's
    # default), and waits for its reduction whatever its size: it is as small as a link allows.
    if zero == 3:
        return LEAST_BUCKET_ELEMENTS
    # Before DeepSpeed reduces a bucket it waits for the one before, which the products that fill a
    # smaller one do not hide. A gradient that is larger than a bucket is reduced where it lies,
    # which ZeRO-2 with `overlap_comm` frees too early (ds_usp/training/deepspeed.py).
    largest = max(layer_matrices(part).fc1 for part in model.parts) // tp
    table = model.padded_vocab(tp) // tp * model.hidden if zero == 2 else 0
    return max(LEAST_BUCKET_ELEMENTS, 2 * largest, table)


@lru_cache(maxsize=256)
def full_buckets(model: ModelShape, tp: int, layers: int, elements: int) -> tuple[Bucket, ...]:
    """The buckets of one backward pass in their order.

    Args:
        layers: of this rank; the tables of the vocabulary are of it too.
        elements: of a bucket. A larger gradient is one of its own.

    Returns:
        Of each the layers' backward that is done when it is full, from 0 to 1, and its elements.
    """
    buckets: list[Bucket] = []
    filled, done = 0.0, 0.0
    for when, size in _gradients(model, tp, layers):
        if filled and filled + size > elements:
            buckets.append((when, filled))
            filled = 0.0
        filled, done = filled + size, when
    return (*buckets, (done, filled))


def _gradients(model: ModelShape, tp: int, layers: int) -> Iterator[Bucket]:
    """Gradients from the last to the first: the part of the layers' backward after which each is
    there, and its elements on a tensor-parallel rank. In a layer the time is divided as elements
    are. A rank has all layers of a model of several kinds, which has no pipeline."""
    table = model.padded_vocab(tp) / tp * model.hidden
    if not model.tied:
        yield 0.0, table
    of_layers = [layer_matrices(kind) for kind in model.kinds for _ in range(kind.layers)]
    for layer, matrices in enumerate(of_layers or [layer_matrices(model)] * layers):
        before = 0.0
        for size in reversed(matrices):
            before += size
            yield (layer + before / sum(matrices)) / layers, size / tp
    yield 1.0, table
