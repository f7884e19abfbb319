"""FlashAttention-4 (the ``flash-attn-4`` package), for Hopper and Blackwell."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch

from ds_usp.kernels.api import GradBuffers, KernelCaps, require_capability
from ds_usp.kernels.score_mod import SOFTCAP, BoundScoreMod
from ds_usp.kernels.varlen import SeqLengths, TileOrCall, VarlenKernel, lengths_as_kwargs


class Flash4Kernel(VarlenKernel):
    """Grouped heads, windows and bottom-right causal masks natively."""

    name = "flash4"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_dim=128,
        # Others go through, with wrong gradients (4.0.0b36 on H200, head dims 40, 72, 80, 104).
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
        self._softcap = 0.0  # none
        # Before this helper came, Hopper's backward left a soft cap out and had no fixed order of
        # sums; on consumer Blackwell (12.x) it has neither.
        has_softcap_backward = hasattr(interface.utils, "create_softcap_scoremod_bwd")
        if not has_softcap_backward or torch.cuda.get_device_capability()[0] >= 12:
            self.caps = replace(self.caps, score_features=frozenset(), deterministic=False)

    def with_score_mod(self, score_mod: BoundScoreMod) -> Flash4Kernel:
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
        left, right = tile.window
        out, lse, *_ = self._fwd(
            q,
            k,
            v,
            softmax_scale=scale,
            causal=tile.is_causal,
            window_size_left=None if tile.is_causal else left,
            window_size_right=None if tile.is_causal else right,
            softcap=self._softcap or None,
            return_lse=True,
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
        grad_buffers: GradBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left, right = tile.window
        buffers = (
            {} if grad_buffers is None else dict(zip(("dq", "dk", "dv"), grad_buffers, strict=True))
        )
        deterministic = (
            {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
        )
        dq, dk, dv = self._bwd(
            q,
            k,
            v,
            out,
            dout,
            lse.contiguous(),
            softmax_scale=scale,
            causal=tile.is_causal,
            window_size_left=None if tile.is_causal else left,
            window_size_right=None if tile.is_causal else right,
            softcap=self._softcap,
            **lengths_as_kwargs(lengths),
            **buffers,
            **deterministic,
        )
        return dq, dk, dv
