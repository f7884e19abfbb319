"""Documents out of megatron-core's ``PackedSeqParams``."""

from __future__ import annotations

from typing import Any

import ds_usp
from ds_usp.errors import UnsupportedAttentionError

_READ = "_usp_mask"


def packed_mask(params: Any, rule: ds_usp.MaskSpec) -> ds_usp.MaskSpec:
    """The rule of a layer within the documents of a batch, which all layers share.

    Reads ``cu_seqlens_q``: borders in global positions, ``[documents + 1]`` for all samples or
    ``[b, documents + 1]``, the last one repeated where a sample has fewer. They are read off the
    device once a batch.

    Raises:
        UnsupportedAttentionError: another format than ``sbhd`` or ``bshd``, in which sequences are
            spread as without documents; keys of other documents than the queries; padding.
    """
    if getattr(params, "qkv_format", None) not in ("sbhd", "bshd"):
        raise UnsupportedAttentionError(
            f"packed_seq_params of format {getattr(params, 'qkv_format', params)!r}: there every "
            "document is cut among the ranks for itself. Pass PackedSeqParams(qkv_format='sbhd', "
            "cu_seqlens_q=borders) with [s, b, h, d] tensors: the borders of documents of any "
            "lengths in a sequence that is cut as without them"
        )
    read = getattr(params, _READ, None)
    if read is None or read.band != rule.band:
        read = ds_usp.MaskSpec(rule.left, rule.right, _borders(params))
        setattr(params, _READ, read)
    return read


def _borders(params: Any) -> Any:
    borders, of_keys = (
        None if each is None else each.tolist()
        for each in (params.cu_seqlens_q, params.cu_seqlens_kv)
    )
    if borders is None or of_keys not in (None, borders):
        raise UnsupportedAttentionError(
            f"cu_seqlens_q {borders} and cu_seqlens_kv {of_keys} of packed_seq_params must be the "
            "same documents; leave cu_seqlens_kv out"
        )
    if params.cu_seqlens_q_padded is not None or params.cu_seqlens_kv_padded is not None:
        raise UnsupportedAttentionError(
            "packed_seq_params has padded documents, and no document needs padding here. Leave "
            "cu_seqlens_q_padded and cu_seqlens_kv_padded out"
        )
    return borders
