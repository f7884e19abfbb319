"""Triton kernels: softmax statistics of logits, and their gradient in place, one pass each. On GPUs
``Logits`` of loss.py runs them for each chunk of tokens, in the place of its torch operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_usp.lowlevel import CachedLauncher

_BLOCK = 4096  # vocabulary entries at a time


# One program a row: the largest logit, the sum of exp(logit - row_max) by online softmax, and the
# label's logit less row_max (0 for the label -1), in fp32.
@triton.jit
def _row_stats(  # type: ignore[no-untyped-def]
    logits, labels, row_max, sum_exp, label_logit, vocab_size, row_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_at = logits + row * row_stride
    label = tl.load(labels + row)
    high, sum_ = float("-inf"), 0.0
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits_at + column, mask=column < vocab_size, other=float("-inf")).to(
            tl.float32
        )
        higher = tl.maximum(high, tl.max(value, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # only -inf so far
        sum_ = sum_ * tl.exp(high - base) + tl.sum(tl.exp(value - base), axis=0)
        high = higher
    label_value = tl.load(logits_at + label, mask=label >= 0, other=0.0).to(tl.float32)
    tl.store(row_max + row, high)
    tl.store(sum_exp + row, sum_)
    base = tl.where(high == float("-inf"), 0.0, high)
    tl.store(label_logit + row, tl.where(label >= 0, label_value - base, 0.0))


# Overwrites logits [t, V] by their gradient, exp(logit - row_max) * scale - dlosses at the label.
# One program a row and block of the vocabulary.
@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits, labels, row_max, scale, dlosses, vocab_size, row_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    logits_at = logits + row * row_stride + column
    value = tl.load(logits_at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(row_max + row)
    result = tl.exp(value - tl.where(high == float("-inf"), 0.0, high)) * tl.load(scale + row)
    result -= tl.where(column == tl.load(labels + row), tl.load(dlosses + row), 0.0)
    tl.store(logits_at, result.to(logits.dtype.element_ty), mask=inside)


_LAUNCH_ROW_STATS, _LAUNCH_GRADIENT = CachedLauncher(_row_stats), CachedLauncher(_gradient)


def row_stats_fused(
    logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``row_max``, ``sum_exp`` and ``label_logit`` of :class:`ds_usp.training.loss.RowStats`, as
    ``_row_stats`` of ``loss.py`` computes them without Triton. The logits stay as they are.

    Shapes:
        logits ``[t, V]`` with dense rows, labels ``[t]``: columns, or -1 for a row that has no
        label, or has it in another rank's vocabulary; results ``[t]``, fp32.
    """
    rows, vocab_size = logits.shape
    stats = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _LAUNCH_ROW_STATS(
        (rows,),
        (logits, labels, *stats),
        (vocab_size, logits.stride(0)),
        BLOCK=_block(vocab_size),
        num_warps=8,
    )
    row_max, sum_exp, label_logit = stats
    return row_max, sum_exp, label_logit


def gradient_fused(
    logits: torch.Tensor,
    labels: torch.Tensor,
    row_max: torch.Tensor,
    scale: torch.Tensor,
    dlosses: torch.Tensor,
) -> None:
    """Write ``exp(logits - row_max) * scale``, less ``dlosses`` at each row's label, over the
    logits ``[t, V]``; labels and row_max as of :func:`row_stats_fused`, the others ``[t]`` fp32."""
    rows, vocab_size = logits.shape
    block = _block(vocab_size)
    _LAUNCH_GRADIENT(
        (rows, triton.cdiv(vocab_size, block)),
        (logits, labels, row_max, scale, dlosses.contiguous()),
        (vocab_size, logits.stride(0)),
        BLOCK=block,
        num_warps=8,
    )


def _block(vocab_size: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(vocab_size))
