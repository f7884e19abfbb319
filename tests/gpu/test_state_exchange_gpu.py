"""States and halos over NCCL: two ranks equal one GPU, also where a rank sends or needs nothing."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_ranks import needs_two, run_on_gpus

import ds_usp
from ds_usp import SequenceMesh, TokenLayout
from ds_usp.geometry.state_chains import Piece

pytestmark = [needs_two, pytest.mark.several_gpus]

TOKENS, CHANNELS = 61, 16
# The second rank needs nothing of the first, or tokens but no state; documents of one token.
DOCUMENTS: tuple[Any, ...] = ((), [0, 31, TOKENS], [0, 1, 2, 30, 60, TOKENS], [0, 45, 46, TOKENS])


def test_a_scan_and_a_convolution_over_nccl_equal_one_gpu():
    run_on_gpus(_compare, 2)


def _decay(tensors: list[torch.Tensor], piece: Piece) -> ds_usp.PieceMap:
    x, a = (y.float() for y in tensors)
    state, outs = torch.zeros_like(x[:, 0]), []
    for t in range(piece.length):
        state = a[:, t] * state + x[:, t]
        outs.append(state)
    left = a.cumprod(1)
    out = torch.stack(outs, 1).to(tensors[0].dtype)
    return ds_usp.PieceMap(out, state, left[:, -1], lambda s: left * s[:, None])


def _compare(rank: int, world: int) -> None:
    single = SequenceMesh.single()
    taps = torch.linspace(-1, 1, 4 * CHANNELS, device="cuda").view(CHANNELS, 1, 4)
    torch.manual_seed(0)  # equal on both
    full = torch.randn(2, TOKENS, CHANNELS, device="cuda")
    weight = torch.randn_like(full)

    def layer(x: torch.Tensor, mesh: SequenceMesh, layout: TokenLayout, documents: Any) -> Any:
        where: dict[str, Any] = {"mesh": mesh, "layout": layout, "documents": documents}

        def conv(y: torch.Tensor) -> torch.Tensor:
            return F.conv1d(F.pad(y, (3, 0)), taps.to(y.dtype), groups=CHANNELS)

        x = ds_usp.causal_conv(conv, x.transpose(1, 2), 4, **where).transpose(1, 2)
        decay = 1 - 0.05 * x.float().sigmoid()
        shape = (CHANNELS,)
        recurrence = ds_usp.Recurrence(_decay, shape, shape, piecewise=True)
        return ds_usp.affine_scan(recurrence, (x, decay), dims=(1, 1), out_dim=1, **where)

    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for degree in (1, world):
            mesh = SequenceMesh.from_group(None, degree)
            for kind in ("contiguous", "zigzag"):
                layout = mesh.layout(kind, TOKENS)
                for documents in DOCUMENTS:
                    x = full.to(dtype, copy=True).requires_grad_()
                    whole = layer(x, single, single.layout(kind, TOKENS), documents)
                    (whole * weight).sum().backward()
                    local = layout.shard(full.to(dtype), 1, rank).requires_grad_()
                    out = layer(local, mesh, layout, documents)
                    (out * layout.shard(weight, 1, rank)).sum().backward()
                    for got, wanted in ((out, whole), (local.grad, x.grad)):
                        part = layout.shard(wanted.detach(), 1, rank)
                        error = (got.detach() - part).abs().max() / wanted.abs().max()
                        assert error <= bound, (dtype, layout, documents, float(error))
            mesh.check()
