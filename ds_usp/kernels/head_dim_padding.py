"""Keys and values of two head dims on kernels that know one."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from ds_usp.geometry.kernel_calls import KernelCall
from ds_usp.kernels.api import AttentionKernel, Places
from ds_usp.kernels.score_mod import ScoreChange


class OneDimKernel:
    """A kernel whose tensors are filled up with zeros to the larger head dim, and cut back.

    Exact: zeros add nothing to a product ``q . k``, and the columns of the output that they make
    are left out. It costs the copies and the products with zeros; nothing more travels. See
    :class:`AttentionKernel` for the shapes.
    """

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel
        self.name, self.caps = kernel.name, replace(kernel.caps, fills_places=False)

    def with_scores(self, change: ScoreChange) -> AttentionKernel:
        """See :meth:`AttentionKernel.with_scores`."""
        return OneDimKernel(self._kernel.with_scores(change))

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
        wide_q, wide_k, wide_v = _one_dim(q, k, v)
        out, lse = self._kernel.forward(wide_q, wide_k, wide_v, call, scale=scale)
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
        places: Places | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :meth:`AttentionKernel.backward`; there are no places, which it does not fill."""
        wide_dout, wide_q, wide_k, wide_v, wide_out = _one_dim(dout, q, k, v, out)
        dq, dk, dv = self._kernel.backward(
            wide_dout, wide_q, wide_k, wide_v, wide_out, lse, call, scale=scale
        )
        keys, values = k.shape[3], v.shape[3]
        return dq[..., :keys], dk[..., :keys], dv[..., :values]


def _one_dim(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Zeros after the features of those that have fewer."""
    most = max(x.shape[3] for x in tensors)
    return [x if x.shape[3] == most else F.pad(x, (0, most - x.shape[3])) for x in tensors]
