"""Many tiles in one call of variable lengths, as the libraries of FlashAttention take them.

Letters of the shapes: those of ``api.py``, and N tokens of all tiles of all samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from ds_usp.geometry.kernel_calls import KernelCall
from ds_usp.geometry.tiles import Tile
from ds_usp.kernels.api import SingleTileKernel

TileOrCall = Tile | KernelCall  # what says which window a call has


class SeqLengths(NamedTuple):
    """Where tiles begin in packed tensors ``[N, heads, D]``; named as the libraries do.

    Shapes:
        cu_seqlens_q, cu_seqlens_k: ``[tiles + 1]`` int32, on the device.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def lengths_as_kwargs(lengths: SeqLengths | None) -> dict[str, torch.Tensor | int]:
    """The lengths as arguments of a library's function; none for a single tile."""
    return {} if lengths is None else lengths._asdict()


class _PackedCall(NamedTuple):
    """A call as one of variable lengths.

    Args:
        rows, columns: which of the call's rows and columns (of all samples, one after the other)
            are in a tile; None: all are.
    """

    lengths: SeqLengths
    rows: torch.Tensor | None
    columns: torch.Tensor | None


class VarlenKernel(SingleTileKernel):
    """Base of kernels whose library takes several tiles in one call.

    ``tile_forward`` and ``tile_backward`` take a call and its :class:`Lengths` in place of a tile;
    tensors are ``[N, heads, D]`` then, and the log-sum-exp is ``[H, N]``.
    """

    def tile_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: TileOrCall,
        scale: float,
        lengths: SeqLengths | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def tile_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tile: TileOrCall,
        scale: float,
        lengths: SeqLengths | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def multi_tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: KernelCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`SingleTileKernel.packed_forward`; in one call."""
        packed = _pack_call(call, q.shape[0], q.device, _current_stream(q))
        packed_out, packed_lse = self.tile_forward(
            _flatten_tokens(q, packed.rows),
            _flatten_tokens(k, packed.columns),
            _flatten_tokens(v, packed.columns),
            call,
            scale,
            packed.lengths,
        )
        batch, tokens, heads = q.shape[:3]
        if packed.rows is not None:
            lse = packed_lse.new_full((heads, batch * tokens), float("-inf"))
            packed_lse = lse.index_copy_(1, packed.rows, packed_lse)
        return _unflatten_tokens(packed_out, packed.rows, q), packed_lse.unflatten(
            1, (batch, tokens)
        ).transpose(0, 1)

    def multi_tile_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: KernelCall,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :meth:`SingleTileKernel.packed_backward`; in one call."""
        packed = _pack_call(call, q.shape[0], q.device, _current_stream(q))
        lse = lse.transpose(0, 1).flatten(1)
        if packed.rows is not None:
            lse = lse.index_select(1, packed.rows)
        dq, dk, dv = self.tile_backward(
            _flatten_tokens(dout, packed.rows),
            _flatten_tokens(q, packed.rows),
            _flatten_tokens(k, packed.columns),
            _flatten_tokens(v, packed.columns),
            _flatten_tokens(out, packed.rows),
            lse,
            call,
            scale,
            packed.lengths,
        )
        return (
            _unflatten_tokens(dq, packed.rows, q),
            _unflatten_tokens(dk, packed.columns, k),
            _unflatten_tokens(dv, packed.columns, v),
        )


def _flatten_tokens(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """``[B, T, heads, D]`` -> ``[N, heads, D]``."""
    x = x.flatten(0, 1)
    return x if index is None else x.index_select(0, index)


def _unflatten_tokens(
    x: torch.Tensor, index: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """``[N, heads, D]`` -> ``[B, T, heads, D]``, zeros where nothing was chosen."""
    if index is not None:
        x = x.new_zeros(like.shape[:2].numel(), *x.shape[1:]).index_copy_(0, index, x)
    return x.unflatten(0, like.shape[:2])


def _current_stream(x: torch.Tensor) -> int:
    """The stream that what is made now is ready on."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


@lru_cache(maxsize=128)
def _pack_call(call: KernelCall, batch: int, device: torch.device, stream: int) -> _PackedCall:
    """Lengths and places of a call's tiles, on the device; once for all layers of a model."""
    samples = call.tiles * (batch if len(call.tiles) == 1 else 1)
    tiles = [tile for tiles in samples for tile in tiles]
    q_lengths, k_lengths = [tile.rows for tile in tiles], [tile.columns for tile in tiles]
    rows = _tile_starts(samples, call.q_start, call.q_stop, keys=False)
    columns = _tile_starts(samples, call.k_start, call.k_stop, keys=True)
    return _PackedCall(
        SeqLengths(
            _to_device(device, [0, *accumulate(q_lengths)], torch.int32),
            _to_device(device, [0, *accumulate(k_lengths)], torch.int32),
            max(q_lengths),
            max(k_lengths),
        ),
        _gather_index(device, list(rows), q_lengths, batch * (call.q_stop - call.q_start)),
        _gather_index(device, list(columns), k_lengths, batch * (call.k_stop - call.k_start)),
    )


def _tile_starts(
    samples: Sequence[Sequence[Tile]], start: int, stop: int, *, keys: bool
) -> Iterator[int]:
    """Where each tile's rows or columns begin among those of the call, sample after sample."""
    for sample, tiles in enumerate(samples):
        for tile in tiles:
            yield sample * (stop - start) + (tile.k_start if keys else tile.q_start) - start


def _gather_index(
    device: torch.device, starts: list[int], lengths: list[int], total: int
) -> torch.Tensor | None:
    """Index of every token of the runs; None if they are all there are, in order."""
    if sum(lengths) == total:
        return None
    return _to_device(
        device,
        [i for start, n in zip(starts, lengths, strict=True) for i in range(start, start + n)],
    )


def _to_device(
    device: torch.device, values: list[int], dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """On GPUs from pinned memory, so that the host does not wait for the stream."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
