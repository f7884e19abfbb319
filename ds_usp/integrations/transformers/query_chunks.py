"""Queries of sparse layers in chunks: masks and scores of all keys exist for a chunk at a time, and
attention to picked latents reads these alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from math import ceil
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ds_usp.errors import UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.kernels.registry import AUTO
from ds_usp.memory.chunks import LOW_PRECISION, in_chunks_at

# What `query_chunks="auto"` lets the largest tensor of one chunk have: several of its size exist.
BYTES_OF_CHUNK: Final = 2**31
_PICKED: Final = "usp_picked"  # attention of transformers' registry: of the keys that are picked
# Arguments of layers that have queries, by their dim; those of others do not go in chunks.
_QUERY_DIMS: Final = {"position_embeddings": -2, "position_ids": -1, "prev_topk_indices": 1}

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


class KeysAreMade(Exception):  # noqa: N818 - ends a run whose keys are all that it was for
    """The keys of a layer are gathered: the rest of its forward is of no use."""


class Keys:
    """Stands for a layer's KV cache: returns the keys of all tokens for those that are put in.

    Args:
        layer: the name of its class.
        gather: makes the keys of all tokens of those of this rank.

    Attributes:
        updated, indexed: keys and values that were put in, and those of the indexer, of all tokens.
        is_first_run: nothing but the keys is asked for (Note [queries in chunks]).
    """

    def __init__(self, layer: str, gather: Callable[[Tensor], Tensor]) -> None:
        self._layer, self._gather = layer, gather
        self.updated: tuple[Tensor, Tensor] | None = None
        self.indexed: Tensor | None = None
        self.is_first_run = False

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
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
        return _EveryLayer(self)

    def update_indexer(self, keys: Tensor, *_: int) -> Tensor:
        self.indexed = self._gather(keys)
        if self.is_first_run:
            raise KeysAreMade
        return self.indexed

    def update_index(self, keys: Tensor) -> Tensor:  # its name in MiniMax M3
        return self.update_indexer(keys)

    def pick(self, run: Callable[[], Any]) -> Any:
        """Return what ``run``, the layer's indexer, returns; None in the first run, which ends
        there. The module ends as it always does: hooks of engines count on that."""
        try:
            return run()
        except KeysAreMade:
            return None

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedAttentionError(
            f"{self._layer} asks its KV cache for {name!r}, which a shard of the tokens has no "
            "answer to: this model is not served"
        )


class _EveryLayer:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def __getitem__(self, _: int) -> Keys:
        return self._keys


class _KeysOfChunk(Keys):
    """Returns the keys that were gathered, and what was picked when backward asks again.

    Args:
        of_layer: the keys of all tokens.
        make: makes what the layer gets for its keys and values.
        picked: by each chunk's first query.
        start: this chunk's.
    """

    def __init__(
        self,
        of_layer: Keys,
        make: Callable[[], tuple[Tensor, Tensor]],
        picked: dict[int, Any],
        start: int,
    ) -> None:
        super().__init__(of_layer._layer, of_layer._gather)
        self.indexed = of_layer.indexed
        self._make, self._picked, self._start = make, picked, start

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._make()

    def update_indexer(self, *_: Any) -> Tensor:
        return cast(Tensor, self.indexed)

    def pick(self, run: Callable[[], Any]) -> Any:
        if self._start not in self._picked:
            with torch.no_grad():  # nor has what backward runs again a graph of it
                self._picked[self._start] = run()
        return self._picked[self._start]


def run_indexer(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``forward`` of an indexer by its cache: picks of a chunk are made once."""
    keys = next((x for x in (*args, *kwargs.values()) if isinstance(x, Keys)), None)
    if keys is None:
        return forward(*args, **kwargs)
    return keys.pick(lambda: forward(*args, **kwargs))


def number_of_chunks(layer: Any, given: int | str, layout: TokenLayout, rows: int) -> int:
    """Return how many chunks a layer's queries go in, the same on every rank: as many as were asked
    for, or as keep the largest tensor of one within ``BYTES_OF_CHUNK``."""
    lengths = [layout.length(rank) for rank in range(layout.degree)]
    if given != AUTO:
        return int(given)
    indexer: Any = getattr(layer, "indexer", None)
    heads = getattr(indexer, "n_heads", 0) or getattr(indexer, "num_heads", 1)
    if not reads_picked_latents(layer):  # a mask of each head at the least
        heads = max(heads, layer.config.num_attention_heads)
    queries = max(1, BYTES_OF_CHUNK // (rows * layout.seq_len * heads * 4))  # scores are in fp32
    return min(ceil(max(lengths) / queries), min(lengths))


def reads_picked_latents(layer: Any) -> bool:
    """Return whether attention of a layer in chunks reads the picked latents, and makes no keys and
    values of heads: ``kv_b_proj`` must be one matrix, without a bias or an adapter's dropout."""
    projection = getattr(layer, "kv_b_proj", None)
    if not hasattr(layer, "expand_kv") or projection is None:
        return False
    return not any(
        isinstance(getattr(part, "bias", None), Tensor)
        or (isinstance(part, nn.Dropout) and part.training and part.p)
        for part in projection.modules()
    )


def run_in_chunks(
    layer: Any,
    forward: Callable[..., Any],
    keys: Keys,
    chunks: int,
    seen: Callable[[int, int], Tensor],
    check: Callable[[], None],
    hidden_states: Tensor,
    arguments: Mapping[str, Any],
) -> Any:
    """Return what ``forward(hidden_states=hidden_states, ...)`` does, by chunks of the queries.

    Args:
        seen: the mask of queries from and to these, as the layer's attention wants it.
        check: raises if the layer has not put its keys into ``keys``.
    """
    keys.is_first_run = True
    nothing = hidden_states.new_empty((1, 1, 0, 0), dtype=torch.bool)
    with _attends_to_picked(layer), suppress(KeysAreMade):
        forward(
            hidden_states=hidden_states,
            attention_mask=nothing,
            past_key_values=keys,
            **arguments,
        )
    check()
    with_latents = reads_picked_latents(layer)
    each = _OfEachChunk(joined=with_latents)
    whole = () if keys.updated is None else each.of(keys.updated)
    # Keys that layers share are as the first run has left them: chunks get a copy, to read.
    shared = {name: x for name, x in arguments.items() if isinstance(x, MutableMapping)}
    reads = getattr(layer, "is_kv_shared_layer", False)
    summed = {
        name: {key: each.of(pair) for key, pair in mapping.items()} if reads else {}
        for name, mapping in shared.items()
    }
    picked: dict[int, Any] = {}
    further: list[tuple[Any, ...]] = []  # results beside attention's and its weights

    def run(part: Tensor, start: int, stop: int) -> Tensor:
        given = {name: _of_queries(name, x, start, stop) for name, x in arguments.items()}
        for name, mapping in summed.items():
            given[name] = {key: each.of_chunk(pair) for key, pair in mapping.items()}
        with _attends_to_picked(layer) if with_latents else nullcontext():
            out = forward(
                hidden_states=part,
                attention_mask=seen(start, stop),
                past_key_values=_KeysOfChunk(keys, partial(each.of_chunk, whole), picked, start),
                **given,
            )
        if not isinstance(out, tuple):
            return cast(Tensor, out)
        if len(further) < chunks:  # and not what backward runs again
            further.append(out[2:])
        return cast(Tensor, out[0])

    result = in_chunks_at(run, hidden_states, chunks, dim=1, module=layer)
    if not further:
        return result
    joined = [torch.cat(parts, 1) for parts in zip(*further, strict=True)]
    further[:] = [()] * chunks
    if joined and picked:  # what a checkpoint keeps of them is a part of what the next layer has
        for start, part in picked.items():
            picked[start] = joined[0].narrow(1, start, part.shape[1])
    return result, None, *joined


class _OfEachChunk:
    """Keys as each chunk is given them, with gradients that are summed over chunks in fp32.

    Args:
        joined: latents and their rotary part as one tensor, with what its gradients go to.
    """

    def __init__(self, *, joined: bool) -> None:
        self._joined = joined

    def of(self, tensors: tuple[Tensor, ...]) -> Any:
        if self._joined:
            tensors = (torch.cat(tensors, -1),)
        return tuple(
            (x.detach(), _SumInFp32.apply(x) if x.dtype in LOW_PRECISION else x) for x in tensors
        )

    def of_chunk(self, pairs: tuple[tuple[Tensor, Tensor], ...]) -> Any:
        if self._joined:
            return pairs[0]
        return tuple(_ForChunk.apply(total, x) for x, total in pairs)


class _SumInFp32(torch.autograd.Function):
    """Makes an fp32 tensor without memory, whose gradients are those of a 16-bit tensor: autograd
    sums them before they are rounded."""

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


def _of_queries(name: str, value: Any, start: int, stop: int) -> Any:
    """Return the part of a layer's argument that belongs to these queries."""
    if isinstance(value, tuple):
        return tuple(_of_queries(name, x, start, stop) for x in value)
    if not isinstance(value, Tensor):
        return value
    if name not in _QUERY_DIMS:
        raise UnsupportedAttentionError(
            f"a layer whose queries go in chunks was given the tensor {name}, which is not known "
            "to have queries in a dim: use query_chunks=1"
        )
    return value.narrow(_QUERY_DIMS[name], start, stop - start)


@contextmanager
def _attends_to_picked(layer: Any) -> Iterator[None]:
    """Let the layer call :func:`attend_to_picked`, with the latents if it has some."""
    AttentionInterface.register(_PICKED, attend_to_picked)
    config, before = layer.config, layer.config._attn_implementation_internal
    config._attn_implementation_internal = _PICKED
    expands = hasattr(layer, "expand_kv")
    if expands:
        layer.expand_kv = lambda latents, rotary: (latents, rotary)
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        if expands:
            del layer.expand_kv


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
    """Attention of queries to the latents that were picked for them (MLA).

    Shapes:
        query ``[b, h, s, nope + rope]``; latents ``[b, 1, t, r + rope]``, whose gradients go to
        total; seen ``[b, 1, s, t]``, bool; indices ``[b, s, k]``; s_aux ``[h]`` -> ``[b, s, h,
        d_v]``.

    Source: DeepSeek-V2 (2405.04434), 2.1.2: the matrices of keys and values move to the query and
    the result.
    """
    if not seen.numel():
        raise KeysAreMade
    rows, heads, length, width = query.shape
    rank, tokens, number = module.kv_lora_rank, latents.shape[-2], indices.shape[-1]
    nope = width - (latents.shape[-1] - rank)
    identity = torch.eye(rank, dtype=query.dtype, device=query.device)
    matrix = module.kv_b_proj(identity).view(rank, heads, -1)
    to_key, to_value = matrix[..., :nope], matrix[..., nope:]
    query = query.to(matrix.dtype).transpose(1, 2)
    of_latents = torch.einsum("bshn,rhn->bshr", query[..., :nope], to_key)
    query = torch.cat([of_latents, query[..., nope:]], -1).flatten(0, 1)

    at = indices.long()
    first = torch.arange(rows, device=at.device)[:, None, None] * tokens
    picked = _Pick.apply(total, latents, (at + first).flatten()).to(query.dtype)
    picked = picked.view(rows * length, number, -1)
    # Half of the least number: a score that is added must not make it infinite.
    unseen = torch.finfo(query.dtype).min / 2
    mask = torch.zeros_like(at, dtype=query.dtype).masked_fill(~seen[:, 0].gather(-1, at), unseen)
    mask = mask.view(rows * length, 1, number).expand(-1, heads, -1)
    scores = torch.baddbmm(mask, query, picked.transpose(1, 2), alpha=scaling)
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).view(1, heads, 1).expand(len(scores), -1, -1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., :number].to(picked.dtype)
    out = torch.bmm(weights, picked[..., :rank]).view(rows, length, heads, rank)
    return torch.einsum("bshr,rhv->bshv", out, to_value), None
