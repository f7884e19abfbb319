"""The shapes of transformers: the fields, and the built-in models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ds_usp.errors import ConfigError
from ds_usp.planner.field_checks import Count, CountOrZero, Positive, violations


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder.

    Args:
        layers: transformer layers.
        hidden: width of the residual stream.
        ffn: width of the MLP; a gated one has two matrices into it and one out of it.
        heads: query heads.
        kv_heads: key/value heads.
        vocab: entries of the vocabulary, before it is padded.
        head_dim: features of a head; 0: ``hidden / heads``.
        gated: SwiGLU and its like (three matrices), else GELU and its like (two).
        tied: the head multiplies by the embedding's weights.
        learned_positions: a table of position embeddings, as long as the sequence.
        biases: linear layers have biases and norms have them too (GPT).
        window: sliding window of some layer in tokens; 0: all of them.
        rope_theta: base of the rotary angles.
        norm_epsilon: added to the variance in every norm.
        qkv_bias: queries, keys and values have biases where nothing else has them (Qwen2).
        qk_norm: a norm over the features of each query and key head (Qwen3).
        other_facts: other facts of the model's configuration, by name. It changes neither memory
            nor time noticeably, but a program that has no setting for it trains another model.

    Raises:
        ConfigError: sizes that make no model; the text names the constraint.
    """

    name: str
    layers: Count
    hidden: Count
    ffn: Count
    heads: Count
    kv_heads: Count
    vocab: Count
    head_dim: CountOrZero = 0
    gated: bool = True
    tied: bool = False
    learned_positions: bool = False
    biases: bool = False
    window: CountOrZero = 0
    rope_theta: Positive = 10000.0
    norm_epsilon: Positive = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    other_facts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for wrong in violations(self):
            raise ConfigError(f"model {self.name}: {wrong}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model {self.name}: {self.heads} query heads cannot share {self.kv_heads} "
                "key/value heads; heads must be a multiple of kv_heads"
            )
        if not self.head_dim:
            if self.hidden % self.heads:
                raise ConfigError(
                    f"model {self.name}: hidden={self.hidden} is not a multiple of "
                    f"heads={self.heads}; give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

    @cached_property
    def q_width(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_dim

    @cached_property
    def kv_width(self) -> int:
        """Features of all key heads (and, as many, of the value heads)."""
        return self.kv_heads * self.head_dim

    @cached_property
    def matrix_elements(self) -> int:
        """Elements of one layer's matrices: each multiplies every token once."""
        attention = 2 * self.hidden * (self.q_width + self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @cached_property
    def vector_elements(self) -> int:
        """Elements of one layer's norms and biases, held by every tensor-parallel rank.

        Biases that tensor parallelism shards are counted as replicated: less than 0.1 % of a layer.
        """
        norms = 2 * self.hidden * (2 if self.biases else 1)
        norms += 2 * self.head_dim if self.qk_norm else 0
        if not self.biases:
            return norms + (self.q_width + 2 * self.kv_width if self.qkv_bias else 0)
        attention = self.q_width + 2 * self.kv_width + self.hidden
        return norms + attention + (2 if self.gated else 1) * self.ffn + self.hidden

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding: a multiple of 128 on every rank (Megatron)."""
        return math.ceil(self.vocab / (128 * tp)) * 128 * tp

    def parameters(self, seq_len_tokens: int = 0) -> int:
        """Elements of the model, its vocabulary not padded."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = seq_len_tokens * self.hidden if self.learned_positions else 0
        layer = self.matrix_elements + self.vector_elements
        return self.layers * layer + tables + positions + self.hidden


_GPT: Mapping[str, bool] = MappingProxyType(
    {"gated": False, "tied": True, "learned_positions": True, "biases": True}
)
_QWEN: Mapping[str, float] = MappingProxyType(
    {"rope_theta": 1e6, "norm_epsilon": 1e-6, "qkv_bias": True}
)


def _model(name: str, sizes: str, *aliases: str, **facts: Any) -> tuple[ModelShape, list[str]]:
    """A shape and its other names; ``sizes``: layers, hidden, ffn, heads, kv_heads, vocab."""
    layers, hidden, ffn, heads, kv_heads, vocab = map(int, sizes.split())
    return ModelShape(name, layers, hidden, ffn, heads, kv_heads, vocab, **facts), [*aliases]


# Names are matched in lower case. Llama-3's and Qwen2.5's facts are those of their config.json. The
# vocabulary of 32004 is that of Kuaishou's runs (kwai/Megatron-Kwai, examples/atc24); gpt shapes
# are those of examples_deepspeed.
_BUILT_IN = (
    _model("llama-7b", "32 4096 11008 32 32 32004", "7b", "llama2-7b"),
    _model("llama-65b", "80 8192 22016 64 64 32004", "65b"),
    _model("llama-70b", "80 8192 28672 64 8 32004", "70b", "llama2-70b"),
    _model("llama-175b", "96 12288 32768 96 96 32004", "175b"),
    _model("llama3-8b", "32 4096 14336 32 8 128256", "8b", "llama-3-8b", rope_theta=5e5),
    _model("llama3-70b", "80 8192 28672 64 8 128256", "llama-3-70b", rope_theta=5e5),
    _model("qwen2.5-7b", "28 3584 18944 28 4 152064", "qwen-2.5-7b", **_QWEN),
    _model("gpt-1.3b", "24 2048 8192 16 16 50257", "1.3b", **_GPT),
    _model("gpt-6.7b", "32 4096 16384 32 32 50257", "6.7b", **_GPT),
    _model("gpt-30b", "64 6144 24576 64 64 50257", "30b", **_GPT),
)
MODELS: Mapping[str, ModelShape] = MappingProxyType({model.name: model for model, _ in _BUILT_IN})
_ALIASES: Mapping[str, str] = MappingProxyType(
    {alias: model.name for model, aliases in _BUILT_IN for alias in aliases}
)


def built_in(name: str) -> ModelShape | None:
    """The built-in model of a name or an alias, in any case; None if there is none."""
    key = name.strip().lower().replace("_", "-").replace("gpt3", "gpt")
    return MODELS.get(_ALIASES.get(key, key))
