"""The interface of an attention kernel: what it declares, what a call asks of it, and a base class.

``registry.py`` makes each kernel once a process; ``attention/passes.py`` calls it, without
autograd, for each call of a ring step. Nothing here communicates.

Shape letters: B batch, S query tokens, T key tokens, H query heads, G key/value heads, D head dim
of queries and keys, E of values and outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.segments import Span
from ds_usp.geometry.tiles import ANY_BAND, KernelCall, Tile, TileSupport
from ds_usp.kernels.head_dims import Dims, HeadDims

# q [B, S, H, D], k [B, T, G, D], v [B, T, G, E]; also their gradients.
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
OutLse = tuple[torch.Tensor, torch.Tensor]
# Out buffers for dq [B, rows, H, D] (None: the kernel allocates it), dk and dv [B, columns, G, .].
GradBuffers = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]


class BackwardInputs(NamedTuple):
    """Inputs of a kernel's backward: q, k and v as in QKV, dout and out ``[B, S, H, E]``, lse
    ``[B, H, S]``; out and lse are final: merged over all key/value blocks."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class KernelRequest:
    """Properties that a call needs from a kernel, the same on every rank.

    Args:
        device, dtype: of q, k and v, the device's type alone; ``head_dim``: of q and k.
        mask: the window; documents change no kernel's answer, and differ from step to step.
        documents: the mask has documents.
        value_dim: head dim of values and outputs; None: ``head_dim``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        deterministic: backward must be bitwise reproducible.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    mask: MaskSpec
    documents: bool = False
    value_dim: int | None = None
    softcap: float | None = None
    deterministic: bool = False

    @property
    def head_dims(self) -> Dims:
        return self.head_dim, self.value_dim or self.head_dim

    def __str__(self) -> str:
        keys, values = self.head_dims
        dims = f"head dim {keys}" + (f" (values {values})" if values != keys else "")
        extra = "" if self.softcap is None else f", softcap {self.softcap}"
        extra += ", deterministic" if self.deterministic else ""
        return f"{self.dtype} on {self.device} with {dims} and a {self.mask} mask{extra}"


@dataclass(frozen=True)
class KernelCaps:
    """Properties of the calls that a kernel computes exactly.

    Args:
        devices: device types; empty means any.
        dtypes: dtypes of q, k and v, forward and backward.
        head_dims: head dims of keys and of values. The kernel gets others padded with zeros
            (:class:`PaddedHeadDimKernel`).
        tiles: the tiles (rectangles with a band mask) that it computes in one call.
        varlen: it computes the tiles of many documents in one call; else one call a tile.
        fp32_grads: it returns the output and gradients in fp32 (fp64 for fp64); gradients are
            then communicated in it.
        softcap: it computes a soft cap of the scores, and implements ``with_softcap``.
        deterministic: its gradients are bitwise reproducible under torch's deterministic
            algorithms.
        writes_grads_in_place: it writes the gradients of a single tile into ``grad_buffers``.
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    head_dims: HeadDims
    tiles: TileSupport = ANY_BAND
    varlen: bool = False
    fp32_grads: bool = False
    softcap: bool = False
    deterministic: bool = False
    writes_grads_in_place: bool = False

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32) if self.fp32_grads else dtype

    def refusal(self, request: KernelRequest) -> str | None:
        """Why the kernel cannot serve a call, without its name; None if it can."""
        if self.devices and request.device not in self.devices:
            return f"runs on {'/'.join(sorted(self.devices))}, not {request.device}"
        if request.dtype not in self.dtypes:
            supported = ", ".join(sorted(map(_dtype_name, self.dtypes)))
            return f"takes {supported}, not {_dtype_name(request.dtype)}"
        if refusal := self.head_dims.refusal(
            request.head_dims, bf16=request.dtype == torch.bfloat16
        ):
            return refusal
        if request.softcap is not None and not self.softcap:
            return "has no softcap"
        if request.deterministic and not self.deterministic:
            return "has no deterministic backward"
        # A right bound alone is no window: geometry/tiles.py cuts it into full and causal tiles.
        if request.mask.left is not None and not self.tiles.window:
            return f"has no sliding window, asked for {request.mask}"
        return None


class AttentionKernel(Protocol):
    """One attention library behind one interface.

    Inputs are a whole query shard and a whole block of keys and values; results cover the call's
    rows ``call.q_span`` (``out``, ``lse``, ``dq``) and columns ``call.k_span`` (``dk``, ``dv``).
    Rows and columns in none of its tiles have out 0, lse ``-inf`` and gradients of 0.
    """

    name: str
    caps: KernelCaps

    def forward(self, qkv: QKV, call: KernelCall, *, scale: float) -> OutLse:
        """Attention of the call's tiles alone: out ``[B, rows, H, E]`` and lse ``[B, H, rows]``,
        the natural log-sum-exp of the scores, of which ``scale`` is a factor, in fp32 (fp64 for
        fp64)."""

    def backward(
        self,
        saved: BackwardInputs,
        call: KernelCall,
        *,
        scale: float,
        grad_buffers: GradBuffers | None = None,
    ) -> QKV:
        """The tiles' contribution to the gradients: dq ``[B, rows, H, D]``, dk and dv
        ``[B, columns, G, .]``, in the dtype of :meth:`KernelCaps.grad_dtype`.

        Args:
            grad_buffers: out buffers, in that dtype, with contiguous features, which are then
                returned; only for calls of one tile, and only for kernels with
                ``caps.writes_grads_in_place``.
        """

    def with_softcap(self, softcap: float) -> AttentionKernel:
        """A kernel that caps scores; only called with ``caps.softcap``."""


class SingleTileKernel:
    """Base of kernels that compute one tile a call: slices the tensors and loops over tiles. A
    kernel implements :meth:`tile_forward` and :meth:`tile_backward`."""

    name: str
    caps: KernelCaps

    def forward(self, qkv: QKV, call: KernelCall, *, scale: float) -> OutLse:
        q, k, v = qkv
        # The dtype of q, k and v decides. A device's type costs more than to ask for any autocast.
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
            with torch.autocast(q.device.type, enabled=False):
                return self.forward(qkv, call, scale=scale)
        q, k, v = _slice_tokens(((q, call.q_span), (k, call.k_span), (v, call.k_span)))
        if call.tile is not None:
            return self.tile_forward((q, k, v), call.tile, scale)
        return self.multi_tile_forward((q, k, v), call, scale)

    def backward(
        self,
        saved: BackwardInputs,
        call: KernelCall,
        *,
        scale: float,
        grad_buffers: GradBuffers | None = None,
    ) -> QKV:
        q = saved.q
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
            with torch.autocast(q.device.type, enabled=False):
                return self.backward(saved, call, scale=scale, grad_buffers=grad_buffers)
        dout, q, k, v, out, lse = saved
        rows, columns = call.q_span, call.k_span
        dout, q, out, k, v = _slice_tokens(
            ((dout, rows), (q, rows), (out, rows), (k, columns), (v, columns))
        )
        if q.shape[1] != lse.shape[2]:
            lse = lse.narrow(2, call.q_start, q.shape[1])
        saved = BackwardInputs(dout, q, k, v, out, lse)
        if call.tile is None:
            return self.multi_tile_backward(saved, call, scale)
        if grad_buffers is None:
            return self.tile_backward(saved, call.tile, scale)
        buffers = {"grad_buffers": grad_buffers}  # only kernels that write into them have it
        return self.tile_backward(saved, call.tile, scale, **buffers)

    def multi_tile_forward(self, qkv: QKV, call: KernelCall, scale: float) -> OutLse:
        """One kernel launch a tile; q, k, v are the rows and columns of the call."""
        q, k, v = qkv  # the output has the dtype that tile_forward returns
        acc_dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=self.caps.grad_dtype(q.dtype))
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=acc_dtype)
        for samples, tile, rows, columns in _tiles_with_slices(call):
            tile_qkv = q[samples, rows], k[samples, columns], v[samples, columns]
            tile_out, tile_lse = self.tile_forward(tile_qkv, tile, scale)
            out[samples, rows] = tile_out
            lse[samples, :, rows] = tile_lse
        return out, lse

    def multi_tile_backward(self, saved: BackwardInputs, call: KernelCall, scale: float) -> QKV:
        """One kernel launch a tile; the tensors are the rows and columns of the call."""
        dout, q, k, v, out, lse = saved
        dtype = self.caps.grad_dtype(q.dtype)
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        for samples, tile, rows, columns in _tiles_with_slices(call):
            q_index, k_index = (samples, rows), (samples, columns)
            tile_saved = BackwardInputs(
                dout[q_index], q[q_index], k[k_index], v[k_index], out[q_index],
                lse[samples, :, rows],
            )  # fmt: skip
            grads = self.tile_backward(tile_saved, tile, scale)
            dq[q_index], dk[k_index], dv[k_index] = grads  # a call's tiles share no row or column
        return dq, dk, dv

    def with_softcap(self, softcap: float) -> AttentionKernel:
        raise NotImplementedError

    def tile_forward(self, qkv: QKV, tile: Tile, scale: float) -> OutLse:
        """:meth:`forward` of one tile, whose rows and columns the tensors are."""
        raise NotImplementedError

    def tile_backward(self, saved: BackwardInputs, tile: Tile, scale: float) -> QKV:
        """:meth:`backward` of one tile, whose rows and columns the tensors are. Kernels with
        ``caps.writes_grads_in_place`` also have ``grad_buffers``."""
        raise NotImplementedError


class PaddedHeadDimKernel:
    """A kernel for head dims that it does not compute by itself: pads them with zeros.

    Args:
        dims: head dims of keys and of values, computed by ``kernel`` and no less than a call's.
    """

    # Exact: zeros add nothing to q . k, and the output columns that they make are sliced off. It
    # costs the copies and the products with zeros, no communication.

    def __init__(self, kernel: AttentionKernel, dims: Dims) -> None:
        self._kernel, self._dims = kernel, dims
        self.name, self.caps = kernel.name, replace(kernel.caps, writes_grads_in_place=False)

    def with_softcap(self, softcap: float) -> PaddedHeadDimKernel:
        return PaddedHeadDimKernel(self._kernel.with_softcap(softcap), self._dims)

    def forward(self, qkv: QKV, call: KernelCall, *, scale: float) -> OutLse:
        q, k, v = qkv
        dim, value_dim = self._dims
        padded = pad_features(q, dim), pad_features(k, dim), pad_features(v, value_dim)
        out, lse = self._kernel.forward(padded, call, scale=scale)
        return out[..., : v.shape[3]], lse

    def backward(
        self,
        saved: BackwardInputs,
        call: KernelCall,
        *,
        scale: float,
        grad_buffers: GradBuffers | None = None,
    ) -> QKV:
        # No call has grad_buffers: these caps say that the kernel writes none.
        dout, q, k, v, out, lse = saved
        dim, value_dim = self._dims
        q, k = pad_features(q, dim), pad_features(k, dim)
        dout, v, out = (pad_features(x, value_dim) for x in (dout, v, out))
        padded = BackwardInputs(dout, q, k, v, out, lse)
        dq, dk, dv = self._kernel.backward(padded, call, scale=scale)
        dim, value_dim = saved.k.shape[3], saved.v.shape[3]  # without the zeros
        return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]


def pad_features(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros after the features ``[..., D] -> [..., dim]``; the tensor itself where D is dim."""
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))


class UnsuitableDeviceError(ImportError):
    """The GPU is none of those that a library supports: installing something would not help."""


def require_capability(major: int, library: str, *, only: bool = False) -> None:
    """Check the GPU's compute capability, as kernels' constructors do before they import a library;
    with ``only`` later generations are not supported either.

    Raises:
        UnsuitableDeviceError: no GPU, or one of another generation.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if capability[0] < major or (only and capability[0] > major):
        required = f"{major}.x" if only else f"{major}.0"
        actual = "this one has {}.{}".format(*capability) if capability[0] else "there is none here"
        raise UnsuitableDeviceError(
            f"{library} needs a GPU of compute capability {required}, {actual}"
        )


def window_mask(tile: Tile, device: torch.device) -> torch.Tensor:
    """The tile's mask ``[rows, columns]``, true where a query attends to a key."""
    rows = torch.arange(tile.q_start, tile.q_stop, device=device)[:, None]
    distance = torch.arange(tile.k_start, tile.k_stop, device=device)[None, :] - rows
    return (distance >= tile.low) & (distance <= tile.high)


def _tiles_with_slices(call: KernelCall) -> Iterator[tuple[slice, Tile, slice, slice]]:
    """Every tile of a call: the samples that have it, the tile, and its rows and columns, counted
    from the call's first ones."""
    for sample, tiles in enumerate(call.tiles):
        samples = slice(None) if len(call.tiles) == 1 else slice(sample, sample + 1)
        for tile in tiles:
            rows = slice(tile.q_start - call.q_start, tile.q_stop - call.q_start)
            columns = slice(tile.k_start - call.k_start, tile.k_stop - call.k_start)
            yield samples, tile, rows, columns


def _slice_tokens(spans: Sequence[tuple[torch.Tensor, Span]]) -> list[torch.Tensor]:
    """The tokens ``start : stop`` of each tensor ``[B, S, H, D]``; views, but copies where features
    are not contiguous: libraries read them as contiguous, torch's without a check."""
    slices = []
    for x, (start, stop) in spans:
        if stop - start != x.shape[1]:
            x = x.narrow(1, start, stop - start)  # as x[:, start:stop], in less of the host's time
        slices.append(x if x.is_contiguous() or x.stride(3) == 1 else x.contiguous())
    return slices


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
