"""What a kernel is: the protocol, what it declares, and what is asked of it.

Letters of the shapes: B batch, S query tokens, T key tokens, H query heads, G key/value heads,
D head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_usp.geometry.kernel_calls import KernelCall
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.tiles import ANY_BAND, Tile, TileSupport
from ds_usp.kernels.score_mod import PLAIN, BoundScoreMod, ScoreMod

# For dq [B, rows, H, D] and dk, dv [B, columns, G, D]; None: in memory of its own.
GradBuffers = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KernelRequest:
    """What a call needs from a kernel, the same on every rank.

    Args:
        head_dim: of queries and keys.
        mask: the window; documents change no kernel's answer, and there are others every time.
        documents: the mask has documents.
        value_dim: of values and outputs; None: the same.
        scores: what becomes of the scores.
        deterministic: two calls alike give the same bits, backward too.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    mask: MaskSpec
    documents: bool = False
    value_dim: int | None = None
    score_mod: ScoreMod = PLAIN
    deterministic: bool = False

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of queries and keys, and of values."""
        return self.head_dim, self.value_dim or self.head_dim

    def __str__(self) -> str:
        keys, values = self.head_dims
        dims = f"head dim {keys}" + (f" (values {values})" if values != keys else "")
        extra = "" if self.score_mod == PLAIN else f", {self.score_mod}"
        extra += ", deterministic" if self.deterministic else ""
        return f"{self.dtype} on {self.device} with {dims} and a {self.mask} mask{extra}"


@dataclass(frozen=True)
class KernelCaps:
    """What a kernel computes exactly.

    Args:
        devices: device types; empty means any.
        dtypes: dtypes of q, k and v, forward and backward.
        max_head_dim: largest head dim; None means any.
        head_dim_multiple: the head dim must be a multiple of this.
        tiles: bands it computes in one call.
        varlen: it computes the tiles of many documents in one call; else it takes one by one.
        wide_gradients: it returns gradients in fp32; they then travel so.
        scores: what it does to scores besides scaling and masking them, of
            ``ds_usp.kernels.score_mod.FEATURES``; then it has ``with_scores``.
        value_dims: values may have another head dim than keys. To the others both come filled up
            with zeros to the larger one (``ds_usp.kernels.head_dim_padding``).
        deterministic: its gradients are the same bits every time where torch's deterministic
            algorithms are asked for.
        fills_places: it writes the gradients of a single tile where the caller wants them.
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    tiles: TileSupport = ANY_BAND
    varlen: bool = False
    fp32_grads: bool = False
    score_features: frozenset[str] = frozenset()
    value_dims: bool = False
    deterministic: bool = False
    writes_grads_in_place: bool = False

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of what it returns for tensors of a dtype."""
        return torch.promote_types(dtype, torch.float32) if self.fp32_grads else dtype

    def refusal(self, request: KernelRequest) -> str | None:
        """Why the kernel cannot serve the request; None if it can."""
        if self.devices and request.device not in self.devices:
            return f"runs on {'/'.join(sorted(self.devices))}, not {request.device}"
        if request.dtype not in self.dtypes:
            supported = ", ".join(sorted(_dtype_name(dtype) for dtype in self.dtypes))
            return f"takes {supported}, not {_dtype_name(request.dtype)}"
        for dim in request.head_dims if self.value_dims else [max(request.head_dims)]:
            if self.max_head_dim is not None and dim > self.max_head_dim:
                return f"takes head dims up to {self.max_head_dim}, not {dim}"
            if dim % self.head_dim_multiple:
                return f"takes head dims that are multiples of {self.head_dim_multiple}, not {dim}"
        if missing := request.score_mod.features - self.score_features:
            return f"has no {' and no '.join(sorted(missing))}"
        if request.deterministic and not self.deterministic:
            return "has no deterministic backward"
        if request.mask.left is not None and not self.tiles.window:
            return f"has no sliding window, asked for {request.mask}"
        return None


class AttentionKernel(Protocol):
    """One attention library behind one face.

    Results cover the rows (``out``, ``lse``, ``dq``) and columns (``dk``, ``dv``) of the call.
    Those that are in none of its tiles have out 0 and lse ``-inf``, and gradients of 0.
    """

    name: str
    caps: KernelCaps

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: KernelCall,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the call's tiles alone.

        Shapes:
            q ``[B, S, H, D]``, k and v ``[B, T, G, D]`` -> out ``[B, rows, H, D]`` and lse
            ``[B, H, rows]``, the natural log-sum-exp of the scaled scores in fp32 (fp64 for fp64).
        """

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: KernelCall,
        *,
        scale: float,
        grad_buffers: GradBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tiles' share of the gradients, from the final ``out`` and ``lse`` of all blocks.

        Args:
            places: where the gradients are wanted, in the dtype in which the kernel returns them,
                each head's features dense; only for calls of one tile, and only of kernels that say
                that they fill them.

        Shapes:
            dout, out ``[B, S, H, D]``, lse ``[B, H, S]`` -> dq ``[B, rows, H, D]``, dk and dv
            ``[B, columns, G, D]``.
        """

    def with_score_mod(self, score_mod: BoundScoreMod) -> AttentionKernel:
        """The same kernel for scores that are changed so; asked only for what it declares."""


class SingleTileKernel:
    """Base of kernels that compute one tile a call: cuts the tensors, the library does the rest."""

    caps: KernelCaps

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: KernelCall,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`AttentionKernel.forward`."""
        with _without_autocast(q.device.type):
            q, k, v = _q_slice(q, call), _k_slice(k, call), _k_slice(v, call)
            if call.tile is not None:
                return self.tile_forward(q, k, v, call.tile, scale)
            return self.multi_tile_forward(q, k, v, call, scale)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: KernelCall,
        *,
        scale: float,
        grad_buffers: GradBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :meth:`AttentionKernel.backward`."""
        with _without_autocast(q.device.type):
            dout, q, out = (_q_slice(x, call) for x in (dout, q, out))
            k, v = _k_slice(k, call), _k_slice(v, call)
            lse = lse[:, :, call.q_start : call.q_stop]
            if call.tile is not None:
                buffers = {} if grad_buffers is None else {"grad_buffers": grad_buffers}
                return self.tile_backward(dout, q, k, v, out, lse, call.tile, scale, **buffers)
            return self.multi_tile_backward(dout, q, k, v, out, lse, call, scale)

    def multi_tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: KernelCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of several tiles, one after the other; q, k, v are the rows and columns of the call."""
        acc_dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=self.caps.grad_dtype(q.dtype))
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=acc_dtype)
        for samples, tile in _tiles_with_samples(call):
            rows, columns = _tile_slices(call, tile)
            tile_out, tile_lse = self.for_samples(samples).tile_forward(
                q[samples, rows], k[samples, columns], v[samples, columns], tile, scale
            )
            out[samples, rows] = tile_out
            lse[samples, :, rows] = tile_lse
        return out, lse

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
        """Of several tiles, one after the other; the tensors are those of the call."""
        dtype = self.caps.grad_dtype(q.dtype)
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        for samples, tile in _tiles_with_samples(call):
            rows, columns = _tile_slices(call, tile)
            tile_grads = self.for_samples(samples).tile_backward(
                dout[samples, rows],
                q[samples, rows],
                k[samples, columns],
                v[samples, columns],
                out[samples, rows],
                lse[samples, :, rows],
                tile,
                scale,
            )
            indices = (samples, rows), (samples, columns), (samples, columns)
            for grad, tile_grad, index in zip((dq, dk, dv), tile_grads, indices, strict=True):
                grad[index] = tile_grad  # no other tile of the call has them
        return dq, dk, dv

    def with_score_mod(self, score_mod: BoundScoreMod) -> AttentionKernel:
        """See :meth:`AttentionKernel.with_scores`."""
        raise NotImplementedError

    def for_samples(self, samples: slice) -> SingleTileKernel:
        """The kernel for some samples of the batch; itself, unless it tells them apart."""
        return self

    def tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
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
        tile: Tile,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class UnsuitableDeviceError(ImportError):
    """The GPU here is none of those that a library computes on: nothing to install would help."""


def require_capability(major: int, library: str, *, only: bool = False) -> None:
    """Check the GPU before a library is tried on it.

    Args:
        only: later generations will not do either.

    Raises:
        UnsuitableDeviceError: no GPU, or one of another generation.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if capability[0] < major or (only and capability[0] > major):
        wanted = f"{major}.x" if only else f"{major}.0"
        actual = (
            f"this one has {capability[0]}.{capability[1]}"
            if capability[0]
            else "there is none here"
        )
        raise UnsuitableDeviceError(
            f"{library} needs a GPU of compute capability {wanted}, {actual}"
        )


def window_mask(tile: Tile, device: torch.device) -> torch.Tensor:
    """The tile's mask, true where a pair attends: ``[rows, columns]`` bool."""
    rows = torch.arange(tile.q_start, tile.q_stop, device=device)[:, None]
    distance = torch.arange(tile.k_start, tile.k_stop, device=device)[None, :] - rows
    return (distance >= tile.low) & (distance <= tile.high)


def _without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """The dtype of q, k and v decides. Where autocast is off already, at no cost."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _tiles_with_samples(call: KernelCall) -> Iterator[tuple[slice, Tile]]:
    """Every tile of a call with the samples that it is for."""
    for sample, tiles in enumerate(call.tiles):
        samples = slice(None) if len(call.tiles) == 1 else slice(sample, sample + 1)
        for tile in tiles:
            yield samples, tile


def _tile_slices(call: KernelCall, tile: Tile) -> tuple[slice, slice]:
    """The rows and columns of a tile among those of its call."""
    rows = slice(tile.q_start - call.q_start, tile.q_stop - call.q_start)
    return rows, slice(tile.k_start - call.k_start, tile.k_stop - call.k_start)


def _q_slice(x: torch.Tensor, call: KernelCall) -> torch.Tensor:
    return _slice_tokens(x, call.q_start, call.q_stop)


def _k_slice(x: torch.Tensor, call: KernelCall) -> torch.Tensor:
    return _slice_tokens(x, call.k_start, call.k_stop)


def _slice_tokens(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Some tokens of ``[B, S, H, D]``; the tensor itself if they are all."""
    return _dense_features(x if stop - start == x.shape[1] else x[:, start:stop])


def _dense_features(x: torch.Tensor) -> torch.Tensor:
    """The features of a head next to each other: libraries read them so, torch's unchecked."""
    return x if x.stride(3) == 1 else x.contiguous()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
