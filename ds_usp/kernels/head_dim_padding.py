"""Keys and values of two head dims on kernels that know one."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from ds_usp.geometry.kernel_calls import KernelCall
from ds_usp.kernels.api import AttentionKernel, GradBuffers
from ds_usp.kernels.score_mod import BoundScoreMod


class PaddedHeadDimKernel:
    """A kernel whose tensors are filled up with zeros to the larger head dim, and cut back.

    Exact: zeros add nothing to a product ``q . k``, and the columns of the output that they make
    are left out. It costs the copies and the products with zeros; nothing more travels. See
    :class:`AttentionKernel` for the shapes.
    """

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel
        self.name, self.caps = kernel.name, replace(kernel.caps, writes_grads_in_place=False)

    def with_score_mod(self, score_mod: BoundScoreMod) -> AttentionKernel:
        """See :meth:`AttentionKernel.with_scores`."""
        return PaddedHeadDimKernel(self._kernel.with_score_mod(score_mod))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: KernelCall,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`AttentionKernel.forward`."""
        padded_q, padded_k, padded_v = _pad_to_one_head_dim(q, k, v)
        out, lse = self._kernel.forward(padded_q, padded_k, padded_v, call, scale=scale)
        return out[..., : v.shape[3]], lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: KernelCall,
        *,
        scale: float,
        grad_buffers: GradBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :meth:`AttentionKernel.backward`; there are no places, which it does not fill."""
        padded_dout, padded_q, padded_k, padded_v, padded_out = _pad_to_one_head_dim(
            dout, q, k, v, out
        )
        dq, dk, dv = self._kernel.backward(
            padded_dout, padded_q, padded_k, padded_v, padded_out, lse, call, scale=scale
        )
        keys, values = k.shape[3], v.shape[3]
        return dq[..., :keys], dk[..., :keys], dv[..., :values]


def _pad_to_one_head_dim(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Zeros after the features of those that have fewer."""
    max_dim = max(x.shape[3] for x in tensors)
    return [x if x.shape[3] == max_dim else F.pad(x, (0, max_dim - x.shape[3])) for x in tensors]
