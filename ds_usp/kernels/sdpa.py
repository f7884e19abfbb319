"""torch's flash kernel for CPUs, which hands out its log-sum-exp."""

from __future__ import annotations

import torch

from ds_usp.geometry.tiles import Tile, TileSupport
from ds_usp.kernels.api import KernelCaps, SingleTileKernel, window_mask

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class SdpaKernel(SingleTileKernel):
    """Grouped heads natively. Its causal flag is aligned to the top left, so only square tiles
    use it; windows go in as a ``[rows, columns]`` bias."""

    name = "sdpa"
    caps = KernelCaps(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16}),
        tiles=TileSupport(rectangular=False, window=True),
        deterministic=True,
    )

    def tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = _flash_forward(
            q, k, v, 0.0, tile.is_causal, attn_mask=_bias(tile, q), scale=scale
        )
        return out.transpose(1, 2), lse

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
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        grads = _flash_backward(
            dout, q, k, v, out, lse, 0.0, tile.is_causal, attn_mask=_bias(tile, q), scale=scale
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


def _bias(tile: Tile, q: torch.Tensor) -> torch.Tensor | None:
    if tile.is_full or tile.is_causal:
        return None
    bias = torch.zeros(tile.rows, tile.columns, dtype=q.dtype, device=q.device)
    return bias.masked_fill_(~window_mask(tile, q.device), float("-inf"))
