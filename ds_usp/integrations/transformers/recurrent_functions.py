"""Functions by which recurrent layers of transformers carry a state from token to token, by name,
and the model types whose layers call nothing else. ``recurrent_layers.py`` lets a layer's forward
call them, on every rank, once more where it is recomputed; ``ds_usp.recurrence`` communicates in
these calls and in backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ds_usp.errors import UnsupportedAttentionError
from ds_usp.recurrence.conv import causal_conv
from ds_usp.recurrence.recurrences import delta_rule, lightning, mamba1, mamba2, rg_lru
from ds_usp.recurrence.scan import state_dtype

# Types of text configurations that are served. By their names, as no flag shows them: zaya has the
# kinds of layers and the flags of a served type, and mixes tokens in its projections.
SERVED = frozenset(
    {"lfm2", "lfm2_moe", "lfm3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"}
    | {"kimi_linear", "bailing_hybrid", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1"}
    | {"zamba2", "mamba2", "jamba", "zamba", "mamba", "falcon_mamba", "minimax", "recurrent_gemma"}
    | {"glm5_next_text", "qwen4_exp_text"}
)
WITHOUT_ATTENTION = frozenset({"mamba", "mamba2", "falcon_mamba"})
# Types that would run and be wrong, or end in an error of something else, and why.
_BIASES = "their attention adds biases by position, and convolutions are given no arguments"
_MAXIMUM = "their states are normalized by a running maximum"
NOT_SERVED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("inkling_text", "inkling2_text"), _BIASES),
        "zaya": "their projections hold convolutions and a delayed value",
        **dict.fromkeys(("rwkv", "xlstm"), _MAXIMUM),
    }
)
# Kinds in `config.layer_types` that hold one recurrent layer; and what may be beside it.
RECURRENT_KINDS = frozenset({"linear_attention", "conv", "hybrid"})
BESIDE = frozenset({"Qwen4ExpTextPLELayer"})


Sharding = Mapping[str, Any]  # ``mesh``, ``layout``, ``documents``


@dataclass(frozen=True)
class MeshFunction:
    """A function of a layer's module, or a method of its own, over the mesh.

    Args:
        run: ``run(sharding, original, *args, **kwargs)`` with the arguments of ``original``, a
            method's module first; sharding: keywords ``mesh``, ``layout`` and ``documents``.
        is_needed: a layer that calls it calls it in every forward pass.
    """

    run: Callable[..., Any]
    is_needed: bool = True


def _refuse(function: str, arguments: Mapping[str, Any], *names: str) -> None:
    """UnsupportedAttentionError for arguments that only a cache, or a packed kernel, has."""
    for name in names:
        if arguments.get(name) is not None and arguments[name] is not False:
            raise UnsupportedAttentionError(
                f"{function} was given {name}: states of caches and borders of a shard are not "
                "served; documents are those of the whole batch"
            )


# Each has the arguments, shapes and results of the function that it stands for, its `kernel`, of
# this rank's tokens, and no final state. Layers hand on more (`position_ids`) in `others`.
def _conv(
    sharding: Sharding,
    kernel: Any,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    _refuse("causal_conv1d_fn", others, "seq_idx", "cu_seqlens")
    conv = partial(kernel, weight=weight, bias=bias, activation=activation)
    return causal_conv(conv, hidden_states, weight.shape[-1], **sharding)


def _delta_rule(
    sharding: Sharding,
    kernel: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    _refuse("a delta rule", others, "initial_state", "output_final_state", "cu_seqlens")
    options = {**sharding, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    return delta_rule(kernel, query, key, value, g, beta, **options), None


def _mamba2(
    sharding: Sharding,
    kernel: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **others: Any,
) -> Tensor:
    states = "initial_states", "return_final_states"
    _refuse("mamba2_chunk_scan", others, "z", *states, "seq_idx")
    options = {name: others[name] for name in _MAMBA2 & others.keys()}
    return mamba2(kernel, hidden_states, dt, A, B, C, **sharding, **options)


def _mamba1(
    sharding: Sharding,
    kernel: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **others: Any,
) -> Tensor:
    _refuse("mamba_selective_scan", others, "return_last_state")
    options = {name: others[name] for name in _MAMBA1 & others.keys()}
    return mamba1(kernel, hidden_states, dt, A, B, C, **sharding, **options)


_MAMBA2 = frozenset({"chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit"})
# The last two: which of torch's own scans.
_MAMBA1 = frozenset(
    {"D", "z", "delta_bias", "delta_softplus", "use_mambapy", "use_associative_scan"}
)


def _decline(*_: Any, **__: Any) -> None:
    """A whole layer in one kernel: None sends the layer on its other way, by functions here."""


def _no_cache(*_: Any, **__: Any) -> Any:
    raise UnsupportedAttentionError(
        "a recurrent layer computes one token from a cache: there are no caches over a mesh"
    )


def _conv_module(sharding: Sharding, forward: Any, conv: nn.Conv1d, x: Tensor) -> Tensor:
    # Its padding is on both sides; the caller drops what is after the last token.
    (taps,) = conv.kernel_size
    return causal_conv(lambda t: forward(t)[..., : t.shape[-1]], x, taps, **sharding)


def _rg_lru(
    sharding: Sharding,
    scan: Any,
    _: nn.Module,
    *,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    **others: Any,
) -> tuple[Tensor, None]:
    _refuse("RG-LRU", others, "recurrent_states")

    def kernel(x: Tensor, gate: Tensor, first: Tensor) -> Any:
        return scan(hidden_states=x, recurrent_gate=gate, reset=first, recurrent_states=None)

    out = rg_lru(kernel, hidden_states, recurrent_gate, reset, **sharding)
    return out, None


def _lightning(
    sharding: Sharding, _: Any, layer: Any, hidden_states: Tensor, **others: Any
) -> tuple[Tensor, None]:
    """``MiniMaxLightningAttention.forward``, which has its scan written out."""
    _refuse("lightning attention", others, "past_key_values")
    b, s, _hidden = hidden_states.shape
    heads, d = layer.num_attention_heads, layer.head_dim
    qkv = layer.act_fn(layer.qkv_proj(hidden_states)).reshape(b, s, heads, 3 * d)
    q, k, v = (x.transpose(1, 2) for x in qkv.split(d, dim=3))
    slope = layer.slope_rate.to(state_dtype(q))
    out = lightning(partial(_lightning_blocks, layer), q, k, v, slope, **sharding)
    out = layer.norm(out.transpose(1, 2).reshape(b, s, heads * d))
    return layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * out), None


def _lightning_blocks(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Lightning attention without a state from before: outputs ``[b, h, t, d]``, the last state."""
    # By the layer's own buffers within a block: they are rounded with the model to bf16.
    outs, state = [], q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    for start in range(0, q.shape[2], layer.block_size):
        qc, kc, vc = (x[:, :, start : start + layer.block_size] for x in (q, k, v))
        n = qc.shape[2]
        scores = (qc @ kc.transpose(-1, -2)) * layer.diagonal_decay[:, :, :n, :n]
        outs.append(scores @ vc + (qc * layer.query_decay[:, :n]) @ state)
        update = (kc * layer.key_decay[:, -n:]).transpose(-1, -2) @ vc
        state = state * torch.exp(-layer.slope_rate * n) + update
    return torch.cat(outs, dim=2), state


def _ngrams(sharding: Sharding, forward: Any, embedding: Any, ids: Tensor, _: None) -> Tensor:
    """Embed each token with those before it in its document: a convolution of their numbers."""

    def embed(numbers: Tensor) -> Tensor:  # each one more than a token's, 0 before a document
        tokens = numbers[:, 0].long() - 1
        embedded: Tensor = forward(tokens.where(tokens >= 0, embedding.eos_token_id), None)
        return embedded.transpose(1, 2)

    numbers = (ids + 1).to(torch.float64)[:, None]
    return causal_conv(embed, numbers, embedding.ngram_size, **sharding).transpose(1, 2)


def _dilated_conv(
    sharding: Sharding, conv: Any, layer: Any, hidden_states: Tensor, _: None
) -> Tensor:
    def of_channels(x: Tensor) -> Tensor:
        out: Tensor = conv(x.transpose(1, 2), None)
        return out.transpose(1, 2)

    x, taps = hidden_states.transpose(1, 2), layer.short_conv_state_len + 1
    return causal_conv(of_channels, x, taps, **sharding).transpose(1, 2)


# By the names that a layer's forward calls in its module.
FUNCTIONS: Mapping[str, MeshFunction] = MappingProxyType(
    {
        "causal_conv1d_fn": MeshFunction(_conv),
        "torch_chunk_gated_delta_rule": MeshFunction(_delta_rule),
        "chunk_kimi_delta_attention": MeshFunction(_delta_rule),
        "mamba2_chunk_scan": MeshFunction(_mamba2),
        "mamba_selective_scan": MeshFunction(_mamba1),
        "mamba2_split_conv1d_scan_combined": MeshFunction(_decline, is_needed=False),
        "mamba_inner_fn": MeshFunction(_decline, is_needed=False),
        "causal_conv1d_update": MeshFunction(_no_cache, is_needed=False),
        "torch_recurrent_gated_delta_rule": MeshFunction(_no_cache, is_needed=False),
        "recurrent_kimi_delta_attention": MeshFunction(_no_cache, is_needed=False),
        "mamba2_selective_state_update": MeshFunction(_no_cache, is_needed=False),
        "mamba_selective_state_update": MeshFunction(_no_cache, is_needed=False),
    }
)
# By class: methods of the layer, or of modules in it, where the scan is no function.
METHODS: Mapping[str, Mapping[str, MeshFunction]] = MappingProxyType(
    {
        "MiniMaxLightningAttention": {"forward": MeshFunction(_lightning)},
        "Qwen4ExpTextPLELayer": {
            "ple_embedding.forward": MeshFunction(_ngrams),
            "_short_conv": MeshFunction(_dilated_conv),
        },
        "RecurrentGemmaRecurrentBlock": {
            "conv_1d.forward": MeshFunction(_conv_module),
            "rg_lru._rnn_scan": MeshFunction(_rg_lru),
        },
    }
)
