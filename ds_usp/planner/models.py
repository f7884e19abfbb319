"""Models: the facts of their layers that formulas need, built-in (``models.json``) or read from
files, once a command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ds_usp.errors import ConfigError
from ds_usp.planner.arguments import (
    Count,
    CountOrZero,
    Layers,
    Positive,
    choice,
    read_json,
    violations,
)


class LayerMatrices(NamedTuple):
    """Elements of the matrices of a layer, in the order in which forward multiplies by them."""

    qkv: int
    out: int
    fc1: int
    fc2: int


@dataclass(frozen=True)
class RecurrentMixer:
    """Describes what a layer has in the place of attention, or beside it, that carries a state from
    token to token; or a causal convolution alone.

    Args:
        into, out: features of the products into it and out of it.
        channels, taps: of the convolution over tokens before it; 0: none.
        heads, key, value: its state, a matrix of key x value features a head, in fp32; 0: none.
        decay: what a token does to the state: a ``matrix`` of key x key a head (delta rules), one
            number a ``head`` (Mamba-2, lightning attention) or an ``element`` (Mamba-1).
        inner: elements of its other matrices, each of which multiplies every token once.
        vectors: elements of its convolution, biases, decays and norms.
    """

    into: Count
    out: Count
    channels: CountOrZero = 0
    taps: CountOrZero = 0
    heads: CountOrZero = 0
    key: CountOrZero = 0
    value: CountOrZero = 0
    decay: str = choice(("matrix", "head", "element"), "head")
    inner: CountOrZero = 0
    vectors: CountOrZero = 0

    @property
    def state_elements(self) -> int:
        """Elements of the state of one sequence."""
        return self.heads * self.key * self.value

    @property
    def decay_elements(self) -> int:
        """Elements of what a run of tokens does to the state that comes into it."""
        by_kind = {"matrix": self.key * self.key, "head": 1, "element": self.key * self.value}
        return self.heads * by_kind[self.decay]


@dataclass(frozen=True)
class Experts:
    """Experts of a layer beside its MLP, each an MLP of width ``ffn``; a rank holds them all."""

    count: int
    per_token: int
    ffn: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder whose layers are alike, or of a few kinds.

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
        window: tokens that a query sees, itself and those before it; 0: all before it.
        rope_theta: base of the rotary angles.
        norm_epsilon: added to the variance in every norm.
        qkv_bias: queries, keys and values have biases where nothing else has them (Qwen2).
        qk_norm: a norm over the features of each query and key head (Qwen3).
        other_facts: other facts of the model's configuration, by name. It changes neither memory
            nor time noticeably, but a program that has no setting for it trains another model.
        attention: its layers have attention; ``output_gate``: whose output is multiplied by a gate
            that the queries' product makes too (Qwen3-Next).
        recurrent: what its layers have in the place of attention, or beside it.
        experts: its layers have experts beside an MLP of width ``ffn`` (0: experts alone).
        kinds: where layers differ: the layers of each kind, as a model of their own.
        other_vectors: elements of a layer's vectors that no other field counts: biases of experts,
            sinks, further norms.

    Raises:
        ConfigError: sizes that make no model; the text names the constraint.
    """

    name: str
    layers: Layers
    hidden: Count
    ffn: CountOrZero
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
    attention: bool = True
    output_gate: bool = False
    recurrent: RecurrentMixer | None = None
    experts: Experts | None = None
    kinds: tuple[ModelShape, ...] = ()
    other_vectors: CountOrZero = 0

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
        if self.kinds and sum(kind.layers for kind in self.kinds) != self.layers:
            raise ConfigError(
                f"model {self.name}: its kinds of layers are not {self.layers} layers"
            )

    @property
    def parts(self) -> tuple[ModelShape, ...]:
        """Models of alike layers that together are this one's."""
        return self.kinds or (self,)

    @property
    def is_plain(self) -> bool:
        """Whether its layers are attention over all tokens and one MLP, as programs with tensor
        parallelism and with pipelines have them."""
        others = self.kinds or self.recurrent or self.experts or self.output_gate or self.window
        return not others

    def for_length(self, seq_len: int) -> ModelShape:
        """Itself on so many tokens: a window that is as long as the sequence is none, and layers
        that differ in nothing else are of one kind."""
        # So that a model with windows that are never reached is plain: programs of plain layers
        # serve it, and its plans are those of the same model without windows.
        if not (self.window or any(kind.window for kind in self.kinds)):
            return self
        window = 0 if self.window >= seq_len else self.window
        kinds: dict[ModelShape, int] = {}
        for kind in self.kinds:
            single = replace(kind.for_length(seq_len), layers=1)
            kinds[single] = kinds.get(single, 0) + kind.layers
        if len(kinds) == 1:
            return replace(next(iter(kinds)), layers=self.layers)
        return replace(
            self,
            window=window,
            kinds=tuple(replace(kind, layers=layers) for kind, layers in kinds.items()),
        )

    @property
    def mlp_width(self) -> int:
        """Features inside the MLP, and inside the experts of one token."""
        return self.ffn + (self.experts.per_token * self.experts.ffn if self.experts else 0)

    @cached_property
    def q_width(self) -> int:
        """Features of all query heads; 0 without attention, and so the keys'."""
        return self.heads * self.head_dim if self.attention else 0

    @cached_property
    def kv_width(self) -> int:
        """Features of all key heads (and, as many, of the value heads)."""
        return self.kv_heads * self.head_dim if self.attention else 0

    @cached_property
    def matrix_elements(self) -> int:
        """Elements of one layer's matrices that multiply a token: once each."""
        idle = self.experts.count - self.experts.per_token if self.experts else 0
        return sum(layer_matrices(self)) - idle * self.expert_elements

    @property
    def expert_elements(self) -> int:
        """Elements of one expert's matrices."""
        return self.hidden * self.experts.ffn * (3 if self.gated else 2) if self.experts else 0

    @cached_property
    def vector_elements(self) -> int:
        """Elements of one layer's norms and biases, held by every tensor-parallel rank."""
        # With the biases that tensor parallelism shards: less than 0.1 % of a layer.
        mixers, mlps = self.attention or self.recurrent is not None, self.mlp_width > 0
        norms = (mixers + mlps) * self.hidden * (2 if self.biases else 1)
        norms += 2 * self.head_dim if self.qk_norm and self.attention else 0
        norms += self.other_vectors + (self.recurrent.vectors if self.recurrent else 0)
        if not self.biases:
            return norms + (qkv_width(self) if self.qkv_bias else 0)
        return norms + qkv_width(self) + self.hidden + fc1_width(self) + self.hidden

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding: a multiple of 128 on every rank (Megatron)."""
        return math.ceil(self.vocab / (128 * tp)) * 128 * tp

    def parameters(self, seq_len_tokens: int = 0) -> int:
        """Elements of the model, its vocabulary not padded."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = seq_len_tokens * self.hidden if self.learned_positions else 0
        layers = sum(x.layers * (sum(layer_matrices(x)) + x.vector_elements) for x in self.parts)
        return layers + tables + positions + self.hidden


def qkv_width(model: ModelShape) -> int:
    """Features of the product that makes queries, keys and values, and their gate."""
    return model.q_width * (2 if model.output_gate else 1) + 2 * model.kv_width


def fc1_width(model: ModelShape) -> int:
    """Features of the first product of the MLP: with a gate, twice its width."""
    return model.ffn * (2 if model.gated else 1)


def layer_matrices(model: ModelShape) -> LayerMatrices:
    """Elements of one layer's matrices; those of recurrent mixers count as attention's, those of
    experts and of their router as the MLP's."""
    widths = qkv_width(model), model.q_width, fc1_width(model), model.ffn
    qkv, out, fc1, fc2 = (model.hidden * width for width in widths)
    if mixer := model.recurrent:
        qkv, out = qkv + model.hidden * mixer.into + mixer.inner, out + model.hidden * mixer.out
    if experts := model.experts:
        last = experts.count * experts.ffn * model.hidden
        fc1 += experts.count * model.expert_elements - last + experts.count * model.hidden
        fc2 += last
    return LayerMatrices(qkv, out, fc1, fc2)


_GPT: Mapping[str, bool] = MappingProxyType(
    {"gated": False, "tied": True, "learned_positions": True, "biases": True}
)


def _delta(keys: int, values: int, dim: int) -> RecurrentMixer:
    channels, out = (2 * keys + values) * dim, values * dim
    vectors = 4 * channels + 2 * values + dim
    into = channels + out + 2 * values
    return RecurrentMixer(into, out, channels, 4, values, dim, dim, "matrix", vectors=vectors)


def _mamba2(heads: int, dim: int, groups: int, state: int, norm: int = 1) -> RecurrentMixer:
    out, channels = heads * dim, heads * dim + 2 * groups * state
    vectors, into = 5 * channels + 3 * heads + out * norm, out + channels + heads
    return RecurrentMixer(into, out, channels, 4, heads, state, dim, "head", vectors=vectors)


def _mamba1(inner: int, state: int, rank: int) -> RecurrentMixer:
    """Return the mixer of Jamba: with norms of the step, of B and of C."""
    more, vectors = inner * (2 * rank + 2 * state), inner * (7 + state) + rank + 2 * state
    return RecurrentMixer(2 * inner, inner, inner, 4, inner, state, 1, "element", more, vectors)


def _lightning(heads: int, dim: int) -> RecurrentMixer:
    width = heads * dim
    return RecurrentMixer(4 * width, width, 0, 0, heads, dim, dim, vectors=width)


def _conv(width: int, taps: int) -> RecurrentMixer:
    return RecurrentMixer(3 * width, width, width, taps, vectors=taps * width)


_MIXERS: Mapping[str, Callable[..., RecurrentMixer]] = MappingProxyType(
    {"delta": _delta, "mamba2": _mamba2, "mamba1": _mamba1, "lightning": _lightning, "conv": _conv}
)


def _built_in(
    name: str, sizes: str, layers: str = "", experts: str = "", source: str = "", **facts: Any
) -> ModelShape:
    """A row of ``models.json``; ``source``: whose config.json it is, as transformers reads it;
    ``sizes``: layers, hidden, ffn, heads, kv_heads, vocab; ``layers``: where they differ or are
    not attention and an MLP: how many have what; ``experts``: of :class:`Experts`."""
    # A word with a colon is a mixer and its sizes; a window is a fact of attention beside it.
    if ":" in layers.replace("window:", ""):
        facts["other_facts"] = ("layers that carry a state",)
    facts["other_facts"] = tuple(facts.get("other_facts", ()))
    facts["experts"] = Experts(*map(int, experts.split())) if experts else None
    depth, hidden, ffn, heads, kv_heads, vocab = map(int, sizes.split())
    model = ModelShape(name, depth, hidden, ffn, heads, kv_heads, vocab, **facts)
    if not layers:
        return model
    kinds = []
    for kind in layers.split(" | "):  # in any order: no plan depends on it
        count, *has = kind.split()
        changes: dict[str, Any] = {"layers": int(count), "attention": "attention" in has}
        changes |= {} if "mlp" in has else {"ffn": 0}
        changes |= {} if "experts" in has else {"experts": None}
        for mixer, *of in (word.split(":") for word in has if ":" in word):
            if mixer == "window":
                changes["window"] = int(of[0])
            else:
                changes["recurrent"] = _MIXERS[mixer](*map(int, of))
        kinds.append(replace(model, **changes))
    # One kind of attention is the model itself, which has more programs than layers that differ.
    alone = len(kinds) == 1 and not kinds[0].recurrent
    return kinds[0] if alone else replace(model, kinds=tuple(kinds))


_ROWS = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        alias: name
        for name, row in _ROWS.items()
        for alias in (
            *row.pop("aliases", "").split(),
            row.get("source", "").partition(",")[0].rpartition("/")[2].lower(),
        )
        if alias not in _ROWS
    }
)
MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {name: _built_in(name, **row) for name, row in _ROWS.items()}
)
# What makers append to the id of a model that they have trained on; its shape stays.
_TRAINED_ON = re.compile(r"-(instruct|base|chat|it|pt|hf|thinking|bf16|2507)$")


def built_in(name: str) -> ModelShape | None:
    """The built-in model of a name, an alias or an id of the hub, in any case; None if there is
    none."""
    key = name.strip().lower().replace("_", "-").replace("gpt3", "gpt").rpartition("/")[2]
    while _ALIASES.get(key, key) not in MODELS and _TRAINED_ON.search(key):
        key = _TRAINED_ON.sub("", key)
    return MODELS.get(_ALIASES.get(key, key))


# ------------------------------------------------------------------ models of files
# By name, from files of models, and from HuggingFace's configurations.


def load_model(name: str) -> ModelShape:
    """A built-in name, an id on the hub, a HuggingFace config.json or the folder of it.

    A file may have the fields of :class:`ModelShape` by their own names, too.

    Raises:
        ConfigError: no such name, or a file that describes no model.
    """
    path = Path(name)
    if name.endswith(".json") or path.is_dir():
        path = path / "config.json" if path.is_dir() else path
        stem = path.stem if path.stem != "config" else path.parent.name
        return _shape(stem, read_json(path, "model"), path)
    model = built_in(name)
    if model is None and (name.count("/") > 1 or name.startswith((".", "~"))):
        raise ConfigError(f"there is no folder {name} with a config.json")
    if model is None:
        asked = name.strip().lower().rpartition("/")[2]
        near = get_close_matches(asked, [*MODELS, *_ALIASES], n=3, cutoff=0.7)
        names = dict.fromkeys(_ALIASES.get(each, each) for each in near)
        meant = f"there are {', '.join(MODELS)}."
        if near or "/" in name:  # a repository of the hub: no name in a list is its model
            meant = f"did you mean {' or '.join(names)}?" if near else "its shape is not built in."
        raise ConfigError(
            f"no model {name!r}; {meant} Any other is planned by its config.json: hf download "
            f"{name if '/' in name else 'ID'} config.json, then --model with the path it prints"
        )
    return model


# Field of ModelShape -> the names that files give it besides, HuggingFace's among them.
_FIELD_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "layers": "num_layers num_hidden_layers n_layer",
        "hidden": "hidden_size n_embd d_model",
        "ffn": "ffn_hidden_size intermediate_size n_inner ffn_dim",
        "heads": "num_attention_heads n_head",
        "kv_heads": "num_key_value_heads num_query_groups",
        "vocab": "vocab_size",
        "head_dim": "kv_channels",
        "tied": "tie_word_embeddings",
        "gated": "",
        "learned_positions": "",
        "biases": "",
        "rope_theta": "rotary_emb_base",
        "norm_epsilon": "rms_norm_eps layer_norm_epsilon layer_norm_eps",
        "qkv_bias": "",
        "qk_norm": "",
    }
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Those whose experts are the MLP of a layer, and the name of their width.
_EXPERT_WIDTH: Mapping[str, str] = MappingProxyType(
    {
        "mixtral": "intermediate_size",
        "gpt_oss": "intermediate_size",
        "qwen3_moe": "moe_intermediate_size",
    }
)

# HuggingFace's model_type -> the defaults of its configurations. Only decoders whose layers are
# attention and one MLP, counted as ModelShape counts them.
_LLAMA: Mapping[str, Any] = MappingProxyType({"norm_epsilon": 1e-6})
_GEMMA: Mapping[str, Any] = MappingProxyType({"tied": True, "norm_epsilon": 1e-6})
_ARCHITECTURES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "granite", "mixtral"), _LLAMA),
        **dict.fromkeys(("gemma", "gemma2"), _GEMMA),
        "gemma3_text": MappingProxyType({**_GEMMA, "qk_norm": True}),
        **dict.fromkeys(("gpt2", "opt"), _GPT),
        **dict.fromkeys(("phi3", "olmo2"), MappingProxyType({})),
        "qwen2": MappingProxyType({**_LLAMA, "qkv_bias": True}),
        **dict.fromkeys(("qwen3", "qwen3_moe"), MappingProxyType({**_LLAMA, "qk_norm": True})),
        "gpt_oss": MappingProxyType({"qkv_bias": True, "rope_theta": 150000.0}),
        "gpt_neox": MappingProxyType({"gated": False, "biases": True}),
        "starcoder2": MappingProxyType({"gated": False, "tied": True, "biases": True}),
    }
)
# What a configuration of an unknown model_type has if its layers are not attention and an MLP:
# attention by latents, states, convolutions.
_OTHER_LAYERS = ("kv_lora", "q_lora", "mamba", "ssm", "state_size", "conv", "linear_", "time_step")
# How many keys, or blocks of keys, an indexer picks.
_INDEXERS = ("index_topk", "index_topk_blocks", "indexer_budget")
# Older decoders that compute attention themselves, of a rank's queries and the keys of all tokens.
_GATHERED = frozenset(
    {"bloom", "clvp_decoder", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt"}
    | {"megatron-bert", "mvp", "rembert", "roformer", "trocr", "xglm"}
)
# Those whose layers the fields of ModelShape describe, apart from what _other_facts lists. The
# other architectures scale, normalize or add in ways of their own.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "starcoder2")


def _other_facts(entry: Mapping[str, Any], gated: bool) -> tuple[str, ...]:
    """Facts of a HuggingFace configuration that no field of ModelShape holds, by name."""
    kind = entry.get("model_type")
    facts = [f"layers of model_type {kind}"] if kind is not None and kind not in _PLAIN else []
    names = ("hidden_act", "activation_function", "hidden_activation")
    activations = {name: entry[name] for name in names if entry.get(name) is not None}
    if kind == "gpt2" and not activations:
        activations = {"activation_function": "gelu_new"}
    usual = ("silu", "swish") if gated else ("gelu",)
    facts += [f"{name} {value}" for name, value in activations.items() if value not in usual]
    rope = entry.get("rope_parameters")  # of newer configurations, scaled or not
    scales = isinstance(rope, Mapping) and rope.get("rope_type", "default") != "default"
    scaling = entry.get("rope_scaling") or (rope if scales else None)
    facts += [f"rope_scaling {json.dumps(scaling)}"] if scaling else []
    for name in ("partial_rotary_factor", "rotary_pct"):
        value = entry.get(name)
        facts += [f"{name} {value}"] if value not in (None, 1, 1.0) else []
    return (*facts, *(n for n in ("attention_bias", "mlp_bias") if entry.get(n) is True))


def _shape(name: str, entry: Any, path: Path) -> ModelShape:
    """The shape from one JSON object: its keys by their aliases, defaults by its architecture."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: model {name} must be an object with layers, hidden, ...")
    if isinstance(entry.get("text_config"), Mapping):  # what enable shards of such a model
        outer = {key: value for key, value in entry.items() if not isinstance(value, Mapping)}
        text = _shape(name, {**outer, **entry["text_config"]}, path)
        facts = *text.other_facts, "towers for images or sounds"
        kinds = tuple(replace(kind, other_facts=facts) for kind in text.kinds)
        return replace(text, other_facts=facts, kinds=kinds)
    defaults = _architecture_defaults(name, entry, path)
    rope = entry.get("rope_parameters")
    values: dict[str, Any] = dict(defaults)
    if isinstance(rope, Mapping) and rope.get("rope_theta") is not None:
        values["rope_theta"] = rope["rope_theta"]
    for field, aliases in _FIELD_NAMES.items():
        stated = (entry.get(alias) for alias in (field, *aliases.split()))
        values[field] = next((x for x in stated if x is not None), values.get(field))
    values = {field: value for field, value in values.items() if value is not None}
    _check_spelling(name, entry, values, path)
    values["other_facts"] = _other_facts(entry, values.get("gated", True))
    if defaults is _GPT:
        values.setdefault("ffn", 4 * values.get("hidden", 0))
    values.setdefault("kv_heads", values.get("heads"))
    required = ("layers", "hidden", "ffn", "heads", "vocab")
    missing = [field for field in required if not values.get(field)]
    if missing:
        raise ConfigError(f"{path}: model {name} has no {', '.join(missing)}")
    model = ModelShape(name=name or path.stem, **values)
    return _with_layer_types(_with_experts(model, entry, path), entry, path)


def _with_experts(model: ModelShape, entry: Mapping[str, Any], path: Path) -> ModelShape:
    """Return the model with the experts of its configuration in the place of the MLP, and with
    vectors that other models have not."""
    kind, hidden = entry.get("model_type"), model.hidden
    if kind in ("gemma2", "gemma3_text"):  # norms behind attention and MLP, too
        return replace(model, other_vectors=2 * hidden)
    if kind not in _EXPERT_WIDTH:
        return model
    count = next((entry[key] for key in _EXPERTS if entry.get(key)), None)
    used = entry.get("num_experts_per_tok") or entry.get("experts_per_token")
    width = entry.get(_EXPERT_WIDTH[str(kind)])
    sizes = {"experts": count, "experts a token": used, _EXPERT_WIDTH[str(kind)]: width}
    for quantity, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{path}: model {model.name} has {quantity} {size!r}: a whole number")
    if entry.get("mlp_only_layers") or entry.get("decoder_sparse_step") not in (None, 1):
        raise ConfigError(
            f"{path}: model {model.name} has experts in some layers and an MLP in others "
            "(mlp_only_layers, decoder_sparse_step): plan it with experts in all layers"
        )
    # The MLP's width is 0 then: some families keep a width that their layers do not use.
    experts = Experts(*map(int, (count or 0, used or 0, width or 0)))
    vectors = 0
    if kind == "gpt_oss":  # biases of experts, router and attention's output; a sink a head
        vectors = experts.count * (2 * experts.ffn + hidden + 1) + hidden + model.heads
    return replace(model, ffn=0, experts=experts, other_vectors=vectors)


def _with_layer_types(model: ModelShape, entry: Mapping[str, Any], path: Path) -> ModelShape:
    """Return the model with the windows of its layers: of all, or of those that ``layer_types``
    names, or of the pattern that is the default of its architecture."""
    # Which layers have the window is not in every configuration file: transformers leaves out what
    # is its default. 2, 6 and 28 are the defaults of its classes.
    window = entry.get("sliding_window") or entry.get("window") or 0
    if not entry.get("use_sliding_window", True) or not window:
        return model
    kind, types = entry.get("model_type"), entry.get("layer_types")
    every = entry.get("sliding_window_pattern") or {"gemma3_text": 6}.get(str(kind), 2)
    if types is None and kind in ("gemma2", "gemma3_text", "gpt_oss"):
        numbers = range(1, model.layers + 1)
        types = ["full_attention" if n % every == 0 else "sliding_attention" for n in numbers]
    if types is None and kind in ("qwen2", "qwen3", "qwen3_moe"):
        first = entry.get("max_window_layers", 28)
        names = ("full_attention", "sliding_attention")
        types = [names[number >= first] for number in range(model.layers)]
    if types is None and kind is not None and kind not in _ARCHITECTURES:
        raise ConfigError(
            f"{path}: model {model.name} has a sliding_window of {window}, and no layer_types says "
            "in which layers: add them"
        )
    if types is None:
        return replace(model, window=window)
    windows = {"full_attention": 0, "sliding_attention": window}
    unknown = [name for name in types if name not in windows]
    if unknown or len(types) != model.layers:
        raise ConfigError(
            f"{path}: model {model.name} has {len(types)} layer_types of {model.layers} layers, "
            f"among them {', '.join(map(str, unknown)) or 'none'} that is not known; known are "
            f"{', '.join(windows)}"
        )
    kinds = tuple(
        replace(model, layers=types.count(name), window=windows[name])
        for name in windows
        if name in types
    )
    return kinds[0] if len(kinds) == 1 else replace(model, kinds=kinds)


def _check_spelling(
    name: str, entry: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> None:
    """Check that no key is nearly the name of a field that has no value: ``kv_heads`` would be
    ``heads`` then. Other keys are those of HuggingFace's configurations that change no plan."""
    names = {field: (field, *aliases.split()) for field, aliases in _FIELD_NAMES.items()}
    spellings = {key for keys in names.values() for key in keys}
    absent = [key for field, keys in names.items() if field not in values for key in keys]
    for key in entry:
        near = [] if key in spellings else get_close_matches(key, absent, n=1, cutoff=0.8)
        if near:
            raise ConfigError(
                f"{path}: model {name} has {key!r}, which is no field, and no {near[0]!r}: write "
                f"{near[0]!r}, or leave {key!r} out"
            )


def _architecture_defaults(name: str, entry: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The defaults of a HuggingFace configuration's model_type; none without a model_type."""
    indexers = [f"{key}={entry[key]}" for key in _INDEXERS if entry.get(key)]
    kind = entry.get("model_type")
    if indexers or kind in list(_GATHERED):  # a list: it may be no text
        trait = "whose indexer picks the keys" if indexers else "that compute attention themselves"
        raise ConfigError(
            f"{path}: {[*indexers, f'model_type {kind!r}'][0]}: layers {trait} are not planned. "
            "Their keys are gathered over all ranks of a sequence: the split into Ulysses and ring "
            "means nothing to them (docs/usage/sparse-models.md)"
        )
    experts = [key for key in _EXPERTS if entry.get(key) not in (None, 0, 1)]
    if experts and entry.get("model_type") not in list(_EXPERT_WIDTH):
        raise ConfigError(
            f"{path}: {experts[0]}={entry[experts[0]]}: experts are planned of model_type "
            f"{', '.join(_EXPERT_WIDTH)}. Of others memory and time are outside the estimate; "
            "their degrees are those of the rule (docs/which-degrees.md)"
        )
    if kind is None or kind in list(_ARCHITECTURES):  # a list: it may be no text
        return _ARCHITECTURES[kind] if kind is not None else MappingProxyType({})
    other = [key for key in entry if key.startswith(_OTHER_LAYERS) and entry[key]]
    if "gated" not in entry and (other or entry.get("hidden_act") not in ("silu", "swish")):
        has = f"has {other[0]}" if other else "does not say whether its MLP is gated"
        raise ConfigError(
            f"{path}: the layers of model_type {kind!r} are not known, and the file {has}; known "
            f"are {', '.join(_ARCHITECTURES)}. Leave model_type out and state gated, tied, "
            "learned_positions and biases to plan it as such a model"
        )
    return MappingProxyType({})
