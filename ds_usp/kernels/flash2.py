"""FlashAttention-2: the ``flash-attn`` package, or the same kernels as torch has them."""

from __future__ import annotations

from dataclasses import replace

import torch
from packaging.version import Version

from ds_usp.geometry.tiles import TileSupport
from ds_usp.kernels.api import QKV, BackwardInputs, KernelCaps, OutLse, require_capability
from ds_usp.kernels.head_dims import HEAD_DIMS
from ds_usp.kernels.varlen import (
    BACKWARD_ARGS,
    Lengths,
    SeqLengths,
    SignatureAdapter,
    TileOrCall,
    VarlenKernel,
)

_MIN_VERSION, _MIN_VERSION_SOFTCAP = Version("2.6"), Version("2.6.2")  # before: no backward of it
_COMMON_ARGS = ("q", "k", "v", "dropout_p", "softcap", "alibi_slopes")

_torch_forward = torch.ops.aten._flash_attention_forward
_torch_backward = torch.ops.aten._flash_attention_backward


class Flash2Kernel(VarlenKernel):
    """Grouped heads, windows and bottom-right causal masks natively."""

    # The library takes a window bound of as many tokens as there are keys or more as none, which is
    # right as long as there are no more queries than keys: tall=False.
    name = "flash2"
    caps = KernelCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_dims=HEAD_DIMS["flash2", None],
        tiles=TileSupport(tall=False),
        softcap=True,
        deterministic=True,
        varlen=True,
    )

    # registry.py makes it once a process; an ImportError says why it cannot be used here.
    def __init__(self) -> None:
        require_capability(8, "FlashAttention-2")
        self._library: _FlashAttnPackage | _TorchFlash
        try:
            self._library = _FlashAttnPackage()
        except (ImportError, AttributeError):
            self._library = _TorchFlash()
        if not self._library.has_softcap:
            self.caps = replace(self.caps, softcap=False)

    # The base classes call these two: of a tile with tensors [B, tokens, heads, D] and lse
    # [B, H, rows]; with ``lengths`` of all tiles of a call, packed [N, heads, D] and [H, N].
    def tile_forward(
        self, qkv: QKV, tile: TileOrCall, scale: float, lengths: Lengths = None
    ) -> OutLse:
        return self._library.forward(qkv, tile, scale, lengths, self.softcap)

    def tile_backward(
        self, saved: BackwardInputs, tile: TileOrCall, scale: float, lengths: Lengths = None
    ) -> QKV:
        return self._library.backward(saved, tile, scale, lengths, self.softcap)


class _FlashAttnPackage:
    """The ``flash-attn`` package. It has the methods of :class:`_TorchFlash`, for tensors as those
    of :class:`Flash2Kernel`; a soft cap of 0.0 is none.

    Raises:
        ImportError, AttributeError: it is not here, or in a version that lacks a function or
            parameter.
    """

    def __init__(self) -> None:
        import flash_attn  # flash-attn-4 alone leaves a folder of its name
        from flash_attn import flash_attn_interface as library

        version = Version(flash_attn.__version__)
        if version < _MIN_VERSION:
            raise ImportError(f"flash-attn {version} is older than {_MIN_VERSION}")
        self.has_softcap = version >= _MIN_VERSION_SOFTCAP
        forward = (*_COMMON_ARGS, "return_softmax")
        backward = (*_COMMON_ARGS, *BACKWARD_ARGS)
        varlen = SeqLengths._fields
        self._fwd = SignatureAdapter(library._flash_attn_forward, *forward)
        self._bwd = SignatureAdapter(library._flash_attn_backward, *backward)
        self._varlen_fwd = SignatureAdapter(library._flash_attn_varlen_forward, *forward, *varlen)
        self._varlen_bwd = SignatureAdapter(library._flash_attn_varlen_backward, *backward, *varlen)

    def forward(
        self, qkv: QKV, tile: TileOrCall, scale: float, lengths: Lengths, softcap: float
    ) -> OutLse:
        q, k, v = qkv
        results = (self._fwd if lengths is None else self._varlen_fwd)(
            tile,
            scale,
            lengths,
            q=q,
            k=k,
            v=v,
            dropout_p=0.0,
            softcap=softcap,
            alibi_slopes=None,
            return_softmax=False,
        )
        # 2.6 returns its padded inputs too, between the output and these last three.
        lse, _dropout_mask, _rng_state = results[-3:]
        return results[0], lse

    def backward(
        self,
        saved: BackwardInputs,
        tile: TileOrCall,
        scale: float,
        lengths: Lengths,
        softcap: float,
    ) -> QKV:
        bwd = self._bwd if lengths is None else self._varlen_bwd
        options = {"dropout_p": 0.0, "softcap": softcap, "alibi_slopes": None}
        return bwd.gradients(saved, tile, scale, lengths, **options)


class _TorchFlash:
    """FlashAttention-2 as it is built into torch for CUDA; it has no soft cap."""

    has_softcap = False

    def __init__(self) -> None:
        if not torch.backends.cuda.is_flash_attention_available():
            raise ImportError("neither flash-attn is here nor FlashAttention in this torch")

    def forward(
        self, qkv: QKV, tile: TileOrCall, scale: float, lengths: Lengths, softcap: float
    ) -> OutLse:
        q, k, v = qkv
        sizes = lengths or _equal_lengths(q, k)
        left, right = tile.window
        out, lse, *_ = _torch_forward(
            q,
            k,
            v,
            *sizes,
            0.0,  # dropout
            tile.is_causal,
            False,  # return no dropout mask
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def backward(
        self,
        saved: BackwardInputs,
        tile: TileOrCall,
        scale: float,
        lengths: Lengths,
        softcap: float,
    ) -> QKV:
        # Without dropout the random state is passed through unread.
        rng = torch.empty(2, dtype=torch.uint64, device=saved.q.device)
        saved = saved._replace(lse=saved.lse.contiguous())
        sizes = lengths or _equal_lengths(saved.q, saved.k)
        left, right = tile.window
        return _torch_backward(
            *saved,  # the operator's order is that of BackwardInputs
            *sizes,
            0.0,  # dropout
            tile.is_causal,
            rng,
            rng,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )


def _equal_lengths(q: torch.Tensor, k: torch.Tensor) -> tuple[None, None, int, int]:
    """The fields of :class:`SeqLengths` for a single tile, in which all samples have one length."""
    return None, None, q.shape[1], k.shape[1]
