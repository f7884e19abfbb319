"""FlashAttention-3 (``flash_attn_interface``, built from flash-attention/hopper), for Hopper."""

from __future__ import annotations

import torch

from ds_usp.geometry.tiles import Tile
from ds_usp.kernels.api import KernelCaps, SingleTileKernel, require_capability
from ds_usp.kernels.named_call import NamedCall

_SHARED = ("q", "k", "v")


class Flash3Kernel(SingleTileKernel):
    """Grouped heads, windows and bottom-right causal masks natively."""

    name = "flash3"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_dim=256,
        head_dim_multiple=8,
        deterministic=True,
    )

    def __init__(self) -> None:
        require_capability(9, "FlashAttention-3", only=True)
        import flash_attn_interface as library

        # Versions without num_splits return the log-sum-exp in another place.
        self._fwd = NamedCall(library._flash_attn_forward, *_SHARED, "num_splits")
        self._bwd = NamedCall(
            library._flash_attn_backward,
            *_SHARED, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic",
        )  # fmt: skip

    def tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._fwd(tile, scale, q=q, k=k, v=v, num_splits=1)
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
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self._bwd(
            tile,
            scale,
            dout=dout,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse.contiguous(),
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv
