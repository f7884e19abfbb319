"""The losses that Megatron-LM prints of ``--sft`` over context-parallel ranks; gradients stay."""

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
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``forward_step_calc_loss``, whose reported losses are those of all context-parallel ranks:
    one more all-reduce of two numbers for each, in each micro batch of the last stage. ``original``
    is that of ``megatron_core/loss.py``, which divides the loss that is trained."""
    from megatron.training import get_args

    flags = get_args()
    # With --sft Megatron-LM's evaluation averages the ranks' mean losses.
    if loss_func is not None and flags.sft and uses_usp(flags):
        loss_func = _reporting_all_ranks(loss_func)
    return original(model, output_tensor, loss_func, *args, **kwargs)


def _reporting_all_ranks(loss_func: Callable[..., Any]) -> Callable[..., Any]:
    """The script's ``loss_func``, whose pairs of (loss sum, tokens) are sums over context-parallel
    ranks; summed over them again, for training, they have the same quotient."""
    from megatron.core import parallel_state

    def reported(value: Tensor) -> Tensor:
        if value.numel() != 2:
            return value
        total = value.clone()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total

    def loss_of_all_ranks(output: Tensor, **kwargs: Any) -> Any:
        outputs = loss_func(output, **kwargs)
        if kwargs or len(outputs) != 3:  # non_loss_data=True, or already a mean
            return outputs
        loss, tokens, report = outputs
        return loss, tokens, {key: reported(value) for key, value in report.items()}

    return loss_of_all_ranks
