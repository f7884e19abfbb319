"""Vocabulary-parallel cross entropy of logits, and its gradient written over them.

On GPUs each is one Triton pass over the logits in their own dtype; elsewhere torch operations over
a copy in fp32.

Letters of the shapes: t tokens, V vocabulary entries of this tensor-parallel rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.lowlevel import load_triton_module
from ds_usp.training.batch import IGNORE_INDEX


class RowStats(NamedTuple):
    """Softmax statistics of each row of logits, over this rank's vocabulary.

    Shapes:
        buffer ``[t, V]``: the logits, or their exponentials; the gradient overwrites it. The others
        ``[t]``, fp32 (fp64 of fp64): the largest logit, the sum of ``exp(logit - row_max)``, and
        the logit of the label less ``row_max``; 0 where the label is in another rank's vocabulary.
    """

    buffer: Tensor
    row_max: Tensor
    sum_exp: Tensor
    label_logit: Tensor


class Logits:
    """Logits in a buffer that this object owns and overwrites.

    Args:
        scores: ``[t, V]``; not to be used afterwards.
        labels: ``[t]``, token ids of the full vocabulary, or -100: no loss and no gradient.
        group: the ranks among which the vocabulary is sharded, in rank order; None: one has it all.
            Collective over it.

    Attributes:
        losses: ``[t]``, the cross entropy.
    """

    def __init__(self, scores: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> None:
        is_sharded = group is not None and dist.get_world_size(group) > 1
        vocab_size = scores.shape[1]
        local_labels = labels - (dist.get_rank(group) * vocab_size if is_sharded else 0)
        is_local = (local_labels >= 0) & (local_labels < vocab_size)
        self._labels = torch.where(is_local, local_labels, -1)
        no_triton = (
            not scores.is_cuda or scores.dtype == torch.float64 or torch.compiler.is_compiling()
        )
        triton = None if no_triton else load_triton_module("ds_usp.training.logits_triton")
        if triton is None:
            self._fused, stats = None, _row_stats(scores, self._labels)
        else:
            self._fused, stats = (
                triton,
                RowStats(scores, *triton.row_stats_fused(scores, self._labels)),
            )
        self._buffer, self._row_max, sum_exp, label_logit = stats
        if is_sharded:
            global_max = self._row_max.clone()
            dist.all_reduce(global_max, dist.ReduceOp.MAX, group=group)
            # All of this rank's logits may be -inf: -inf less itself is NaN.
            rescale = torch.where(self._row_max == -math.inf, -math.inf, self._row_max - global_max)
            sums_over_ranks = torch.stack(
                [sum_exp * rescale.exp(), torch.where(is_local, label_logit + rescale, 0)]
            )
            dist.all_reduce(sums_over_ranks, group=group)
            sum_exp, label_logit = sums_over_ranks
            self._inv_sum_exp = rescale.exp() / sum_exp
        else:
            self._inv_sum_exp = sum_exp.reciprocal()
        self._counts = labels != IGNORE_INDEX
        self.losses = torch.where(self._counts, sum_exp.log() - label_logit, 0)

    def gradient(self, dlosses: Tensor) -> Tensor:
        """The gradient of the logits ``[t, V]`` from that of the losses ``[t]``; overwrites the
        logits."""
        dlosses = torch.where(self._counts, dlosses, 0)
        scale = dlosses * self._inv_sum_exp
        if self._fused is None:
            return _gradient(self._buffer, self._labels, scale, dlosses)
        self._fused.gradient_fused(self._buffer, self._labels, self._row_max, scale, dlosses)
        return self._buffer


def _row_stats(scores: Tensor, labels: Tensor) -> RowStats:
    """Softmax statistics of each row in PyTorch; ``buffer`` is a new tensor of exponentials.

    Shapes:
        scores ``[t, V]``, labels ``[t]``: indices into this rank's vocabulary, negative outside.
    """
    logits = scores if scores.dtype == torch.float64 else scores.float()
    row_max = logits.max(dim=1).values
    base = torch.where(row_max == -math.inf, 0, row_max)
    logits = logits - base.unsqueeze(1)
    label_logit = logits.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    label_logit = torch.where(labels >= 0, label_logit, 0)
    exponentials = logits.exp_()
    return RowStats(exponentials, row_max, exponentials.sum(dim=1), label_logit)


def _gradient(exponentials: Tensor, labels: Tensor, scale: Tensor, dlosses: Tensor) -> Tensor:
    exponentials.mul_(scale.unsqueeze(1))
    label_grad = torch.where(labels >= 0, dlosses, 0).to(exponentials.dtype)
    return exponentials.scatter_add_(1, labels.clamp(min=0).unsqueeze(1), -label_grad.unsqueeze(1))
