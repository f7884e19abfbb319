"""The reference kernel: plain matrix products and softmax, on any device and in any dtype."""

from __future__ import annotations

import torch

from ds_usp.geometry.tiles import Tile
from ds_usp.kernels.api import (
    QKV,
    BackwardInputs,
    GradBuffers,
    KernelCaps,
    OutLse,
    SingleTileKernel,
    window_mask,
)
from ds_usp.kernels.head_dims import HEAD_DIMS


# The formulas are written out, forward and backward, instead of asking autograd: backward gets the
# out and lse of all blocks, not of this one, and autograd would differentiate this block's softmax.
class EagerKernel(SingleTileKernel):
    """Materializes all ``[B, H, rows, columns]`` scores: for checks, and for what no other kernel
    computes. Computes and returns fp32 (fp64 for fp64), whatever the inputs' dtype."""

    name = "eager"
    caps = KernelCaps(
        devices=frozenset(),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        head_dims=HEAD_DIMS["eager", None],
        fp32_grads=True,
        softcap=True,
        deterministic=True,
        writes_grads_in_place=True,
    )

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    def with_softcap(self, softcap: float) -> EagerKernel:
        return EagerKernel(softcap)

    # The tile's rows of q, out and their gradients, its columns of k and v, [B, tokens, heads, D];
    # lse [B, H, rows]. In ``saved`` out and lse are of all keys. Letters of the products: b sample,
    # g KV head, r query head of it, s query, t key, d feature.
    def tile_forward(self, qkv: QKV, tile: Tile, scale: float) -> OutLse:
        q, k, v = qkv
        dtype, groups = torch.promote_types(q.dtype, torch.float32), k.shape[2]
        scores = self._capped_scores(_by_kv_group(q.to(dtype), groups), k.to(dtype), scale)
        scores = _mask(scores, tile)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_()
        out = torch.einsum("bgrst,btgd->bsgrd", weights, v.to(dtype))
        return out.flatten(2, 3), lse.flatten(1, 2)

    def tile_backward(
        self,
        saved: BackwardInputs,
        tile: Tile,
        scale: float,
        grad_buffers: GradBuffers | None = None,
    ) -> QKV:
        groups = saved.k.shape[2]
        dtype = torch.promote_types(saved.q.dtype, torch.float32)
        q, dout, out = (_by_kv_group(x.to(dtype), groups) for x in (saved.q, saved.dout, saved.out))
        k, v = saved.k.to(dtype), saved.v.to(dtype)
        scores, cap = self._capped_scores(q, k, scale), self._softcap
        softcap_grad = None if cap is None else 1.0 - (scores / cap).square_()  # 1 - tanh ** 2
        lse = saved.lse.unflatten(1, (groups, -1)).unsqueeze(-1)
        weights = _mask(scores, tile).sub_(lse).exp_()
        # d(softmax): p * (dp - rowsum(dout * out)), FlashAttention-2 paper, section 2.3.1
        delta = torch.einsum("bsgrd,bsgrd->bgrs", dout, out).unsqueeze(-1)
        dweights = torch.einsum("bsgrd,btgd->bgrst", dout, v)
        dv = torch.einsum("bgrst,bsgrd->btgd", weights, dout)
        dscores = dweights.sub_(delta).mul_(weights).mul_(scale)
        if softcap_grad is not None:
            dscores.mul_(softcap_grad)
        dq = torch.einsum("bgrst,btgd->bsgrd", dscores, k).flatten(2, 3)
        dk = torch.einsum("bgrst,bsgrd->btgd", dscores, q)
        buffers = (None, None, None) if grad_buffers is None else grad_buffers
        dq, dk, dv = (
            grad if buffer is None else buffer.copy_(grad)
            for grad, buffer in zip((dq, dk, dv), buffers, strict=True)
        )
        return dq, dk, dv

    def _capped_scores(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        """``scale * q . k`` under the soft cap, ``[B, G, H / G, S, T]``, of queries as
        :func:`_by_kv_group` has them and keys ``[B, T, G, D]``."""
        scores, cap = torch.einsum("bsgrd,btgd->bgrst", q, k).mul_(scale), self._softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def _by_kv_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """``[B, S, H, D]`` -> ``[B, S, G, H / G, D]``."""
    return x.unflatten(2, (groups, -1))


def _mask(scores: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The scores ``[..., rows, columns]`` with -inf where a query does not attend to a key; in
    place."""
    if not tile.is_full:
        scores.masked_fill_(~window_mask(tile, scores.device), float("-inf"))
    return scores
