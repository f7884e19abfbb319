"""Merges of attention outputs and sums of gradients, each a single pass on the GPU (Triton), for
``merge.py``, which imports this where Triton is installed and computes the same without it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl

from ds_usp.lowlevel import CachedLauncher

# Pointers and strides are written out below: tuple arguments need Triton 3.3, torch 2.6 has 3.2.
_ROWS = 32
_MAX_PARTIALS = 8


def _arguments(
    tensors: Sequence[torch.Tensor], count: int
) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Return a launch's grid, integers and constants, for tensors ``[B, rows, H, D]``, of which the
    first is the result, and log-sum-exps ``[B, H, rows]``. Integers are the numbers of rows and
    features, and all strides but the last, tensor by tensor. Both have the order of the kernels'
    parameters below, by which later launches may pass them.
    ``count``: partial results, the kernels' COUNT; 0: they have none."""
    # CachedLauncher caches it by count, the first shape, dtypes and strides, which alone it reads.
    batch, rows, heads, dim = tensors[0].shape
    strides = chain.from_iterable([x.stride()[:-1] for x in tensors])
    constants = {"COUNT": count} if count else {}
    is_fp64 = any(x.dtype == torch.float64 for x in tensors)
    constants |= {
        "ROWS": _ROWS,
        "DIM": int(triton.next_power_of_2(dim)),
        "ACC": tl.float64 if is_fp64 else tl.float32,
    }
    return (-(-rows // _ROWS), heads, batch), (rows, dim, *strides), constants


# Merges two partial attention results by their log-sum-exp. One program a block of rows of one head
# of one sample. Results may be one of the inputs. Arguments after dim: strides. In the body a, b:
# log-sum-exps of old and new.
@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out, lse, old, old_lse, new, new_lse,
    rows, dim,
    out_batch, out_row, out_head, lse_batch, lse_head,
    old_batch, old_row, old_head, old_lse_batch, old_lse_head,
    new_batch, new_row, new_head, new_lse_batch, new_lse_head,
    ROWS: tl.constexpr, DIM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    a = tl.load(
        old_lse + batch * old_lse_batch + head * old_lse_head + row, mask=inside, other=0.0
    ).to(ACC)
    b = tl.load(
        new_lse + batch * new_lse_batch + head * new_lse_head + row, mask=inside, other=0.0
    ).to(ACC)
    # The result may overwrite its inputs, of which every warp loads its own copy: no warp may
    # write before all have read.
    tl.debug_barrier()
    high = tl.maximum(a, b)
    high = tl.where(high == float("-inf"), 0.0, high)  # a row that attends to no key on either side
    total = high + tl.log(tl.exp(a - high) + tl.exp(b - high))
    base = tl.where(total == float("-inf"), 0.0, total)
    old_weight, new_weight = tl.exp(a - base), tl.exp(b - base)
    tl.store(lse + batch * lse_batch + head * lse_head + row, total, mask=inside)
    column = tl.arange(0, DIM)
    both = inside[:, None] & (column < dim)[None, :]
    row = row.to(tl.int64)[:, None]
    old_at = old + batch * old_batch + head * old_head + row * old_row + column[None, :]
    new_at = new + batch * new_batch + head * new_head + row * new_row + column[None, :]
    value = tl.load(old_at, mask=both, other=0.0).to(ACC) * old_weight[:, None]
    value += tl.load(new_at, mask=both, other=0.0).to(ACC) * new_weight[:, None]
    out_at = out + batch * out_batch + head * out_head + row * out_row + column[None, :]
    tl.store(out_at, value.to(out.dtype.element_ty), mask=both)


_LAUNCH_MERGE = CachedLauncher(_merge)


def merge_fused(
    out: torch.Tensor,
    lse: torch.Tensor,
    old: torch.Tensor,
    old_lse: torch.Tensor,
    new: torch.Tensor,
    new_lse: torch.Tensor,
) -> None:
    """:func:`ds_usp.kernels.merge.merge_rows` with one read of each partial result and one write.
    Features and, of the log-sum-exps, rows are contiguous."""
    _LAUNCH_MERGE.launch_by_tensors((out, lse, old, old_lse, new, new_lse), 0, _arguments)


# _merge of COUNT (3 or 4) partial results p with log-sum-exps l, in one pass. Strides of batch, row
# and head: pb, pr, ph of p; lb, lh of l. In the body a, b, c, d: log-sum-exps of the four.
@triton.jit
def _merge_of_four(  # type: ignore[no-untyped-def]
    out, lse, p0, l0, p1, l1, p2, l2, p3, l3,
    rows, dim,
    out_batch, out_row, out_head, lse_batch, lse_head,
    pb0, pr0, ph0, lb0, lh0, pb1, pr1, ph1, lb1, lh1,
    pb2, pr2, ph2, lb2, lh2, pb3, pr3, ph3, lb3, lh3,
    COUNT: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    a = tl.load(l0 + batch * lb0 + head * lh0 + row, mask=inside, other=0.0).to(ACC)
    b = tl.load(l1 + batch * lb1 + head * lh1 + row, mask=inside, other=0.0).to(ACC)
    c = tl.load(l2 + batch * lb2 + head * lh2 + row, mask=inside, other=0.0).to(ACC)
    high = tl.maximum(tl.maximum(a, b), c)
    if COUNT > 3:
        d = tl.load(l3 + batch * lb3 + head * lh3 + row, mask=inside, other=0.0).to(ACC)
        high = tl.maximum(high, d)
    tl.debug_barrier()  # as above: the result may overwrite the first partial result
    high = tl.where(high == float("-inf"), 0.0, high)  # a row that attends to no key
    total = tl.exp(a - high) + tl.exp(b - high) + tl.exp(c - high)
    if COUNT > 3:
        total += tl.exp(d - high)
    total = high + tl.log(total)
    base = tl.where(total == float("-inf"), 0.0, total)
    tl.store(lse + batch * lse_batch + head * lse_head + row, total, mask=inside)
    column = tl.arange(0, DIM)[None, :]
    both = inside[:, None] & (column < dim)
    row = row.to(tl.int64)[:, None]
    value = tl.load(p0 + batch * pb0 + head * ph0 + row * pr0 + column, mask=both, other=0.0)
    result = value.to(ACC) * tl.exp(a - base)[:, None]
    value = tl.load(p1 + batch * pb1 + head * ph1 + row * pr1 + column, mask=both, other=0.0)
    result += value.to(ACC) * tl.exp(b - base)[:, None]
    value = tl.load(p2 + batch * pb2 + head * ph2 + row * pr2 + column, mask=both, other=0.0)
    result += value.to(ACC) * tl.exp(c - base)[:, None]
    if COUNT > 3:
        value = tl.load(p3 + batch * pb3 + head * ph3 + row * pr3 + column, mask=both, other=0.0)
        result += value.to(ACC) * tl.exp(d - base)[:, None]
    out_at = out + batch * out_batch + head * out_head + row * out_row + column
    tl.store(out_at, result.to(out.dtype.element_ty), mask=both)


_LAUNCH_MERGE_OF_FOUR = CachedLauncher(_merge_of_four)


def merge_up_to_4_fused(
    out: torch.Tensor, lse: torch.Tensor, partials: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """:func:`merge_fused` of three or four partial results (output, log-sum-exp), of which only
    the first may be ``out`` and ``lse``."""
    operands = chain.from_iterable([*partials, *[partials[0]] * (4 - len(partials))])
    _LAUNCH_MERGE_OF_FOUR.launch_by_tensors((out, lse, *operands), len(partials), _arguments)


# Sum of COUNT (1 or 2) tensors p [batch, rows, heads, dim], added in the dtype ACC. Their strides:
# b of batch, r of row, h of head. merge.py copies one tensor, and leaves two to torch where it adds
# them in place: to the same bits.
@triton.jit
def _sum_of_few(  # type: ignore[no-untyped-def]
    out, p0, p1,
    rows, dim,
    out_batch, out_row, out_head, b0, r0, h0, b1, r1, h1,
    COUNT: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, DIM)[None, :]
    inside = (row < rows) & (column < dim)
    total = tl.load(p0 + batch * b0 + head * h0 + row * r0 + column, mask=inside).to(ACC)
    if COUNT > 1:
        total += tl.load(p1 + batch * b1 + head * h1 + row * r1 + column, mask=inside).to(ACC)
    out_at = out + batch * out_batch + head * out_head + row * out_row + column
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)


# As _sum_of_few, of up to 8 tensors (_MAX_PARTIALS): sum_fused launches it again, with the sum so
# far as p0, for more. p1 to p7 from COUNT on are given, and not read.
@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    out, p0, p1, p2, p3, p4, p5, p6, p7,
    rows, dim,
    out_batch, out_row, out_head,
    b0, r0, h0, b1, r1, h1, b2, r2, h2, b3, r3, h3, b4, r4, h4, b5, r5, h5, b6, r6, h6, b7, r7, h7,
    COUNT: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, DIM)[None, :]
    inside = (row < rows) & (column < dim)
    total = tl.load(p0 + batch * b0 + head * h0 + row * r0 + column, mask=inside).to(ACC)
    if COUNT > 1:
        total += tl.load(p1 + batch * b1 + head * h1 + row * r1 + column, mask=inside).to(ACC)
    if COUNT > 2:
        total += tl.load(p2 + batch * b2 + head * h2 + row * r2 + column, mask=inside).to(ACC)
    if COUNT > 3:
        total += tl.load(p3 + batch * b3 + head * h3 + row * r3 + column, mask=inside).to(ACC)
    if COUNT > 4:
        total += tl.load(p4 + batch * b4 + head * h4 + row * r4 + column, mask=inside).to(ACC)
    if COUNT > 5:
        total += tl.load(p5 + batch * b5 + head * h5 + row * r5 + column, mask=inside).to(ACC)
    if COUNT > 6:
        total += tl.load(p6 + batch * b6 + head * h6 + row * r6 + column, mask=inside).to(ACC)
    if COUNT > 7:
        total += tl.load(p7 + batch * b7 + head * h7 + row * r7 + column, mask=inside).to(ACC)
    out_at = out + batch * out_batch + head * out_head + row * out_row + column
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)


_LAUNCH_SUM_OF_FEW, _LAUNCH_SUM = CachedLauncher(_sum_of_few), CachedLauncher(_sum)


def sum_fused(out: torch.Tensor, partials: Sequence[torch.Tensor]) -> None:
    """Write the sum of tensors ``[B, rows, H, D]`` with contiguous features, added in fp32 (fp64
    for fp64) and rounded once; of more than eight, eight at a time. The first may be ``out``."""
    acc_dtype = torch.promote_types(out.dtype, torch.float32)
    while len(partials) > _MAX_PARTIALS:
        total = torch.empty_like(out, dtype=acc_dtype)
        sum_fused(total, partials[:_MAX_PARTIALS])
        partials = [total, *partials[_MAX_PARTIALS:]]
    # Every argument costs CPU launch overhead, and sums of more than two are rare.
    launcher, slots = (
        (_LAUNCH_SUM_OF_FEW, 2) if len(partials) <= 2 else (_LAUNCH_SUM, _MAX_PARTIALS)
    )
    operands = (out, *partials, *[partials[0]] * (slots - len(partials)))
    launcher.launch_by_tensors(operands, len(partials), _arguments)
