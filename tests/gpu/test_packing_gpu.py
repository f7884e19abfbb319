"""Packing for all ranks as one kernel, beside the definition."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ds_usp.comm.channel import StagingBuffer, StridedView
from ds_usp.comm.packing import OwnTokens, PackPlan, SendTensor, SendViews, pack_for_send
from ds_usp.comm.uniform_all_to_all import (
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
@pytest.mark.parametrize("rest", [0, 1, 3])  # tokens over a multiple of the ranks' slices
@pytest.mark.parametrize("ranks, own_rank", [(2, 0), (2, 1), (4, 2), (3, 2)])
@pytest.mark.parametrize("shapes", [((4, 128),) * 3, ((6, 64), (2, 64), (2, 32)), ((40, 128),)])
def test_each_rank_gets_its_heads_and_its_tokens(
    shapes: tuple[tuple[int, int], ...],
    ranks: int,
    own_rank: int,
    rest: int,
    layout: str,
    batch: int,
) -> None:
    tokens = 2 * TOKENS * ranks + rest
    slices = TokenSlices.of_runs(TokenLayout(layout, tokens, ranks, 1).runs(0), ranks)
    assert slices is not None
    own = slices.of_rank[own_rank]
    ranges = tuple(HeadRange(0, heads, heads) for heads, _ in shapes)

    shards = [wide(batch, slices.lengths[own_rank], ranks * heads, dim) for heads, dim in shapes]
    sizes, plan, _ = plan_to_heads(own_rank, slices, ranges, *strided(shards))
    received = torch.empty(sizes.in_order, device="cuda", dtype=torch.bfloat16)
    staging = launched(plan, shards, [received] * len(shards))
    want_received = torch.full_like(received, -1)
    for rank in range(ranks):
        heads = [x.unflatten(2, (ranks, -1))[:, :, rank].transpose(0, 1) for x in shards]
        piece = torch.cat([x.flatten(2) for x in heads], 2)
        if rank != own_rank:
            assert torch.equal(staging[rank], piece)
            continue
        for start, stop, row in own:
            want_received[start:stop] = piece[row : row + stop - start]
    assert torch.equal(received, want_received)

    results = [wide(batch, tokens, heads, dim) for heads, dim in shapes]
    outs = [torch.empty_like(x) for x in shards]

    def own_of(sources: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, of which this rank's heads are written."""
        wanted = []
        for out, x in zip(outs, sources, strict=True):
            want = torch.full_like(out, -1).unflatten(2, (ranks, -1))
            want[:, :, own_rank] = torch.cat([x[:, start:stop] for start, stop, _ in own], 1)
            wanted.append(want.flatten(2, 3))
        return wanted

    plan = plan_to_sequence(own_rank, slices, ranges, strided(results), strided(outs))
    staging = launched(plan, results, outs)[0]
    whole = torch.cat([x.transpose(0, 1).flatten(2) for x in results], 2)
    for rank, of_rank in enumerate(slices.of_rank):
        for start, stop, _ in of_rank:
            assert rank == own_rank or torch.equal(staging[start:stop], whole[start:stop])
    assert all(map(torch.equal, outs, own_of(results)))

    # A kernel wrote them into the buffer: this rank's own tokens go to the outputs, nothing else.
    staging = torch.randn(sizes.in_order, device="cuda").bfloat16()
    written, before = StagingBuffer(staging).views(shapes, tokens_first=True), staging.clone()
    plan = plan_to_sequence(own_rank, slices, ranges, strided(written), strided(outs))
    assert plan._fused is not None
    for out in outs:
        out.fill_(-1)
    plan.pack(staging, written, outs, already_packed=True)
    assert torch.equal(staging, before)
    assert all(map(torch.equal, outs, own_of(written)))


def view_of(x: Tensor, base: Tensor) -> StridedView:
    """``x`` as a view of ``base``."""
    offset = (x.data_ptr() - base.data_ptr()) // x.element_size()
    return StridedView(tuple(x.shape), x.stride(), offset)


def check_one_by_one(source: SendTensor, own: OwnTokens, want: Tensor) -> None:
    """Every token ``[P, T, B, h, D]`` is where it belongs."""
    pieces, tokens, batch, heads, dim = want.shape
    staging = want.new_full((pieces, tokens, batch, heads * dim), float("nan"))
    pack_for_send(staging, own, ((heads, dim),), [source])
    is_own = torch.zeros(pieces, tokens, dtype=torch.bool)
    for start, stop, place in own.runs:
        is_own[own.piece, start:stop] = True
        assert torch.equal(
            source.local_out[place : place + stop - start], want[own.piece, start:stop]
        )
    for piece, token in (~is_own).nonzero().tolist():
        assert torch.equal(staging[piece, token], want[piece, token].flatten(1))


@pytest.mark.parametrize("calls", [1, 2])
def test_each_rank_gets_its_tokens_of_a_sum(calls: int) -> None:
    shape = (2, 128)
    like = torch.empty(1, 3 * TOKENS, *shape, device="cuda", dtype=torch.bfloat16)
    total, parts = GradAccumulator(like), []
    for _ in range(calls):
        parts.append(torch.randn_like(like))
        total.add(parts[-1], [(0, like.shape[1])])
    assert (total.as_tensor_if_single() is not None) == (calls == 1)
    want = torch.stack(parts).float().sum(0).bfloat16().transpose(0, 1)[None]
    own = OwnTokens(0, ((5, TOKENS, 0), (2 * TOKENS, 2 * TOKENS + 3, TOKENS - 5)))
    check_one_by_one(SendTensor(total, wide(TOKENS, 1, *shape)), own, want)


def test_heads_that_are_no_neighbours_are_packed_one_by_one() -> None:
    ranks, own, shape = 2, OwnTokens(0, ((0, TOKENS, 0),)), (3, 64)
    x = torch.randn(1, ranks * 3, TOKENS, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    pieces = x.unflatten(2, (ranks, 3)).permute(2, 1, 0, 3, 4)
    out = wide(TOKENS, 1, *shape)
    views = [SendViews(view_of(pieces, x), view_of(out, out))]
    assert PackPlan((ranks, TOKENS, 1, 3 * 64), own, views)._fused is None
    check_one_by_one(SendTensor(pieces, out), own, pieces)
