"""Queries of sparse layers in chunks: masks and scores of all keys exist for a chunk at a time, and
attention to picked latents reads these alone. ``sparse_layers.py`` and ``decoders.py`` call it in
each layer of a pass, on every rank. Only :class:`KeyCache` communicates, where a layer puts keys
in, and in backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import ceil
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from ds_usp.errors import DataError, UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.state_chains import StateChains
from ds_usp.kernels.registry import AUTO
from ds_usp.memory.chunks import LOW_PRECISION, in_chunks_at

# What `query_chunks="auto"` lets the largest tensor of one chunk have: several of its size exist.
BYTES_OF_CHUNK: Final = 2**31
_PICKED: Final = "usp_picked"  # attention of transformers' registry: of the keys that are picked
# Arguments of layers that have queries, by their dim; those of others do not go in chunks.
_QUERY_DIMS: Final = {"position_embeddings": -2, "prev_topk_indices": 1, "position_ids": -1}
_QUERY_DIMS["input_ids"] = -1  # of text models, where no tower has made embeddings of them

# Note [queries in chunks]
# The forward of a layer as transformers wrote it runs once more than there are chunks. The first
# run ends where its keys and those of its indexer are in the cache (KeysAreMade): they are gathered
# there, once. Then each chunk of the queries runs it in a checkpoint, with a cache that returns the
# gathered keys, whatever is put in: keys of a chunk are computed and dropped. A query's keys are
# picked in forward alone; what backward recomputes takes them from there. Gradients of the keys are
# summed over chunks in fp32, as those of parameters are (Note [gradients of chunks]).
# Layers that attend to latents (MLA, known by `expand_kv`) are given these instead of keys and
# values of all heads, and the picked ones alone are read: `kv_b_proj` is moved from the keys to the
# query and the result. Its matrix is what the module makes of an identity, so that adapters and
# engines that shard it are as in any call.
# Layers that count tokens in their cache (`sparse_layers._COUNTS`) run so for each piece of a
# document, in no checkpoint where that is one chunk: the cache has the document's keys alone, up to
# the last query. A chunk, or a piece of one, is a Part.


class KeysAreMade(Exception):  # noqa: N818 - ends a run whose keys are all that it was for
    """The keys of a layer are gathered: the rest of its forward is of no use."""


class KeyCache:
    """Stands for a layer's KV cache: returns the keys of all tokens for those that are put in.

    Args:
        layer: the name of its class.
        gather: makes the keys of all tokens of those of this rank, along dim -2; collective.

    Attributes:
        updated, indexed: keys and values that were put in, and those of the indexer, of all tokens.
        compressed: by its name, what a compressor makes fewer keys of (DeepSeek V4), of all tokens.
        is_first_run: nothing but the keys is asked for (Note [queries in chunks]).
    """

    def __init__(self, layer: str, gather: Callable[[Tensor], Tensor]) -> None:
        self._layer, self._gather = layer, gather
        self.updated: tuple[Tensor, Tensor] | None = None
        self.indexed: Tensor | None = None
        self.compressed: dict[str, tuple[Tensor, Tensor]] = {}
        self.is_first_run = False

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if keys is values:  # DeepSeek V4, which pads its mask to its keys: none in the first run
            self.updated = (self._gather(keys),) * 2
            return (keys[..., :0, :],) * 2 if self.is_first_run else self.updated
        if keys.shape[:-1] != values.shape[:-1] or keys.dtype != values.dtype:
            self.updated = self._gather(keys), self._gather(values)
        else:
            together = self._gather(torch.cat([keys, values], -1))  # one exchange
            whole_keys, whole_values = together.split((keys.shape[-1], values.shape[-1]), -1)
            self.updated = whole_keys, whole_values
        return self.updated

    @property
    def layers(self) -> Any:
        """The cache of each layer, which MiniMax M3 asks: all are this one."""
        return defaultdict(lambda: self)

    def update_indexer(self, keys: Tensor, *_: int) -> Tensor:
        self.indexed = self._gather(keys)
        if self.is_first_run:
            raise KeysAreMade
        return self.indexed

    def update_index(self, keys: Tensor) -> Tensor:  # its name in MiniMax M3
        return self.update_indexer(keys)

    def store_compression_weights(
        self, name: str, keys: Tensor, gates: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Gather what DeepSeek V4 compresses, and return none of it: only the first run asks."""
        whole = self._gather(torch.cat([keys, gates], -1))
        self.compressed[name] = whole[..., : keys.shape[-1]], whole[..., keys.shape[-1] :]
        return keys[:, :0], gates[:, :0], 0

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        return None, None  # nothing comes before the first window of a document

    def update_compressor_states(self, _: str, compressed: Tensor) -> Tensor:
        return compressed

    def pick(self, run: Callable[[], Any]) -> Any:
        """Return what ``run``, the layer's indexer, returns: its picks; in the first run, where
        :meth:`update_indexer` ends it, an empty tensor."""
        try:
            return run()
        except KeysAreMade:  # the module ends as it always does: hooks of engines count on that
            return cast(Tensor, self.indexed).new_empty((1, 0, 0), dtype=torch.int32)

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedAttentionError(
            f"{self._layer} asks its KV cache for {name!r}, which a shard of the tokens has no "
            "answer to: this model is not served"
        )


class Part(NamedTuple):
    """Queries that a layer computes together.

    Attributes:
        start, stop: a range of the rank's queries. Where rows differ in their documents they lie
            one after the other.
        row: of the batch; None: of all rows.
        row_start: index of the first query in its row of the shard.
        first, last: the range of places in the sequence of which these queries may see keys.
    """

    start: int
    stop: int
    row: int | None
    row_start: int
    first: int
    last: int

    def of_rows(self, x: Tensor) -> Tensor:
        return x if self.row is None or len(x) == 1 else x[self.row : self.row + 1]

    def queries(self, x: Tensor, dim: int) -> Tensor:
        return self.of_rows(x).narrow(dim, self.row_start, self.stop - self.start)

    def keys(self, x: Tensor) -> Tensor:
        x = self.of_rows(x)
        whole = self.last - self.first == x.shape[-2]
        return x if whole else x.narrow(-2, self.first, self.last - self.first)


def parts_of_shard(length: int, chunks: int, seq_len: int) -> list[Part]:
    """Return so many chunks of a rank's queries, which may see all keys."""
    borders = pairwise(index * length // chunks for index in range(chunks + 1))
    return [Part(start, stop, None, start, 0, seq_len) for start, stop in borders]


@lru_cache(maxsize=64)
def parts_of_documents(chains: StateChains, rank: int, chunks: int) -> tuple[Part, ...]:
    """Return the pieces of documents that a rank has, each as queries of a prefill of its document
    alone: none has keys of other documents or behind its last query. They are cut where a chunk
    of the shard would be shorter, and into as many parts on every rank.

    Raises:
        DataError: on every rank, if a rank has fewer tokens than another one has pieces.
    """
    layout = chains.layout
    chunk_counts = [
        sum(ceil(piece.length * chunks / layout.length(owner)) for piece in pieces)
        for owner, pieces in enumerate(chains.by_rank)
    ]
    tokens = min(sum(piece.length for piece in pieces) for pieces in chains.by_rank)
    # One number on all ranks: engines that gather parameters do so for each part.
    num_parts = max(min(max(chunk_counts), tokens), *map(len, chains.by_rank))
    if num_parts > tokens:
        raise DataError(
            f"a rank has {num_parts} pieces of documents, and another one {tokens} tokens: "
            "documents of a token each, which these layers cannot share out. Give rows of fewer "
            "documents"
        )
    pieces = chains.by_rank[rank]
    counts = [1] * len(pieces)
    longest: list[tuple[float, int]] = [(-piece.length, i) for i, piece in enumerate(pieces)]
    heapify(longest)
    for _ in range(num_parts - len(pieces)):
        _, i = heappop(longest)
        counts[i] += 1
        heappush(longest, (-pieces[i].length / counts[i], i))
    parts, length = [], layout.length(rank)
    for piece, count in zip(pieces, counts, strict=True):
        row_offset = piece.offset - length * (piece.row or 0)
        for a, b in pairwise(n * piece.length // count for n in range(count + 1)):
            start, stop = piece.offset + a, piece.offset + b
            parts.append(Part(start, stop, piece.row, row_offset + a, piece.first, piece.start + b))
    return tuple(parts)


class _CacheOfPart(KeyCache):
    """Returns the keys that were gathered, and what was picked when backward asks again.

    Args:
        layer_cache: has the keys of all tokens, after the first run.
        part: of the queries.
        gathered: what the layer gets its keys and values of.
        picked: by each part's first query.
    """

    def __init__(
        self, layer_cache: KeyCache, part: Part, gathered: Gathered, picked: dict[int, Any]
    ) -> None:
        super().__init__(layer_cache._layer, layer_cache._gather)
        self.indexed = None if layer_cache.indexed is None else part.keys(layer_cache.indexed)
        self._part, self._gathered, self._picked = part, gathered, picked

    def update(self, *_: Any, **__: Any) -> Any:
        return self._gathered.keys_of(self._part)

    def update_indexer(self, *_: Any) -> Tensor:
        return self.keys

    @property
    def keys(self) -> Tensor:
        return cast(Tensor, self.indexed)

    def get_seq_length(self) -> int:
        return self._part.last - self._part.first

    def store_compression_weights(
        self, name: str, keys: Tensor, gates: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        return (*self._gathered.to_compress(self._part, name), 0)

    def pick(self, run: Callable[[], Any]) -> Any:
        start = self._part.start
        if start not in self._picked:
            with torch.no_grad():  # nor has what backward runs again a graph of it
                picked = run()
            self._gathered.dtype_of_picks = picked.dtype
            self._picked[start] = picked.int() if picked.dtype == torch.int64 else picked
        return self._picked[start].to(self._gathered.dtype_of_picks)


def run_indexer(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``forward`` of an indexer by its cache: picks of a chunk are made once."""
    key_cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, KeyCache)), None)
    if key_cache is None:
        return forward(*args, **kwargs)
    return key_cache.pick(lambda: forward(*args, **kwargs))


def number_of_chunks(query_chunks: int | str, layout: TokenLayout, query_bytes: int) -> int:
    """Return how many chunks a layer's queries go in, the same on every rank: as many as were asked
    for, or as keep the largest tensor of one within ``BYTES_OF_CHUNK``.

    Args:
        query_bytes: the bytes of that tensor for one query of each row.
    """
    lengths = [layout.length(rank) for rank in range(layout.degree)]
    if query_chunks != AUTO:
        return int(query_chunks)
    queries = max(1, BYTES_OF_CHUNK // query_bytes)
    return min(ceil(max(lengths) / queries), min(lengths))


def bytes_of_query(layer: Any, keys: int, itemsize: int) -> int:
    """Return the bytes of the largest tensor that a sparse layer makes for a query of one row."""
    owner = getattr(layer, "compressor", None) or layer
    indexer: Any = getattr(owner, "indexer", None)
    heads = getattr(indexer, "n_heads", 0) or getattr(indexer, "num_heads", 1)
    # Scores of the indexer are in fp32; GLM-5 Next's are of pools, beside a count of each key.
    scores = max(4 * heads // getattr(indexer, "index_kpool", 1), 8) * keys
    if reads_picked_latents(layer):
        width = layer.kv_lora_rank + layer.qk_rope_head_dim
        return int(max(scores, min(layer.config.index_topk, keys) * width * itemsize))
    # A mask of each head at the least.
    scores = max(scores, 4 * layer.config.num_attention_heads * keys)
    return int(scores // getattr(owner, "compress_rate", 1))


def reads_picked_latents(layer: Any) -> bool:
    """Return whether a layer whose queries go in chunks attends to the picked latents, and makes no
    keys and values of heads: ``kv_b_proj`` must be one matrix, without bias and dropout."""
    projection = getattr(layer, "kv_b_proj", None)
    if not hasattr(layer, "expand_kv") or projection is None:
        return False
    return not any(
        isinstance(getattr(module, "bias", None), Tensor)
        or (isinstance(module, nn.Dropout) and module.training and module.p)
        for module in projection.modules()
    )


def run_in_parts(
    layer: Any,
    forward: Callable[..., Any],
    key_cache: KeyCache,
    parts: Sequence[Part],
    seen: Callable[[Part], Tensor],
    check: Callable[[], None],
    hidden_states: Tensor,
    arguments: Mapping[str, Any],
    *,
    recomputed: bool,
    real: Tensor | None = None,
    key_arguments: Mapping[str, Any] = MappingProxyType({}),
    window: int | None = None,
) -> Any:
    """Return what ``forward(hidden_states=hidden_states, **arguments)`` does, by parts of this
    rank's queries, ``[rows, s_local, h]``.

    Args:
        seen: the mask of a part, as the layer's attention wants it.
        check: raises if the layer has not put its keys into ``key_cache``.
        recomputed: each part is computed again in backward, and reads picked latents alone.
        real: the mask of the first run, which only marks padding; None: nothing is seen in it.
        key_arguments: arguments that a part is given of its keys' tokens, instead of its queries'.
        window: tokens that a query sees of what is not compressed; None: all.
    """
    key_cache.is_first_run = True
    empty_mask = hidden_states.new_empty((1, 1, 0, 0), dtype=torch.bool)
    with _attends_to_picked(layer, empty_mask), suppress(KeysAreMade):
        forward(
            hidden_states=hidden_states,
            attention_mask=empty_mask if real is None else real,
            past_key_values=key_cache,
            **arguments,
        )
    check()
    with_latents = recomputed and reads_picked_latents(layer)  # their masks are of bools
    gathered = Gathered(layer, key_cache, window, joined=with_latents)
    # Keys that layers share are as the first run has left them: parts get a copy, to read.
    mappings = {name: x for name, x in arguments.items() if isinstance(x, MutableMapping)}
    shared = {
        name: gathered.of_mapping(x) for name, x in mappings.items() if name not in _QUERY_DIMS
    }
    picked: dict[int, Any] = {}
    further: list[tuple[Any, ...]] = []  # results beside attention's and its weights
    part_at = {part.start: part for part in parts}

    def run(x: Tensor, start: int, _: int) -> Tensor:  # in backward again, if ``recomputed``
        part = part_at[start]
        sliced = {name: of_queries(name, x, part, _QUERY_DIMS) for name, x in arguments.items()}
        for name, mapping in shared.items():
            sliced[name] = {key: gathered.of_part(pair, part) for key, pair in mapping.items()}
        for name, value in key_arguments.items():
            sliced[name] = tuple(part.keys(y).expand(len(x), -1, -1) for y in value)
        with _attends_to_picked(layer) if with_latents else nullcontext():
            out = forward(
                hidden_states=x,
                attention_mask=seen(part),
                past_key_values=_CacheOfPart(key_cache, part, gathered, picked),
                **sliced,
            )
        if not isinstance(out, tuple):
            return cast(Tensor, out)
        if len(further) < len(parts):  # and not what backward runs again
            further.append(out[2:])
        return cast(Tensor, out[0])

    rows = 0 if parts[0].row is None else len(hidden_states)  # that lie one after the other
    x = hidden_states.flatten(0, 1)[None] if rows else hidden_states
    borders = [(part.start, part.stop) for part in parts]
    if recomputed:
        result = in_chunks_at(run, x, borders, dim=1, module=layer)
    else:
        result = torch.cat([run(x[:, a:b], a, b) for a, b in borders], 1)
    result = _in_rows(result, rows)
    return result if not further else (result, None, *_joined(further, picked, rows))


def _in_rows(x: Tensor, rows: int) -> Tensor:
    return x[0].unflatten(0, (rows, -1)) if rows else x


def _joined(further: list[tuple[Any, ...]], picked: dict[int, Any], rows: int) -> list[Any]:
    """Join the parts' further results, of which the first is what was picked, if the next layer
    gets it: ``picked`` becomes views of that, so that checkpoints keep it once."""
    joined = [x[0] if x[0] is None else torch.cat(x, 1) for x in zip(*further, strict=True)]
    further[:] = [()] * len(further)  # frees them; backward adds none, as they are as many
    if joined and joined[0] is not None:
        for start, part_picks in picked.items():
            picked[start] = joined[0].narrow(1, start, part_picks.shape[1])
    return [x if x is None else _in_rows(x, rows) for x in joined]


class Gathered:
    """Gives each part what was gathered of a layer, with gradients that are summed over parts in
    fp32.

    Args:
        window: tokens that a query sees of what is not compressed; None: all.
        joined: latents and their rotary part as one tensor, with what its gradients go to.

    Attributes:
        dtype_of_picks: in which the layer reads what is kept in 32 bits.
    """

    dtype_of_picks = torch.int32

    def __init__(self, layer: Any, cache: KeyCache, window: int | None, *, joined: bool) -> None:
        self._joined, self._window = joined, window
        self._keys = () if cache.updated is None else self._summed(cache.updated)
        self._reads = getattr(layer, "is_kv_shared_layer", False)
        self._rate = getattr(getattr(layer, "compressor", None), "compress_rate", 1)
        self._compressed = {name: self._summed(pair) for name, pair in cache.compressed.items()}

    def _summed(self, tensors: tuple[Tensor, ...]) -> Any:
        """Pair each tensor, without its graph, with the one that its gradients go to."""
        if self._joined:
            tensors = (torch.cat(tensors, -1),)
        return tuple(
            (x.detach(), _SumInFp32.apply(x) if x.dtype in LOW_PRECISION else x) for x in tensors
        )

    def of_part(self, pairs: tuple[tuple[Tensor, Tensor], ...], part: Part) -> Any:
        if self._joined:
            return tuple(map(part.keys, pairs[0]))
        return tuple(part.keys(_ForChunk.apply(total, x)) for x, total in pairs)

    def of_mapping(self, mapping: Mapping[Any, tuple[Tensor, ...]]) -> dict[Any, Any]:
        """Pair keys of earlier layers as ``_summed`` does; {} for a layer that reads none."""
        return {key: self._summed(x) for key, x in mapping.items()} if self._reads else {}

    def keys_of(self, part: Part) -> Any:
        pair = self.of_part(self._keys, part)
        if self._window is None:
            return pair
        # As seen_keys_in_document has them: from the first that the first query sees.
        return tuple(x[..., 1 - self._window - part.stop + part.start :, :] for x in pair)

    def to_compress(self, part: Part, name: str) -> Any:
        """Return the keys and gates of the document's tokens that fill whole windows; without any,
        those of one window, filled up with zeros, which no query sees."""
        pair = self.of_part(self._compressed[name], part)
        whole = pair[0].shape[-2] // self._rate * self._rate
        if whole:  # else every rank runs the same modules too, with the gather in its backward
            return tuple(x[..., :whole, :] for x in pair)
        return tuple(pad(x, (0, 0, 0, self._rate - x.shape[-2])) for x in pair)


class _SumInFp32(torch.autograd.Function):
    """Makes an fp32 tensor without memory: autograd sums gradients there before they are rounded to
    the 16 bits of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return x.new_zeros((), dtype=torch.float32).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


class _ForChunk(torch.autograd.Function):
    """``x``, whose gradient goes to ``total``."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, x: Tensor) -> Tensor:
        ctx.dtype = total.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class _Pick(torch.autograd.Function):
    """Rows of ``x`` at ``places``; their gradients are summed in the dtype of ``total``."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape, ctx.dtype = total.shape, total.dtype
        return x.flatten(0, -2).index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.shape, dtype=ctx.dtype)
        total.view(-1, ctx.shape[-1]).index_add_(0, places, grad.to(ctx.dtype))
        return total, None, None


def of_queries(name: str, value: Any, part: Part, dims: Mapping[str, int | None]) -> Any:
    """Return the part of a layer's argument that belongs to these queries.

    Args:
        dims: the dim of queries of each argument that is a tensor or has some; None: it has none.
    """
    if isinstance(value, tuple):
        return tuple(of_queries(name, x, part, dims) for x in value)
    if isinstance(value, dict):  # of kinds of rotary embeddings
        return {kind: of_queries(name, x, part, dims) for kind, x in value.items()}
    if not isinstance(value, Tensor):
        return value
    if name not in dims:
        raise UnsupportedAttentionError(
            f"a layer whose queries go in chunks was given the tensor {name}, which is not known "
            "to have queries in a dim: use query_chunks=1"
        )
    dim = dims[name]
    return value if dim is None else part.queries(value, dim)


@contextmanager
def _attends_to_picked(layer: Any, empty_mask: Tensor | None = None) -> Iterator[None]:
    """Let the layer call :func:`attend_to_picked`, with the latents if it has some.

    Args:
        empty_mask: the mask of the first run; None in others.
    """
    AttentionInterface.register(_PICKED, attend_to_picked)
    config, before = layer.config, layer.config._attn_implementation_internal  # SparseLayers' copy
    config._attn_implementation_internal = _PICKED
    methods: dict[str, Any] = {"expand_kv": lambda latents, rotary: (latents, rotary)}
    # GLM-5 Next hands attention a mask of what is picked, and not the indices.
    methods["build_attention_mask_from_topk"] = lambda topk_indices, **_: (
        topk_indices if empty_mask is None else empty_mask
    )
    methods = {name: method for name, method in methods.items() if hasattr(layer, name)}
    vars(layer).update(methods)
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        for name in methods:
            del vars(layer)[name]


def attend_to_picked(
    module: Any,
    query: Tensor,
    latents: Tensor,
    total: Tensor,
    seen: Tensor,
    scaling: float,
    *,
    indices: Any = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of queries to the latents that were picked for them (MLA); KeysAreMade in the first
    run, where ``seen`` is empty.

    Shapes:
        query ``[b, h, s, nope + rope]``; latents ``[b, 1, t, r + rope]``, whose gradients go to
        total; seen ``[b, 1, s, t]``, bool; indices ``[b, s, k]``, or in the place of seen, with -1
        where nothing is picked; s_aux ``[h]`` -> ``[b, s, h, d_v]``.

    Source: DeepSeek-V2 (2405.04434), 2.1.2: the matrices of keys and values move to the query and
    the result.
    """
    if not seen.numel():
        raise KeysAreMade
    if indices is None:
        indices = seen.clamp(min=0)
        seen_picks = seen >= 0
    else:
        seen_picks = seen[:, 0].gather(-1, indices.long())
    rows, heads, length, width = query.shape
    lora_rank, tokens, num_picks = module.kv_lora_rank, latents.shape[-2], indices.shape[-1]
    nope = width - (latents.shape[-1] - lora_rank)
    identity = torch.eye(lora_rank, dtype=query.dtype, device=query.device)
    matrix = module.kv_b_proj(identity).view(lora_rank, heads, -1)
    to_key, to_value = matrix[..., :nope], matrix[..., nope:]
    query = query.to(matrix.dtype).transpose(1, 2)
    latent_query = torch.einsum("bshn,rhn->bshr", query[..., :nope], to_key)
    query = torch.cat([latent_query, query[..., nope:]], -1).flatten(0, 1)
    positions = indices.long()
    first = torch.arange(rows, device=positions.device)[:, None, None] * tokens
    picked = _Pick.apply(total, latents, (positions + first).flatten()).to(query.dtype)
    picked = picked.view(rows * length, num_picks, -1)
    # Half of the least number: a score that is added must not make it infinite.
    unseen = torch.finfo(query.dtype).min / 2
    mask = torch.zeros_like(positions, dtype=query.dtype).masked_fill(~seen_picks, unseen)
    mask = mask.view(rows * length, 1, num_picks).expand(-1, heads, -1)
    scores = torch.baddbmm(mask, query, picked.transpose(1, 2), alpha=scaling)
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).view(1, heads, 1).expand(len(scores), -1, -1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., :num_picks].to(picked.dtype)
    out = torch.bmm(weights, picked[..., :lora_rank]).view(rows, length, heads, lora_rank)
    return torch.einsum("bshr,rhv->bshv", out, to_value), None
