"""The logits of some tokens: their losses, and in their memory their gradient.

On GPUs each is one pass over the logits as the product left them, in Triton; elsewhere torch's,
over a copy in fp32.

Letters of the shapes: t tokens, V words of this tensor-parallel rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.triton_launch import load_triton_module


class Sums(NamedTuple):
    """What a row of logits comes to, over this rank's words.

    Shapes:
        kept ``[t, V]``: what the gradient is made from, and in; the others ``[t]``, fp32 (fp64 of
        fp64): the largest logit, the sum of ``exp(logit - largest)``, and the logit of the label,
        less the largest; 0 where the label is another rank's word.
    """

    kept: Tensor
    largest: Tensor
    total: Tensor
    aimed: Tensor


class Logits:
    """Logits whose memory is ours.

    Args:
        scores: ``[t, V]``; not to be used afterwards.
        labels: ``[t]``, words of the whole vocabulary.
        group: the ranks among which the words are cut, in rank order; None: one has them all.
            Collective over it.

    Attributes:
        losses: ``[t]``, the cross entropy.
    """

    def __init__(self, scores: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> None:
        several = group is not None and dist.get_world_size(group) > 1
        count = scores.shape[1]
        words = labels - (dist.get_rank(group) * count if several else 0)
        mine = (words >= 0) & (words < count)
        self._words = torch.where(mine, words, -1)
        plain = not scores.is_cuda or scores.dtype == torch.float64 or torch.compiler.is_compiling()
        triton = None if plain else load_triton_module("ds_usp.training.logits_triton")
        if triton is None:
            self._fused, sums = None, _sums(scores, self._words)
        else:
            self._fused, sums = triton, Sums(scores, *triton.sums_fused(scores, self._words))
        self._kept, self._largest, total, aimed = sums
        if several:
            largest = self._largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            # No word of this rank may be possible: minus infinity less itself is no number.
            lower = torch.where(self._largest == -math.inf, -math.inf, self._largest - largest)
            both = torch.stack([total * lower.exp(), torch.where(mine, aimed + lower, 0)])
            dist.all_reduce(both, group=group)
            total, aimed = both
            self._share = lower.exp() / total
        else:
            self._share = total.reciprocal()
        self.losses = total.log() - aimed

    def gradient(self, dlosses: Tensor) -> Tensor:
        """Of the logits, ``[t, V]``, from that of the losses ``[t]``; ends their life."""
        scale = dlosses * self._share
        if self._fused is None:
            return _gradient(self._kept, self._words, scale, dlosses)
        self._fused.gradient_fused(self._kept, self._words, self._largest, scale, dlosses)
        return self._kept


def _sums(scores: Tensor, words: Tensor) -> Sums:
    logits = scores if scores.dtype == torch.float64 else scores.float()
    largest = logits.max(dim=1).values
    base = torch.where(largest == -math.inf, 0, largest)
    logits = logits - base.unsqueeze(1)
    aimed = logits.gather(1, words.clamp(min=0).unsqueeze(1)).squeeze(1)
    aimed = torch.where(words >= 0, aimed, 0)
    exponentials = logits.exp_()
    return Sums(exponentials, largest, exponentials.sum(dim=1), aimed)


def _gradient(exponentials: Tensor, words: Tensor, scale: Tensor, dlosses: Tensor) -> Tensor:
    exponentials.mul_(scale.unsqueeze(1))
    less = torch.where(words >= 0, dlosses, 0).to(exponentials.dtype)
    return exponentials.scatter_add_(1, words.clamp(min=0).unsqueeze(1), -less.unsqueeze(1))
