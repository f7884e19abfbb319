"""The reference kernel: plain matrix products and softmax, on any device and in any dtype."""

from __future__ import annotations

import torch

from ds_usp.geometry.tiles import Tile
from ds_usp.kernels.api import KernelCaps, SingleTileKernel, band


class EagerKernel(SingleTileKernel):
    """Holds all ``[B, H, rows, columns]`` scores at once: for checks and for what no other takes.

    Computes and returns fp32 (fp64 for fp64), whatever the inputs are.
    """

    name = "eager"
    caps = KernelCaps(
        devices=frozenset(),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        wide_gradients=True,
    )

    def tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = _scores(_grouped(q.to(dtype), k.shape[2]), k.to(dtype), tile, scale)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_()
        out = torch.einsum("bgrst,btgd->bsgrd", weights, v.to(dtype))
        return out.flatten(2, 3), lse.flatten(1, 2)

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
        dtype, groups = torch.promote_types(q.dtype, torch.float32), k.shape[2]
        q, dout, out = (_grouped(x.to(dtype), groups) for x in (q, dout, out))
        k, v = k.to(dtype), v.to(dtype)
        lse = lse.unflatten(1, (groups, -1)).unsqueeze(-1)
        weights = _scores(q, k, tile, scale).sub_(lse).exp_()
        dv = torch.einsum("bgrst,bsgrd->btgd", weights, dout)
        # d(softmax): p * (dp - rowsum(dout * out)), FlashAttention-2 paper, section 2.3.1
        delta = torch.einsum("bsgrd,bsgrd->bgrs", dout, out).unsqueeze(-1)
        dscores = torch.einsum("bsgrd,btgd->bgrst", dout, v).sub_(delta).mul_(weights).mul_(scale)
        dq = torch.einsum("bgrst,btgd->bsgrd", dscores, k).flatten(2, 3)
        dk = torch.einsum("bgrst,bsgrd->btgd", dscores, q)
        return dq, dk, dv


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """``[B, S, H, D]`` -> ``[B, S, G, H / G, D]``."""
    return x.unflatten(2, (groups, -1))


def _scores(q: torch.Tensor, k: torch.Tensor, tile: Tile, scale: float) -> torch.Tensor:
    scores = torch.einsum("bsgrd,btgd->bgrst", q, k).mul_(scale)
    if not tile.is_full:
        scores.masked_fill_(~band(tile, q.device), float("-inf"))
    return scores
