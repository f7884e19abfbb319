"""Packing for all ranks as one kernel, beside the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_usp.comm.packing import PackPlan, SendTensor, SendViews, StridedView, pack_for_send
from ds_usp.kernels.merge import GradAccumulator

fused = pytest.importorskip("ds_usp.comm.packing_triton", exc_type=ImportError)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOKENS = 37  # fills no block


def wide(*size: int) -> Tensor:
    """Numbers that lie in a tensor of twice as many heads."""
    *front, heads, dim = size
    x = torch.randn(*front, 2 * heads, dim, device="cuda", dtype=torch.bfloat16)
    return x[..., heads:, :]


def check(
    own_rank: int,
    shapes: tuple[tuple[int, int], ...],
    sources: list[SendTensor],
    want: list[Tensor],
) -> None:
    """Every rank's pieces ``[P, s, B, h, D]`` are where they belong."""
    ranks, tokens, batch = want[0].shape[:3]
    features = sum(heads * dim for heads, dim in shapes)
    staging = want[0].new_full((ranks, tokens, batch, features), float("nan"))
    pack_for_send(staging, own_rank, shapes, sources)
    packed = torch.cat([x.flatten(3) for x in want], 3)
    for rank in range(ranks):
        if rank != own_rank:
            assert torch.equal(staging[rank], packed[rank])
    for (_, own), x in zip(sources, want, strict=True):
        assert torch.equal(own, x[own_rank])


def view_of(x: Tensor, base: Tensor) -> StridedView:
    """``x`` as a view of ``base``."""
    offset = (x.data_ptr() - base.data_ptr()) // x.element_size()
    return StridedView(tuple(x.shape), x.stride(), offset)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("ranks, own_rank", [(2, 0), (2, 1), (4, 2), (3, 2)])
@pytest.mark.parametrize("shapes", [((4, 128),) * 3, ((6, 64), (2, 64), (2, 64)), ((40, 128),)])
def test_each_rank_gets_its_heads(
    shapes: tuple[tuple[int, int], ...], ranks: int, own_rank: int, batch: int
) -> None:
    views, sources, outs, want, own = [], [], [], [], []
    for heads, dim in shapes:
        sources.append(wide(batch, TOKENS, ranks * heads, dim))
        pieces = sources[-1].unflatten(2, (ranks, heads)).permute(2, 1, 0, 3, 4)
        outs.append(torch.full((TOKENS, batch, 2 * heads, dim), float("nan")).bfloat16().cuda())
        own.append(outs[-1][..., heads:, :])
        views.append(SendViews(view_of(pieces, sources[-1]), view_of(own[-1], outs[-1])))
        want.append(pieces)
    features = sum(heads * dim for heads, dim in shapes)
    plan = PackPlan((ranks, TOKENS, batch, features), own_rank, views)
    staging = torch.full(plan.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
    assert plan._fused is not None
    for _ in range(2):  # the second launch is of what the first one compiled
        for x in (*sources, *own):
            x.normal_()
        plan.pack(staging, sources, outs)
        packed = torch.cat([x.flatten(3) for x in want], 3)
        others = [rank for rank in range(ranks) if rank != own_rank]
        assert torch.equal(staging[others], packed[others])
        for out, x in zip(own, want, strict=True):
            assert torch.equal(out, x[own_rank])


@pytest.mark.parametrize("calls", [1, 2])
def test_each_rank_gets_its_tokens_of_a_sum(calls: int) -> None:
    ranks, own_rank, shape = 4, 1, (2, 128)
    like = torch.empty(1, ranks * TOKENS, *shape, device="cuda", dtype=torch.bfloat16)
    total, parts = GradAccumulator(like), []
    for _ in range(calls):
        parts.append(torch.randn_like(like))
        total.add(parts[-1], [(0, like.shape[1])])
    assert (total.as_tensor_if_single() is not None) == (calls == 1)
    want = torch.stack(parts).float().sum(0).bfloat16()
    own = wide(TOKENS, 1, *shape)
    pieces = want.unflatten(1, (ranks, -1)).permute(1, 2, 0, 3, 4)
    check(own_rank, (shape,), [SendTensor(total, own)], [pieces])


def test_heads_that_are_no_neighbours_are_packed_one_by_one() -> None:
    ranks, own_rank, shape = 2, 0, (3, 64)
    x = torch.randn(1, ranks * 3, TOKENS, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    pieces = x.unflatten(2, (ranks, 3)).permute(2, 1, 0, 3, 4)
    own = wide(TOKENS, 1, *shape)
    views = [SendViews(view_of(pieces, x), view_of(own, own))]
    assert PackPlan((ranks, TOKENS, 1, 3 * 64), own_rank, views)._fused is None
    check(own_rank, (shape,), [SendTensor(pieces, own)], [pieces])
