"""Documents out of megatron-core's ``PackedSeqParams``."""

from __future__ import annotations

from typing import Any

import ds_usp
from ds_usp.errors import UnsupportedAttentionError

_CACHED_MASK, _LAYOUT = "_usp_mask", "context_parallel"


def packed_mask(params: Any, rule: ds_usp.MaskSpec) -> ds_usp.MaskSpec:
    """The rule of a layer within the documents of a batch, which all layers share.

    Reads ``cu_seqlens_q``: borders in tokens of the whole sequence. In the formats ``sbhd`` and
    ``bshd`` the sequence is cut as without documents: they have any lengths, and may be
    ``[b, documents + 1]``, the last border repeated where a sample has fewer. In ``thd`` every
    document is cut for itself (see :func:`packed_layout`). They are read off the device once a
    batch.

    Raises:
        UnsupportedAttentionError: another format; keys of other documents than the queries;
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
    """Where tokens of the format ``thd`` are: a zigzag over all ranks for each document.

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
            f"packed_seq_params of format 'thd' cuts every document for itself in the layout "
            f"{_LAYOUT!r}, not in {kind!r}. Apply the patches with layout={_LAYOUT!r}, or pass "
            "format 'sbhd'"
        )
    return mesh.layout(_LAYOUT, tokens * mesh.sp_degree, mask.documents)


def _borders(params: Any) -> Any:
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
