"""The shapes of transformers: the fields, and the built-in models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from ds_usp.errors import ConfigError


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
        window: tokens that a query sees back at most in some layer; 0: all of them.
        rope_theta: base of the rotary angles.
        norm_epsilon: added to the variance in every norm.
        qkv_bias: queries, keys and values have biases where nothing else has them (Qwen2).
        qk_norm: a norm over the features of each query and key head (Qwen3).
        other_facts: what else the model's configuration says, by name. It changes neither memory
            nor time noticeably, but a program that has no setting for it trains another model.

    Raises:
        ConfigError: sizes that make no model; the text names the constraint.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 0
    gated: bool = True
    tied: bool = False
    learned_positions: bool = False
    biases: bool = False
    window: int = 0
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    other_facts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab"):
            size = getattr(self, field)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(
                    f"model {self.name}: {field}={size!r} must be a whole number of 1 or more"
                )
        for field in ("head_dim", "window"):
            size = getattr(self, field)
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ConfigError(
                    f"model {self.name}: {field}={size!r} must be a whole number of 0 or more"
                )
        for field in ("rope_theta", "norm_epsilon"):
            number = getattr(self, field)
            known = isinstance(number, (int, float)) and not isinstance(number, bool)
            if not known or not 0 < number < math.inf:
                raise ConfigError(f"model {self.name}: {field}={number!r} must be more than 0")
        for field in ("gated", "tied", "learned_positions", "biases", "qkv_bias", "qk_norm"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(
                    f"model {self.name}: {field}={getattr(self, field)!r} must be true or false"
                )
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

        Biases that tensor parallelism does cut are counted whole: less than 0.1 % of a layer.
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
        """Elements of the whole model, its vocabulary not padded."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = seq_len_tokens * self.hidden if self.learned_positions else 0
        layer = self.matrix_elements + self.vector_elements
        return self.layers * layer + tables + positions + self.hidden


def _gpt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        name,
        layers,
        hidden,
        4 * hidden,
        heads,
        heads,
        50257,
        gated=False,
        tied=True,
        learned_positions=True,
        biases=True,
    )


# Names are matched in lower case. Llama-3's and Qwen2.5's facts are those of their config.json. The
# vocabulary of 32004 is that of Kuaishou's runs (kwai/Megatron-Kwai, examples/atc24); gpt shapes
# are those of examples_deepspeed.
MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            ModelShape("llama-7b", 32, 4096, 11008, 32, 32, 32004),
            ModelShape("llama-65b", 80, 8192, 22016, 64, 64, 32004),
            ModelShape("llama-70b", 80, 8192, 28672, 64, 8, 32004),
            ModelShape("llama-175b", 96, 12288, 32768, 96, 96, 32004),
            ModelShape("llama3-8b", 32, 4096, 14336, 32, 8, 128256, rope_theta=500000.0),
            ModelShape("llama3-70b", 80, 8192, 28672, 64, 8, 128256, rope_theta=500000.0),
            ModelShape(
                "qwen2.5-7b",
                28,
                3584,
                18944,
                28,
                4,
                152064,
                rope_theta=1e6,
                norm_epsilon=1e-6,
                qkv_bias=True,
            ),
            _gpt("gpt-1.3b", 24, 2048, 16),
            _gpt("gpt-6.7b", 32, 4096, 32),
            _gpt("gpt-30b", 64, 6144, 64),
        )
    }
)
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "7b": "llama-7b",
        "llama2-7b": "llama-7b",
        "65b": "llama-65b",
        "70b": "llama-70b",
        "llama2-70b": "llama-70b",
        "175b": "llama-175b",
        "8b": "llama3-8b",
        "llama-3-8b": "llama3-8b",
        "llama-3-70b": "llama3-70b",
        "qwen-2.5-7b": "qwen2.5-7b",
        "1.3b": "gpt-1.3b",
        "6.7b": "gpt-6.7b",
        "30b": "gpt-30b",
    }
)


def is_built_in(name: str) -> bool:
    """Whether :func:`built_in` knows a name or an alias."""
    key = name.strip().lower().replace("_", "-").replace("gpt3", "gpt")
    return key in MODELS or key in _ALIASES


def built_in(model: str) -> ModelShape:
    """The built-in model of a name or an alias, in any case.

    Raises:
        ConfigError: there is none.
    """
    key = model.strip().lower().replace("_", "-").replace("gpt3", "gpt")
    key = _ALIASES.get(key, key)
    if key not in MODELS:
        raise ConfigError(
            f"no model {model!r}; there are {', '.join(MODELS)}. Or give FILE.json:NAME or a "
            "HuggingFace config.json"
        )
    return MODELS[key]
