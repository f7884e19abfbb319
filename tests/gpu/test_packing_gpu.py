"""Packing for all ranks as one kernel, beside the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_usp.comm.channel import StagingBuffer, StridedView
from ds_usp.comm.packing import PackPlan, SendTensor, SendViews, pack_for_send
from ds_usp.comm.uniform_plan import (
    HeadRange,
    plan_to_heads,
    plan_to_sequence,
    strided,
)
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.token_slices import TokenSlices
from ds_usp.kernels.merge import GradAccumulator

fused = pytest.importorskip("ds_usp.comm.packing_triton", exc_type=ImportError)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOKENS = 37  # fills no block


def wide(*size: int) -> Tensor:
    """Numbers that lie in a tensor of twice as many heads."""
    *front, heads, dim = size
    x = torch.randn(*front, 2 * heads, dim, device="cuda", dtype=torch.bfloat16)
    return x[..., heads:, :]


def launched(plan: PackPlan, sources: list[Tensor], outs: list[Tensor]) -> Tensor:
    """The staging buffer, packed by the kernel. A second launch is of what the first compiled."""
    assert plan._fused is not None
    for _ in range(2):
        staging = torch.full(plan.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        for out in outs:
            out.fill_(-1)
        plan.pack(staging, sources, outs)
    return staging


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "context_parallel"])
@pytest.mark.parametrize("ranks, own_rank", [(2, 0), (2, 1), (4, 2), (3, 2)])
@pytest.mark.parametrize("shapes", [((4, 128),) * 3, ((6, 64), (2, 64), (2, 32)), ((40, 128),)])
def test_each_rank_gets_its_heads_and_its_tokens(
    shapes: tuple[tuple[int, int], ...], ranks: int, own_rank: int, layout: str, batch: int
) -> None:
    tokens = 2 * TOKENS
    runs = TokenLayout(layout, ranks * tokens, ranks, 1).runs(0)
    slices = TokenSlices.of_runs(runs, ranks)
    assert slices is not None
    own, length = slices.of_rank[own_rank], tokens // slices.per_rank
    ranges = tuple(HeadRange(0, heads, heads) for heads, _ in shapes)
    features = sum(heads * dim for heads, dim in shapes)

    shards = [wide(batch, tokens, ranks * heads, dim) for heads, dim in shapes]
    received = torch.empty(ranks * tokens, batch, features, device="cuda", dtype=torch.bfloat16)
    _, plan = plan_to_heads(ranks, own_rank, slices, ranges, *strided(shards))
    staging = launched(plan, shards, [received] * len(shards))
    for rank in range(ranks):
        heads = [x.unflatten(2, (ranks, -1))[:, :, rank].transpose(0, 1) for x in shards]
        piece = torch.cat([x.flatten(2) for x in heads], 2)
        if rank != own_rank:
            assert torch.equal(staging[rank], piece)
            continue
        for part, number in zip(piece.split(length), own, strict=True):
            assert torch.equal(received[number * length : (number + 1) * length], part)
    assert (received == -1).sum() >= (ranks - 1) * tokens * batch * features

    results = [wide(batch, ranks * tokens, heads, dim) for heads, dim in shapes]
    outs = [torch.empty_like(x) for x in shards]
    plan = plan_to_sequence(ranks, own_rank, slices, ranges, strided(results), strided(outs))
    staging = launched(plan, results, outs)
    pieces = torch.cat([x.transpose(0, 1).flatten(2) for x in results], 2).split(length)
    for number, piece in enumerate(pieces):
        if number not in own:
            assert torch.equal(staging[number], piece)
    for out, x in zip(outs, results, strict=True):
        want = torch.full_like(out, -1).unflatten(2, (ranks, -1))
        want[:, :, own_rank] = torch.cat([x.split(length, 1)[number] for number in own], 1)
        assert torch.equal(out, want.flatten(2, 3))

    # A kernel wrote them into the buffer: this rank's own pieces go to the outputs, nothing else.
    staging = torch.randn(plan.shape, device="cuda").bfloat16()
    written, before = StagingBuffer(staging).views(shapes, tokens_first=True), staging.clone()
    plan = plan_to_sequence(ranks, own_rank, slices, ranges, strided(written), strided(outs))
    assert plan._fused is not None
    for out in outs:
        out.fill_(-1)
    plan.pack(staging, written, outs, already_packed=True)
    assert torch.equal(staging, before)
    for out, x in zip(outs, written, strict=True):
        want = torch.full_like(out, -1).unflatten(2, (ranks, -1))
        want[:, :, own_rank] = torch.cat([x.split(length, 1)[number] for number in own], 1)
        assert torch.equal(out, want.flatten(2, 3))


def view_of(x: Tensor, base: Tensor) -> StridedView:
    """``x`` as a view of ``base``."""
    offset = (x.data_ptr() - base.data_ptr()) // x.element_size()
    return StridedView(tuple(x.shape), x.stride(), offset)


def check_one_by_one(own_rank: int, source: SendTensor, want: Tensor) -> None:
    """Every rank's piece ``[P, 1, s, B, h, D]`` is where it belongs."""
    ranks, _, tokens, batch, heads, dim = want.shape
    staging = want.new_full((ranks, tokens, batch, heads * dim), float("nan"))
    pack_for_send(staging, (own_rank,), ((heads, dim),), [source])
    for rank in range(ranks):
        if rank != own_rank:
            assert torch.equal(staging[rank], want[rank, 0].flatten(2))
    assert torch.equal(source.local_out[0], want[own_rank])


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
    own = wide(1, 1, TOKENS, 1, *shape)
    pieces = want.unflatten(1, (ranks, 1, -1)).permute(1, 2, 3, 0, 4, 5)
    check_one_by_one(own_rank, SendTensor(total, own), pieces)


def test_heads_that_are_no_neighbours_are_packed_one_by_one() -> None:
    ranks, own_rank, shape = 2, 0, (3, 64)
    x = torch.randn(1, ranks * 3, TOKENS, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    pieces = x.unflatten(2, (ranks, 3)).permute(2, 1, 0, 3, 4).unsqueeze(1)
    own = wide(1, 1, TOKENS, 1, *shape)
    views = [SendViews(view_of(pieces, x), view_of(own, own))]
    assert PackPlan((ranks, TOKENS, 1, 3 * 64), (own_rank,), views)._fused is None
    check_one_by_one(own_rank, SendTensor(pieces, own), pieces)
