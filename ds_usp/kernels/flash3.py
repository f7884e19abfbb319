"""FlashAttention-3 (``flash_attn_interface``, built from flash-attention/hopper), for Hopper."""

from __future__ import annotations

import torch

from ds_usp.kernels.api import QKV, BackwardInputs, KernelCaps, OutLse, require_capability
from ds_usp.kernels.head_dims import HEAD_DIMS
from ds_usp.kernels.varlen import (
    BACKWARD_ARGS,
    Lengths,
    SeqLengths,
    SignatureAdapter,
    TileOrCall,
    VarlenKernel,
)

_COMMON_ARGS = ("q", "k", "v", "softcap", *SeqLengths._fields)


class Flash3Kernel(VarlenKernel):
    """Grouped heads, windows and bottom-right causal masks natively."""

    name = "flash3"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_dims=HEAD_DIMS["flash3", None],
        softcap=True,
        deterministic=True,
        varlen=True,
    )

    # registry.py makes it once a process; an ImportError says why it cannot be used here.
    def __init__(self) -> None:
        require_capability(9, "FlashAttention-3", only=True)
        import flash_attn_interface as library

        # Versions without num_splits return the log-sum-exp at another index.
        self._fwd = SignatureAdapter(library._flash_attn_forward, *_COMMON_ARGS, "num_splits")
        self._bwd = SignatureAdapter(library._flash_attn_backward, *_COMMON_ARGS, *BACKWARD_ARGS)

    # The base classes call these two: of a tile with tensors [B, tokens, heads, D] and lse
    # [B, H, rows]; with ``lengths`` of all tiles of a call, packed [N, heads, D] and [H, N].
    def tile_forward(
        self, qkv: QKV, tile: TileOrCall, scale: float, lengths: Lengths = None
    ) -> OutLse:
        q, k, v = qkv
        # num_splits: splits of the keys (flash decoding); 0 would leave it to a heuristic.
        out, lse, *_ = self._fwd(
            tile, scale, lengths, q=q, k=k, v=v, softcap=self.softcap, num_splits=1
        )
        return out, lse

    def tile_backward(
        self, saved: BackwardInputs, tile: TileOrCall, scale: float, lengths: Lengths = None
    ) -> QKV:
        return self._bwd.gradients(saved, tile, scale, lengths, softcap=self.softcap)
