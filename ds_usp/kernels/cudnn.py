"""cuDNN's fused attention, as it is built into torch."""

from __future__ import annotations

import torch

from ds_usp.geometry.tiles import Tile, TileSupport
from ds_usp.kernels.api import KernelCaps, SingleTileKernel, require_capability
from ds_usp.kernels.eager import EagerKernel

_cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


class CudnnKernel(SingleTileKernel):
    """Grouped heads natively; its causal flag is aligned to the top left, and it has no window."""

    name = "cudnn"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_dim=128,
        head_dim_multiple=8,
        tiles=TileSupport(rectangular=False, window=False),
    )

    def __init__(self) -> None:
        require_capability(9, "cuDNN's attention")
        if not torch.backends.cudnn.is_available():
            raise ImportError("this torch has no cuDNN")
        self._eager = EagerKernel()  # which cuDNN refuses

    def tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if tile.rows == tile.columns == 1:
            out, lse = self._eager.tile_forward(q, k, v, tile, scale)
            return out.to(q.dtype), lse
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = _cudnn_forward(q, k, v, None, True, 0.0, tile.is_causal, scale=scale)
        return out.transpose(1, 2), lse.squeeze(-1)

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
        if tile.rows == tile.columns == 1:
            grads = self._eager.tile_backward(dout, q, k, v, out, lse, tile, scale)
            dq, dk, dv = (grad.to(q.dtype) for grad in grads)
            return dq, dk, dv
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        # Without dropout the random state is passed through unread.
        unused_rng_state = torch.empty((), dtype=torch.int64, device=q.device)
        grads = _cudnn_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.unsqueeze(-1).contiguous(),
            unused_rng_state,
            unused_rng_state,
            None,
            None,
            None,
            tile.rows,
            tile.columns,
            0.0,
            tile.is_causal,
            scale=scale,
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv
