"""Batches of packed documents (``--sft``) on context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import ds_usp
from megatron_patches.megatron_core.groups import LAYOUT
from megatron_patches.megatron_lm.context_parallel_kind import attends_on_one_rank, uses_usp

_NOT_SHARDED = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")


def get_thd_batch_on_this_cp_rank(
    original: Callable[..., Any],
    batch: dict[str, Any],
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    max_seqlen: Tensor,
    cp_size: int | None = None,
    cp_rank: int | None = None,
) -> tuple[dict[str, Any], Any]:
    """``get_thd_batch_on_this_cp_rank`` where USP computes attention: every document is sharded for
    itself, in the layout context_parallel. Once a micro batch, without communication.

    Args:
        cu_seqlens: where documents begin, ``[documents + 1]``, or ``[1, documents + 1]``, as the
            loader has them.
        cu_seqlens_padded: where they begin in the tensors; None: documents have no padding between
            them.
        cp_size, cp_rank: None: of the context-parallel group.

    Shapes:
        the batch's tensors: ``[1, tokens]``; of the result ``[1, tokens / cp_size]``. The second
        result is of all tokens.

    Raises:
        LayoutError: documents that do not divide into two chunks a rank.
    """
    from megatron.core import parallel_state
    from megatron.training import get_args

    args = get_args()
    if not (uses_usp(args) or attends_on_one_rank(args)):
        return original(batch, cu_seqlens, cu_seqlens_padded, max_seqlen, cp_size, cp_rank)
    size = parallel_state.get_context_parallel_world_size() if cp_size is None else cp_size
    rank = parallel_state.get_context_parallel_rank() if cp_rank is None else cp_rank
    offsets = cu_seqlens.flatten()
    padded = offsets if cu_seqlens_padded is None else cu_seqlens_padded.flatten()
    # As of one rank, which shards nothing: over more it needs TransformerEngine.
    batch, params = original(batch, offsets, padded, max_seqlen, cp_size=1, cp_rank=0)
    if size == 1:
        return batch, params
    tokens = batch["tokens"]
    layout = ds_usp.TokenLayout(LAYOUT, tokens.shape[1], size, documents=tuple(padded.tolist()))
    for key, value in batch.items():
        if key not in _NOT_SHARDED and value is not None:
            batch[key] = layout.shard(value, 1, rank)
    return batch, params
