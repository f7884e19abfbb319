"""What a kernel is: the protocol, what it declares, and what is asked of it.

Letters of the shapes: B batch, S query tokens, T key tokens, H query heads, G key/value heads,
D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.tiles import ANY_BAND, Tile, TileSupport
from ds_usp.kernels.scores import PLAIN, ScoreChange, ScoreSpec


@dataclass(frozen=True)
class KernelRequest:
    """What a call needs from a kernel, the same on every rank.

    Args:
        head_dim: of queries and keys.
        value_dim: of values and outputs; None: the same.
        scores: what becomes of the scores.
        deterministic: two calls alike give the same bits, backward too.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    mask: MaskSpec
    value_dim: int | None = None
    scores: ScoreSpec = PLAIN
    deterministic: bool = False

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of queries and keys, and of values."""
        return self.head_dim, self.value_dim or self.head_dim

    def __str__(self) -> str:
        keys, values = self.head_dims
        dims = f"head dim {keys}" + (f" (values {values})" if values != keys else "")
        extra = "" if self.scores == PLAIN else f", {self.scores}"
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
        wide_gradients: it returns gradients in fp32; they then travel so.
        scores: what it does to scores besides scaling and masking them, of
            ``ds_usp.kernels.scores.FEATURES``; then it has ``with_scores``.
        value_dims: values may have another head dim than keys. To the others both come filled up
            with zeros to the larger one (``ds_usp.kernels.one_dim``).
        deterministic: its gradients are the same bits every time where torch's deterministic
            algorithms are asked for.
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    tiles: TileSupport = ANY_BAND
    wide_gradients: bool = False
    scores: frozenset[str] = frozenset()
    value_dims: bool = False
    deterministic: bool = False

    def refusal(self, request: KernelRequest) -> str | None:
        """Why the kernel cannot serve the request; None if it can."""
        if self.devices and request.device not in self.devices:
            return f"runs on {'/'.join(sorted(self.devices))}, not {request.device}"
        if request.dtype not in self.dtypes:
            known = ", ".join(sorted(_short(dtype) for dtype in self.dtypes))
            return f"takes {known}, not {_short(request.dtype)}"
        for dim in request.head_dims if self.value_dims else [max(request.head_dims)]:
            if self.max_head_dim is not None and dim > self.max_head_dim:
                return f"takes head dims up to {self.max_head_dim}, not {dim}"
            if dim % self.head_dim_multiple:
                return f"takes head dims that are multiples of {self.head_dim_multiple}, not {dim}"
        if lacking := request.scores.features - self.scores:
            return f"has no {' and no '.join(sorted(lacking))}"
        if request.deterministic and not self.deterministic:
            return "has no deterministic backward"
        if request.mask.left is not None and not self.tiles.window:
            return f"has no sliding window, asked for {request.mask}"
        return None


class AttentionKernel(Protocol):
    """One attention library behind one face.

    ``tiles`` have disjoint, ascending query rows and are computed in one call. Results cover the
    rows (``out``, ``lse``, ``dq``) and columns (``dk``, ``dv``) of the tiles, in their order.
    """

    name: str
    caps: KernelCaps

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: tuple[Tile, ...],
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the tiles alone.

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
        tiles: tuple[Tile, ...],
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tiles' share of the gradients, from the final ``out`` and ``lse`` of all blocks.

        Shapes:
            dout, out ``[B, S, H, D]``, lse ``[B, H, S]`` -> dq ``[B, rows, H, D]``, dk and dv
            ``[B, columns, G, D]``.
        """

    def with_scores(self, change: ScoreChange) -> AttentionKernel:
        """The same kernel for scores that are changed so; asked only for what it declares."""


class SingleTileKernel:
    """Base of kernels that compute one tile a call: cuts the tensors, the library does the rest."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: tuple[Tile, ...],
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`AttentionKernel.forward`."""
        (tile,) = tiles
        with torch.autocast(q.device.type, enabled=False):  # the dtype of q, k and v decides
            return self.tile_forward(
                _rows(q, tile), _columns(k, tile), _columns(v, tile), tile, scale
            )

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: tuple[Tile, ...],
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :meth:`AttentionKernel.backward`."""
        (tile,) = tiles
        with torch.autocast(q.device.type, enabled=False):
            return self.tile_backward(
                _rows(dout, tile),
                _rows(q, tile),
                _columns(k, tile),
                _columns(v, tile),
                _rows(out, tile),
                lse[:, :, tile.q_start : tile.q_stop],
                tile,
                scale,
            )

    def with_scores(self, change: ScoreChange) -> AttentionKernel:
        """See :meth:`AttentionKernel.with_scores`."""
        raise NotImplementedError

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
    have = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if have[0] < major or (only and have[0] > major):
        wanted = f"{major}.x" if only else f"{major}.0"
        found = f"this one has {have[0]}.{have[1]}" if have[0] else "there is none here"
        raise UnsuitableDeviceError(
            f"{library} needs a GPU of compute capability {wanted}, {found}"
        )


def band(tile: Tile, device: torch.device) -> torch.Tensor:
    """The tile's mask, true where a pair attends: ``[rows, columns]`` bool."""
    rows = torch.arange(tile.q_start, tile.q_stop, device=device)[:, None]
    distance = torch.arange(tile.k_start, tile.k_stop, device=device)[None, :] - rows
    return (distance >= tile.low) & (distance <= tile.high)


def _rows(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    return _dense_features(x[:, tile.q_start : tile.q_stop])


def _columns(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    return _dense_features(x[:, tile.k_start : tile.k_stop])


def _dense_features(x: torch.Tensor) -> torch.Tensor:
    """The features of a head next to each other: libraries read them so, torch's unchecked."""
    return x if x.stride(3) == 1 else x.contiguous()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
