"""The shapes of transformers, and where they are read from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
        for field in ("gated", "tied", "learned_positions", "biases"):
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
        if not self.biases:
            return norms
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


# Names are matched in lower case. The vocabulary of 32004 is that of Kuaishou's runs
# (kwai/Megatron-Kwai, examples/atc24); gpt shapes are those of examples_deepspeed.
MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            ModelShape("llama-7b", 32, 4096, 11008, 32, 32, 32004),
            ModelShape("llama-65b", 80, 8192, 22016, 64, 64, 32004),
            ModelShape("llama-70b", 80, 8192, 28672, 64, 8, 32004),
            ModelShape("llama-175b", 96, 12288, 32768, 96, 96, 32004),
            ModelShape("llama3-8b", 32, 4096, 14336, 32, 8, 128256),
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
        "1.3b": "gpt-1.3b",
        "6.7b": "gpt-6.7b",
        "30b": "gpt-30b",
    }
)


def load_model(given: str) -> ModelShape:
    """A built-in name, ``FILE.json:NAME``, a file with one model, or a HuggingFace config.json.

    A file of models maps names to the fields of :class:`ModelShape`, or lists such objects with
    a ``name``; HuggingFace's names of the fields are understood everywhere.

    Raises:
        ConfigError: nothing of that name, or a file that describes no model.
    """
    path, _, name = given.rpartition(":")
    if path.endswith(".json"):
        if not Path(path).exists() and Path(path).name == "models.json" and _known(name):
            return _built_in(name)
        return _from_file(Path(path), name)
    if given.endswith(".json") or Path(given).is_dir():
        folder = Path(given)
        return _from_file(folder / "config.json" if folder.is_dir() else folder, "")
    return _built_in(given)


def _known(name: str) -> bool:
    key = name.strip().lower().replace("_", "-").replace("gpt3", "gpt")
    return key in MODELS or key in _ALIASES


def _built_in(given: str) -> ModelShape:
    key = given.strip().lower().replace("_", "-").replace("gpt3", "gpt")
    key = _ALIASES.get(key, key)
    if key not in MODELS:
        raise ConfigError(
            f"no model {given!r}; there are {', '.join(MODELS)}. Or give FILE.json:NAME or a "
            "HuggingFace config.json"
        )
    return MODELS[key]


def _from_file(path: Path, name: str) -> ModelShape:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the model file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    entries = _entries(content)
    if entries is None:
        if name:
            raise ConfigError(f"{path} describes one model; leave out ':{name}'")
        return _shape(path.stem if path.stem != "config" else path.parent.name, content, path)
    if not name and len(entries) == 1:
        name = next(iter(entries))
    wanted = {key.lower(): key for key in entries}
    if name.lower() not in wanted:
        raise ConfigError(f"{path} has no model {name!r}; it has {', '.join(entries)}")
    key = wanted[name.lower()]
    return _shape(key, entries[key], path)


def _entries(content: Any) -> dict[str, Any] | None:
    """The models of a file by name; None if the file is one model."""
    if isinstance(content, Mapping) and isinstance(content.get("models"), (Mapping, list)):
        content = content["models"]
    if isinstance(content, list):
        named = [entry for entry in content if isinstance(entry, Mapping)]
        by_name = {str(entry.get("name", entry.get("model"))): entry for entry in named}
        return by_name or None
    whole = content.values() if isinstance(content, Mapping) else ()
    if whole and all(isinstance(entry, Mapping) for entry in whole):
        return {str(name): entry for name, entry in content.items()}
    return None


# Field -> the names that files give it, ours first, then HuggingFace's.
_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layers": ("layers", "num_layers", "num_hidden_layers", "n_layer"),
        "hidden": ("hidden", "hidden_size", "n_embd", "d_model"),
        "ffn": ("ffn", "ffn_hidden_size", "intermediate_size", "n_inner", "ffn_dim"),
        "heads": ("heads", "num_attention_heads", "n_head"),
        "kv_heads": ("kv_heads", "num_key_value_heads", "num_query_groups"),
        "vocab": ("vocab", "vocab_size"),
        "head_dim": ("head_dim", "kv_channels"),
        "tied": ("tied", "tie_word_embeddings"),
        "gated": ("gated",),
        "learned_positions": ("learned_positions",),
        "biases": ("biases",),
    }
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

# HuggingFace's model_type -> what its configurations leave unsaid. Only decoders whose layers are
# attention and one MLP, counted as ModelShape counts them.
_LLAMA: Mapping[str, bool] = MappingProxyType({})
_GEMMA: Mapping[str, bool] = MappingProxyType({"tied": True})
_GPT: Mapping[str, bool] = MappingProxyType(
    {"gated": False, "tied": True, "learned_positions": True, "biases": True}
)
_FAMILIES: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "granite"), _LLAMA),
        **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA),
        **dict.fromkeys(("gpt2", "opt"), _GPT),
        "gpt_neox": MappingProxyType({"gated": False, "biases": True}),
        "starcoder2": MappingProxyType({"gated": False, "tied": True, "biases": True}),
    }
)


def _shape(name: str, entry: Any, path: Path) -> ModelShape:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: model {name} must be an object with layers, hidden, ...")
    defaults = _family(name, entry, path)
    found: dict[str, Any] = {}
    for field, names in _NAMES.items():
        given = [entry[alias] for alias in names if entry.get(alias) is not None]
        if given:
            found[field] = given[0]
    found = {**defaults, **found}
    if defaults == _GPT:
        found.setdefault("ffn", 4 * found.get("hidden", 0))
    if entry.get("use_sliding_window", True):
        found["window"] = entry.get("sliding_window") or entry.get("window") or 0
    found.setdefault("kv_heads", found.get("heads"))
    missing = [field for field in ("layers", "hidden", "ffn", "heads") if not found.get(field)]
    if missing or not found.get("vocab"):
        missing += [] if found.get("vocab") else ["vocab"]
        raise ConfigError(f"{path}: model {name} has no {', '.join(missing)}")
    return ModelShape(name=name or path.stem, **found)


def _family(name: str, entry: Mapping[str, Any], path: Path) -> Mapping[str, bool]:
    """What is unsaid in a HuggingFace configuration of this kind; nothing without a kind.

    Raises:
        ConfigError: layers that are not attention and one MLP.
    """
    experts = [key for key in _EXPERTS if (entry.get(key) or 0) > 1]
    if experts:
        raise ConfigError(
            f"{path}: {experts[0]}={entry[experts[0]]}: only dense models are planned"
        )
    if entry.get("text_config"):
        raise ConfigError(
            f"{path}: model {name} has several parts; give its text_config as a file of its own"
        )
    kind = entry.get("model_type")
    if kind is not None and kind not in _FAMILIES:
        raise ConfigError(
            f"{path}: the layers of model_type {kind!r} are not known; known are "
            f"{', '.join(_FAMILIES)}. Leave model_type out and say gated, tied, learned_positions "
            "and biases to plan it as such a model"
        )
    return _FAMILIES.get(kind, _LLAMA) if kind else _LLAMA
