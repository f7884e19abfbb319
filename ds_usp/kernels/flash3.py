"""FlashAttention-3 (``flash_attn_interface``, built from flash-attention/hopper), for Hopper."""

from __future__ import annotations

from copy import copy

import torch

from ds_usp.kernels.api import KernelCaps, require_capability
from ds_usp.kernels.score_mod import SOFTCAP, BoundScoreMod
from ds_usp.kernels.signature_adapter import SignatureAdapter
from ds_usp.kernels.varlen import SeqLengths, TileOrCall, VarlenKernel, lengths_as_kwargs

_COMMON_ARGS = ("q", "k", "v", "softcap", *SeqLengths._fields)


class Flash3Kernel(VarlenKernel):
    """Grouped heads, windows and bottom-right causal masks natively."""

    name = "flash3"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_dim=256,
        head_dim_multiple=8,
        score_features=frozenset({SOFTCAP}),
        deterministic=True,
        varlen=True,
    )

    def __init__(self) -> None:
        require_capability(9, "FlashAttention-3", only=True)
        import flash_attn_interface as library

        self._softcap = 0.0  # none
        # Versions without num_splits return the log-sum-exp in another place.
        self._fwd = SignatureAdapter(library._flash_attn_forward, *_COMMON_ARGS, "num_splits")
        self._bwd = SignatureAdapter(
            library._flash_attn_backward,
            *_COMMON_ARGS, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic",
        )  # fmt: skip

    def with_score_mod(self, score_mod: BoundScoreMod) -> Flash3Kernel:
        """See :meth:`AttentionKernel.with_scores`."""
        kernel = copy(self)
        kernel._softcap = score_mod.mod.softcap or 0.0
        return kernel

    def tile_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: TileOrCall,
        scale: float,
        lengths: SeqLengths | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._fwd(
            tile,
            scale,
            q=q,
            k=k,
            v=v,
            softcap=self._softcap,
            num_splits=1,
            **lengths_as_kwargs(lengths),
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
        tile: TileOrCall,
        scale: float,
        lengths: SeqLengths | None = None,
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
            softcap=self._softcap,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **lengths_as_kwargs(lengths),
        )
        return dq, dk, dv
