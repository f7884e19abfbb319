"""The batches and the pipeline model of ``pretrain_gpt.py``, where attention is ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ds_usp
from ds_usp.training import document_borders
from megatron_patches.megatron_deepspeed.state import get_state, set_mask

_KEY = "text"


class Batch(NamedTuple):
    """What one rank holds of a micro batch.

    Shapes:
        tokens, labels, position_ids: ``[b, s_local]``; loss_mask: ``[b, s]``, of the whole
        sequence, as the gathered losses are.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor


def make_batch(data: dict[str, Tensor] | None) -> Batch:
    """Cut one micro batch. Collective over the ranks that share the sequence.

    Args:
        data: what the host's data loader gave, on the first of these ranks; None elsewhere.
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
    # No mask of tokens x tokens: attention knows that it is causal, and its documents.
    _, loss_mask, position_ids = get_ltor_masks_and_position_ids(
        tokens,
        get_tokenizer().eod,
        args.reset_position_ids,
        False,
        args.eod_mask_loss,
        skip_mask=True,
    )
    layout, rank = state.layout, state.mesh.rank
    # Labels are shifted before the cut: the label of a shard's last token is another rank's token.
    tokens, labels, position_ids = (
        layout.shard(x, dim=1, rank=rank) for x in (tokens, text[:, 1:], position_ids)
    )
    return Batch(tokens, labels, loss_mask, position_ids)


def get_batch(
    original: Callable[..., Any], data_iterator: Iterator[dict[str, Tensor]] | None
) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    """The script's ``get_batch``."""
    if not get_state().active:
        return original(data_iterator)
    batch = make_batch(None if data_iterator is None else next(data_iterator))
    return batch.tokens, batch.labels, batch.loss_mask, None, batch.position_ids


def get_batch_pipe(
    data: dict[str, Tensor] | None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The script's function of that name: inputs of the first stage, labels of the last."""
    batch = make_batch(data)
    return (batch.tokens, batch.position_ids), (batch.labels, batch.loss_mask)


def model_provider(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The script's ``model_provider``; for a pipeline, without its mask of tokens x tokens."""
    from megatron import get_args
    from megatron.arguments import core_transformer_config_from_args
    from megatron.model import GPTModelPipe

    flags = get_args()
    if not get_state().active or flags.no_pipeline_parallel:
        return original(*args, **kwargs)
    model = GPTModelPipe(core_transformer_config_from_args(flags), parallel_output=True)
    model._megatron_batch_fn = get_batch_pipe
    # Its layers look these up; a mask and rotary tables of the whole sequence would be wrong.
    flags.attn_mask = flags.rotary_pos_emb = None
    return model
