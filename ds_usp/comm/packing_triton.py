"""Packing of tensors for all ranks, for :class:`PackPlan`: up to three in one kernel, more in
several. It writes what ``pack_for_send`` of packing.py does; :func:`prepare` runs once a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
import triton
import triton.language as tl

from ds_usp.comm.packing import PackPlan, SendViews
from ds_usp.geometry.layout import MAX_SLICES
from ds_usp.lowlevel import PreparedLaunch

_MAX_TENSORS = 3  # q, k and v
_TILE = 8192  # elements of a program
_COLUMNS = 1024
# Numbers that differ between lengths and ranks: none is to be compiled for.
_OPEN = ("own_piece", "start0", "stop0", "place0", "start1", "stop1", "place1", "tokens")


# Packs up to three tensors [pieces, tokens, batch, width] into staging [pieces, tokens, batch,
# features]; grid (row blocks, pieces, tensors). This rank's own tokens, start0:stop0 and
# start1:stop1 (empty: there is one run) of ``own_piece``, go to its own outputs, dst, from place0
# and place1 on. With ONLY_OWN the grid has these runs instead of the pieces. piece0, token0 and
# sample0 are strides of src0, local_token0 and local_sample0 of dst0, in elements; width0: a
# token's elements of src0, heads x head dim.
@triton.jit(do_not_specialize=_OPEN)
def _pack_for_send(  # type: ignore[no-untyped-def]
    staging, src0, src1, src2, dst0, dst1, dst2,
    own_piece, start0, stop0, place0, start1, stop1, place1, tokens, batch, features,
    piece0, token0, sample0, local_token0, local_sample0, width0,
    piece1, token1, sample1, local_token1, local_sample1, width1,
    piece2, token2, sample2, local_token2, local_sample2, width2,
    ONLY_OWN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    piece, tensor = tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    if ONLY_OWN:
        first = tl.where(piece == 0, start0, start1)
        stop = tl.where(piece == 0, stop0, stop1)
        row += first.to(tl.int64) * batch
        piece = own_piece.to(tl.int64)
    else:
        stop = tokens
    token, sample = row // batch, row % batch
    inside = token < stop
    second = (token >= start1) & (token < stop1)
    is_own = (piece == own_piece) & (second | ((token >= start0) & (token < stop0)))
    place = token + tl.where(second, place1 - start1, place0 - start0)
    if tensor == 0:
        source = src0 + piece * piece0
        source += (token * token0 + sample * sample0)[:, None]
        local_out = dst0 + (place * local_token0 + sample * local_sample0)[:, None]
        width, offset = width0, 0
    elif tensor == 1:
        source = src1 + piece * piece1
        source += (token * token1 + sample * sample1)[:, None]
        local_out = dst1 + (place * local_token1 + sample * local_sample1)[:, None]
        width, offset = width1, width0
    else:
        source = src2 + piece * piece2
        source += (token * token2 + sample * sample2)[:, None]
        local_out = dst2 + (place * local_token2 + sample * local_sample2)[:, None]
        width, offset = width2, width0 + width1
    send_out = staging + ((piece * tokens * batch + row) * features)[:, None] + offset
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        mask = inside[:, None] & (column < width)
        value = tl.load(source + column, mask=mask)
        tl.store(local_out + column, value, mask=mask & is_own[:, None])
        if not ONLY_OWN:
            tl.store(send_out + column, value, mask=mask & (is_own == 0)[:, None])


def prepare(plan: PackPlan) -> tuple[Callable[..., bool], Callable[..., bool]] | None:
    """:meth:`PackPlan.pack` as one kernel, for all tokens and for this rank's own alone, which
    returns False as :func:`_bind_addresses` says; None where a token's heads are not dense, or for
    more than two own runs."""
    strides: list[tuple[int, ...]] = []  # of each tensor, and its width, as the kernel takes them
    for view, local_out in plan.views:
        heads, dim = view.size[3:]
        if not view.stride[3:] == local_out.stride[2:] == (dim, 1):
            return None
        strides.append((*view.stride[:3], *local_out.stride[:2], heads * dim))
    pieces, tokens, batch, features = plan.shape
    piece, runs = plan.kept
    if len(runs) > MAX_SLICES:
        return None
    bounds = (*chain(*runs), *(0, 0, 0) * (MAX_SLICES - len(runs)))
    longest = max([stop - start for start, stop, _ in runs], default=0)
    parts = [slice(i, i + _MAX_TENSORS) for i in range(0, len(strides), _MAX_TENSORS)]

    def launch_of(longest_piece: int, num_pieces: int, *, only_own: bool) -> Callable[..., bool]:
        packs = []
        for part in parts:
            of_part = strides[part]
            unused = _MAX_TENSORS - len(of_part)
            columns = min(triton.next_power_of_2(max([x[-1] for x in of_part])), _COLUMNS)
            rows = _TILE // columns
            launch = PreparedLaunch(
                _pack_for_send,
                (triton.cdiv(longest_piece * batch, rows), num_pieces, len(of_part)),
                (piece, *bounds, tokens, batch, features, *chain(*of_part, *of_part[:1] * unused)),
                num_warps=8,
                ONLY_OWN=only_own,
                ROWS=rows,
                COLUMNS=columns,
            )
            features_before = sum([x[-1] for x in strides[: part.start]])
            packs.append(_bind_addresses(launch, plan.views[part], features_before))
        if len(packs) == 1:
            return packs[0]
        pairs = list(zip(packs, parts, strict=True))
        return lambda staging, sources, outs: all(
            pack(staging, sources[part], outs[part]) for pack, part in pairs
        )

    return launch_of(tokens, pieces, only_own=False), launch_of(longest, len(runs), only_own=True)


def _bind_addresses(
    launch: PreparedLaunch, views: Sequence[SendViews], features_before: int
) -> Callable[..., bool]:
    """The launch as a function of tensors; False, and nothing is launched, if dtypes differ
    or a tensor is torch's lazy negative of its memory.

    Args:
        features_before: a token's features of other launches that lie before those of this one.
    """
    unused = _MAX_TENSORS - len(views)  # they get the first address, which no program reads
    offsets = [(source.offset, out.offset) for source, out in views]

    def pack(
        staging: torch.Tensor, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> bool:
        dtype, itemsize = staging.dtype, staging.element_size()
        source_addresses, out_addresses = [], []
        for (first, local_first), source, out in zip(offsets, sources, outs, strict=True):
            if not source.dtype == out.dtype == dtype or source.is_neg():
                return False
            source_addresses.append(source.data_ptr() + first * itemsize)
            out_addresses.append(out.data_ptr() + local_first * itemsize)
        addresses = [
            staging.data_ptr() + features_before * itemsize,
            *source_addresses,
            *source_addresses[:1] * unused,
            *out_addresses,
            *out_addresses[:1] * unused,
        ]
        launch(staging.device, (dtype,) * len(addresses), addresses)
        return True

    return pack
