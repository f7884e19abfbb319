"""The loss over context-parallel ranks that hold different numbers of loss tokens.

Without ``--calculate-per-token-loss`` Megatron-LM divides the loss of every rank by the rank's own
number of loss tokens, and averages over ranks. That is the mean over all tokens only where ranks
have as many each, which masks of the loss (``--eod-mask-loss``, ``--sft``, padding) and
``--mtp-num-layers`` do not give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_patches.megatron_lm.context_parallel_kind import uses_usp


def forward_step_calc_loss(
    original: Callable[..., Any],
    model: Any,
    output_tensor: Any,
    loss_func: Callable[..., Any] | None,
    config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``forward_step_calc_loss`` with the number of loss tokens of all context-parallel ranks.

    Adds one blocking all-reduce of a scalar over the context-parallel group to every micro batch of
    the last pipeline stage, after the forward pass; with ``--sft`` one more for every reported
    loss, because Megatron-LM's evaluation averages quotients of each rank's.
    """
    from megatron.training import get_args

    flags = get_args()
    if loss_func is not None and uses_usp(flags):
        loss_func = _over_all_ranks(
            loss_func, mean=not config.calculate_per_token_loss, reports=flags.sft
        )
    return original(model, output_tensor, loss_func, config, *args, **kwargs)


def roll_tensor(
    original: Callable[..., tuple[Tensor, Tensor]], tensor: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """``roll_tensor``, whose sum of a loss mask is the mean over context-parallel ranks.

    Losses of ``--mtp-num-layers`` are divided by it, and averaged over these ranks. Adds one
    blocking all-reduce of a scalar over the context-parallel group for every such layer.
    """
    from megatron.core import parallel_state
    from megatron.training import get_args

    rolled, total = original(tensor, *args, **kwargs)
    if tensor.is_floating_point() and uses_usp(get_args()):  # the mask, not tokens or labels
        group = parallel_state.get_context_parallel_group()
        total = _sum(total, group) / dist.get_world_size(group)
    return rolled, total


def _over_all_ranks(loss_func: Callable[..., Any], *, mean: bool, reports: bool) -> Any:
    """The script's ``loss_func``, whose (loss sum, tokens, reports) count all ranks' tokens."""
    from megatron.core import parallel_state

    def loss_of_all_ranks(output: Tensor, **kwargs: Any) -> Any:
        outputs = loss_func(output, **kwargs)
        if kwargs or len(outputs) != 3:  # not a loss, or already a mean
            return outputs
        loss, tokens, report = outputs
        group = parallel_state.get_context_parallel_group()
        if reports:
            report = {
                key: _sum(value, group) if value.numel() == 2 else value
                for key, value in report.items()
            }
        if mean:
            # Gradients are averaged over these ranks: each counts its sum as often.
            loss, tokens = loss * dist.get_world_size(group), _sum(tokens, group)
        return loss, tokens, report

    return loss_of_all_ranks


def _sum(value: Tensor, group: Any) -> Tensor:
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total
