"""FLOPs, parameters and saved activations of a model, each formula with its source.

Letters: h hidden, f MLP width, q and k widths of the queries and of the keys, s sequence, V
vocabulary, L layers. A multiplication and an addition are 2 FLOP.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_usp.errors import ConfigError
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload


def mean_visible_keys(seq_len: int, documents: Sequence[int] = ()) -> float:
    """Mean number of keys to which a causal query attends: half of its document.

    Attention of packed documents costs as one of length ``sum(s_i ** 2) / sum(s_i)``.

    Args:
        documents: their lengths ``s_i``, which sum to ``seq_len``; empty: one document.
    """
    if not documents:
        return seq_len / 2
    return sum(length**2 for length in documents) / sum(documents) / 2


def attention_flop_per_token(
    model: ModelShape, seq_len: int, documents: Sequence[int] = ()
) -> float:
    """Forward FLOP of one layer's scores and their product with the values, causal half.

    Two products of q features for each visible key: ``4 q s/2``; backward costs twice as much, and
    flash kernels 2.5 times, because they compute the scores again (FlashAttention-2, 2307.08691).
    """
    return 4 * model.q_width * mean_visible_keys(seq_len, documents)


def model_flop_per_token(model: ModelShape, seq_len: int, documents: Sequence[int] = ()) -> float:
    """FLOP that the model needs for one token, forward and backward: what MFU counts.

    ``6 (L P + h V) + 6 L q s``, P the elements of a layer's matrices (PaLM's appendix B with the
    causal half; so count Kuaishou's tables, ATC 24). Recomputation is not in it.
    """
    matrices = model.layers * model.matrix_elements + model.hidden * model.vocab
    attention = model.layers * attention_flop_per_token(model, seq_len, documents)
    return 6 * matrices + 3 * attention


def hardware_flop_per_token(
    model: ModelShape,
    seq_len: int,
    recompute: str = "none",
    documents: Sequence[int] = (),
    *,
    mlp_chunks: int = 0,
    checkpoint_layers: int = 1,
) -> float:
    """FLOP that are executed for one token: with flash backward and recomputation.

    ``full`` adds a forward pass of the layers, ``attention-only`` one of the attention core,
    ``attention`` one of all but it,
    ``gemm-last`` norms and activation functions only, which are not counted here. An MLP in
    chunks adds its own forward pass; with several layers a checkpoint all but one of a group are
    recomputed once more.
    """
    attention = model.layers * attention_flop_per_token(model, seq_len, documents)
    total = model_flop_per_token(model, seq_len, documents) + attention / 2
    forward = 2 * model.layers * model.matrix_elements
    if mlp_chunks > 1:
        total += forward * mlp_share(model)
    again = 2 - 1 / checkpoint_layers
    if recompute == "full":
        total += again * (forward + attention)
    elif recompute == "attention-only":
        total += attention
    elif recompute == "attention":
        total += again * forward
    elif recompute not in ("none", "gemm-last"):
        raise ConfigError(f"recompute={recompute!r} is unknown")
    return total


def mlp_share(model: ModelShape) -> float:
    """The MLP's part of a layer's matrix products."""
    return (3 if model.gated else 2) * model.hidden * model.ffn / model.matrix_elements


def qkv_share(model: ModelShape) -> float:
    """The part of a layer's matrix products that makes queries, keys and values."""
    return model.hidden * (model.q_width + 2 * model.kv_width) / model.matrix_elements


def mfu(flop_per_s: float, peak_flop_per_s: float) -> float:
    """Model FLOPs utilization: model FLOP/s of one GPU over its peak."""
    return flop_per_s / peak_flop_per_s


# ------------------------------------------------------------------ parameters


def embedding_elements(work: Workload, config: ParallelConfig) -> int:
    """Elements of the token embedding, and of learned positions, on one tensor-parallel rank."""
    model = work.model
    table = model.padded_vocab(config.tp) * model.hidden // config.tp
    return table + (work.seq_len * model.hidden if model.learned_positions else 0)


def head_elements(work: Workload, config: ParallelConfig) -> int:
    """Elements of the output head and of the last norm on one tensor-parallel rank."""
    model = work.model
    table = model.padded_vocab(config.tp) * model.hidden // config.tp
    shared = model.tied and config.pp == 1
    return model.hidden + (0 if shared else table)


def layer_elements(model: ModelShape, tp: int) -> int:
    """Elements of one layer on one tensor-parallel rank: matrices sharded, vectors replicated."""
    return model.matrix_elements // tp + model.vector_elements


def stage_elements(work: Workload, config: ParallelConfig, stage: int) -> int:
    """Elements of the parameters of one rank of a pipeline stage, before ZeRO shards them.

    The first stage has the embedding, the last one the head; tied ones are held twice under pp.
    """
    model = work.model
    total = config.layers_per_stage(model) * layer_elements(model, config.tp)
    if stage == 0:
        total += embedding_elements(work, config)
    if stage == config.pp - 1:
        total += head_elements(work, config)
    return total


# ------------------------------------------------------------------ activations


def saved_elements(model: ModelShape, config: ParallelConfig) -> tuple[float, float]:
    """What one layer saves for backward, in elements per token: sharded by tp, and replicated.

    ``none``: norm 1 in and out 2h, queries q, keys and values 2k, attention's output q, norm 2 in
    and out 2h, MLP 4f (fc1 2f, sigmoid branch f, product f; 3f where the activation is fused; 2f
    without a gate). ``gemm-last`` saves neither norm outputs nor what follows fc1. With Ulysses
    the attention's output is saved twice, before and after the exchange, unless the core is
    recomputed; a KV head with several users is saved by each. ``full`` saves the layer's input.
    ``attention`` saves that and attention's output; with Ulysses also q, k, v and out after the
    all-to-all, which recomputation would have to repeat. An MLP in chunks saves the input of norm 2
    and nothing behind it. With ``projection_overlap="recompute"`` neither queries, keys nor values
    are saved, and attention's output once.

    Without Megatron's sequence parallelism tp does not shard what the norms save.
    """
    h, f, q, k = model.hidden, model.ffn, model.q_width, model.kv_width
    if config.recompute == "full":
        return (h, 0.0) if config.tp_sequence else (0.0, h)
    kv_copies = max(1.0, config.ulysses * config.tp / model.kv_heads)
    if config.recompute == "attention":
        core = 3 * q + 2 * k * kv_copies if config.ulysses > 1 else q
        return (h + core, 0.0) if config.tp_sequence else (core, h)
    attention = 2 * q + 2 * k * (1 if config.recompute == "attention-only" else kv_copies)
    if config.ulysses > 1 and config.recompute != "attention-only":
        attention += q
    if config.heads_in_chunks:
        attention = q
    norms, mlp = 4 * h, 4 * f if model.gated else 2 * f
    if model.gated and config.fused_activation:
        mlp = 3 * f
    if config.recompute == "gemm-last":
        norms, mlp = 2 * h, 2 * f if model.gated else f
    if config.mlp_chunks > 1:
        norms, mlp = (2 if config.recompute == "gemm-last" else 3) * h, 0
    if config.tp_sequence:
        return norms + attention + mlp, 0.0
    return attention + mlp, norms


def statistics_bytes(model: ModelShape, config: ParallelConfig) -> float:
    """Bytes per token of one layer that tp x sp ranks save together in fp32: log-sum-exp, norms."""
    norms = 0.0 if config.recompute == "attention" else 8.0 * (2 if model.biases else 1)
    norms /= 2 if config.mlp_chunks > 1 else 1
    lse = 0.0 if config.recompute == "attention-only" else 4.0 * model.heads
    return (
        0.0
        if config.recompute == "full"
        else lse + norms * (1 if config.tp_sequence else config.tp)
    )


def layer_bytes(work: Workload, config: ParallelConfig) -> float:
    """Bytes that one layer saves of one micro batch on one rank (activations of 2 bytes)."""
    model = work.model
    tokens = work.rank_tokens(config)
    sharded, replicated = saved_elements(model, config)
    elements = sharded / config.tp + replicated
    return tokens * (elements * config.param_bytes + statistics_bytes(model, config) / config.tp)


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
    width = tokens * model.ffn / config.tp * config.param_bytes
    inside = width * ((2 if model.gated else 1) + (config.recompute == "gemm-last"))
    if config.mlp_chunks <= 1:
        return input_bytes(work, config) + inside
    whole, chunked = (
        config.replace(recompute="none", mlp_chunks=0),
        config.replace(recompute="none"),
    )
    inside += layer_bytes(work, whole) - layer_bytes(work, chunked)
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
