"""FlashAttention-3 (``flash_attn_interface``, built from flash-attention/hopper), for Hopper."""

from __future__ import annotations

from copy import copy

import torch

from ds_usp.kernels.api import KernelCaps, require_capability
from ds_usp.kernels.score_mod import SOFTCAP, ScoreChange
from ds_usp.kernels.signature_adapter import NamedCall
from ds_usp.kernels.varlen import Band, Lengths, VarlenKernel, named

_SHARED = ("q", "k", "v", "softcap", *Lengths._fields)


class Flash3Kernel(VarlenKernel):
    """Grouped heads, windows and bottom-right causal masks natively."""

    name = "flash3"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_dim=256,
        head_dim_multiple=8,
        scores=frozenset({SOFTCAP}),
        deterministic=True,
        varlen=True,
    )

    def __init__(self) -> None:
        require_capability(9, "FlashAttention-3", only=True)
        import flash_attn_interface as library

        self._softcap = 0.0  # none
        # Versions without num_splits return the log-sum-exp in another place.
        self._fwd = NamedCall(library._flash_attn_forward, *_SHARED, "num_splits")
        self._bwd = NamedCall(
            library._flash_attn_backward,
            *_SHARED, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic",
        )  # fmt: skip

    def with_scores(self, change: ScoreChange) -> Flash3Kernel:
        """See :meth:`AttentionKernel.with_scores`."""
        changed = copy(self)
        changed._softcap = change.spec.softcap or 0.0
        return changed

    def tile_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: Band,
        scale: float,
        lengths: Lengths | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._fwd(
            tile,
            scale,
            q=q,
            k=k,
            v=v,
            softcap=self._softcap,
            num_splits=1,
            **named(lengths),
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
        tile: Band,
        scale: float,
        lengths: Lengths | None = None,
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
            **named(lengths),
        )
        return dq, dk, dv
