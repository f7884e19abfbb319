"""The loss that every rank back-propagates: reduced gradients are those of the global mean.

A rank holds some of a step's tokens and never sees the others, so it weights each token loss with
``scale / (all loss tokens)`` and sums. A training loop does this for each micro batch, on each
rank; what communicates does so over the tensor-parallel ranks, or once a step (:func:`mean_loss`).

In chunks, the logits of one chunk of tokens exist at a time. On GPUs the cross entropy and its
gradient are one Triton pass each over the logits in their own dtype; elsewhere torch operations
over a copy in fp32.

Sources: the chunked linear cross entropy of Liger Kernel (Hsu et al., 2410.10989); the reductions
over a sharded vocabulary are Megatron's (1909.08053).

Shapes: T tokens, t those of a chunk, h hidden, V vocabulary entries of this tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.errors import ConfigError, DataError
from ds_usp.lowlevel import load_triton_module, refuse_second_derivative
from ds_usp.training.whole_batch import IGNORE_INDEX


def loss_token_weight(loss_tokens: float, scale: float) -> float:
    """Weight of one loss token in the loss that a rank back-propagates.

    Args:
        loss_tokens: loss tokens of the whole step, over all ranks and micro batches.
        scale: what the wrapper divides summed gradients by: the world size under DDP and FSDP2,
            ``rule.loss_scale(micro_batches)`` under DeepSpeed, 1 where they are only summed.

    Raises:
        DataError: no token of the step counts.
    """
    # Note [a sum, scaled, and not a mean of means]
    # Ranks and micro batches have different numbers of loss tokens: padding, prompts, documents,
    # and under contiguous layouts the last rank. The mean of their means would weigh a token by the
    # company it is in, other degrees would train otherwise, and a rank without any would divide by
    # zero. So every token weighs 1 / (loss tokens of the step). Wrappers then divide what they have
    # summed, each by a number of its own (DDP by the world, DeepSpeed by replicas or by all ranks
    # and by the micro batches); `scale` is that number, and cancels it.
    if loss_tokens <= 0:
        raise DataError(
            "the loss mask of a whole step leaves no token to learn from: the data consists of "
            "padding or, with --eod-mask-loss, of end-of-document tokens only"
        )
    return scale / loss_tokens


def weighted_loss(token_losses: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of this rank's token losses, of one shape, in fp32 (fp64 for fp64)."""
    return (token_losses.to(torch.promote_types(token_losses.dtype, torch.float32)) * weights).sum()


def mean_loss(local_losses: Sequence[Tensor], scale: float, group: dist.ProcessGroup) -> float:
    """The loss of the whole step, the same number on every rank of ``group``. Collective over it;
    waits for the GPU.

    Args:
        local_losses: what :func:`weighted_loss` gave for each micro batch of this rank.
        scale: as given to :func:`loss_token_weight`.
        group: the ranks that hold different tokens: sequence x data parallel.
    """
    total = torch.stack([loss.detach() for loss in local_losses]).sum()
    dist.all_reduce(total, group=group)
    return total.item() / scale


Group = dist.ProcessGroup | None


def chunked_weighted_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    *,
    chunks: int,
    tp_group: Group = None,
) -> Tensor:
    """``sum(loss_weights * cross_entropy(hidden @ weight.T, labels))``, in fp32 (fp64 for fp64).

    Shapes:
        hidden ``[..., h]``, weight ``[V, h]``, labels and loss_weights ``[...]``; a scalar.

    Args:
        labels: token ids of the full vocabulary, or -100: no loss and no gradient.
        chunks: number of chunks of tokens.
        loss_weights: get no gradient.
        tp_group: the ranks among which the vocabulary is sharded, in rank order, and which all have
            these tokens; None: one rank has all of it. Collective over it.

    Raises:
        ConfigError: shapes or dtypes that do not fit, fp16, chunks below 1, loss weights that
            require a gradient; on CPUs also a label outside of the vocabulary whose weight is not
            0. On GPUs, which are not waited for, loss and gradients are then NaN.
    """
    tokens, weight, targets = _validate(hidden, weight, labels, chunks)
    if loss_weights.shape != labels.shape:
        raise ConfigError(f"labels {list(labels.shape)}, loss_weights {list(loss_weights.shape)}")
    if torch.is_grad_enabled() and loss_weights.requires_grad:
        raise ConfigError(
            "loss_weights require a gradient, which chunked_weighted_loss does not compute: detach "
            "them, or use (chunked_token_losses(...) * loss_weights).sum()"
        )
    # Asked here: in an autograd.Function's forward grad mode is off.
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    factors = loss_weights.reshape(-1).to(torch.promote_types(hidden.dtype, torch.float32))
    factors = _refuse_unknown(targets, factors, len(weight) * _ranks(tp_group))
    return WeightedLoss.apply(tokens, weight, targets, factors, chunks, tp_group, needs_grad)


def chunked_token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunks: int, tp_group: Group = None
) -> Tensor:
    """The cross entropy of every token, not reduced; logits of one chunk exist at a time.

    For frameworks that apply the loss mask and the mean afterwards: backward, where the gradient of
    each loss arrives, computes each chunk's logits again, ``2 h V`` FLOP a token more than
    :func:`chunked_weighted_loss`, whose other arguments and errors it has, but one: a label outside
    of the vocabulary is not noticed, and its loss, which is wrong, must be masked.

    Shapes:
        hidden ``[..., h]``, weight ``[V, h]``, labels ``[...]``; the result like labels, in fp32
        (fp64 for fp64).
    """
    tensors = _validate(hidden, weight, labels, chunks)
    losses: Tensor = TokenLosses.apply(*tensors, chunks, tp_group)
    return losses.view(labels.shape)


class WeightedLoss(torch.autograd.Function):
    """The weighted sum of losses, whose gradients are computed and saved in the forward pass. Takes
    hidden ``[T, h]``, labels and loss weights ``[T]``, these in fp32 (fp64 for fp64)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_weights: Tensor,
        chunks: int,
        group: Group,
        needs_grad: bool,
    ) -> Tensor:
        loss = loss_weights.new_zeros(())
        grads = _Gradients(hidden, weight, weight.requires_grad) if needs_grad else None
        for rows, logits in _chunks(hidden, weight, labels, chunks, group):
            loss += logits.losses @ loss_weights[rows]
            if grads:
                grads.add(rows, logits.gradient(loss_weights[rows]))
        # The gradient of a sum is known before backward, but for one factor: computed now, each
        # chunk's logits are in memory and are overwritten. Later they would be computed again.
        if grads:
            ctx.save_for_backward(*grads.result(group))
            ctx.chunks, ctx.dtype, ctx.acc_dtype = chunks, weight.dtype, grads.acc_dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Scaled in fp32: in bf16 the factor itself would be rounded, and all gradients of the model
        # be wrong by as much.
        refuse_second_derivative("chunked_weighted_loss")
        dhidden, dweight = ctx.saved_tensors
        scaled = torch.empty_like(dhidden)
        for out_chunk, grad_chunk in zip(
            scaled.chunk(ctx.chunks), dhidden.chunk(ctx.chunks), strict=True
        ):
            out_chunk.copy_(grad_chunk.to(ctx.acc_dtype) * grad)
        if dweight is not None:
            dweight = (dweight * grad).to(ctx.dtype)
        return scaled, dweight, *[None] * 5


class TokenLosses(torch.autograd.Function):
    """Losses ``[T]`` of tokens, whose logits are recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int, group: Group
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunks, ctx.group = chunks, group
        chunk_logits = _chunks(hidden, weight, labels, chunks, group)
        return torch.cat([logits.losses for _, logits in chunk_logits])

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("chunked_token_losses")
        hidden, weight, labels = ctx.saved_tensors
        grads = _Gradients(hidden, weight, ctx.needs_input_grad[1])
        for rows, logits in _chunks(hidden, weight, labels, ctx.chunks, ctx.group):
            grads.add(rows, logits.gradient(dlosses[rows]))
        dhidden, dweight = grads.result(ctx.group)
        if dweight is not None:
            dweight = dweight.to(weight.dtype)
        return dhidden, dweight, None, None, None


def _chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int, group: Group
) -> Iterator[tuple[slice, Logits]]:
    # Yields each chunk's tokens and logits. Collective for each: all ranks have as many tokens.
    tokens = max(1, len(labels))  # an empty batch is one chunk without rows
    size = -(-tokens // chunks)
    for start in range(0, tokens, size):
        rows = slice(start, min(start + size, len(labels)))
        yield rows, Logits(hidden[rows] @ weight.t(), labels[rows], group)


class _Gradients:
    """Adds up the gradients of hidden ``[T, h]`` and weight ``[V, h]`` from those of the logits of
    one chunk after the other; the weight's in ``acc_dtype``."""

    def __init__(self, hidden: Tensor, weight: Tensor, needs_weight_grad: bool) -> None:
        # In fp32 (fp64 for fp64) the weight's, as every chunk adds to all of it.
        self._hidden, self._weight = hidden, weight
        self._dhidden = torch.empty_like(hidden)
        self.acc_dtype = torch.promote_types(weight.dtype, torch.float32)
        self._dweight: Tensor | None = None
        if needs_weight_grad:
            self._dweight = torch.zeros(weight.shape, dtype=self.acc_dtype, device=weight.device)

    def add(self, rows: slice, dlogits: Tensor) -> None:
        dlogits = dlogits.to(self._weight.dtype)
        self._dhidden[rows] = dlogits @ self._weight
        if self._dweight is None:
            return
        if self._dweight.dtype == self._weight.dtype:
            self._dweight.addmm_(dlogits.t(), self._hidden[rows])
        else:
            self._dweight += dlogits.t() @ self._hidden[rows]

    def result(self, group: Group) -> tuple[Tensor, Tensor | None]:
        # Hidden's gradient is a sum over the ranks' vocabularies: collective. The weight's is None
        # where it is not trained.
        if _ranks(group) > 1:
            dist.all_reduce(self._dhidden, group=group)
        return self._dhidden, self._dweight


def _ranks(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _refuse_unknown(labels: Tensor, loss_weights: Tensor, vocab_size: int) -> Tensor:
    """The loss weights ``[T]``, NaN where a label is outside of the whole vocabulary and counts;
    ConfigError then on a CPU."""
    outside = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= vocab_size))
    outside &= loss_weights != 0
    if labels.device.type == "cpu" and outside.any():
        raise ConfigError(
            f"a label is {int(labels[outside][0])}, and the vocabulary has {vocab_size} entries: "
            f"give token ids from 0 to {vocab_size - 1}, or {IGNORE_INDEX} where no loss is wanted"
        )
    return loss_weights.masked_fill(outside, torch.nan)


def _validate(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden ``[T, h]``, the weight and labels ``[T]``; ConfigError if they do not fit."""
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ConfigError(f"chunks={chunks!r} must be a whole number of 1 or more")
    if hidden.shape[:-1] != labels.shape or weight.shape[1:] != hidden.shape[-1:]:
        raise ConfigError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, labels "
            f"{list(labels.shape)}: hidden must be [..., h], weight [V, h], labels [...]"
        )
    if labels.is_floating_point():
        raise ConfigError(f"labels are {labels.dtype}, expected token ids: whole numbers")
    if hidden.dtype != weight.dtype or hidden.dtype == torch.float16:
        raise ConfigError(
            f"hidden {hidden.dtype}, weight {weight.dtype}: both must be of one dtype, fp32, fp64 "
            "or bf16; in fp16 gradients of single tokens vanish before the loss scale reaches them"
        )
    return hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1)


class RowStats(NamedTuple):
    """Softmax statistics of each row of logits, over this rank's vocabulary.

    Shapes:
        buffer ``[t, V]``: the logits with Triton, else ``exp(logit - row_max)``; the gradient
        overwrites it. The others ``[t]``, fp32 (fp64 of fp64): the largest logit, the sum of
        ``exp(logit - row_max)``, and the logit of the label less ``row_max``; 0 without one here.
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
        group: the ranks among which the vocabulary is sharded, over which making the object is
            collective; None: one has it all.

    Attributes:
        losses: ``[t]``, the cross entropy.
    """

    def __init__(self, scores: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> None:
        is_sharded = group is not None and dist.get_world_size(group) > 1
        vocab_size = scores.shape[1]
        local_labels = labels - (dist.get_rank(group) * vocab_size if is_sharded else 0)
        is_local = (local_labels >= 0) & (local_labels < vocab_size)
        self._labels = torch.where(is_local, local_labels, -1)
        self._fused = None
        if scores.is_cuda and scores.dtype != torch.float64 and not torch.compiler.is_compiling():
            self._fused = load_triton_module("ds_usp.training.logits_triton")
        if self._fused is None:
            stats = _row_stats(scores, self._labels)
        else:
            stats = RowStats(scores, *self._fused.row_stats_fused(scores, self._labels))
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
        """The gradient ``[t, V]`` from that of the losses ``[t]``, in the buffer of
        :class:`RowStats`, which it overwrites: it can be called once."""
        dlosses = torch.where(self._counts, dlosses, 0)
        scale = dlosses * self._inv_sum_exp
        if self._fused is None:
            return _gradient(self._buffer, self._labels, scale, dlosses)
        self._fused.gradient_fused(self._buffer, self._labels, self._row_max, scale, dlosses)
        return self._buffer


def _row_stats(scores: Tensor, labels: Tensor) -> RowStats:
    # Without Triton, as `_gradient` below: logits_triton.py has the same two.
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
