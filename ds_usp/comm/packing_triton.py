"""Packing of up to three tensors for all ranks as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from ds_usp.comm.packing import PackPlan
from ds_usp.triton_launch import PreparedLaunch

_MAX_TENSORS = 3  # tensors: q, k and v
_TILE = 8192  # elements of a program
_COLUMNS = 1024


# Packs up to three tensors [ranks, tokens, batch, width] into staging [ranks, tokens, batch,
# features]; grid (row blocks, ranks, tensors). This rank's rows go to its own outputs, dst.
@triton.jit
def _pack_for_send(  # type: ignore[no-untyped-def]
    staging, src0, src1, src2, dst0, dst1, dst2,
    local_rank, tokens, batch, features,
    rank0, token0, sample0, local_token0, local_sample0, width0,
    rank1, token1, sample1, local_token1, local_sample1, width1,
    rank2, token2, sample2, local_token2, local_sample2, width2,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rank, tensor = tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (row < tokens * batch)[:, None]
    token, sample = row // batch, row % batch
    if tensor == 0:
        source = src0 + rank * rank0 + (token * token0 + sample * sample0)[:, None]
        local_out = dst0 + (token * local_token0 + sample * local_sample0)[:, None]
        width, offset = width0, 0
    elif tensor == 1:
        source = src1 + rank * rank1 + (token * token1 + sample * sample1)[:, None]
        local_out = dst1 + (token * local_token1 + sample * local_sample1)[:, None]
        width, offset = width1, width0
    else:
        source = src2 + rank * rank2 + (token * token2 + sample * sample2)[:, None]
        local_out = dst2 + (token * local_token2 + sample * local_sample2)[:, None]
        width, offset = width2, width0 + width1
    send_out = staging + ((rank * tokens * batch + row) * features)[:, None] + offset
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        mask = inside & (column < width)
        value = tl.load(source + column, mask=mask)
        if rank == local_rank:
            tl.store(local_out + column, value, mask=mask)
        else:
            tl.store(send_out + column, value, mask=mask)


def prepare(plan: PackPlan) -> Callable[..., bool] | None:
    """:meth:`PackPlan.pack` as one kernel, which returns False for tensors of several dtypes;
    None where heads are no neighbours or there are more than three tensors."""
    ranks, tokens, batch, features = plan.shape
    strides: list[tuple[int, ...]] = []
    max_width = 0
    for per_rank, local_out in plan.views:
        rank_stride, token, sample, *rest = per_rank.stride
        local_token, local_sample, *local_rest = local_out.stride
        heads, dim = local_out.size[2:]
        if not rest == local_rest == [dim, 1]:
            return None
        strides.append((rank_stride, token, sample, local_token, local_sample, heads * dim))
        max_width = max(max_width, heads * dim)
    count = len(plan.views)
    if count > _MAX_TENSORS:
        return None
    unused = _MAX_TENSORS - count
    strides += strides[:1] * unused
    columns = min(triton.next_power_of_2(max_width), _COLUMNS)
    rows = _TILE // columns
    launch = PreparedLaunch(
        _pack_for_send,
        (triton.cdiv(tokens * batch, rows), ranks, count),
        (plan.rank, tokens, batch, features, *strides[0], *strides[1], *strides[2]),
        num_warps=8,
        ROWS=rows,
        COLUMNS=columns,
    )
    offsets = [(source.offset, out.offset) for source, out in plan.views]

    def pack(
        staging: torch.Tensor, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> bool:
        dtype, itemsize = staging.dtype, staging.element_size()
        source_addresses, out_addresses = [], []
        for (first, local_first), source, out in zip(offsets, sources, outs, strict=True):
            if not source.dtype == out.dtype == dtype:
                return False
            source_addresses.append(source.data_ptr() + first * itemsize)
            out_addresses.append(out.data_ptr() + local_first * itemsize)
        addresses = [
            staging.data_ptr(),
            *source_addresses,
            *source_addresses[:1] * unused,
            *out_addresses,
            *out_addresses[:1] * unused,
        ]
        launch(staging.device, (dtype,) * len(addresses), addresses)
        return True

    return pack
