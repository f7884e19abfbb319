"""The merge of a block's attention into the running one as a single pass on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 32


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out, lse, part, part_lse,
    rows, dim,
    out_batch, out_row, out_head,
    lse_batch, lse_head,
    part_batch, part_row, part_head,
    part_lse_batch, part_lse_head,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    old_at = lse + batch * lse_batch + head * lse_head + row
    old = tl.load(old_at, mask=inside, other=0.0)
    new_at = part_lse + batch * part_lse_batch + head * part_lse_head + row
    new = tl.load(new_at, mask=inside, other=0.0)
    high = tl.maximum(old, new)
    total = high + tl.log(tl.exp(old - high) + tl.exp(new - high))
    keep, take = tl.exp(old - total), tl.exp(new - total)
    tl.store(old_at, total, mask=inside)
    column = tl.arange(0, DIM)
    both = inside[:, None] & (column < dim)[None, :]
    row = row.to(tl.int64)[:, None]
    out_at = out + batch * out_batch + head * out_head + row * out_row + column[None, :]
    part_at = part + batch * part_batch + head * part_head + row * part_row + column[None, :]
    value = tl.load(out_at, mask=both, other=0.0) * keep[:, None]
    value += tl.load(part_at, mask=both, other=0.0).to(WIDE) * take[:, None]
    tl.store(out_at, value, mask=both)


def merge_rows(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge in place: one read of each, one write of ``out`` and ``lse``.

    Shapes:
        out, part ``[B, S, H, D]``, lse, part_lse ``[B, H, S]``; features and, of lse, rows dense.
    """
    batch, rows, heads, dim = out.shape
    wide = tl.float64 if out.dtype == torch.float64 else tl.float32
    with torch.cuda.device(out.device):
        _merge[(triton.cdiv(rows, _ROWS), heads, batch)](
            out, lse, part, part_lse,
            rows, dim,
            *out.stride()[:3],
            *lse.stride()[:2],
            *part.stride()[:3],
            *part_lse.stride()[:2],
            ROWS=_ROWS, DIM=triton.next_power_of_2(dim), WIDE=wide,
        )  # fmt: skip
