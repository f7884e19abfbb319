"""torch's flash attention kernel for CPUs, which returns its log-sum-exp."""

from __future__ import annotations

import torch
from packaging.version import Version

from ds_usp.geometry.tiles import Tile, TileSupport
from ds_usp.kernels.api import (
    QKV,
    BackwardInputs,
    KernelCaps,
    OutLse,
    SingleTileKernel,
    window_mask,
)
from ds_usp.kernels.head_dims import HEAD_DIMS

_MIN_TORCH = Version("2.9")  # before, grouped heads made it read and write beyond its tensors
_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class SdpaKernel(SingleTileKernel):
    """Grouped heads natively. Its causal mask is aligned to the top left, so only square tiles
    use it; windows are passed as a ``[rows, columns]`` bias."""

    name = "sdpa"
    caps = KernelCaps(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16}),
        head_dims=HEAD_DIMS["sdpa", None],
        tiles=TileSupport(rectangular=False, window=True),
        deterministic=True,
    )

    # registry.py makes it once a process; an ImportError says why it cannot be used here.
    def __init__(self) -> None:
        if Version(torch.__version__) < _MIN_TORCH:
            raise ImportError(
                f"needs torch {_MIN_TORCH}, for grouped heads; not {torch.__version__}"
            )

    # The tile's rows of q, out and their gradients, its columns of k and v, [B, tokens, heads, D],
    # where torch takes heads first; lse [B, H, rows]. In ``saved`` out and lse are of all keys.
    def tile_forward(self, qkv: QKV, tile: Tile, scale: float) -> OutLse:
        q, k, v = qkv
        out, lse = _flash_forward(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            0.0,  # dropout
            tile.is_causal,
            attn_mask=None if tile.is_full or tile.is_causal else _bias(tile, q),
            scale=scale,
        )
        return out.transpose(1, 2), lse

    def tile_backward(self, saved: BackwardInputs, tile: Tile, scale: float) -> QKV:
        dout, q, k, v, out, lse = saved
        dq, dk, dv = _flash_backward(
            dout.transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            out.transpose(1, 2),
            lse,
            0.0,  # dropout
            tile.is_causal,
            attn_mask=None if tile.is_full or tile.is_causal else _bias(tile, q),
            scale=scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _bias(tile: Tile, q: torch.Tensor) -> torch.Tensor:
    """0 where a query attends to a key, else -inf: ``[rows, columns]`` in the queries' dtype."""
    bias = torch.zeros(tile.rows, tile.columns, dtype=q.dtype, device=q.device)
    return bias.masked_fill_(~window_mask(tile, q.device), float("-inf"))
