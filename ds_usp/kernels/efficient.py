"""Memory-efficient attention (xformers' kernels on CUTLASS), as it is built into torch for CUDA."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from ds_usp.geometry.tiles import Tile, TileSupport
from ds_usp.kernels.api import (
    QKV,
    BackwardInputs,
    KernelCaps,
    OutLse,
    SingleTileKernel,
    require_capability,
)
from ds_usp.kernels.head_dims import HEAD_DIMS

_forward = torch.ops.aten._efficient_attention_forward
_backward = torch.ops.aten._efficient_attention_backward

_NO_MASK, _CAUSAL_BOTTOM_RIGHT = 0, 2
_LSE_ROWS = 32  # the kernels' log-sum-exp has a multiple of so many rows
_VECTOR_BYTES = 16


class EfficientKernel(SingleTileKernel):
    """The kernel for every GPU, and for fp32 without materializing all scores. It has no grouped
    heads: keys and values are repeated for their query heads."""

    # fp32 is not TF32, whatever torch's switches are set to: from Ampere on the kernels add up
    # three TF32 products, which is as exact as fp32 (CUTLASS's OpMultiplyAddFastF32).
    name = "efficient"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=HEAD_DIMS["efficient", None],
        tiles=TileSupport(window=False),
        deterministic=True,
    )

    # registry.py makes it once a process; an ImportError says why it cannot be used here.
    def __init__(self) -> None:
        require_capability(5, "memory-efficient attention")
        if torch.cuda.get_device_capability() < (8, 0):
            self.caps = replace(self.caps, dtypes=self.caps.dtypes - {torch.bfloat16})

    # The tile's rows of q, out and their gradients, its columns of k and v, [B, tokens, heads, D];
    # lse [B, H, rows]. In ``saved`` out and lse are of all keys.
    def tile_forward(self, qkv: QKV, tile: Tile, scale: float) -> OutLse:
        q, k, v = qkv
        out, lse, *_ = _forward(
            _aligned(q),
            _expand_kv_heads(k, q.shape[2]),
            _expand_kv_heads(v, q.shape[2]),
            *[None] * 5,  # bias, cu_seqlens and max_seqlen of queries and keys
            0.0,  # dropout
            _mask_type(tile),
            True,  # return the log-sum-exp
            scale=scale,
        )
        return out, lse[:, :, : tile.rows]

    def tile_backward(self, saved: BackwardInputs, tile: Tile, scale: float) -> QKV:
        dout, q, k, v, out, lse = saved
        # Padded as forward's is: rows beyond the last weigh exp(score - inf) = 0.
        padded = F.pad(lse, (0, -tile.rows % _LSE_ROWS), value=float("inf")).contiguous()
        # Without dropout the random state is passed through unread.
        unused_rng_state = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = _backward(
            _aligned(dout.contiguous()),
            _aligned(q),
            _expand_kv_heads(k, q.shape[2]),
            _expand_kv_heads(v, q.shape[2]),
            None,  # bias
            _aligned(out.contiguous()),  # the kernel does not read its row stride
            None,  # cu_seqlens of queries, and next of keys
            None,
            tile.rows,
            tile.columns,
            padded,
            0.0,  # dropout
            unused_rng_state,
            unused_rng_state,
            _mask_type(tile),
            False,  # no gradient of a bias
            scale=scale,
        )
        return dq, _group_sum(dk, k.shape[2]), _group_sum(dv, k.shape[2])


def _mask_type(tile: Tile) -> int:
    return _CAUSAL_BOTTOM_RIGHT if tile.is_causal else _NO_MASK


def _expand_kv_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, T, G, D]`` -> ``[B, T, H, D]``."""
    groups = x.shape[2]
    return _aligned(x if groups == heads else x.repeat_interleave(heads // groups, dim=2))


def _group_sum(grad: torch.Tensor, groups: int) -> torch.Tensor:
    """``[B, T, H, D]`` -> ``[B, T, G, D]``, summed in fp32."""
    if grad.shape[2] == groups:
        return grad
    return grad.unflatten(2, (groups, -1)).sum(3, dtype=torch.float32).to(grad.dtype)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its vectors are not aligned to the kernels' loads of 16 bytes."""
    batch, token, head, _ = x.stride()
    distances = (batch | token | head) * x.element_size()  # in bytes; | keeps all low bits
    return (
        x
        if (x.data_ptr() | distances) % _VECTOR_BYTES == 0
        else x.clone(memory_format=torch.contiguous_format)
    )
