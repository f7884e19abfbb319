"""Outputs and losses of shards, from which scripts of ALST make their losses: the gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.integrations.transformers.loss import WholeBatchLoss
from ds_usp.lowlevel import refuse_second_derivative
from ds_usp.training.batch import IGNORE_INDEX


class ShardLoss:
    """``model.loss_function`` for scripts, which call it with logits and labels of a shard."""

    def __init__(self, whole: WholeBatchLoss) -> None:
        self._whole = whole

    def __call__(self, logits: Any, labels: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Shapes: logits ``[b, s_local, v]``; a scalar, 0 of a shard without loss tokens."""
        inside = self._whole.targets is not None  # the model calls it in its forward pass
        loss = self._whole(logits, labels, *args, **kwargs)
        targets = kwargs.get("shift_labels", labels)
        if inside or targets is None:
            return loss
        # Its weight is 0 in a script, and 0 times the nan of a mean of nothing is nan.
        return torch.where((targets != IGNORE_INDEX).any(), loss, torch.zeros_like(loss))


def scale_gradients(value: Any, length: int, factor: float) -> Any:
    """An output as it is; if it is per token of this rank's shard, with gradients times a factor.

    Args:
        length: tokens of this rank.
    """
    if isinstance(value, tuple):
        return tuple(scale_gradients(x, length, factor) for x in value)
    if isinstance(value, Tensor) and value.ndim >= 3 and value.shape[1] == length:
        return ScaledGradient.apply(value, factor)
    return value


class ScaledGradient(torch.autograd.Function):
    """A tensor as it is, with its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """Shapes: any."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradient times the factor."""
        return grad * ctx.factor, None


class MeanOfGradients(torch.autograd.Function):
    """The whole batch's loss, which every rank has, for scripts that weigh the ranks' losses.

    Weights that add up to 1 leave its value. In a differentiable all-gather the gradient of the
    loss of rank r is ``sp_degree`` times its weight, without one it is 1: the mean over the ranks
    is 1 either way.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, mesh: SequenceMesh) -> Tensor:
        """Shapes: any, the same on all ranks."""
        ctx.mesh = mesh
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The mean over the ranks of the mesh."""
        refuse_second_derivative("the loss of a whole batch")
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.mesh.sp_group)
        return grad / ctx.mesh.sp_degree, None
