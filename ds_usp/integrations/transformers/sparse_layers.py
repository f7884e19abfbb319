"""Attention layers whose indexer picks the keys of each query: they run as transformers wrote them,
on this rank's queries and a KV cache that returns the keys of all tokens. ``refusals.py`` asks what
is served, then ``EnabledModel`` makes :class:`SparseLayers`. A layer's forward gathers keys, once
more where it is recomputed, on every rank; nothing else here communicates."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, Final

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, DataError, UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec, has_only
from ds_usp.geometry.state_chains import StateChains, state_chains
from ds_usp.integrations.transformers.attention import Shard, layer_mask, mask_of, text_of_dropout
from ds_usp.integrations.transformers.query_chunks import (
    KeyCache,
    Part,
    bytes_of_query,
    number_of_chunks,
    parts_of_documents,
    parts_of_shard,
    reads_picked_latents,
    run_in_parts,
    run_indexer,
)
from ds_usp.integrations.transformers.recurrent_layers import (
    ReplacedAttributes,
    has_other_forward,
    is_of_transformers,
)
from ds_usp.integrations.transformers.text_model import text_modules
from ds_usp.integrations.transformers.whole_arguments import WholeArguments
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.recurrence.exchange import ExchangeCall
from ds_usp.training.whole_batch import local_positions

_OLDEST: Final = "5.23"  # earlier indexers keep their keys themselves: refused by their masks
# Classes that count tokens in their KV cache: blocks, pools and windows of keys begin at its first
# one, and queries are its last ones. Of these, those that compare such counts with positions.
_COMPARES: Final = frozenset({"MiniMaxM3VLAttention", "DeepseekV4Attention"})
_COUNTS: Final = _COMPARES | {"Glm5NextTextAttention", "Qwen4ExpTextAttention"}
# Classes that are exact with gathered keys, by their names.
_CLASSES: Final = _COUNTS | {
    *("DeepseekV32Attention", "GlmMoeDsaAttention", "AXK2Attention", "HYV4Attention"),
    *("Dots3NoteTextAttention", "MistralLarge4TextAttention"),
}
_ANGLES_OF_KEYS: Final = frozenset({"Qwen4ExpTextAttention"})  # are given those of all keys
_LOOPS_OVER_QUERIES: Final = frozenset({"Qwen4ExpTextQSAIndexer"})
_PADDING_MASKS: Final = frozenset({"Glm5NextTextAttention"})  # see all before them but padding
# Kinds of layers in `config.layer_types` whose names do not say that they are attention.
SPARSE_KINDS: Final = frozenset({"minimax_m3_sparse"})


def sparse_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Return the layers of the text model that attend to what their indexer, or that of a layer
    before, has picked; none before transformers 5.23."""
    if Version(transformers.__version__) < Version(_OLDEST):
        return iter(())
    return (module for module in text_modules(model) if _is_sparse(module))


def _is_sparse(module: nn.Module) -> bool:
    kind = type(module)
    # A class may have layers of other kinds too (windows of `dots3_note`), which have no indexer.
    owners = (getattr(module, name, None) is not None for name in ("indexer", "compressor"))
    return _is_any(kind, _CLASSES) and (any(owners) or getattr(module, "skip_topk", False))


def _is_any(kind: Any, names: frozenset[str]) -> bool:
    return not names.isdisjoint(_names_of(kind))


@lru_cache(maxsize=1024)
def _names_of(kind: Any) -> frozenset[str]:
    """Return the names of a class and its bases that are transformers' own."""
    return frozenset(base.__name__ for base in kind.__mro__ if is_of_transformers(base))


def reason_against_layer(layer: nn.Module) -> str:
    """Return why a sparse layer cannot run on gathered keys; an empty text if it can."""
    kind = type(layer)
    if has_other_forward(layer) or not is_of_transformers(kind):
        return (
            f"{kind.__name__} picks keys by an indexer, and its forward is not transformers' own: "
            "load the model without use_kernels and trust_remote_code"
        )
    return ""


class SparseLayers:
    """The sparse layers of a model, none in most, whose keys are gathered over the mesh until
    :meth:`restore`. ``EnabledModel`` makes it in ``enable`` and at each end of ``paused``.

    Args:
        implementation: of attention, which the model had before it was enabled: these layers keep
            it, if it is ``sdpa``, and else compute eagerly.
        query_chunks: see :func:`ds_usp.integrations.transformers.enable`.
    """

    # Note [sparse layers]
    # A query's keys may be anywhere, and an indexer reads all of them: there is nothing that a ring
    # or heads could divide. Such models can prefill in chunks, where queries of a chunk attend to
    # keys of a cache. So each of these layers gets a cache whose `update` gathers, a mask of this
    # rank's queries x all keys, and a configuration that names its own attention. The keys are
    # in the sequence's order, and masks are made of the places that tokens have in it: a shard may
    # be of any layout. What is gathered is what the model would cache, latents in most. The shard
    # comes as the keyword `usp` (Note [the pass travels with the layers]); the model itself is
    # given no cache, which checkpoints would take away.
    def __init__(
        self, model: PreTrainedModel, implementation: str | None, query_chunks: int | str
    ) -> None:
        self._replaced = ReplacedAttributes()
        self.layers = list(sparse_layers(model))
        name = "sdpa" if implementation == "sdpa" else "eager"
        configs: dict[int, Any] = {}
        for layer in self.layers:
            config = configs.setdefault(id(layer.config), copy.copy(layer.config))
            config._attn_implementation_internal = name  # query_chunks.py: for some calls another
            self._replaced.set(layer, "config", config)
            forward = partial(type(layer).forward, layer)
            run = partial(_run_layer, layer, forward, name, query_chunks)
            self._replaced.set(layer, "forward", run)  # inside of Accelerate's hooks, if it has any
            if (indexer := _indexer_of(layer)) is not None:
                by_cache = partial(run_indexer, partial(type(indexer).forward, indexer))
                in_blocks = _is_any(type(indexer), _LOOPS_OVER_QUERIES)
                run = partial(_pick_blocks, indexer) if in_blocks else by_cache
                self._replaced.set(indexer, "forward", run)
        self._name = type(model).__name__
        self._compares = any(_is_any(type(x), _COMPARES) for x in self.layers)

    def check(self, batch: WholeArguments) -> None:
        """Raise DataError for documents whose tokens have other positions than 0, 1, 2, ...: some
        layers compare positions with numbers of keys in the KV cache."""
        if not self._compares:
            return
        positions = batch.arguments.get("position_ids")
        places = torch.arange(batch.seq_len, device="cpu")
        counted = places[None] if positions is None else positions.cpu()
        for row, start, stop in batch.runs():
            document = counted[row % len(counted), start:stop]
            if not document.equal(places[: stop - start]):
                raise DataError(
                    f"{self._name} compares positions with the counts of a document's keys, and "
                    f"the document at token {start} of row {row} has positions {document[0]} to "
                    f"{document[-1]} for {stop - start} tokens: give position_ids that count from "
                    "0 in each document, or pad on the right"
                )

    def restore(self) -> None:
        self._replaced.restore()


def _indexer_of(layer: nn.Module) -> Any:
    return getattr(getattr(layer, "compressor", None) or layer, "indexer", None)


@disable_in_compile("keys are gathered over the ranks, in calls that they compare")
def _run_layer(
    layer: nn.Module,
    forward: Any,
    implementation: str,
    query_chunks: int | str,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    *,
    attention_mask: Any,
    position_ids: Tensor | None = None,
    usp: Shard | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    # Stands for a sparse layer's `forward`, which is bound. `implementation`: "sdpa" or "eager".
    kind, counts_tokens = type(layer).__name__, _is_any(type(layer), _COUNTS)
    if usp is None or (position_ids is None and not counts_tokens):
        raise ConfigError(
            f"{kind} runs without a sharded batch, or without its positions. Call the model that "
            "was given to ds_usp.integrations.transformers.enable, not a part of it"
        )
    reads_keys = _check_layer(layer, usp)
    spec = _spec_of(layer, attention_mask, usp)
    layout, (rows, length, _) = usp.layout, hidden_states.shape
    device, dtype = hidden_states.device, hidden_states.dtype
    gather = partial(gather_tokens, dim=-2, mesh=usp.call.mesh, layout=layout)
    key_cache = KeyCache(kind, gather)
    check = partial(_check_keys, layer, key_cache, reads_keys=reads_keys)
    kwargs["position_embeddings"] = position_embeddings
    if position_ids is not None:
        kwargs["position_ids"] = position_ids
    chains = state_chains(layout, spec.documents, rows) if counts_tokens else None
    rows_together = rows if chains is None else chains.rows_of_piece
    bytes_a_row = bytes_of_query(layer, layout.seq_len, hidden_states.element_size())
    chunks = number_of_chunks(query_chunks, layout, rows_together * bytes_a_row)
    takes_bools = implementation != "eager" or (chunks > 1 and reads_picked_latents(layer))
    run = partial(run_in_parts, layer, forward, key_cache, check=check, recomputed=chunks > 1)
    run = partial(run, hidden_states=hidden_states, arguments=kwargs)
    if chains is not None:
        if _is_any(type(layer), _COMPARES):
            kwargs["position_ids"] = _counts(usp, chains, device)
        key_arguments: dict[str, Any] = {}
        if _is_any(type(layer), _ANGLES_OF_KEYS):
            key_arguments["position_embeddings"] = _angles_of_keys(usp, position_embeddings, gather)
        real = hidden_states.new_ones((rows, length), dtype=torch.bool)
        masks_padding = _is_any(type(layer), _PADDING_MASKS)
        window = None if spec.left is None else spec.left + 1

        def seen_in_document(part: Part) -> Tensor:
            if masks_padding:
                return part.queries(real, 1)
            seen = seen_keys_in_document(layer, part, window, device)
            seen = seen if takes_bools else as_scores(seen, dtype)
            return seen.expand(rows_together, -1, -1, -1)

        out = run(
            parts=parts_of_documents(chains, usp.call.mesh.rank, chunks),
            seen=seen_in_document,
            real=real if masks_padding else None,
            key_arguments=key_arguments,
            window=window,
        )
    elif chunks > 1:

        def seen_by(part: Part) -> Tensor:
            seen = seen_keys(spec, usp, device, part.start, part.stop)
            seen = seen if takes_bools else as_scores(seen, dtype)
            return seen.expand(rows, -1, -1, -1)

        out = run(parts=parts_of_shard(length, chunks, layout.seq_len), seen=seen_by)
    else:
        mask_key = spec, implementation, dtype
        seen = usp.masks.get(mask_key)  # of a layer before, which is of the same pass
        if seen is None:
            seen = seen_keys(spec, usp, device, 0, length)
            seen = seen if takes_bools else as_scores(seen, dtype)
            usp.masks[mask_key] = seen
        kwargs |= {"attention_mask": seen.expand(rows, -1, -1, -1), "past_key_values": key_cache}
        out = forward(hidden_states=hidden_states, **kwargs)
        check()
    usp.layers.append(kind)
    return out


def _check_layer(layer: nn.Module, usp: Shard) -> bool:
    """Return whether a layer reads the keys of one before it; notes in ``usp`` one that has made
    such keys without a graph. Refuses dropout, and gradients that would be lost."""
    if getattr(layer, "store_full_length_kv", False) and not torch.is_grad_enabled():
        usp.shares_keys_without_graph = any(x.requires_grad for x in layer.parameters())
    reads_keys = getattr(layer, "is_kv_shared_layer", False)
    if reads_keys and usp.shares_keys_without_graph and torch.is_grad_enabled():
        raise UnsupportedAttentionError(
            f"{type(layer).__name__} reads the keys of a layer before it, which a reentrant "
            "checkpoint has made without a graph: their gradients would be lost, as they are in "
            "one process. Use gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    dropout = getattr(layer, "attention_dropout", 0.0)
    if layer.training and dropout:
        raise UnsupportedAttentionError(text_of_dropout(layer, dropout))
    return bool(reads_keys)


def _spec_of(layer: nn.Module, mask: Any, usp: Shard) -> MaskSpec:
    """Return what a layer's queries may see before it picks of that; refuses masks not served."""
    kind = type(layer).__name__
    if _is_any(type(layer), _PADDING_MASKS) and isinstance(mask, Tensor) and mask.ndim == 2:
        mask = None  # padding is a document of its own
    spec = mask_of(layer_mask(layer, mask, None, None), usp.packing, usp.layout.seq_len, kind)
    # Windows are served beside what is compressed.
    windows = ("left",) if getattr(layer, "compressor", None) is not None else ()
    if spec.right != 0 or not has_only(spec, "right", "documents", *windows):
        raise UnsupportedAttentionError(
            f"{kind} picks keys by an indexer under {spec}: served are causal masks, of documents "
            "too, without windows, blocks and trees"
        )
    return spec


def _angles_of_keys(
    usp: Shard, angles: tuple[Tensor, Tensor], gather: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """Return the cosines and sines of all tokens, which are gathered once a pass."""
    whole = usp.masks.get("angles")
    if whole is None:
        whole = usp.masks["angles"] = gather(torch.cat(angles, -1))
    return whole.chunk(2, -1)


def _pick_blocks(
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    _attention_mask: Tensor,  # the layer applies it to what is returned
    keys: KeyCache,
) -> Tensor:
    """Return the keys that queries pick, as Qwen4-Exp's indexer does, ``[rows, 1, queries, keys]``:
    true for the best complete blocks and for all keys behind them.

    Stands for the indexer's forward, a loop over queries. In the first run (Note [queries in
    chunks]) ``keys`` gathers, and ``keys.pick`` returns an empty tensor, as this does then. In a
    part the queries are the last of its keys, and ``keys.pick`` gives backward forward's picks.

    Shapes:
        hidden_states ``[rows, queries, h]``; position_embeddings, of keys: two ``[rows, keys, d]``.
    """
    ratio, width = indexer.compress_ratio, indexer.index_head_dim
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    (rows, queries), (cos, sin) = hidden_states.shape[:2], position_embeddings
    query_angles = {"cos": cos[:, -queries:], "sin": sin[:, -queries:], "unsqueeze_dim": 2}
    heads = indexer.index_qk_proj(hidden_states).view(rows, queries, -1, width)
    query = rotate(indexer.q_layernorm(heads[:, :, :-1]), **query_angles)
    places = torch.arange(cos.shape[1], device=cos.device)
    complete = ((places[-queries:] + 1) // ratio)[:, None]  # blocks of each query

    def pick() -> Tensor:  # [rows, queries, topk], once for these queries, without a graph
        key = keys.update_indexer(heads[:, :, -1])
        count = max(key.shape[1] // ratio, 1)  # one block at the least, filled up with zeros
        behind = max(count * ratio - key.shape[1], 0)
        whole = pad(key, (0, 0, 0, behind))[:, : count * ratio].unflatten(1, (count, ratio))
        pooled = indexer.k_layernorm(whole.float().mean(2).to(key.dtype))[:, :, None]
        angles = {"cos": cos[:, : count * ratio : ratio], "sin": sin[:, : count * ratio : ratio]}
        pooled = rotate(pooled, **angles, unsqueeze_dim=2)[:, :, 0]
        scores = torch.relu(query.float() @ pooled.float().transpose(1, 2)[:, None])
        scores = scores.sum(2) / width**0.5
        scores = scores.masked_fill(places[:count] >= complete, float("-inf"))
        best = scores.topk(min(indexer.block_topk, count), -1).indices
        return best.masked_fill(best >= complete, count)  # none

    best = keys.pick(pick)
    if not best.numel():  # the first run: update_indexer has raised KeysAreMade in pick()
        return best
    count = max(len(places) // ratio, 1)
    blocks = best.new_zeros((rows, queries, count + 1), dtype=torch.bool).scatter(-1, best, True)
    picked = blocks[..., :count].repeat_interleave(ratio, -1)[..., : len(places)]
    picked = pad(picked, (0, len(places) - picked.shape[-1]))
    return (picked | (places >= complete * ratio))[:, None]


def _counts(usp: Shard, chains: StateChains, device: torch.device) -> Tensor:
    """Return the index of each of this rank's tokens in its document, ``[1 or rows, tokens]``, of
    padding too: ``SparseLayers.check`` has refused real tokens with other positions."""
    counts = usp.masks.get("counts")
    if counts is None:
        pieces = chains.by_rank[usp.call.mesh.rank]
        spans = [(piece.start - piece.first, piece.stop - piece.first) for piece in pieces]
        counts = torch.cat([torch.arange(*span, device=device) for span in spans])
        counts = usp.masks["counts"] = counts.view(-1, usp.length)
    return counts


def _check_keys(layer: nn.Module, key_cache: KeyCache, *, reads_keys: bool) -> None:
    """Raise UnsupportedAttentionError where a layer has not gathered its keys or its indexer's."""
    picks = _indexer_of(layer) is not None
    if getattr(layer, "compressor", None) is not None:
        missing = len(key_cache.compressed) < 1 + picks
    else:
        missing = picks and key_cache.indexed is None
    if (key_cache.updated is None and not reads_keys) or missing:
        raise UnsupportedAttentionError(
            f"{type(layer).__name__} has not put its keys, or those of its indexer, into the KV "
            "cache that it was given: each query would see those of its rank alone"
        )


def as_scores(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that eager attention adds to scores: 0 where a key is seen."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def seen_keys(spec: MaskSpec, shard: Shard, device: torch.device, start: int, stop: int) -> Tensor:
    """Return which of all keys this rank's queries from ``start`` to ``stop`` may see, ``[rows or
    1, 1, stop - start, seq_len]``, by their places in the sequence."""
    layout = shard.layout
    keys = torch.arange(layout.seq_len, device=device)
    queries = local_positions(layout, shard.call.mesh.rank, device)[start:stop]
    distance = keys - queries[:, None]
    seen = (distance <= (layout.seq_len if spec.right is None else spec.right))[None]
    seen = seen if spec.left is None else seen & (distance >= -spec.left)
    if spec.documents:
        borders = (torch.tensor(row[1:], device=device) for row in spec.documents)
        numbers = torch.stack([torch.searchsorted(row, keys, right=True) for row in borders])
        seen = seen & (numbers[:, queries, None] == numbers[:, None])
    return seen[:, None]


def seen_keys_in_document(
    layer: Any, part: Part, window: int | None, device: torch.device
) -> Tensor:
    """Return which of its keys a part's queries see, ``[1, 1, queries, keys]``: the queries are the
    last of these tokens. Under a window the keys begin with the first that the first query sees,
    as those that :meth:`Gathered.keys_of` returns."""
    queries, keys = part.stop - part.start, part.last - part.first
    keys = keys if window is None else min(keys, window + queries - 1)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    seen = seen if window is None else seen.triu(keys - queries - window + 1)
    # Layers show a single query all compressed keys: one that zeros fill up is hidden here.
    rate = getattr(getattr(layer, "compressor", None), "compress_rate", 0)
    seen = pad(seen, (0, 1)) if queries == 1 and part.last - part.first < rate else seen
    return seen[None, None]


def gather_tokens(x: Tensor, dim: int, *, mesh: SequenceMesh, layout: TokenLayout) -> Tensor:
    """Return the tensor of all tokens, in the sequence's order, from each rank's shard. Backward
    sums the ranks' gradients of a token on the rank that holds it. Collective over the mesh.

    Shapes:
        x: ``layout.length(rank)`` along ``dim``, which is not dim 0; the result ``layout.seq_len``.
    """
    call = ExchangeCall("gather_tokens", "kv_gather", [x], [dim], mesh, layout, ())
    local = call.begin(lambda inputs: ([f"along dim {dim % x.ndim}"], inputs[0]))
    if layout.degree == 1:
        return local
    ranks = range(layout.degree)
    # One part that is expanded: backward sums it in one reduction, 16-bit gradients in fp32.
    copies = local.expand(layout.degree, *local.shape)
    shapes = [list(x.shape) for _ in ranks]
    for rank, shape in enumerate(shapes):
        shape[dim] = layout.length(rank)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = call.exchange([copies], [x.numel()] * layout.degree, sizes, x.dtype).split(sizes)
    whole = torch.cat([part.view(s) for part, s in zip(received, shapes, strict=True)], dim)
    if layout.kind != "contiguous":
        whole = whole.index_select(dim, _sequence_order(layout, x.device))
    return call.leave(whole, dim)


# Each layer of each pass gathers by it: at a million tokens it takes longer to make than to use.
@lru_cache(maxsize=4)
def _sequence_order(layout: TokenLayout, device: torch.device) -> Tensor:
    """Return where each token of the sequence is among the ranks' shards, joined in their order."""
    with torch.inference_mode(False):  # a later pass may have gradients
        ranks = range(layout.degree)
        return torch.cat([local_positions(layout, rank, device) for rank in ranks]).argsort()
