"""Losses over context-parallel ranks that hold different numbers of loss tokens.

Without ``calculate_per_token_loss`` megatron-core divides the loss of every rank by the rank's own
number of loss tokens, and averages over ranks. That is the mean over all tokens only where ranks
have as many each, which masks of the loss, padding and multi-token prediction do not give.

These functions take the place of ``original`` in each micro batch's forward pass, on the ranks that
compute its loss or its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_usp
from ds_usp.errors import UnsupportedAttentionError
from megatron_patches.megatron_core.context_parallel import ContextParallel
from megatron_patches.megatron_core.groups import LAYOUT
from megatron_patches.megatron_core.packed_documents import packed_documents


def forward_step_calc_loss(
    original: Callable[..., Any],
    model: Any,
    output_tensor: Any,
    loss_func: Callable[..., Any] | None,
    config: Any,
    *args: Any,
    context_parallel: ContextParallel,
    **kwargs: Any,
) -> Any:
    """``forward_step_calc_loss``, which divides what a loss function of three values returns (sum,
    tokens, report) by the number of loss tokens of all context-parallel ranks. Collective over
    them, of a scalar. A function of two values has divided itself.
    """
    from megatron.core.utils import unwrap_model

    divides = config.context_parallel_size > 1 and not config.calculate_per_token_loss
    if loss_func is not None and context_parallel.settings is not None and divides:
        group = getattr(unwrap_model(model), "cp_group", None)
        loss_func = _divided_by_all(loss_func, context_parallel.mesh_over(group))
    return original(model, output_tensor, loss_func, config, *args, **kwargs)


def _divided_by_all(loss_func: Callable[..., Any], mesh: ds_usp.SequenceMesh) -> Callable[..., Any]:
    """The program's ``loss_func``: its loss times the ranks, with the sum of their tokens."""

    def loss_of_all_ranks(output: Any, **kwargs: Any) -> Any:
        outputs = loss_func(output, **kwargs)
        if kwargs or len(outputs) != 3:  # non_loss_data=True, or already a mean
            return outputs
        loss, tokens, report = outputs
        tokens = tokens.to(loss.device, copy=True)
        dist.all_reduce(tokens, group=mesh.sp_group)
        # Gradients are averaged over these ranks: each counts its sum as often.
        return loss * mesh.sp_degree, tokens, report

    return loss_of_all_ranks


@torch.no_grad()
def roll_tensor(
    original: Callable[..., tuple[Tensor, Tensor]],
    tensor: Tensor,
    shifts: int = -1,
    dims: int = -1,
    cp_group: dist.ProcessGroup | None = None,
    packed_seq_params: Any = None,
    *,
    uses_sum: bool,
    context_parallel: ContextParallel,
) -> tuple[Tensor, Tensor]:
    """``roll_tensor`` of multi-token prediction: every token's next one in its document, and the
    sum over all context-parallel ranks divided by their number. Collective over them.

    Losses are divided by that sum of the loss mask, and averaged over ranks. The original sums a
    rank's own tokens, and takes every shard for a zigzag, and documents for packed without padding:
    for others the whole tensor is gathered, rolled and sharded. The last token of a document and
    its padding become 0.

    Args:
        uses_sum: bound by ``patch_table.py``: the caller uses the sum, as ``GPTModel`` does. For
            the multi-token layers, which drop it, it may be this rank's own: no all-reduce.

    Shapes:
        tensor: ``[b, s_local]``, or ``[..., b, s_local]``.
    """
    settings, ranks = context_parallel.settings, 1 if cp_group is None else cp_group.size()
    if settings is None or (ranks == 1 and packed_seq_params is None):
        return original(tensor, shifts, dims, cp_group, packed_seq_params)
    if packed_seq_params is None and settings.layout == LAYOUT:
        rolled, total = original(tensor, shifts, dims, cp_group)
        if uses_sum:
            dist.all_reduce(total, group=cp_group)
        return rolled, total / ranks
    mesh, tokens = context_parallel.mesh_over(cp_group), tensor.movedim(dims, 0)
    layout, documents = settings.layout, ds_usp.MaskSpec.causal().documents
    if packed_seq_params is not None:
        packed = packed_documents(packed_seq_params, ds_usp.MaskSpec.causal(), layout, mesh, tokens)
        layout, documents = packed.layout, packed.mask.documents
        if packed.padding is not None:  # [s_local, 1 or b, 1]
            tokens = tokens.masked_fill(packed.padding.squeeze(-1), 0)
    if isinstance(layout, str):
        kind = layout if ranks > 1 else "contiguous"
        layout = mesh.layout(kind, len(tokens) * ranks)
    tokens = mesh.gather(tokens, layout, 0)
    rolled = tokens.roll(shifts, 0)
    for sample, borders in enumerate(documents or ((len(rolled),),)):
        ends = [border + i for border in borders for i in range(shifts, 0) if border + i >= 0]
        sample_tokens = rolled[..., sample] if len(documents) > 1 else rolled
        sample_tokens.index_fill_(0, torch.tensor(ends, device=rolled.device), 0)
    local = layout.shard(rolled, 0, mesh.rank)
    return local.movedim(0, dims).contiguous(), rolled.sum() / ranks


def recompute_packed(
    original: Callable[..., Any],
    layer: Any,
    forward_func: Callable[..., Any],
    *,
    packed_seq_params: Any = None,
    **tensors: Any,
) -> Any:
    """``MultiTokenPredictionLayer._checkpointed_forward``, which saves documents as a tensor: the
    checkpoint gets a function that knows them."""

    def forward(*values: Any, **named: Any) -> Any:
        named |= dict(zip(tensors, values, strict=False))
        return forward_func(**named, packed_seq_params=packed_seq_params)

    return original(layer, forward, **tensors)


def apply_z_loss(
    original: Callable[..., Tensor],
    router: Any,
    logits: Tensor,
    padding_mask: Tensor | None = None,
    *,
    context_parallel: ContextParallel,
) -> Tensor:
    """``TopKRouter.apply_z_loss``, the mean over a rank's own tokens that are no padding.

    Shapes:
        logits, result ``[tokens, experts]``; padding_mask ``[tokens]``.

    Raises:
        UnsupportedAttentionError: a padding mask, by which context-parallel ranks have other
            numbers of them.
    """
    coefficient, ranks = router.config.moe_z_loss_coeff, router.config.context_parallel_size
    if coefficient and padding_mask is not None and ranks > 1 and context_parallel.settings:
        raise UnsupportedAttentionError(
            f"moe_z_loss_coeff={coefficient} with a padding_mask: megatron-core averages the "
            f"means of {ranks} context-parallel ranks, which have other numbers of tokens. Leave "
            "padding_mask out, or set moe_z_loss_coeff=None"
        )
    return original(router, logits, padding_mask)
