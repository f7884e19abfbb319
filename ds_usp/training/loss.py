"""The loss that every rank back-propagates: reduced gradients are those of the global mean.

The loss of a step is the mean over all loss tokens of the global batch: over the whole sequence
(all sequence-parallel ranks), all micro batches and all data-parallel replicas. A rank holds some
of these tokens and never sees the others, so it weights each token loss with
``scale / (all loss tokens)`` and sums. ``scale`` is what DeepSpeed is going to divide the summed
gradients by (``GradientRule.loss_scale``), so that it cancels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.errors import DataError


def loss_token_weight(loss_tokens: float, scale: float) -> float:
    """Weight of one loss token in the loss that a rank back-propagates.

    Args:
        loss_tokens: loss tokens of the whole step, over all ranks and micro batches.
        scale: what the wrapper divides summed gradients by: the world size under DDP and FSDP2,
            ``rule.loss_scale(micro_batches)`` under DeepSpeed, 1 where they are only summed.

    Raises:
        DataError: no token of the step counts.
    """
    if loss_tokens <= 0:
        raise DataError(
            "the loss mask of a whole step leaves no token to learn from: the data consists of "
            "padding or, with --eod-mask-loss, of end-of-document tokens only"
        )
    return scale / loss_tokens


def weighted_loss(token_losses: Tensor, weights: Tensor) -> Tensor:
    """The local loss of this rank: the weighted sum of its token losses, in fp32 (fp64 for fp64).

    Shapes:
        token_losses, weights: any, the same; the result is a scalar.
    """
    return (token_losses.to(torch.promote_types(token_losses.dtype, torch.float32)) * weights).sum()


def mean_loss(local_losses: Sequence[Tensor], scale: float, group: dist.ProcessGroup) -> float:
    """The loss of the whole step, the same number on every rank of ``group``.

    Args:
        local_losses: what :func:`weighted_loss` gave for each micro batch of this rank.
        scale: as given to :func:`loss_token_weight`.
        group: the ranks that hold different tokens: sequence x data parallel.
    """
    total = torch.stack([loss.detach() for loss in local_losses]).sum()
    dist.all_reduce(total, group=group)
    return total.item() / scale
