"""Packing of up to three tensors for all ranks as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
import triton
import triton.language as tl

from ds_usp.comm.packing import PackPlan
from ds_usp.triton_launch import PreparedLaunch

_MAX_TENSORS = 3  # q, k and v
_MAX_LOCAL = 2  # own pieces
_TILE = 8192  # elements of a program
_COLUMNS = 1024


# Packs up to three tensors [pieces, runs, tokens, batch, width] into staging [pieces, runs, tokens,
# batch, features]; grid (row blocks, pieces x runs, tensors). The rows of this rank's own pieces,
# which are local0 and local1 (-1: there is one), go to its own outputs, dst. With ONLY_LOCAL the
# grid has no other pieces.
@triton.jit
def _pack_for_send(  # type: ignore[no-untyped-def]
    staging, src0, src1, src2, dst0, dst1, dst2,
    local0, local1, runs, tokens, batch, features,
    piece0, run0, token0, sample0, local_piece0, local_run0, local_token0, local_sample0, width0,
    piece1, run1, token1, sample1, local_piece1, local_run1, local_token1, local_sample1, width1,
    piece2, run2, token2, sample2, local_piece2, local_run2, local_token2, local_sample2, width2,
    ONLY_LOCAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    slice_index, tensor = tl.program_id(1).to(tl.int64), tl.program_id(2)
    piece, run = slice_index // runs, slice_index % runs
    if ONLY_LOCAL:
        piece = tl.where(piece == 0, local0, local1).to(tl.int64)
    second = (piece == local1).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (row < tokens * batch)[:, None]
    token, sample = row // batch, row % batch
    if tensor == 0:
        source = src0 + piece * piece0 + run * run0
        source += (token * token0 + sample * sample0)[:, None]
        local_out = dst0 + second * local_piece0 + run * local_run0
        local_out += (token * local_token0 + sample * local_sample0)[:, None]
        width, offset = width0, 0
    elif tensor == 1:
        source = src1 + piece * piece1 + run * run1
        source += (token * token1 + sample * sample1)[:, None]
        local_out = dst1 + second * local_piece1 + run * local_run1
        local_out += (token * local_token1 + sample * local_sample1)[:, None]
        width, offset = width1, width0
    else:
        source = src2 + piece * piece2 + run * run2
        source += (token * token2 + sample * sample2)[:, None]
        local_out = dst2 + second * local_piece2 + run * local_run2
        local_out += (token * local_token2 + sample * local_sample2)[:, None]
        width, offset = width2, width0 + width1
    send_out = staging + ((slice_index * tokens * batch + row) * features)[:, None] + offset
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        mask = inside & (column < width)
        value = tl.load(source + column, mask=mask)
        if (piece == local0) | (piece == local1):
            tl.store(local_out + column, value, mask=mask)
        else:
            tl.store(send_out + column, value, mask=mask)


def prepare(plan: PackPlan) -> tuple[Callable[..., bool], Callable[..., bool]] | None:
    """:meth:`PackPlan.pack` as one kernel, which returns False for tensors of several dtypes, of
    all pieces and of this rank's own; None where heads are no neighbours, for more than three
    tensors or two own pieces."""
    strides: list[tuple[int, ...]] = []
    max_width = 0
    for view, local_out in plan.views:
        heads, dim = view.size[4:]
        if not view.stride[4:] == local_out.stride[4:] == (dim, 1):
            return None
        strides.append((*view.stride[:4], *local_out.stride[:4], heads * dim))
        max_width = max(max_width, heads * dim)
    pieces, runs, tokens, batch = plan.views[0].pieces.size[:4]
    count = len(plan.views)
    if count > _MAX_TENSORS or len(plan.local) > _MAX_LOCAL:
        return None
    unused = _MAX_TENSORS - count
    strides += strides[:1] * unused
    columns = min(triton.next_power_of_2(max_width), _COLUMNS)
    rows = _TILE // columns

    def launch_of(pieces: int, only_local: bool) -> Callable[..., bool]:
        launch = PreparedLaunch(
            _pack_for_send,
            (triton.cdiv(tokens * batch, rows), pieces * runs, count),
            (*(*plan.local, -1)[:_MAX_LOCAL], runs, tokens, batch, plan.shape[3], *chain(*strides)),
            num_warps=8,
            ONLY_LOCAL=only_local,
            ROWS=rows,
            COLUMNS=columns,
        )
        return _with_addresses(launch, plan)

    return launch_of(pieces, False), launch_of(len(plan.local), True)


def _with_addresses(launch: PreparedLaunch, plan: PackPlan) -> Callable[..., bool]:
    """The launch as a function of the staging buffer, the sources and the outputs."""
    unused = _MAX_TENSORS - len(plan.views)
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
