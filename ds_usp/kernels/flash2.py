"""FlashAttention-2: the ``flash-attn`` package, or the same kernels as torch has them."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from packaging.version import Version

from ds_usp.geometry.tiles import TileSupport
from ds_usp.kernels.api import KernelCaps, require_capability
from ds_usp.kernels.score_mod import SOFTCAP, BoundScoreMod
from ds_usp.kernels.signature_adapter import SignatureAdapter
from ds_usp.kernels.varlen import SeqLengths, TileOrCall, VarlenKernel, lengths_as_kwargs

_MIN_VERSION, _MIN_VERSION_SOFTCAP = Version("2.6"), Version("2.6.2")  # before, it had no backward
_COMMON_ARGS = ("q", "k", "v", "dropout_p", "softcap", "alibi_slopes")

_torch_forward = torch.ops.aten._flash_attention_forward
_torch_backward = torch.ops.aten._flash_attention_backward


class Flash2Kernel(VarlenKernel):
    """Grouped heads, windows and bottom-right causal masks natively.

    A window's bound of as many tokens as there are keys or more is none to the library, which is
    right as long as there are no more queries than keys.
    """

    name = "flash2"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_dim=256,
        head_dim_multiple=8,
        tiles=TileSupport(tall=False),
        score_features=frozenset({SOFTCAP}),
        deterministic=True,
        varlen=True,
    )

    def __init__(self) -> None:
        require_capability(8, "FlashAttention-2")
        self._library: _FlashAttnPackage | _TorchFlash
        try:
            self._library = _FlashAttnPackage()
        except (ImportError, AttributeError):
            self._library = _TorchFlash()
        if not self._library.has_softcap:
            self.caps = replace(self.caps, score_features=frozenset())

    def with_score_mod(self, score_mod: BoundScoreMod) -> Flash2Kernel:
        """See :meth:`AttentionKernel.with_scores`."""
        kernel = copy(self)
        kernel._library = copy(self._library)
        kernel._library.softcap = score_mod.mod.softcap or 0.0
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
        return self._library.forward(q, k, v, tile, scale, lengths)

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._library.backward(dout, q, k, v, out, lse.contiguous(), tile, scale, lengths)


class _FlashAttnPackage:
    """The ``flash-attn`` package.

    Raises:
        ImportError: it is not installed (``flash-attn-4`` alone leaves a folder of its name), or
            it is not a version that is known here.
    """

    def __init__(self) -> None:
        import flash_attn
        from flash_attn import flash_attn_interface as library

        if Version(flash_attn.__version__) < _MIN_VERSION:
            raise ImportError(f"flash-attn {flash_attn.__version__} is older than {_MIN_VERSION}")
        self.softcap = 0.0  # none
        self.has_softcap = Version(flash_attn.__version__) >= _MIN_VERSION_SOFTCAP
        forward = (*_COMMON_ARGS, "return_softmax")
        backward = (
            *_COMMON_ARGS, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic",
        )  # fmt: skip
        varlen = SeqLengths._fields
        self._fwd = SignatureAdapter(library._flash_attn_forward, *forward)
        self._bwd = SignatureAdapter(library._flash_attn_backward, *backward)
        self._varlen_fwd = SignatureAdapter(library._flash_attn_varlen_forward, *forward, *varlen)
        self._varlen_bwd = SignatureAdapter(library._flash_attn_varlen_backward, *backward, *varlen)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: TileOrCall,
        scale: float,
        lengths: SeqLengths | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`VarlenKernel.tile_forward`."""
        results = (self._fwd if lengths is None else self._varlen_fwd)(
            tile,
            scale,
            q=q,
            k=k,
            v=v,
            dropout_p=0.0,
            softcap=self.softcap,
            alibi_slopes=None,
            return_softmax=False,
            **lengths_as_kwargs(lengths),
        )
        # 2.6 returns its padded inputs too, between the output and these last three.
        lse, _, _ = results[-3:]
        return results[0], lse

    def backward(
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :meth:`VarlenKernel.tile_backward`."""
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        (self._bwd if lengths is None else self._varlen_bwd)(
            tile,
            scale,
            dout=dout,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            dropout_p=0.0,
            softcap=self.softcap,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),  # as torch's own does
            **lengths_as_kwargs(lengths),
        )
        return dq, dk, dv


class _TorchFlash:
    """FlashAttention-2 as it is built into torch for CUDA.

    Raises:
        ImportError: it is not built in.
    """

    def __init__(self) -> None:
        if not torch.backends.cuda.is_flash_attention_available():
            raise ImportError("neither flash-attn is here nor FlashAttention in this torch")
        self.softcap, self.has_softcap = 0.0, False

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: TileOrCall,
        scale: float,
        lengths: SeqLengths | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`VarlenKernel.tile_forward`."""
        left, right = tile.window
        out, lse, *_ = _torch_forward(
            q,
            k,
            v,
            *(lengths or _equal_lengths(q, k)),
            0.0,
            tile.is_causal,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def backward(
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :meth:`VarlenKernel.tile_backward`."""
        left, right = tile.window
        # Without dropout the random state is passed through unread.
        unused_rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        return _torch_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            *(lengths or _equal_lengths(q, k)),
            0.0,
            tile.is_causal,
            unused_rng_state,
            unused_rng_state,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )


def _equal_lengths(q: torch.Tensor, k: torch.Tensor) -> tuple[None, None, int, int]:
    """In place of :class:`Lengths`, where every sample has the same: ``[B, S, H, D]``."""
    return None, None, q.shape[1], k.shape[1]
