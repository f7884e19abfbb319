"""Attention kernels of one GPU, as ds_usp or as a program of their own library calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from shapes import Shape
from torch.nn.attention import SDPBackend, sdpa_kernel

import ds_usp

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}


def usp_attend(
    mesh: ds_usp.SequenceMesh,
    layout: ds_usp.TokenLayout,
    kernel: str,
    mask: ds_usp.MaskSpec,
) -> Attend:
    """usp_attention as a function of q, k and v."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ds_usp.usp_attention(q, k, v, mesh=mesh, layout=layout, mask=mask, kernel=kernel)

    return attend


def torch_attend(kernel: str, causal: bool = True) -> Attend:
    """Torch's attention of [batch, tokens, heads, dim] by one of its backends."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(BACKENDS[kernel]):
            out = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
            )
        return out.transpose(1, 2)

    return attend


def local_kernel(shape: Shape, kernel: str) -> Attend:
    """The kernel on the full sequence, called as its own library is; ds_usp's adapter of it where
    that takes more than one call (documents) and for kernels of ds_usp."""
    if kernel in BACKENDS and not (shape.window or shape.documents):
        return torch_attend(kernel, causal=not shape.full)
    if kernel == "flash4" and not shape.documents:
        from flash_attn.cute import flash_attn_func

        options: dict[str, Any] = {"causal": not (shape.full or shape.window)}
        if shape.window:
            options["window_size"] = (shape.window, 0)
        return lambda q, k, v: flash_attn_func(q, k, v, **options)[0]
    single = ds_usp.SequenceMesh.single()
    layout = single.layout("contiguous", shape.seq_len)
    return usp_attend(single, layout, kernel, shape.mask)
