"""FlashAttention-4 (the ``flash-attn-4`` package), for Hopper and Blackwell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version

from ds_usp.geometry.tiles import Bounds
from ds_usp.kernels.api import (
    QKV,
    BackwardInputs,
    GradBuffers,
    KernelCaps,
    OutLse,
    pad_features,
    require_capability,
)
from ds_usp.kernels.head_dims import HEAD_DIMS
from ds_usp.kernels.varlen import Lengths, TileOrCall, VarlenKernel

_LARGE_HEAD_DIMS = Version("4.0.0b36")


class Flash4Kernel(VarlenKernel):
    """Grouped heads, windows and bottom-right causal masks natively."""

    name = "flash4"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_dims=HEAD_DIMS["flash4", 9],
        varlen=True,
        softcap=True,
        deterministic=True,
        writes_grads_in_place=True,
    )

    # registry.py makes it once a process; an ImportError says why it cannot be used here.
    def __init__(self) -> None:
        require_capability(9, "FlashAttention-4")
        from flash_attn.cute import interface

        self._fwd, self._bwd = interface._flash_attn_fwd, interface._flash_attn_bwd
        # Versions without this helper ignore a soft cap in Hopper's backward and have no
        # deterministic one; on consumer Blackwell (12.x) all versions are so.
        has_softcap_backward = hasattr(interface.utils, "create_softcap_scoremod_bwd")
        major = torch.cuda.get_device_capability()[0]
        if major != 9 or not _has_large_head_dims():
            self.caps = replace(self.caps, head_dims=HEAD_DIMS["flash4", None])
        if not has_softcap_backward or major >= 12:
            self.caps = replace(self.caps, softcap=False, deterministic=False)

    # The base classes call these two: of a tile with tensors [B, tokens, heads, D] and lse
    # [B, H, rows]; with ``lengths`` of all tiles of a call, packed [N, heads, D] and [H, N].
    def tile_forward(
        self, qkv: QKV, tile: TileOrCall, scale: float, lengths: Lengths = None
    ) -> OutLse:
        options = _mask_args(tile.window, scale)
        if lengths is not None:
            options = {**options, **lengths._asdict()}
        q, k, v = qkv
        if pads := _pads_values(q, k, v):
            v = pad_features(v, k.shape[-1])
        out, lse, *_ = self._fwd(q, k, v, softcap=self.softcap or None, return_lse=True, **options)
        return out[..., : qkv[2].shape[-1]] if pads else out, lse

    def tile_backward(
        self,
        saved: BackwardInputs,
        tile: TileOrCall,
        scale: float,
        lengths: Lengths = None,
        grad_buffers: GradBuffers | None = None,
    ) -> QKV:
        options = dict(_mask_args(tile.window, scale))
        if lengths is not None:
            options.update(lengths._asdict())
        if grad_buffers is not None:  # without ``lengths``; a dq of None is the library's own
            options["dq"], options["dk"], options["dv"] = grad_buffers
        if torch.are_deterministic_algorithms_enabled():
            options["deterministic"] = True
        dout, q, k, v, out, lse = saved
        # Padded values get a padded gradient, which does not fit the caller's buffer: the library
        # writes it to a tensor of its own, whose first features are copied.
        dv_buffer, values = options.get("dv"), v.shape[-1]
        if pads := _pads_values(q, k, v):
            dout, v, out = (pad_features(x, k.shape[-1]) for x in (dout, v, out))
            options["dv"] = None
        dq, dk, dv = self._bwd(
            q, k, v, out, dout, lse.contiguous(), softcap=self.softcap, **options
        )
        if pads:
            dv = dv[..., :values] if dv_buffer is None else dv_buffer.copy_(dv[..., :values])
        return dq, dk, dv


def _pads_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether values are padded to the keys' head dim: the library's backward pass takes two head
    dims without grouped heads only (4.0.0b36, Hopper)."""
    return v.shape[-1] != k.shape[-1] and k.shape[-2] != q.shape[-2]


def _has_large_head_dims() -> bool:
    """The installed version is one whose head dims above 128 were measured."""
    try:
        return Version(version("flash-attn-4")) >= _LARGE_HEAD_DIMS
    except PackageNotFoundError:
        return False


@lru_cache(maxsize=1024)
def _mask_args(window: Bounds, scale: float) -> Mapping[str, Any]:
    """Scale and mask as arguments of FlashAttention-4; None is no bound, and -1 in ``varlen.py``,
    for the libraries before. Cached: a caller does not change it."""
    is_causal = window == (None, 0)
    left, right = (None, None) if is_causal else window
    return {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size_left": left,
        "window_size_right": right,
    }
