"""Sequence-sharded batches of ``pretrain_gpt.py``, its pipeline model and its data set index.

Batches are made once a micro batch, on each rank of the first and the last pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ds_usp
from ds_usp.training import document_borders
from megatron_patches.megatron_deepspeed.state import get_state, set_mask

_KEY = "text"


class Batch(NamedTuple):
    """One rank's shard of a micro batch.

    Shapes:
        tokens, labels, position_ids: ``[b, s_local]``; loss_mask: ``[b, s]``, of the whole
        sequence, as the gathered losses are.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor


def make_batch(data: dict[str, Tensor] | None) -> Batch:
    """Shard one micro batch, and set its mask for attention where documents are apart
    (``--reset-attention-mask``). Collective over the sequence-parallel group, or, with one rank a
    sequence, over the tensor-parallel group.

    Args:
        data: ``{"text": [b, s + 1]}`` of the data loader on the group's first rank, else None.
    """
    from megatron import get_args, get_tokenizer
    from megatron.core import tensor_parallel
    from megatron.utils import get_ltor_masks_and_position_ids

    args, state = get_args(), get_state()
    text = tensor_parallel.broadcast_data([_KEY], data, torch.int64)[_KEY].long()
    tokens = text[:, :-1].contiguous()
    if args.reset_attention_mask:
        borders = document_borders(tokens, get_tokenizer().eod)
        set_mask(ds_usp.MaskSpec.causal(borders))
    # No dense mask: attention has a mask rule, with the documents of set_mask().
    _, loss_mask, position_ids = get_ltor_masks_and_position_ids(
        tokens,
        get_tokenizer().eod,
        args.reset_position_ids,
        False,
        args.eod_mask_loss,
        skip_mask=True,
    )
    layout, rank = state.layout, state.mesh.rank
    # Labels are shifted before sharding: the label of a shard's last token is another rank's token.
    tokens, labels, position_ids = (
        layout.shard(x, dim=1, rank=rank) for x in (tokens, text[:, 1:], position_ids)
    )
    return Batch(tokens, labels, loss_mask, position_ids)


def get_batch(
    original: Callable[..., Any], data_iterator: Iterator[dict[str, Tensor]] | None
) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    """The script's ``get_batch``: its own where the state is not active, else with None as mask."""
    if not get_state().active:
        return original(data_iterator)
    batch = make_batch(None if data_iterator is None else next(data_iterator))
    return batch.tokens, batch.labels, batch.loss_mask, None, batch.position_ids


def get_batch_pipe(
    data: dict[str, Tensor] | None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The script's ``get_batch_pipe``, of DeepSpeed's engine: inputs of the first stage, labels of
    the last."""
    batch = make_batch(data)
    return (batch.tokens, batch.position_ids), (batch.labels, batch.loss_mask)


def model_provider(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The script's ``model_provider``; for a pipeline, without its dense mask."""
    from megatron import get_args
    from megatron.arguments import core_transformer_config_from_args
    from megatron.model import GPTModelPipe

    flags = get_args()
    if not get_state().active or flags.no_pipeline_parallel:
        return original(*args, **kwargs)
    model = GPTModelPipe(core_transformer_config_from_args(flags), parallel_output=True)
    model._megatron_batch_fn = get_batch_pipe
    # Its layers read these flags; a mask and rotary tables of the whole sequence would be wrong.
    flags.attn_mask = flags.rotary_pos_emb = None
    return model


def build_index_mappings(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``_build_index_mappings`` of each data set, at the start: first on the first tensor-parallel
    rank, then on the others."""
    # Rank 0 writes the index before barriers over its data- and pipeline-parallel groups. Under
    # sequence parallelism all tensor-parallel ranks read, which are in neither.
    from megatron import get_args
    from megatron.core import parallel_state

    is_sequence_parallel = parallel_state.get_sequence_parallel_world_size() > 1
    if not (is_sequence_parallel or get_args().force_ds_sequence_parallel):
        return original(*args, **kwargs)  # one tensor-parallel rank reads
    group = parallel_state.get_tensor_model_parallel_group()
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    if not is_first:
        dist.barrier(group=group)
    mappings = original(*args, **kwargs)
    if is_first:
        dist.barrier(group=group)
    return mappings
