"""Models from files: our own fields, or a HuggingFace ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ds_usp.errors import ConfigError
from ds_usp.planner.models import ModelShape, built_in, is_built_in


def load_model(model: str) -> ModelShape:
    """A built-in name, ``FILE.json:NAME``, a file with one model, or a HuggingFace config.json.

    A file of models maps names to the fields of :class:`ModelShape`, or lists such objects with
    a ``name``; HuggingFace's names of the fields are understood everywhere.

    Raises:
        ConfigError: nothing of that name, or a file that describes no model.
    """
    path, _, name = model.rpartition(":")
    if path.endswith(".json"):
        if not Path(path).exists() and Path(path).name == "models.json" and is_built_in(name):
            return built_in(name)
        return _from_file(Path(path), name)
    if model.endswith(".json") or Path(model).is_dir():
        folder = Path(model)
        return _from_file(folder / "config.json" if folder.is_dir() else folder, "")
    return built_in(model)


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
        "rope_theta": ("rope_theta", "rotary_emb_base"),
        "norm_epsilon": (
            "norm_epsilon",
            "rms_norm_eps",
            "layer_norm_epsilon",
            "layer_norm_eps",
        ),
        "qkv_bias": ("qkv_bias",),
        "qk_norm": ("qk_norm",),
    }
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

# HuggingFace's model_type -> what its configurations leave unsaid. Only decoders whose layers are
# attention and one MLP, counted as ModelShape counts them.
_LLAMA: Mapping[str, Any] = MappingProxyType({"norm_epsilon": 1e-6})
_GEMMA: Mapping[str, Any] = MappingProxyType({"tied": True, "norm_epsilon": 1e-6})
_GPT: Mapping[str, Any] = MappingProxyType(
    {"gated": False, "tied": True, "learned_positions": True, "biases": True}
)
_FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "granite"), _LLAMA),
        **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA),
        **dict.fromkeys(("gpt2", "opt"), _GPT),
        **dict.fromkeys(("phi3", "olmo2"), MappingProxyType({})),
        "qwen2": MappingProxyType({**_LLAMA, "qkv_bias": True}),
        "qwen3": MappingProxyType({**_LLAMA, "qk_norm": True}),
        "gpt_neox": MappingProxyType({"gated": False, "biases": True}),
        "starcoder2": MappingProxyType({"gated": False, "tied": True, "biases": True}),
    }
)
# Those whose layers are what the fields of ModelShape say, but for what _other_facts finds. Others
# scale, norm or add in ways of their own.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "starcoder2")
_SILU, _GELU = ("silu", "swish"), ("gelu",)


def _other_facts(entry: Mapping[str, Any], gated: bool) -> tuple[str, ...]:
    """What a HuggingFace configuration says that no field of ModelShape holds, by name."""
    kind = entry.get("model_type")
    facts = [f"layers of model_type {kind}"] if kind is not None and kind not in _PLAIN else []
    names = ("hidden_act", "activation_function", "hidden_activation")
    activations = {name: entry[name] for name in names if entry.get(name) is not None}
    if kind == "gpt2" and not activations:
        activations = {"activation_function": "gelu_new"}
    usual = _SILU if gated else _GELU
    facts += [f"{name} {value}" for name, value in activations.items() if value not in usual]
    scaling = entry.get("rope_scaling") or _scaled_rope(entry.get("rope_parameters"))
    facts += [f"rope_scaling {json.dumps(scaling)}"] if scaling else []
    for name in ("partial_rotary_factor", "rotary_pct"):
        share = entry.get(name)
        facts += [f"{name} {share}"] if share not in (None, 1, 1.0) else []
    for name in ("attention_bias", "mlp_bias"):
        facts += [name] if entry.get(name) is True else []
    return tuple(facts)


def _scaled_rope(parameters: Any) -> Any:
    """The ``rope_parameters`` of newer configurations, if they scale angles."""
    scales = isinstance(parameters, Mapping) and parameters.get("rope_type", "default") != "default"
    return parameters if scales else None


def _shape(name: str, entry: Any, path: Path) -> ModelShape:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: model {name} must be an object with layers, hidden, ...")
    defaults = _architecture_family(name, entry, path)
    values: dict[str, Any] = {}
    for field, names in _NAMES.items():
        given = [entry[alias] for alias in names if entry.get(alias) is not None]
        if given:
            values[field] = given[0]
    parameters = entry.get("rope_parameters")
    if isinstance(parameters, Mapping) and parameters.get("rope_theta") is not None:
        values.setdefault("rope_theta", parameters["rope_theta"])
    values = {**defaults, **values}
    values["other_facts"] = _other_facts(entry, values.get("gated", True))
    if defaults is _GPT:
        values.setdefault("ffn", 4 * values.get("hidden", 0))
    if entry.get("use_sliding_window", True):
        values["window"] = entry.get("sliding_window") or entry.get("window") or 0
    values.setdefault("kv_heads", values.get("heads"))
    missing = [field for field in ("layers", "hidden", "ffn", "heads") if not values.get(field)]
    if missing or not values.get("vocab"):
        missing += [] if values.get("vocab") else ["vocab"]
        raise ConfigError(f"{path}: model {name} has no {', '.join(missing)}")
    return ModelShape(name=name or path.stem, **values)


def _architecture_family(name: str, entry: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
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
    return _FAMILIES[kind] if kind is not None else MappingProxyType({})
