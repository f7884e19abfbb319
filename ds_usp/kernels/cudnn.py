"""cuDNN's fused attention, as it is built into torch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from ds_usp.geometry.tiles import Tile, TileSupport
from ds_usp.kernels.api import (
    QKV,
    BackwardInputs,
    KernelCaps,
    OutLse,
    SingleTileKernel,
    require_capability,
)
from ds_usp.kernels.eager import EagerKernel
from ds_usp.kernels.head_dims import HEAD_DIMS

_LARGE_HEAD_DIMS = 91900  # cuDNN with which head dims above 128 were measured
_cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


class CudnnKernel(SingleTileKernel):
    """Grouped heads natively; its causal mask is aligned to the top left, and it has no window: a
    tile is full, or causal and square."""

    # One call a document: with cumulative lengths torch's ``_cudnn_attention_backward`` returned
    # wrong gradients, some NaN, for three of four sets of documents (torch 2.11, cuDNN 9.19, H100).
    name = "cudnn"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_dims=HEAD_DIMS["cudnn", 9],
        tiles=TileSupport(rectangular=False, window=False),
    )

    # registry.py makes it once a process; an ImportError says why it cannot be used here.
    def __init__(self) -> None:
        require_capability(9, "cuDNN's attention")
        if not torch.backends.cudnn.is_available():
            raise ImportError("this torch has no cuDNN")
        hopper = torch.cuda.get_device_capability()[0] == 9
        if not hopper or (torch.backends.cudnn.version() or 0) < _LARGE_HEAD_DIMS:
            self.caps = replace(self.caps, head_dims=HEAD_DIMS["cudnn", None])
        self._eager = EagerKernel()  # for one query and one key, which cuDNN refuses

    # The tile's rows of q, out and their gradients, its columns of k and v, [B, tokens, heads, D],
    # where torch takes heads first; lse [B, H, rows]. In ``saved`` out and lse are of all keys.
    def tile_forward(self, qkv: QKV, tile: Tile, scale: float) -> OutLse:
        # cuDNN refuses a single query with a single key (last tokens of uneven shards).
        if tile.rows == tile.columns == 1:
            out, lse = self._eager.tile_forward(qkv, tile, scale)
            return out.to(qkv[0].dtype), lse
        q, k, v = qkv
        out, lse, *_ = _cudnn_forward(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            None,  # bias
            True,  # return the log-sum-exp, [B, H, rows, 1]
            0.0,  # dropout
            tile.is_causal,
            scale=scale,
        )
        return out.transpose(1, 2), lse.squeeze(-1)

    def tile_backward(self, saved: BackwardInputs, tile: Tile, scale: float) -> QKV:
        if tile.rows == tile.columns == 1:
            grads = self._eager.tile_backward(saved, tile, scale)
            dq, dk, dv = (grad.to(saved.q.dtype) for grad in grads)
            return dq, dk, dv
        unused_rng_state = _unused_rng_state(saved.q.device)
        dout, q, k, v, out, lse = saved
        dq, dk, dv = _cudnn_backward(
            dout.transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            out.transpose(1, 2),
            lse.unsqueeze(-1).contiguous(),
            unused_rng_state,
            unused_rng_state,
            None,  # bias; next cu_seqlens of queries and keys
            None,
            None,
            tile.rows,
            tile.columns,
            0.0,  # dropout
            tile.is_causal,
            scale=scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@lru_cache(maxsize=16)
def _unused_rng_state(device: torch.device) -> torch.Tensor:
    """Return a state of random numbers that backward takes, and without dropout does not read."""
    return torch.empty((), dtype=torch.int64, device=device)
