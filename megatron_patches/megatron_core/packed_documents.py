"""The documents of megatron-core's ``PackedSeqParams``, as attention over ranks takes them: each
layer asks in its forward pass, each rank reads its own copy, and only a refusal is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import le
from typing import Any

import torch
from torch import Tensor

import ds_usp
from ds_usp.errors import UnsupportedAttentionError
from megatron_patches.megatron_core.groups import LAYOUT

_OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of one batch on one rank.

    Args:
        mask: the layer's rule within the documents; padding is a document of its own.
        layout: of the tokens, or the kind of one.
        padding: True for this rank's padding tokens, ``[s_local, 1 or b, 1]``; None without any.
    """

    mask: ds_usp.MaskSpec
    layout: ds_usp.TokenLayout | str
    padding: Tensor | None


def packed_documents(
    params: Any,
    rule: ds_usp.MaskSpec,
    layout: ds_usp.TokenLayout | str,
    mesh: ds_usp.SequenceMesh,
    tokens: Tensor,
) -> PackedDocuments:
    """The documents of a batch, read from the device once in a forward pass.

    In the format ``sbhd`` the sequence is sharded as without documents: they have any lengths, and
    the offsets may be ``[b, documents + 1]``, the last one repeated where a sample has fewer. In
    ``thd`` every document is sharded for itself. ``cu_seqlens_q_padded``, where it is given, has
    the places of documents in the tensors; ``cu_seqlens_q`` their lengths without padding.

    Args:
        params: ``PackedSeqParams``, whose offsets are of the whole sequence.
        rule, layout: of the layer, without documents.
        tokens: ``[s_local, ...]``, read for its length and device alone.

    Raises:
        UnsupportedAttentionError: another format, offsets that do not fit, other documents of keys
            than of queries, or a group of its own for the batch.
        ConfigError, LayoutError: documents that do not ascend from 0 to the end of the sequence;
            those of ``thd`` that do not divide into two chunks a rank. On others a MeshError.
    """
    offsets = {x: y for x in _OFFSETS if (y := getattr(params, x, None)) is not None}
    key = (*offsets, params.qkv_format, rule, layout, tokens.shape[0], tokens.device)
    with mesh.consistency.raising_everywhere():
        return mesh.readings.of(
            [*offsets.values()], key, lambda: _read(params, offsets, rule, layout, mesh, tokens)
        )


def _read(
    params: Any,
    offsets: Mapping[str, Tensor],
    rule: ds_usp.MaskSpec,
    layout: ds_usp.TokenLayout | str,
    mesh: ds_usp.SequenceMesh,
    tokens: Tensor,
) -> PackedDocuments:
    """:func:`packed_documents`, not from the cache."""
    if getattr(params, "qkv_format", None) not in ("sbhd", "thd"):
        raise UnsupportedAttentionError(
            f"packed_seq_params of format {getattr(params, 'qkv_format', params)!r}. Pass "
            "PackedSeqParams(qkv_format='sbhd', cu_seqlens_q=borders) with [s, b, h, d] tensors, "
            "or 'thd' with [t, h, d]"
        )
    size, group = (getattr(params, name, None) for name in ("local_cp_size", "cp_group"))
    if size is not None or group is not None:
        raise UnsupportedAttentionError(
            f"packed_seq_params with local_cp_size={size} and cp_group={group}: the mesh of this "
            f"layer has {mesh.sp_degree} ranks in every batch. Switch hybrid context parallelism "
            "off (--hybrid-context-parallel)"
        )
    shapes = [list(x.shape) for x in offsets.values()]
    if params.qkv_format == "thd" and any(len(shape) != 1 for shape in shapes):
        raise UnsupportedAttentionError(f"offsets {shapes} of 'thd' must be [documents + 1] each")
    lengths, places = _lengths_and_places(offsets)
    seq_len = tokens.shape[0] * mesh.sp_degree
    if params.qkv_format == "thd":
        layout = _layout_of_each_document(places, layout, seq_len, mesh)
    borders, padding = _separate_padding(lengths, places)
    mask = replace(rule, documents=tuple(map(tuple, borders)))
    if not any(padding):
        return PackedDocuments(mask, layout, None)
    if isinstance(layout, str):
        layout = mesh.layout(layout, seq_len)
    is_padding = torch.zeros(layout.seq_len, len(padding), 1, dtype=torch.bool)
    for sample, ranges in enumerate(padding):
        for start, stop in ranges:
            is_padding[start:stop, sample] = True
    shard = layout.shard(is_padding, 0, mesh.rank).to(tokens.device)
    return PackedDocuments(mask, layout, shard)


def _lengths_and_places(
    offsets: Mapping[str, Tensor],
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the documents' cumulative lengths without padding, and their borders in the tensors,
    for each sample or once for all; from those of ``_OFFSETS`` that are given."""
    queries, keys, placed_queries, placed_keys = (
        offsets[name].tolist() if name in offsets else None for name in _OFFSETS
    )
    if queries is None or keys not in (None, queries):
        raise UnsupportedAttentionError(
            f"cu_seqlens_q {queries} and cu_seqlens_kv {keys} of packed_seq_params must be the "
            "same documents; leave cu_seqlens_kv out"
        )
    placed_queries = queries if placed_queries is None else placed_queries
    if placed_keys not in (None, placed_queries):
        raise UnsupportedAttentionError(
            f"cu_seqlens_q_padded {placed_queries} and cu_seqlens_kv_padded {placed_keys} of "
            "packed_seq_params must be the same places; leave cu_seqlens_kv_padded out"
        )
    lengths, places = (
        x if x and isinstance(x[0], list) else [x] for x in (queries, placed_queries)
    )
    if len(lengths) != len(places) or not all(map(_fits, lengths, places)):
        raise UnsupportedAttentionError(
            f"the documents of cu_seqlens_q {queries} do not fit into the places of "
            f"cu_seqlens_q_padded {placed_queries}: both need a 0, then an offset for each "
            "document's end, and a place as many tokens as its document or more"
        )
    return lengths, places


def _fits(lengths: list[int], places: list[int]) -> bool:
    """Whether each document of one sample is at most as long as its place."""
    sizes = [[end - begin for begin, end in pairwise(x)] for x in (lengths, places)]
    begin_together = len(lengths) == len(places) and lengths[:1] == places[:1]
    return begin_together and all(map(le, *sizes))


def _separate_padding(
    lengths: list[list[int]], places: list[list[int]]
) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Borders for each sample, in which padding after a document is a document, empty where there
    is none; and the ranges ``(start, stop)`` of padding."""
    borders, padding = [], []
    for sample_lengths, sample_places in zip(lengths, places, strict=True):
        sample_borders, ranges = [*sample_places[:1]], []
        pairs = zip(pairwise(sample_lengths), pairwise(sample_places), strict=True)
        for (start, stop), (begin, end) in pairs:
            last = begin + stop - start
            sample_borders += last, end
            if last < end:
                ranges.append((last, end))
        borders.append(sample_borders)
        padding.append(ranges)
    return borders, padding


def _layout_of_each_document(
    places: list[list[int]],
    layout: ds_usp.TokenLayout | str,
    seq_len: int,
    mesh: ds_usp.SequenceMesh,
) -> ds_usp.TokenLayout:
    """The layout of the format ``thd``: a zigzag over all ranks for each document, which is
    refused if ``layout``, the layer's, is another than megatron-core's. ``seq_len`` is global."""
    if mesh.sp_degree == 1:
        return mesh.layout("contiguous", seq_len, places)
    kind = layout if isinstance(layout, str) else layout.kind
    if kind != LAYOUT:
        raise UnsupportedAttentionError(
            f"packed_seq_params of format 'thd' shards every document for itself in the layout "
            f"{LAYOUT!r}, not in {kind!r}. Apply the patches with layout={LAYOUT!r}, or pass "
            "format 'sbhd'"
        )
    return mesh.layout(LAYOUT, seq_len, places)
