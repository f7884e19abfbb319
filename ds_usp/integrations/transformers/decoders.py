"""Decoders of an older make: their attention is no function of transformers' interface, their
layers hand no keyword arguments on, or they take no positions. ``refusals.py`` asks what is served,
then ``EnabledModel`` makes :class:`Decoders`. Layers that compute attention themselves gather keys
in forward, on every rank, once more where it is recomputed; nothing else here communicates."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_usp.errors import DataError, UnsupportedAttentionError
from ds_usp.geometry.masks import has_only
from ds_usp.integrations.transformers.attention import (
    PASS,
    LayerMask,
    Shard,
    mask_of,
    outside_of_pass,
    text_of_dropout,
)
from ds_usp.integrations.transformers.query_chunks import (
    Gathered,
    KeyCache,
    KeysAreMade,
    number_of_chunks,
    of_queries,
    parts_of_shard,
)
from ds_usp.integrations.transformers.recurrent_layers import (
    ReplacedAttributes,
    has_other_forward,
    is_of_transformers,
)
from ds_usp.integrations.transformers.sparse_layers import as_scores, gather_tokens, seen_keys
from ds_usp.integrations.transformers.text_model import text_model, text_modules
from ds_usp.memory.chunks import in_chunks_at
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.training.whole_batch import local_positions

_OLDEST: Final = "5.23"  # as far as every such type was run: see the table of types
# What a layer calls its KV cache, and how it puts keys there.
_CACHES: Final = ("past_key_values", "layer_past")
_PUTS_KEYS: Final = re.compile(r"\b(layer_past|(\w+_)?past_key_values)\.update\(")
# Tensors that a layer is given: the dim of its queries, None where it has none.
_QUERY_DIMS: Final[Mapping[str, int | None]] = MappingProxyType(
    dict.fromkeys(("hidden_states", "residual"), 1)
    | dict.fromkeys(("attention_mask", "position_embeddings", "sinusoidal_pos"), -2)
    | {"position_ids": -1}
    | dict.fromkeys(("alibi", "position_bias", "rotary_pos_emb"))
)
_INTERFACE: Final = "ALL_ATTENTION_FUNCTIONS"
# What embeds positions as angles, for layers that take them of one row.
_ANGLES: Final = frozenset({"RoFormerSinusoidalPositionalEmbedding"})
# Models whose positions are a bias of scores, and the method that makes it: "" where it has a
# value for each key that only differs from key to key by their distance, which no shard changes.
_BIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"BloomModel": "build_alibi_tensor", "MptModel": ""}
)
T = TypeVar("T")


def _cached(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """Make a function compute once for each class."""
    return lru_cache(maxsize=1024)(function)  # type checkers take classes for not hashable


def attention_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of the text model that put keys into a KV cache."""
    return [x for x in text_modules(model) if _PUTS_KEYS.search(_source(type(x)))]


@_cached
def _source(kind: Any) -> str:
    """The code of a class's forward where it is transformers' own, without wrappers; else ""."""
    base = next(filter(is_of_transformers, kind.__mro__), None)  # FSDP2 makes classes of its own
    if base is None or not hasattr(kind, "forward"):
        return ""
    forward: Any = inspect.unwrap(kind.forward)
    if forward is not inspect.unwrap(vars(base).get("forward", base.forward)):
        return ""
    return inspect.getsource(forward)


def gathered_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Attention layers that compute scores themselves, in a model without transformers' attention
    interface: they run on the keys of all tokens."""
    if text_model(model)._supports_attention_backend:
        return []
    return [x for x in attention_layers(model) if _INTERFACE not in _source(type(x))]


def reason_against_attention(model: PreTrainedModel) -> str:
    """Why layers of a model without transformers' attention interface cannot be sharded, or ""."""
    text = text_model(model)
    layers, gathered = attention_layers(model), gathered_layers(model)
    reason = "it computes attention itself (_supports_attention_backend is not set)"
    if Version(transformers.__version__) < Version(_OLDEST):
        return f"{reason}: such models are served with transformers>={_OLDEST}"
    if hasattr(text, "set_attention_type") and text.config.attention_type != "original_full":
        return (
            f"{reason}, which kind by the tokens that it is given: set "
            "attention_type='original_full'"
        )
    if not layers:
        return f"{reason}, and puts no keys into a KV cache, by which a rank could get all of them"
    if 0 < len(gathered) < len(layers):
        return f"{reason} in some layers only"
    models = (type(x) for x in text_modules(model) if isinstance(x, PreTrainedModel))
    codes = (inspect.getsource(x) for x in models if is_of_transformers(x))
    if gathered and not any("create_causal_mask" in code for code in codes):
        return f"{reason}, and makes its masks of the tokens that it is given"
    for layer in gathered:
        kind = type(layer)
        if has_other_forward(layer):
            return f"{reason}, and the forward of {kind.__name__} is not transformers' own"
        if "_flash_attention_forward" in _source(kind):
            return f"{reason} by FlashAttention: load it with attn_implementation='eager' or 'sdpa'"
    if getattr(text.config, "alibi", False) and _bias(text) is None:
        return f"{reason}, and biases scores by positions that it counts (config.alibi)"
    return ""


def counts_positions(model: PreTrainedModel) -> bool:
    """Return whether a model takes no position_ids and has no other way by which a shard's
    positions could reach it."""
    forwards = model.forward, model.base_model.forward  # the latter without the head
    if all("position_ids" in inspect.signature(x).parameters for x in forwards):
        return False
    positions_reach_it = _bias(text_model(model)) is not None or any(_position_embeddings(model))
    return not positions_reach_it or Version(transformers.__version__) < Version(_OLDEST)


def _bias(text: PreTrainedModel) -> str | None:
    return next((_BIASES[x.__name__] for x in type(text).__mro__ if x.__name__ in _BIASES), None)


def _position_embeddings(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Modules that count positions, and take them instead."""
    for module in text_modules(model):
        if "past_key_values_length" in _source(type(module)):
            taken = inspect.signature(type(module).forward).parameters.keys()
            if {"position_ids", "past_key_values_length"} <= taken:
                yield module


def need_carry(model: PreTrainedModel) -> bool:
    """Return whether layers may hand no keyword arguments on: checkpoints must carry the pass."""
    if not text_model(model)._supports_attention_backend:
        return True
    layers = (type(x) for x in text_modules(model) if isinstance(x, GradientCheckpointingLayer))
    return any(_source(kind).count("**") <= 1 for kind in layers)  # its own, and none of a call


class Decoders:
    """Replaces what a decoder cannot compute from a shard alone, until :meth:`restore`: forwards of
    attention layers, embeddings of positions, biases."""

    # Note [older decoders]
    # Where a layer calls transformers' attention interface, `usp` is its function, and learns of
    # the pass from PASS. Else the layer runs as sparse layers do (Note [sparse layers]): on this
    # rank's queries and a KV cache that returns the keys of all tokens, with a mask of this rank's
    # queries x all keys. That mask is made as a tensor where the model asks transformers for it,
    # so a model may do with it what it does with its own. Positions come as `position_ids`; where
    # a model takes none, its embedding of positions is given them, or its bias those of all keys.
    def __init__(self, model: PreTrainedModel, query_chunks: int | str) -> None:
        self._replaced = ReplacedAttributes()
        text = text_model(model)
        gathered = gathered_layers(model)
        for layer in gathered:
            forward = partial(type(layer).forward, layer)
            run = partial(_run_layer, layer, forward, text.config, query_chunks)
            self._replaced.set(layer, "forward", run)
        self._mask_of_keys = _mask_of_keys if gathered else None
        self._takes_positions = "position_ids" in inspect.signature(text.forward).parameters
        for module in _position_embeddings(model):
            forward = partial(type(module).forward, module)
            rotates = type(module).__name__ in _ANGLES
            if not self._takes_positions:
                self._replaced.set(module, "forward", partial(_embed_positions, forward, rotates))
            elif hasattr(module, "make_weights"):
                self._replaced.set(module, "forward", partial(_embed_in_table, forward))
        if name := _bias(text):
            self._replaced.set(text, name, partial(_bias_of_keys, getattr(text, name)))

    def begin(self, shard: Shard, local: dict[str, Any], positions: Tensor | None) -> None:
        """Give a shard what layers ask it for.

        Args:
            local: arguments of this rank, of which those that the model does not take are dropped.
            positions: of the whole batch, ``[1 or b, seq_len]``; None: each token's place.
        """
        shard.mask_of_keys = self._mask_of_keys
        if self._takes_positions:
            return
        shard.positions, shard.key_positions = local.pop("position_ids"), positions

    def restore(self) -> None:
        self._replaced.restore()


@_cached
def _signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.forward)


@disable_in_compile("keys are gathered over the ranks, in calls that they compare")
def _run_layer(
    layer: nn.Module, forward: Any, config: Any, query_chunks: int | str, *args: Any, **kwargs: Any
) -> Any:
    # Stands for a gathered layer's `forward`, which is bound; `config` is the text model's.
    name, shard = type(layer).__name__, PASS.get()
    arguments = _signature(type(layer)).bind(layer, *args, **kwargs).arguments
    others = arguments.pop("kwargs", {})
    hidden = next(x for x in arguments.values() if isinstance(x, Tensor))
    if shard is None or hidden.shape[1] != shard.length:
        raise outside_of_pass(layer)
    if layer.training and (dropout := _dropout(layer)):
        raise UnsupportedAttentionError(text_of_dropout(layer, dropout, config))
    gather = partial(gather_tokens, dim=-2, mesh=shard.call.mesh, layout=shard.layout)
    key_cache = _DecoderCache(name, gather)
    key_cache.before = shard.layout.seq_len - shard.length
    cache_name = next(x for x in _CACHES if x in _signature(type(layer)).parameters)
    del arguments["self"]
    query_bytes = 4 * len(hidden) * config.num_attention_heads * shard.layout.seq_len
    chunks = number_of_chunks(query_chunks, shard.layout, query_bytes)
    run = partial(forward, **others)
    if chunks > 1:
        out = _run_in_chunks(layer, shard, key_cache, chunks, run, arguments, cache_name)
    else:
        with _RowsOfMask(layer, shard, slice(None)):
            out = run(**{**arguments, cache_name: key_cache})
    if key_cache.updated is None:
        raise UnsupportedAttentionError(
            f"{name} has not put its keys into the KV cache that it was given: each query would "
            "see those of its rank alone"
        )
    shard.layers.append(name)
    return out


def _run_in_chunks(
    layer: nn.Module,
    shard: Shard,
    key_cache: _DecoderCache,
    chunks: int,
    forward: Any,
    arguments: Mapping[str, Any],
    cache_name: str,
) -> Any:
    """Return what ``forward(**arguments)`` does, by chunks of the queries (Note [queries in chunks]
    of query_chunks.py)."""
    key_cache.is_first_run = True
    with suppress(KeysAreMade), _RowsOfMask(layer, shard, slice(None)):
        forward(**{**arguments, cache_name: key_cache})
    gathered = Gathered(layer, key_cache, None, joined=False)
    seq_len = shard.layout.seq_len
    parts = {x.start: x for x in parts_of_shard(shard.length, chunks, seq_len)}
    hidden_name = next(name for name, x in arguments.items() if isinstance(x, Tensor))
    further: list[Any] = []  # results beside attention's: no weights, 1-D biases that callers add

    def run(x: Tensor, start: int, stop: int) -> Tensor:
        """Return attention of this rank's queries ``[start, stop)``; in backward again."""
        part = parts[start]
        part_cache = _CacheOfChunk(key_cache, gathered.keys_of(part))
        part_cache.before = seq_len - stop + start
        sliced = {key: of_queries(key, y, part, _QUERY_DIMS) for key, y in arguments.items()}
        with _RowsOfMask(layer, shard, slice(start, stop)):
            out = forward(**{**sliced, hidden_name: x, cache_name: part_cache})
        if not isinstance(out, tuple):
            return cast(Tensor, out)
        further[:] = None, *out[2:]
        if any(isinstance(x, Tensor) and x.ndim > 1 for x in out[2:]):
            raise UnsupportedAttentionError(
                f"{type(layer).__name__} returns more of its queries than attention's result and "
                "weights, which is not joined over chunks: use query_chunks=1"
            )
        return cast(Tensor, out[0])

    borders = [(part.start, part.stop) for part in parts.values()]
    result = in_chunks_at(run, arguments[hidden_name], borders, 1, layer)
    return (result, *further) if further else result


def _dropout(layer: nn.Module) -> float:
    """The probability by which a layer drops attention weights."""
    for name in ("attention_dropout", "attn_dropout", "attn_dropout_p", "dropout"):
        value = getattr(layer, name, 0.0)
        if probability := getattr(value, "p", value):
            return float(probability)
    return 0.0


class _DecoderCache(KeyCache):
    """Keys of a decoder.

    Attributes:
        before: the length of its cache that the layer reads: keys before this rank's queries.
    """

    before = 0

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(keys, values)
        if self.is_first_run:
            raise KeysAreMade
        return keys.contiguous(), values.contiguous()  # as a cache's: some layers take views

    def get_seq_length(self, *_: Any) -> int:
        return self.before


class _CacheOfChunk(_DecoderCache):
    """Returns the keys that were gathered."""

    def __init__(self, layer_cache: _DecoderCache, keys_and_values: tuple[Tensor, Tensor]) -> None:
        super().__init__(layer_cache._layer, layer_cache._gather)
        self._keys_and_values = keys_and_values

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._keys_and_values


class _RowsOfMask:
    """Replaces a layer's own mask of all positions (GPT-Neo's), in a ``with`` block, by its rows
    for this rank's queries, whatever rows the layer takes."""

    def __init__(self, layer: nn.Module, shard: Shard, queries: slice) -> None:
        mask = layer._buffers.get("bias")
        is_square = mask is not None and mask.ndim == 4 and mask.dtype == torch.bool
        self._names, self._shard = vars(layer), shard
        self._mask = mask if is_square else None
        self._queries = queries

    def __enter__(self) -> None:
        if self._mask is not None:
            self._names["bias"] = self

    def __getitem__(self, _: Any) -> Tensor:
        layout, mask = self._shard.layout, cast(Tensor, self._mask)
        rows = local_positions(layout, self._shard.call.mesh.rank, mask.device)[self._queries]
        return mask[:, :, rows, : layout.seq_len]

    def __exit__(self, *_: object) -> None:
        self._names.pop("bias", None)


def _mask_of_keys(
    shard: Shard, mask: LayerMask, rows: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the mask that layers add to scores of this rank's queries x all keys, ``[rows, 1, q,
    keys]``: ``Shard.mask_of_keys``, for ``usp_mask``."""
    spec = mask_of(mask, shard.packing, shard.layout.seq_len)
    if not has_only(spec, "left", "right", "documents"):
        raise UnsupportedAttentionError(
            f"layers compute attention themselves under {spec}: served are causal masks and "
            "windows, of documents too, without blocks and trees"
        )
    seen = as_scores(seen_keys(spec, shard, device, 0, shard.length), dtype)
    return seen.expand(rows, -1, -1, -1)


def _embed_positions(forward: Any, embeds_angles: bool, *args: Any, **kwargs: Any) -> Any:
    """Embed the positions of this rank's tokens, where the model would count them. The module, one
    that ``_position_embeddings`` finds, as Bart's, or with ``embeds_angles`` one of ``_ANGLES``,
    takes ``[n]``; the model adds a dim of rows to a result ``[tokens, d]``, and RoFormer's to any
    result."""
    shard = PASS.get()
    if shard is None or shard.positions is None:
        return forward(*args, **kwargs)
    positions = shard.positions
    kwargs = {x: y for x, y in kwargs.items() if x != "past_key_values_length"}
    out: Tensor = forward(*args[:1], **{**kwargs, "position_ids": positions.flatten()})
    if len(positions) == 1:
        return out.view(len(positions[0]), -1)
    if embeds_angles:
        raise DataError(
            "the model takes rotary angles of one row of positions for all rows, and the batch has "
            f"positions of {len(positions)} rows: give documents of the same lengths in all rows, "
            "as positions [1, tokens], or a batch of one row"
        )
    return out.view(*positions.shape, -1)


def _embed_in_table(forward: Any, position_ids: Tensor, past_key_values_length: int = 0) -> Tensor:
    """Embed positions by a table that grows with the count of tokens (XGLM's): here with that of
    all ranks, of which this rank's tokens may have any positions."""
    if (shard := PASS.get()) is not None:
        past_key_values_length = int(shard.largest_position) + 1
    embedded: Tensor = forward(position_ids, past_key_values_length)
    return embedded


def _bias_of_keys(original: Any, mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Return ALiBi of the keys of all tokens, ``[rows * heads, 1, keys]``, by their positions."""
    shard = PASS.get()
    if shard is None:
        return original(mask, heads, dtype)
    positions = shard.key_positions
    count = shard.layout.seq_len if positions is None else int(shard.largest_position) + 1
    bias: Tensor = original(mask.new_ones(1, count), heads, dtype)  # of each position
    if positions is not None:
        bias = bias[:, 0, positions].transpose(0, 1)  # [rows, heads, keys]
    bias = bias.view(-1, heads, 1, shard.layout.seq_len)
    return bias.expand(len(mask), -1, -1, -1).reshape(len(mask) * heads, 1, -1)
