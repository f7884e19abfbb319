"""Rotary position embedding of up to two tensors as one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ds_usp.lowlevel import CachedLauncher

_TILE = 4096  # elements of a program


# Rotates up to two tensors in one launch: grid axis 1 is the tensor, axis 0 blocks of (token,
# sample, head) rows. The results may be the sources: a program reads its rows before it writes
# them. half: r / 2; REST: features that are not rotated, copied; 0 if there are none.
@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x0, x1, y0, y1, cos, sin,
    tokens, batch, heads0, heads1, half, dim,
    token0, sample0, head0, token1, sample1, head1,
    out_token0, out_sample0, out_head0, out_token1, out_sample1, out_head1, cos_row, sin_row,
    TRANSPOSED: tl.constexpr, ROUNDED: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    second = tl.program_id(1) == 1
    heads = heads1 if second else heads0
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (row < tokens * batch * heads)[:, None]
    token, sample, head = row // (batch * heads), row // heads % batch, row % heads
    if second:
        source = x1 + (token * token1 + sample * sample1 + head * head1)[:, None]
        out = y1 + (token * out_token1 + sample * out_sample1 + head * out_head1)[:, None]
    else:
        source = x0 + (token * token0 + sample * sample0 + head * head0)[:, None]
        out = y0 + (token * out_token0 + sample * out_sample0 + head * out_head0)[:, None]
    column = tl.arange(0, HALF)[None, :]
    mask = inside & (column < half)
    front = tl.load(source + column, mask=mask).to(tl.float32)
    back = tl.load(source + half + column, mask=mask).to(tl.float32)
    cosines = cos + (token * cos_row)[:, None] + column
    sines = sin + (token * sin_row)[:, None] + column
    front_cos = tl.load(cosines, mask=mask).to(tl.float32)
    back_cos = tl.load(cosines + half, mask=mask).to(tl.float32)
    front_sin = tl.load(sines, mask=mask).to(tl.float32)
    back_sin = tl.load(sines + half, mask=mask).to(tl.float32)
    first, last = front * front_cos, back * back_cos
    if TRANSPOSED:
        to_first, to_last = back * back_sin, -(front * front_sin)
    else:
        to_first, to_last = -(back * front_sin), front * back_sin
    if ROUNDED:  # each product, as where they are tensors
        first = first.to(y0.dtype.element_ty).to(tl.float32)
        last = last.to(y0.dtype.element_ty).to(tl.float32)
        to_first = to_first.to(y0.dtype.element_ty).to(tl.float32)
        to_last = to_last.to(y0.dtype.element_ty).to(tl.float32)
    first, last = first + to_first, last + to_last
    tl.store(out + column, first.to(y0.dtype.element_ty), mask=mask)
    tl.store(out + half + column, last.to(y0.dtype.element_ty), mask=mask)
    if REST > 0:
        column = 2 * half + tl.arange(0, REST)[None, :]
        mask = inside & (column < dim)
        tl.store(out + column, tl.load(source + column, mask=mask), mask=mask)


# LLVM computes products that are rounded to bf16 in bf16; fused with the sum, they are not rounded.
_LAUNCH = CachedLauncher(_rotate, enable_fp_fusion=False)


def rotate_fused(
    tensors: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    token_dim: int,
    transposed: bool,
    *,
    in_place: bool = False,
) -> tuple[torch.Tensor, ...]:
    """:func:`ds_usp.kernels.rotary.apply_rotary` of one or two tensors of one dtype.

    Args:
        in_place: as ``RotaryPositions.rotate_in_place``, of tensors whose features are contiguous;
            else to new tensors.
    """
    dense = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    out = tuple(
        x if in_place else torch.empty_like(x, memory_format=torch.contiguous_format) for x in dense
    )
    (x0, y0), (x1, y1) = (pairs := list(zip(dense, out, strict=True)))[0], pairs[-1]
    tokens, batch, dim = x0.shape[token_dim], x0.shape[1 - token_dim], x0.shape[3]
    half = cos.shape[1] // 2
    half_padded = triton.next_power_of_2(half)
    rest = dim - 2 * half
    rows = max(1, _TILE // half_padded)
    strides = [x.stride(d) for x in (x0, x1) for d in (token_dim, 1 - token_dim, 2)]
    strides += [y.stride(d) for y in (y0, y1) for d in (token_dim, 1 - token_dim, 2)]
    grid = triton.cdiv(tokens * batch * max(x.shape[2] for x in dense), rows), len(dense)
    _LAUNCH(
        grid,
        (x0, x1, y0, y1, cos, sin),
        (
            tokens,
            batch,
            x0.shape[2],
            x1.shape[2],
            half,
            dim,
            *strides,
            cos.stride(0),
            sin.stride(0),
        ),
        TRANSPOSED=transposed,
        ROUNDED=in_place,
        ROWS=rows,
        HALF=half_padded,
        REST=triton.next_power_of_2(rest) if rest else 0,
    )
    return out
