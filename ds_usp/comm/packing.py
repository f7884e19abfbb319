"""Packing of tensors into a staging buffer; what this rank keeps goes straight to its destination:
one read and one write of each element.

The buffer is ``[P, T, B, features]``: P pieces of T tokens. To heads there is one piece a rank, of
this rank's tokens; to the sequence one piece, of the ring rank's tokens in their order. This rank's
own tokens are one or two runs of one piece, which are not packed. ``uniform_all_to_all.py`` and
``attention/kv_exchange.py`` pack each exchange so before they post it; nothing here communicates.

Letters of the shapes: B batch, h heads of a rank, D head dim, L tokens of the destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import NamedTuple, Protocol

import torch

from ds_usp.comm.channel import Channel, HeadShapes, StagingBuffer, StridedView, split_features
from ds_usp.lowlevel import load_triton_module, strided_copy


# Why packing has a protocol for sums. Backward, dK and dV of a chunk are several partial results
# (one a kernel call or a rank), of which the sum is sent and then never read again. Summing first
# would write the sum to memory and read it back to pack it; `write` sums into the send buffer. The
# sums are `GradAccumulator`s of ds_usp/kernels/merge.py.
class DeferredSum(Protocol):
    """A tensor ``[B, tokens, h, D]`` that is still to be summed."""

    def as_tensor_if_single(self) -> torch.Tensor | None:
        """The sum, if it is one tensor already and in its dtype."""

    def write(self, out: torch.Tensor, first: int = 0) -> None:
        """Write its tokens from ``first`` on to ``out`` ``[B, ., h, D]``, as many as that has."""

    def result(self) -> torch.Tensor: ...


class OwnTokens(NamedTuple):
    """The tokens that this rank keeps: the piece that has them; the runs ``start : stop`` of it,
    ascending, each with the index of its first token in the destination."""

    piece: int
    runs: tuple[tuple[int, int, int], ...]


class SendTensor(NamedTuple):
    """One tensor, as pieces.

    Attributes:
        pieces: ``[P, T, B, h, D]``, a view, or, for P = 1, the sum ``[B, T, h, D]``.
        local_out: ``[L, B, h, D]``, the destination of this rank's own tokens.
    """

    pieces: torch.Tensor | DeferredSum
    local_out: torch.Tensor


class SendViews(NamedTuple):
    """:class:`SendTensor` as views of the tensor and of the one that holds ``local_out``."""

    pieces: StridedView
    local_out: StridedView


class PackPlan:
    """Packing of tensors that all are there, without sums, into a staging buffer of this shape
    ``[P, T, B, features]``."""

    def __init__(
        self, shape: tuple[int, int, int, int], kept: OwnTokens, views: Sequence[SendViews]
    ) -> None:
        self.shape, self.kept, self.views = shape, kept, tuple(views)
        self.head_shapes = tuple([(x.size[3], x.size[4]) for x, _ in self.views])

    def pack(
        self,
        staging: torch.Tensor,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        *,
        already_packed: bool = False,
    ) -> None:
        """Pack ``sources`` into the dense ``staging``, and write this rank's own tokens to
        ``outs``. With ``already_packed`` the sources are views of ``staging``: only ``outs`` are
        written. Shapes and strides must be those of the plan: no others are noticed."""
        # Otherwise one copy kernel a tensor and piece: right everywhere, and launch-bound on GPUs.
        if staging.is_cuda and self._fused is not None:
            pack_all, write_own = self._fused
            if (write_own if already_packed else pack_all)(staging, sources, outs):
                return
        pairs = zip(self.views, sources, outs, strict=True)
        tensors = [SendTensor(a.of(source), b.of(out)) for (a, b), source, out in pairs]
        buffer = staging.view(self.shape)
        pack_for_send(buffer, self.kept, self.head_shapes, tensors, already_packed=already_packed)

    @cached_property
    def _fused(self) -> tuple[Callable[..., bool], Callable[..., bool]] | None:
        """:meth:`pack` as one kernel, for all tokens and for this rank's own alone, which returns
        False where it cannot run; None without Triton, or where it runs for no tensors."""
        triton = load_triton_module("ds_usp.comm.packing_triton")
        return None if triton is None else triton.prepare(self)


class PreallocatedSend(NamedTuple):
    """A staging buffer acquired before its contents are computed: a kernel may write them there,
    into its views ``[B, S, h, D]`` of each tensor. Channel None: not a copy engine's."""

    channel: Channel | None
    staging: StagingBuffer
    views: tuple[torch.Tensor, ...]

    def already_written(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all tensors are these views."""
        return all(x.is_set_to(view) for x, view in zip(tensors, self.views, strict=True))


def copy_or_sum_into(out: torch.Tensor, source: torch.Tensor | DeferredSum) -> None:
    """Write a tensor or a sum to ``out``, which has its shape."""
    if isinstance(source, torch.Tensor):
        strided_copy(out, source)
    else:
        source.write(out)


def pack_for_send(
    staging: torch.Tensor,
    kept: OwnTokens,
    shapes: HeadShapes,
    tensors: Sequence[SendTensor],
    *,
    already_packed: bool = False,
) -> None:
    """Pack tensors for other ranks, and own tokens into ``local_out``, as packing_triton.py does.

    Args:
        staging: ``[P, T, B, features]``, dense; a token's heads of all tensors are neighbours.
        kept: this rank's own tokens, which are undefined in ``staging`` afterwards.
        shapes: heads and head dim of each tensor.
        already_packed: they are in ``staging``: only ``local_out`` is written.
    """
    piece, runs = kept
    if not already_packed:
        # What lies between this rank's own runs: every second pair of neighbouring bounds.
        between = pairwise((0, *chain.from_iterable([run[:2] for run in runs]), staging.shape[1]))
        gaps = [(start, stop) for start, stop in islice(between, 0, None, 2) if start < stop]
        other_pieces = [x for x in (slice(piece), slice(piece + 1, None)) if len(staging[x])]
        for view, (source, _) in zip(split_features(staging, shapes), tensors, strict=True):
            if isinstance(source, torch.Tensor):  # a sum has no other pieces
                for x in other_pieces:
                    strided_copy(view[x], source[x])
            for start, stop in gaps:
                _write(view[piece, start:stop], source, piece, start)
    for source, local_out in tensors:
        for start, stop, place in runs:
            _write(local_out[place : place + stop - start], source, piece, start)


def _write(out: torch.Tensor, pieces: torch.Tensor | DeferredSum, piece: int, first: int) -> None:
    """Write the tokens of a piece from ``first`` on to ``out`` ``[., B, h, D]``."""
    if isinstance(pieces, torch.Tensor):
        strided_copy(out, pieces[piece, first : first + len(out)])
    else:
        pieces.write(out.transpose(0, 1), first)


def one_piece(x: torch.Tensor | DeferredSum) -> torch.Tensor | DeferredSum:
    """``[B, T, h, D]`` as one piece ``[1, T, B, h, D]``, a view; a sum as it is."""
    return x.transpose(0, 1)[None] if isinstance(x, torch.Tensor) else x
