"""Attention layers whose indexer picks the keys of each query: they run as transformers wrote them,
on this rank's queries and a KV cache that returns the keys of all tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, Final

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, DataError, UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.integrations.transformers.attention import (
    LayerMask,
    Shard,
    mask_of,
    text_of_dropout,
)
from ds_usp.integrations.transformers.query_chunks import (
    Keys,
    number_of_chunks,
    reads_picked_latents,
    run_in_chunks,
    run_indexer,
)
from ds_usp.integrations.transformers.recurrent_layers import (
    ReplacedAttributes,
    is_of_transformers,
)
from ds_usp.integrations.transformers.text_model import text_modules
from ds_usp.integrations.transformers.whole_arguments import WholeArguments
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.recurrence.exchange import ExchangeCall
from ds_usp.training.whole_batch import local_positions

_OLDEST: Final = "5.23"  # earlier indexers keep their keys themselves: refused by their masks
# Classes that are exact with gathered keys. By their names: others with an indexer read positions
# as offsets into a cache (`glm5_next`), or compress keys there (`deepseek_v4`).
_CLASSES: Final = frozenset(
    {"DeepseekV32Attention", "GlmMoeDsaAttention", "AXK2Attention", "HYV4Attention"}
    | {"Dots3NoteTextAttention", "MistralLarge4TextAttention", "MiniMaxM3VLAttention"}
)
# Of these, what picks keys in blocks that are counted from the first token of a row.
_BLOCKS_OF_ROWS: Final = frozenset({"MiniMaxM3VLAttention"})
# Kinds of layers in `config.layer_types` whose names do not say that they are attention.
SPARSE_KINDS: Final = frozenset({"minimax_m3_sparse"})


def sparse_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The layers of the text model that attend to what an indexer has picked, their own or that of
    a layer before."""
    if Version(transformers.__version__) < Version(_OLDEST):
        return iter(())
    return (module for module in text_modules(model) if _is_sparse(module))


def _is_sparse(module: nn.Module) -> bool:
    kind = type(module)
    known = any(x.__name__ in _CLASSES and is_of_transformers(x) for x in kind.__mro__)
    # A class may have layers of other kinds too (windows of `dots3_note`), which have no indexer.
    picks = getattr(module, "indexer", None) is not None or getattr(module, "skip_topk", False)
    return known and picks


def reason_against_layer(layer: nn.Module) -> str:
    """Why a sparse layer cannot run on gathered keys; nothing if it can."""
    kind = type(layer)
    forward = vars(layer).get("_old_forward", vars(layer).get("forward"))
    replaced = forward is not None and getattr(forward, "__func__", None) is not kind.forward
    if replaced or not is_of_transformers(kind):
        return (
            f"{kind.__name__} picks keys by an indexer, and its forward is not transformers' own: "
            "load the model without use_kernels and trust_remote_code"
        )
    return ""


class SparseLayers:
    """The sparse layers of a model, whose keys are gathered over the mesh until :meth:`restore`.

    Args:
        implementation: of attention, which the model had before it was enabled: these layers keep
            it, if it is ``sdpa``, and else compute eagerly.
        query_chunks: see :func:`ds_usp.integrations.transformers.enable`.
    """

    # Note [sparse layers]
    # A query's keys may be anywhere, and an indexer reads all of them: there is nothing that a ring
    # or heads could divide. Such models can prefill in chunks, where queries of a chunk meet keys
    # that a cache returns. So each of these layers gets a cache whose `update` gathers, a mask of
    # this rank's queries x all keys, and a configuration that names its own attention. The keys are
    # in the sequence's order, and masks are made of the places that tokens have in it: a shard may
    # be of any layout. What is gathered is what the model would cache, latents in most. The shard
    # comes as the keyword `usp`, so that a checkpoint has it (Note [the pass travels with the
    # layers]); the model itself is given no cache, which checkpoints would take away.
    def __init__(
        self, model: PreTrainedModel, implementation: str | None, query_chunks: int | str
    ) -> None:
        self._replaced = ReplacedAttributes()
        self.layers = list(sparse_layers(model))
        name = "sdpa" if implementation == "sdpa" else "eager"
        configs: dict[int, Any] = {}
        for layer in self.layers:
            owned: Any = layer
            config = configs.setdefault(id(owned.config), copy.copy(owned.config))
            config._attn_implementation_internal = name
            self._replaced.set(layer, "config", config)
            forward = partial(type(layer).forward, layer)
            run = partial(_run_layer, layer, forward, name, query_chunks)
            self._replaced.set(layer, "forward", run)
            if (indexer := getattr(layer, "indexer", None)) is not None:
                forward = partial(type(indexer).forward, indexer)
                self._replaced.set(indexer, "forward", partial(run_indexer, forward))
        self._name = type(model).__name__
        self._in_blocks = any(type(x).__name__ in _BLOCKS_OF_ROWS for x in self.layers)

    def check(self, batch: WholeArguments) -> None:
        """DataError for documents whose blocks of keys would not be theirs: some indexers pick keys
        in blocks, which are counted from the first token of a row."""
        if not self._in_blocks:
            return
        positions = batch.arguments.get("position_ids")
        counted = None if positions is None else positions.cpu()
        for row, start, stop in batch.runs():
            first = torch.arange(stop)
            if start or (
                counted is not None and not counted[row % len(counted), :stop].equal(first)
            ):
                raise DataError(
                    f"{self._name} picks keys in blocks that are counted from the first token of a "
                    f"row, and row {row} has a document at token {start}, or positions that do not "
                    "count from 0: give each document as a row of its own, padded on the right"
                )

    def restore(self) -> None:
        self._replaced.restore()


@disable_in_compile("keys are gathered over the ranks, in calls that they compare")
def _run_layer(
    layer: nn.Module,
    forward: Any,
    implementation: str,
    query_chunks: int | str,
    *,
    hidden_states: Tensor,
    attention_mask: Any,
    position_ids: Tensor | None = None,
    usp: Shard | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    kind = type(layer).__name__
    if usp is None or position_ids is None:
        raise ConfigError(
            f"{kind} runs without a sharded batch, or without its positions. Call the model that "
            "was given to ds_usp.integrations.transformers.enable, not a part of it"
        )
    if getattr(layer, "store_full_length_kv", False) and not torch.is_grad_enabled():
        usp.shares_keys_without_graph = any(x.requires_grad for x in layer.parameters())
    reads_keys = getattr(layer, "is_kv_shared_layer", False)
    if reads_keys and usp.shares_keys_without_graph and torch.is_grad_enabled():
        raise UnsupportedAttentionError(
            f"{kind} reads the keys of a layer before it, which a reentrant checkpoint has made "
            "without a graph: their gradients would be lost, as they are in one process. Use "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    dropout = getattr(layer, "attention_dropout", 0.0)
    if layer.training and dropout:
        raise UnsupportedAttentionError(text_of_dropout(layer, dropout))
    if not isinstance(attention_mask, LayerMask):
        raise UnsupportedAttentionError(
            f"{kind} was given a mask of its own ({type(attention_mask).__name__}): masks are "
            "served as transformers' mask functions make them, not as tensors"
        )
    spec = mask_of(attention_mask, usp.packing, usp.layout.seq_len, kind)
    if spec != MaskSpec.causal(documents=spec.documents):
        raise UnsupportedAttentionError(
            f"{kind} picks keys by an indexer under {spec}: served are causal masks, of documents "
            "too, without windows, blocks and trees"
        )
    keys = Keys(kind, partial(gather_tokens, dim=-2, mesh=usp.call.mesh, layout=usp.layout))
    check = partial(_check_keys, layer, keys, reads_keys=reads_keys)
    rows, device = len(hidden_states), hidden_states.device
    chunks = number_of_chunks(layer, query_chunks, usp.layout, rows)
    kwargs |= {"position_ids": position_ids}
    if chunks > 1:
        bools = implementation != "eager" or reads_picked_latents(layer)

        def seen_by(start: int, stop: int) -> Tensor:
            seen = seen_keys(spec, usp, device, start, stop)
            seen = seen if bools else as_scores(seen, hidden_states.dtype)
            return seen.expand(rows, -1, -1, -1)

        out = run_in_chunks(layer, forward, keys, chunks, seen_by, check, hidden_states, kwargs)
    else:
        key = spec, implementation, hidden_states.dtype
        seen = usp.masks.get(key)  # of a layer before, which is of the same pass
        if seen is None:
            seen = seen_keys(spec, usp, device, 0, usp.length)
            if implementation == "eager":
                seen = as_scores(seen, hidden_states.dtype)
            usp.masks[key] = seen
        seen = seen.expand(rows, -1, -1, -1)
        kwargs |= {"attention_mask": seen, "past_key_values": keys}
        out = forward(hidden_states=hidden_states, **kwargs)
        check()
    usp.layers.append(kind)
    return out


def _check_keys(layer: nn.Module, keys: Keys, *, reads_keys: bool) -> None:
    picks = getattr(layer, "indexer", None) is not None
    if (keys.updated is None and not reads_keys) or (picks and keys.indexed is None):
        raise UnsupportedAttentionError(
            f"{type(layer).__name__} has not put its keys, or those of its indexer, into the KV "
            "cache that it was given: each query would see those of its rank alone"
        )


def as_scores(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that eager attention adds to scores: 0 where a key is seen."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def seen_keys(spec: MaskSpec, shard: Shard, device: torch.device, start: int, stop: int) -> Tensor:
    """Return which of all keys this rank's queries from ``start`` to ``stop`` may see, ``[rows or
    1, 1, stop - start, seq_len]``. It goes by the places of tokens in the sequence, whatever
    positions their embeddings have."""
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


def gather_tokens(x: Tensor, dim: int, *, mesh: SequenceMesh, layout: TokenLayout) -> Tensor:
    """The tensor of all tokens, in the sequence's order, from each rank's shard; backward sums what
    the ranks' gradients of a token are, on the rank that holds it. Collective over the mesh.

    Shapes:
        x: ``layout.length(rank)`` along ``dim``, which is not dim 0; the result ``layout.seq_len``.
    """
    call = ExchangeCall("gather_tokens", "kv_gather", [x], [dim], mesh, layout, ())
    local = call.begin(lambda inputs: ([f"along dim {dim % x.ndim}"], inputs[0]))
    if layout.degree == 1:
        return local
    ranks = range(layout.degree)
    # One part that is expanded, and not a part for each rank: backward sums it in one reduction,
    # which accumulates 16-bit gradients in fp32.
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
    """Where each token of the sequence is among the ranks' shards, joined in their order."""
    with torch.inference_mode(False):  # a later pass may have gradients
        ranks = range(layout.degree)
        return torch.cat([local_positions(layout, rank, device) for rank in ranks]).argsort()
