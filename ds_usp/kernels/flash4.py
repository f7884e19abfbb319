"""FlashAttention-4 (the ``flash-attn-4`` package), for Hopper and Blackwell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ds_usp.geometry.tiles import Bounds
from ds_usp.kernels.api import (
    QKV,
    BackwardInputs,
    GradBuffers,
    KernelCaps,
    OutLse,
    require_capability,
)
from ds_usp.kernels.score_mod import SOFTCAP
from ds_usp.kernels.varlen import Lengths, TileOrCall, VarlenKernel


class Flash4Kernel(VarlenKernel):
    """Grouped heads, windows and bottom-right causal masks natively."""

    name = "flash4"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_dim=128,
        # It accepts others and returns wrong gradients (4.0.0b36, H200, head dims 40, 72, 80, 104).
        head_dim_multiple=32,
        varlen=True,
        score_features=frozenset({SOFTCAP}),
        deterministic=True,
        writes_grads_in_place=True,
    )

    def __init__(self) -> None:
        require_capability(9, "FlashAttention-4")
        from flash_attn.cute import interface

        self._fwd, self._bwd = interface._flash_attn_fwd, interface._flash_attn_bwd
        # Versions without this helper ignore a soft cap in Hopper's backward and have no
        # deterministic one; on consumer Blackwell (12.x) all versions are so.
        has_softcap_backward = hasattr(interface.utils, "create_softcap_scoremod_bwd")
        if not has_softcap_backward or torch.cuda.get_device_capability()[0] >= 12:
            self.caps = replace(self.caps, score_features=frozenset(), deterministic=False)

    def tile_forward(
        self, qkv: QKV, tile: TileOrCall, scale: float, lengths: Lengths = None
    ) -> OutLse:
        """See :meth:`VarlenKernel.tile_forward`."""
        options = _mask_args(tile.window, scale)
        if lengths is not None:
            options = {**options, **lengths._asdict()}
        out, lse, *_ = self._fwd(*qkv, softcap=self.softcap or None, return_lse=True, **options)
        return out, lse

    def tile_backward(
        self,
        saved: BackwardInputs,
        tile: TileOrCall,
        scale: float,
        lengths: Lengths = None,
        grad_buffers: GradBuffers | None = None,
    ) -> QKV:
        """See :meth:`VarlenKernel.tile_backward`."""
        options = dict(_mask_args(tile.window, scale))
        if lengths is not None:
            options.update(lengths._asdict())
        if grad_buffers is not None:
            options["dq"], options["dk"], options["dv"] = grad_buffers
        if torch.are_deterministic_algorithms_enabled():
            options["deterministic"] = True
        dout, q, k, v, out, lse = saved
        dq, dk, dv = self._bwd(
            q, k, v, out, dout, lse.contiguous(), softcap=self.softcap, **options
        )
        return dq, dk, dv


@lru_cache(maxsize=1024)
def _mask_args(window: Bounds, scale: float) -> Mapping[str, Any]:
    """Keyword arguments of a FlashAttention-4 call: scale and mask."""
    is_causal = window == (None, 0)
    left, right = (None, None) if is_causal else window
    return {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size_left": left,
        "window_size_right": right,
    }
