"""The reference kernel: plain matrix products and softmax, on any device and in any dtype."""

from __future__ import annotations

import torch

from ds_usp.geometry.tiles import Tile
from ds_usp.kernels.api import KernelCaps, Places, SingleTileKernel, band
from ds_usp.kernels.score_mod import FEATURES, ScoreChange


class EagerKernel(SingleTileKernel):
    """Holds all ``[B, H, rows, columns]`` scores at once: for checks and for what no other takes.

    Computes and returns fp32 (fp64 for fp64), whatever the inputs are.

    Args:
        change: what becomes of its scores.
    """

    name = "eager"
    caps = KernelCaps(
        devices=frozenset(),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        wide_gradients=True,
        scores=FEATURES,
        value_dims=True,
        deterministic=True,
        fills_places=True,
    )

    def __init__(self, change: ScoreChange | None = None) -> None:
        self._change = change or ScoreChange()

    def with_scores(self, change: ScoreChange) -> EagerKernel:
        """See :meth:`AttentionKernel.with_scores`."""
        return EagerKernel(change)

    def for_samples(self, samples: slice) -> EagerKernel:
        """See :meth:`SingleTileKernel.for_samples`."""
        return EagerKernel(self._change.for_samples(samples))

    def tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, groups = torch.promote_types(q.dtype, torch.float32), k.shape[2]
        change = self._change.of(tile)
        scores = change.capped(_scores(_grouped(q.to(dtype), groups), k.to(dtype), scale))
        scores = _seen(scores, change, tile)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_()
        if (kept := change.kept(dtype)) is not None:
            weights.mul_(kept.unflatten(1, (groups, -1)))
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
        places: Places | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype, groups = torch.promote_types(q.dtype, torch.float32), k.shape[2]
        change = self._change.of(tile)
        q, dout, out = (_grouped(x.to(dtype), groups) for x in (q, dout, out))
        k, v = k.to(dtype), v.to(dtype)
        scores = change.capped(_scores(q, k, scale))
        slope = change.slope(scores)
        lse = lse.unflatten(1, (groups, -1)).unsqueeze(-1)
        weights = _seen(scores, change, tile).sub_(lse).exp_()
        # d(softmax): p * (dp - rowsum(dout * out)), FlashAttention-2 paper, section 2.3.1
        delta = torch.einsum("bsgrd,bsgrd->bgrs", dout, out).unsqueeze(-1)
        dweights = torch.einsum("bsgrd,btgd->bgrst", dout, v)
        used = weights
        if (kept := change.kept(dtype)) is not None:
            kept = kept.unflatten(1, (groups, -1))
            used, dweights = weights * kept, dweights.mul_(kept)
        dv = torch.einsum("bgrst,bsgrd->btgd", used, dout)
        dscores = dweights.sub_(delta).mul_(weights).mul_(scale)
        if slope is not None:
            dscores.mul_(slope)
        dq = torch.einsum("bgrst,btgd->bsgrd", dscores, k).flatten(2, 3)
        dk = torch.einsum("bgrst,bsgrd->btgd", dscores, q)
        wanted = (None, None, None) if places is None else places
        dq, dk, dv = (
            x if place is None else place.copy_(x)
            for x, place in zip((dq, dk, dv), wanted, strict=True)
        )
        return dq, dk, dv


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """``[B, S, H, D]`` -> ``[B, S, G, H / G, D]``."""
    return x.unflatten(2, (groups, -1))


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """``[B, G, H / G, S, T]``."""
    return torch.einsum("bsgrd,btgd->bgrst", q, k).mul_(scale)


def _seen(scores: torch.Tensor, change: ScoreChange, tile: Tile) -> torch.Tensor:
    """The scores with the bias of their places, -inf where a pair does not attend; in place."""
    if (bias := change.bias(scores.dtype)) is not None:
        scores.add_(bias.unflatten(0, scores.shape[1:3]))
    if not tile.is_full:
        scores.masked_fill_(~band(tile, scores.device), float("-inf"))
    return scores
