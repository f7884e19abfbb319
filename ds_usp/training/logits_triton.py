"""Losses of logits and their gradient, each in one pass on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_usp.triton_launch import CachedLauncher

_BLOCK = 4096  # words at a time


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    scores, words, largest, total, aimed, count, row_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = scores + row * row_stride
    word = tl.load(words + row)
    high, sum_ = float("-inf"), 0.0
    for start in range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(at + column, mask=column < count, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(value, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # so far no word is possible
        sum_ = sum_ * tl.exp(high - base) + tl.sum(tl.exp(value - base), axis=0)
        high = higher
    label = tl.load(at + word, mask=word >= 0, other=0.0).to(tl.float32)
    tl.store(largest + row, high)
    tl.store(total + row, sum_)
    base = tl.where(high == float("-inf"), 0.0, high)
    tl.store(aimed + row, tl.where(word >= 0, label - base, 0.0))


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    scores, words, largest, scale, dlosses, count, row_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < count
    at = scores + row * row_stride + column
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(largest + row)
    result = tl.exp(value - tl.where(high == float("-inf"), 0.0, high)) * tl.load(scale + row)
    result -= tl.where(column == tl.load(words + row), tl.load(dlosses + row), 0.0)
    tl.store(at, result.to(scores.dtype.element_ty), mask=inside)


_LAUNCH_SUMS, _LAUNCH_GRADIENT = CachedLauncher(_sums), CachedLauncher(_gradient)


def sums_fused(
    scores: torch.Tensor, words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest, the total and what is aimed at of :class:`ds_usp.training.logits.Sums`.

    Shapes:
        scores ``[t, V]`` with dense rows, words ``[t]``: -1 is no word of this rank.
    """
    rows, count = scores.shape
    found = torch.empty(3, rows, dtype=torch.float32, device=scores.device)
    _LAUNCH_SUMS(
        (rows,),
        (scores, words, *found),
        (count, scores.stride(0)),
        BLOCK=_block(count),
        num_warps=8,
    )
    largest, total, aimed = found
    return largest, total, aimed


def gradient_fused(
    scores: torch.Tensor,
    words: torch.Tensor,
    largest: torch.Tensor,
    scale: torch.Tensor,
    dlosses: torch.Tensor,
) -> None:
    """Write ``exp(scores - largest) * scale``, less ``dlosses`` at each row's word, over the
    scores."""
    rows, count = scores.shape
    block = _block(count)
    _LAUNCH_GRADIENT(
        (rows, triton.cdiv(count, block)),
        (scores, words, largest, scale, dlosses.contiguous()),
        (count, scores.stride(0)),
        BLOCK=block,
        num_warps=8,
    )


def _block(count: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(count))
