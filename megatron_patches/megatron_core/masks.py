"""Masks in megatron-core's forms: the documents of ``PackedSeqParams``, and dense masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ds_usp
from ds_usp.errors import UnsupportedAttentionError

_CACHED_MASK, _LAYOUT = "_usp_mask", "context_parallel"
_ROWS = 1024  # compared at a time, to bound the memory of the comparison


def packed_mask(params: Any, rule: ds_usp.MaskSpec) -> ds_usp.MaskSpec:
    """The layer's mask rule within the documents of a batch.

    Reads ``cu_seqlens_q``, token offsets in the whole sequence, from the device once a batch; the
    rule is cached on ``params``, which all layers share. In the formats ``sbhd`` and ``bshd`` the
    sequence is sharded as without documents: they have any lengths, and the offsets may be
    ``[b, documents + 1]``, the last one repeated where a sample has fewer. In ``thd`` every
    document is sharded for itself (see :func:`packed_layout`).

    Raises:
        UnsupportedAttentionError: another format, other documents of keys than of queries, or
            padding.
    """
    if getattr(params, "qkv_format", None) not in ("sbhd", "bshd", "thd"):
        raise UnsupportedAttentionError(
            f"packed_seq_params of format {getattr(params, 'qkv_format', params)!r}. Pass "
            "PackedSeqParams(qkv_format='sbhd', cu_seqlens_q=borders) with [s, b, h, d] tensors, "
            "or 'thd' with [t, h, d]"
        )
    borders = params.cu_seqlens_q
    version = None if borders is None or borders.is_inference() else borders._version
    cached, cached_borders, cached_version = getattr(params, _CACHED_MASK, (None, None, None))
    if (
        cached is None
        or cached_borders is not borders
        or cached_version != version
        or cached.band != rule.band
    ):
        cached = ds_usp.MaskSpec(rule.left, rule.right, _borders(params))
        setattr(params, _CACHED_MASK, (cached, borders, version))
    mask: ds_usp.MaskSpec = cached
    return mask


def packed_layout(
    mask: ds_usp.MaskSpec, kind: str, tokens: int, mesh: ds_usp.SequenceMesh
) -> ds_usp.TokenLayout:
    """The layout of the format ``thd``: a zigzag over all ranks for each document.

    Args:
        kind: the layout that megatron-core's groups were made for.
        tokens: of this rank.

    Raises:
        UnsupportedAttentionError: another layout than megatron-core's.
        LayoutError: documents that do not divide into two chunks a rank.
    """
    if mesh.sp_degree == 1:
        return mesh.layout("contiguous", tokens)
    if kind != _LAYOUT:
        raise UnsupportedAttentionError(
            f"packed_seq_params of format 'thd' shards every document for itself in the layout "
            f"{_LAYOUT!r}, not in {kind!r}. Apply the patches with layout={_LAYOUT!r}, or pass "
            "format 'sbhd'"
        )
    return mesh.layout(_LAYOUT, tokens * mesh.sp_degree, mask.documents)


def _borders(params: Any) -> Any:
    """Document offsets as lists, after refusing padded or different documents of keys."""
    borders, kv_borders = (
        None if tensor is None else tensor.tolist()
        for tensor in (params.cu_seqlens_q, params.cu_seqlens_kv)
    )
    if borders is None or kv_borders not in (None, borders):
        raise UnsupportedAttentionError(
            f"cu_seqlens_q {borders} and cu_seqlens_kv {kv_borders} of packed_seq_params must be "
            "the same documents; leave cu_seqlens_kv out"
        )
    if params.cu_seqlens_q_padded is not None or params.cu_seqlens_kv_padded is not None:
        raise UnsupportedAttentionError(
            "packed_seq_params has padded documents, and no document needs padding here. Leave "
            "cu_seqlens_q_padded and cu_seqlens_kv_padded out"
        )
    return borders


def check_dense_mask(
    mask: Any, rule: ds_usp.MaskSpec, layout: ds_usp.TokenLayout, mesh: ds_usp.SequenceMesh
) -> None:
    """Refuse a dense mask that differs from the layer's ``rule``. Collective over the mesh.

    Shapes:
        mask: ``[b or 1, 1, s_local, seq_len]``, True where a query must not look.

    Raises:
        UnsupportedAttentionError: on the ranks whose rows of the mask differ.
        MeshError: on the others.
    """
    error = None
    if not _equals_rule(mask, rule, layout, mesh.rank):
        error = UnsupportedAttentionError(
            f"attention_mask was given and is not the rule of this layer, {rule}, for the tokens "
            f"of this rank in {layout}. USP attention computes one rule over global positions for "
            "every sequence. Pass attention_mask=None, and documents as packed_seq_params"
        )
    mesh.agree("a dense mask that equals the layer's rule", error)


def _equals_rule(mask: Any, rule: ds_usp.MaskSpec, layout: ds_usp.TokenLayout, rank: int) -> bool:
    """Whether the rows of this rank's queries hide the same keys as the rule."""
    rows = layout.positions(rank)
    if rule.documents:  # packed_seq_params carry them, so a dense mask beside them is refused
        return False
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim < 2:
        return False
    if mask.shape[-2:] != (len(rows), layout.seq_len):
        return False
    keys = torch.arange(layout.seq_len, device=mask.device)
    for begin in range(0, len(rows), _ROWS):
        queries = torch.tensor(rows[begin : begin + _ROWS], device=mask.device)
        distance = keys - queries[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if rule.left is not None:
            hidden |= distance < -rule.left
        if rule.right is not None:
            hidden |= distance > rule.right
        if bool((mask[..., begin : begin + _ROWS, :] != hidden).any()):
            return False
    return True
