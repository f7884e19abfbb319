"""FlashAttention-2 as it is built into torch for CUDA."""

from __future__ import annotations

import torch

from ds_usp.geometry.tiles import Tile
from ds_usp.kernels.api import KernelCaps, SingleTileKernel, require_capability

_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


class Flash2Kernel(SingleTileKernel):
    """Grouped heads, windows and bottom-right causal masks natively (FlashAttention >= 2.1)."""

    name = "flash2"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_dim=256,
        head_dim_multiple=8,
    )

    def __init__(self) -> None:
        require_capability(8, "FlashAttention-2")

    def tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = tile.window
        out, lse, *_ = _flash_forward(
            q,
            k,
            v,
            None,
            None,
            tile.rows,
            tile.columns,
            0.0,
            tile.is_causal,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

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
        left, right = tile.window
        # Without dropout the random state is passed through unread.
        unread = torch.empty(2, dtype=torch.uint64, device=q.device)
        return _flash_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,
            None,
            tile.rows,
            tile.columns,
            0.0,
            tile.is_causal,
            unread,
            unread,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
