"""Packing of up to three tensors for all ranks as one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ds_usp.comm.packing import view_by_rank
from ds_usp.triton_launch import CachedLauncher

_MAX_TENSORS = 3  # tensors: q, k and v
_TILE = 8192  # elements of a program
_COLUMNS = 1024


@triton.jit
def _pack_for_send(  # type: ignore[no-untyped-def]
    staging, p0, p1, p2, o0, o1, o2,
    local_rank, tokens, batch, features,
    rank0, token0, sample0, own_token0, own_sample0, width0,
    rank1, token1, sample1, own_token1, own_sample1, width1,
    rank2, token2, sample2, own_token2, own_sample2, width2,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rank, tensor = tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (row < tokens * batch)[:, None]
    token, sample = row // batch, row % batch
    if tensor == 0:
        source = p0 + rank * rank0 + (token * token0 + sample * sample0)[:, None]
        local_out = o0 + (token * own_token0 + sample * own_sample0)[:, None]
        width, at = width0, 0
    elif tensor == 1:
        source = p1 + rank * rank1 + (token * token1 + sample * sample1)[:, None]
        local_out = o1 + (token * own_token1 + sample * own_sample1)[:, None]
        width, at = width1, width0
    else:
        source = p2 + rank * rank2 + (token * token2 + sample * sample2)[:, None]
        local_out = o2 + (token * own_token2 + sample * own_sample2)[:, None]
        width, at = width2, width0 + width1
    send_out = staging + ((rank * tokens * batch + row) * features)[:, None] + at
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        mask = inside & (column < width)
        value = tl.load(source + column, mask=mask)
        if rank == local_rank:
            tl.store(local_out + column, value, mask=mask)
        else:
            tl.store(send_out + column, value, mask=mask)


_LAUNCH = CachedLauncher(_pack_for_send)


def pack_for_send_fused(staging: torch.Tensor, mine: int, tensors: Sequence[Any]) -> bool:
    """:func:`ds_usp.comm.packing.hand_out` of tensors whose heads are neighbours; False: these are
    others, and nothing was done."""
    ranks, tokens, batch, features = staging.shape
    sources: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    numbers: list[tuple[int, ...]] = []
    widest = 0
    for pieces, own in tensors:
        each = pieces
        if not isinstance(each, torch.Tensor):
            whole = each.as_tensor_if_single()
            if whole is None:
                return False
            each = view_by_rank(whole, ranks)
        *_, heads, dim = own.shape
        # Asked for once each: on the host the numbers cost more than the launch.
        (rank, token, sample, *rest), (own_token, own_sample, *own_rest) = (
            each.stride(),
            own.stride(),
        )
        if not (rest == own_rest == [dim, 1] and each.dtype == own.dtype == staging.dtype):
            return False
        sources.append(each)
        places.append(own)
        numbers.append((rank, token, sample, own_token, own_sample, heads * dim))
        widest = max(widest, heads * dim)
    count = len(sources)
    if count > _MAX_TENSORS:
        return False
    empty = _MAX_TENSORS - count
    sources, places = sources + sources[:1] * empty, places + places[:1] * empty
    numbers += numbers[:1] * empty
    columns = min(triton.next_power_of_2(widest), _COLUMNS)
    rows = _TILE // columns
    _LAUNCH(
        (triton.cdiv(tokens * batch, rows), ranks, count),
        (staging, *sources, *places),
        (mine, tokens, batch, features, *numbers[0], *numbers[1], *numbers[2]),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=8,
    )
    return True
