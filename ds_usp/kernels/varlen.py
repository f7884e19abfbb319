"""Base of the FlashAttention kernels: many tiles in one varlen call, library functions called by
parameter name.

Shape letters: those of ``api.py``, and N tokens of all tiles of all samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ds_usp.geometry.tiles import Bounds, KernelCall, Tile
from ds_usp.kernels.api import QKV, BackwardInputs, OutLse, SingleTileKernel

TileOrCall = Tile | KernelCall  # both have ``window`` and ``is_causal``

_TILE_ARGS = ("softmax_scale", "causal", "window_size_left", "window_size_right")


class SeqLengths(NamedTuple):
    """Lengths of a varlen call, packed tensors ``[N, heads, D]``; named as the libraries do.

    Shapes:
        cu_seqlens_q, cu_seqlens_k: ``[tiles + 1]`` int32, on the device.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


Lengths = SeqLengths | None  # None: a single tile, tensors ``[B, S, heads, D]``


class VarlenKernel(SingleTileKernel):
    """Base of kernels whose library takes several tiles in one call, and a soft cap. A kernel
    implements :meth:`tile_forward` and :meth:`tile_backward`, which take a tile, or, through
    :meth:`multi_tile_forward`, a call of several tiles and its :class:`SeqLengths`."""

    softcap = 0.0  # none

    def with_softcap(self, softcap: float) -> VarlenKernel:
        capped = copy(self)
        capped.softcap = softcap
        return capped

    def tile_forward(
        self, qkv: QKV, tile: TileOrCall, scale: float, lengths: Lengths = None
    ) -> OutLse:
        """Attention of one tile, or, with ``lengths``, of all tiles of a call in one varlen call.

        Shapes:
            One tile: q ``[B, S, H, D]``, k ``[B, T, G, D]``, v ``[B, T, G, E]`` -> out
            ``[B, S, H, E]``, lse ``[B, H, S]``, where S and T are the tile's rows and columns.
            With ``lengths`` B and S, or T, are one dim N, and lse is ``[H, N]``.
        """
        raise NotImplementedError

    def tile_backward(
        self, saved: BackwardInputs, tile: TileOrCall, scale: float, lengths: Lengths = None
    ) -> QKV:
        """dq, dk and dv, in the inputs' dtype; shapes as in :meth:`tile_forward`. Kernels with
        ``caps.writes_grads_in_place`` also have ``grad_buffers``, without ``lengths``."""
        raise NotImplementedError

    def multi_tile_forward(self, qkv: QKV, call: KernelCall, scale: float) -> OutLse:
        """One varlen call for all tiles; tensors are the call's rows and columns, with samples, as
        are out ``[B, S, H, E]`` and lse ``[B, H, S]``."""
        q, k, v = qkv
        packed = _pack_call(call, q.shape[0], q.device, _current_stream(q))
        packed_qkv = (
            _flatten_tokens(q, packed.rows),
            _flatten_tokens(k, packed.columns),
            _flatten_tokens(v, packed.columns),
        )
        out, lse = self.tile_forward(packed_qkv, call, scale, packed.lengths)
        batch, tokens, heads = q.shape[:3]
        # Rows outside of every tile were not computed: they see no key, and -inf says so to merges.
        if packed.rows is not None:
            empty = lse.new_full((heads, batch * tokens), float("-inf"))
            lse = empty.index_copy_(1, packed.rows, lse)
        lse = lse.unflatten(1, (batch, tokens)).transpose(0, 1)
        return _unflatten_tokens(out, packed.rows, q), lse

    def multi_tile_backward(self, saved: BackwardInputs, call: KernelCall, scale: float) -> QKV:
        """One varlen call for all tiles; tensors and gradients are the call's rows and columns."""
        dout, q, k, v, out, lse = saved
        packed = _pack_call(call, q.shape[0], q.device, _current_stream(q))
        lse = lse.transpose(0, 1).flatten(1)
        packed_saved = BackwardInputs(
            _flatten_tokens(dout, packed.rows),
            _flatten_tokens(q, packed.rows),
            _flatten_tokens(k, packed.columns),
            _flatten_tokens(v, packed.columns),
            _flatten_tokens(out, packed.rows),
            lse if packed.rows is None else lse.index_select(1, packed.rows),
        )
        dq, dk, dv = self.tile_backward(packed_saved, call, scale, packed.lengths)
        return (
            _unflatten_tokens(dq, packed.rows, q),
            _unflatten_tokens(dk, packed.columns, k),
            _unflatten_tokens(dv, packed.columns, v),
        )


# FlashAttention's functions changed order, names and defaults of their parameters in almost every
# release, and a positional call that still fits may mean something else (softcap taken for a
# window). By name a renamed parameter is found missing when the kernel is loaded, and named; a
# parameter without a default that nobody gives is None, by which these libraries mean that a
# feature is not used.
class SignatureAdapter:
    """Calls a FlashAttention function by parameter name: one interface for its versions. A call
    takes a tile or a :class:`KernelCall`, the scale, its :class:`SeqLengths` if it is a varlen
    function, and other arguments by name; it returns what the function does.

    Args:
        function: a function, or an operator that torch made of one.
        required: parameters that it must have besides those of scale and mask.

    Raises:
        ImportError: the function lacks some of them.
    """

    def __init__(self, function: Callable[..., Any], *required: str) -> None:
        # An operator has the signature (*args, **kwargs) and keeps the function that it was.
        source = getattr(function, "_init_fn", function)
        parameters = inspect.signature(source).parameters
        self._function = function
        self._causal_name = "is_causal" if "is_causal" in parameters else "causal"
        self._window_pair = "window_size" in parameters
        names = {name: name for name in (*_TILE_ARGS, *required)}
        names["causal"] = self._causal_name
        if self._window_pair:
            names["window_size_left"] = names["window_size_right"] = "window_size"
        missing = [arg for arg, name in names.items() if name not in parameters]
        if missing:
            raise ImportError(
                f"{source.__module__}.{source.__qualname__} of this version has no parameter "
                f"{', '.join(missing)}"
            )
        self._none_defaults = {
            name: None
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
        }

    def __call__(self, tile: TileOrCall, scale: float, lengths: Lengths, **kwargs: Any) -> Any:
        mask = _mask_args(tile.window, scale, self._causal_name, self._window_pair)
        if lengths is not None:
            kwargs.update(lengths._asdict())
        return self._function(**{**self._none_defaults, **mask, **kwargs})

    def gradients(
        self, saved: BackwardInputs, tile: TileOrCall, scale: float, lengths: Lengths, **kwargs: Any
    ) -> QKV:
        """dq, dk and dv of a backward function, which has the parameters ``BACKWARD_ARGS`` and
        writes its results into ``dq``, ``dk`` and ``dv``."""
        inputs = saved.q, saved.k, saved.v
        dq, dk, dv = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
        self(
            tile,
            scale,
            lengths,
            dout=saved.dout,
            q=saved.q,
            k=saved.k,
            v=saved.v,
            out=saved.out,
            softmax_lse=saved.lse.contiguous(),
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **kwargs,
        )
        return dq, dk, dv


@lru_cache(maxsize=1024)
def _mask_args(
    window: Bounds, scale: float, causal_name: str, window_pair: bool
) -> Mapping[str, Any]:
    """Return scale and mask as arguments of FlashAttention-2 or -3, of which versions differ in two
    parameters; -1 is no bound. Cached: a caller does not change it."""
    left, right = (-1 if bound is None else bound for bound in window)
    args: dict[str, Any] = {"softmax_scale": scale, causal_name: window == (None, 0)}
    if window_pair:
        return {**args, "window_size": (left, right)}
    return {**args, "window_size_left": left, "window_size_right": right}


BACKWARD_ARGS = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")


class _PackedCall(NamedTuple):
    """A call as one varlen call.

    Args:
        lengths: of the tiles, sample after sample.
        rows, columns: indices ``[N]`` of the call's rows and columns (of all samples, one after the
            other) that are in a tile; None: all are, in order.
    """

    lengths: SeqLengths
    rows: torch.Tensor | None
    columns: torch.Tensor | None


def _flatten_tokens(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """The tokens of an index, ``[B, T, heads, D]`` -> ``[N, heads, D]``; None: all of them."""
    x = x.flatten(0, 1)
    return x if index is None else x.index_select(0, index)


def _unflatten_tokens(
    x: torch.Tensor, index: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """``[N, heads, D]`` -> ``[B, T, heads, D]``, B and T of ``like``; zeros at tokens that are not
    in the index."""
    if index is not None:
        x = x.new_zeros(like.shape[:2].numel(), *x.shape[1:]).index_copy_(0, index, x)
    return x.unflatten(0, like.shape[:2])


def _current_stream(x: torch.Tensor) -> int:
    """The CUDA stream on which tensors that are made now are ready."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


@lru_cache(maxsize=128)
def _pack_call(call: KernelCall, batch: int, device: torch.device, stream: int) -> _PackedCall:
    """Lengths and indices of a call's tiles, on the device; once for all layers of a model.

    Args:
        batch: samples of the tensors.
        stream: of :func:`_current_stream`; a part of the cache's key alone, as tensors that are
            made on one stream may not be ready on another.
    """
    samples = call.tiles * (batch if len(call.tiles) == 1 else 1)  # once for all, or for each
    tiles = [(sample, tile) for sample, tiles in enumerate(samples) for tile in tiles]
    rows, columns = call.q_stop - call.q_start, call.k_stop - call.k_start
    q_runs = [(sample * rows + tile.q_start - call.q_start, tile.rows) for sample, tile in tiles]
    k_runs = [
        (sample * columns + tile.k_start - call.k_start, tile.columns) for sample, tile in tiles
    ]
    cu_q, max_q, q_index = _pack_runs(q_runs, batch * rows, device)
    cu_k, max_k, k_index = _pack_runs(k_runs, batch * columns, device)
    return _PackedCall(SeqLengths(cu_q, cu_k, max_q, max_k), q_index, k_index)


def _pack_runs(
    runs: list[tuple[int, int]], total: int, device: torch.device
) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """``cu_seqlens``, the longest run, and the index of every token of runs (start, length),
    which ascend and share no token; None if they are all ``total`` tokens."""
    lengths = [length for _, length in runs]
    cu_seqlens = _to_device([0, *accumulate(lengths)], torch.int32, device)
    if sum(lengths) == total:
        return cu_seqlens, max(lengths), None
    index = [token for start, length in runs for token in range(start, start + length)]
    return cu_seqlens, max(lengths), _to_device(index, torch.int64, device)


def _to_device(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy to the device; to GPUs from pinned memory, so that the CPU waits for no stream."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
