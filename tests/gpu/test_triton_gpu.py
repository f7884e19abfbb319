"""Kernels in Triton beside their definition in torch or fp64."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ds_usp.attention.kv_exchange import _plan_run
from ds_usp.comm.channel import StagingBuffer, StridedView
from ds_usp.comm.packing import OwnTokens, PackPlan, SendTensor, SendViews, pack_for_send
from ds_usp.comm.uniform_all_to_all import HeadRange, plan_to_heads, plan_to_sequence, strided
from ds_usp.geometry.layout import TokenLayout, TokenSlices
from ds_usp.kernels.merge import GradAccumulator, _merge_into, _sum_into
from ds_usp.lowlevel import CachedLauncher
from ds_usp.testing import relative_error
from ds_usp.training.loss import Logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
SHAPE = 2, 70, 3, 40  # neither rows nor features fill a block


def strided_views(dtype: torch.dtype) -> torch.Tensor:
    """``[B, S, H, D]`` inside of a larger tensor."""
    batch, rows, heads, dim = SHAPE
    return (
        torch.randn(rows, batch, 2 * heads, dim, device="cuda")
        .to(dtype)[:, :, 1::2]
        .transpose(0, 1)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "into the first"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_merge_is_the_softmax_over_all_sets_of_keys(count, in_place, dtype):
    acc_dtype = torch.promote_types(dtype, torch.float32)
    batch, rows, heads, _ = SHAPE
    partials = []
    for index in range(count):
        lse = 4 * torch.randn(batch, heads, rows, device="cuda", dtype=acc_dtype)
        lse[:, :, index::5] = float("-inf")  # and some rows attend to no key of any set
        lse[:, :, 4::5] = float("-inf")
        partials.append((strided_views(dtype), lse))
    sums = torch.stack([x for _, x in partials]).double()
    values = torch.stack([x for x, _ in partials]).double()
    out, lse = partials[0] if in_place else (strided_views(dtype), torch.empty_like(partials[0][1]))
    _merge_into(out, lse, partials)
    want_lse = sums.logsumexp(0)
    weights = (sums - want_lse).exp().nan_to_num(0.0).transpose(2, 3).unsqueeze(-1)
    want = (weights * values).sum(0)
    seen = want_lse > float("-inf")
    assert torch.equal(lse > float("-inf"), seen) and not seen.all()
    assert relative_error(lse[seen], want_lse[seen]) < (
        1e-13 if acc_dtype == torch.float64 else 1e-6
    )
    limit = {torch.bfloat16: 4e-3, torch.float32: 1e-6, torch.float64: 1e-13}[dtype]
    assert relative_error(out, want) < limit
    assert not out[~seen.transpose(1, 2)].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4, 8, 9])
def test_a_sum_is_rounded_once(count, dtype):
    partials, out = [strided_views(dtype) for _ in range(count)], strided_views(dtype)
    _sum_into(out, partials)
    want = torch.stack(partials).double().sum(0)
    limit = {torch.bfloat16: 4e-3, torch.float32: 1e-6, torch.float64: 1e-13}[dtype]
    assert relative_error(out, want) < limit
    if count == 2:  # torch adds in place: the same bits
        total = partials[0].contiguous()
        _sum_into(total, [total, partials[1]])
        assert torch.equal(total, out)


fused = pytest.importorskip("ds_usp.comm.packing_triton", exc_type=ImportError)
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
@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 128),) * 3,
        ((6, 64), (2, 64), (2, 32)),
        ((40, 128),),
        ((6, 64), (2, 64), (2, 32), (6, 32), (6, 32)),
    ],
)
def test_each_rank_gets_its_heads_and_its_tokens(shapes, ranks, own_rank, rest, layout, batch):
    tokens = 2 * TOKENS * ranks + rest
    slices = TokenSlices.from_runs(TokenLayout(layout, tokens, ranks, 1).runs(0), ranks)
    assert slices is not None
    own = slices.by_rank[own_rank]
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
    for rank, of_rank in enumerate(slices.by_rank):
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


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dims", [(64, 64), (128, 32)])
def test_a_run_of_keys_and_values_is_packed(dims, batch):
    start, stop = 5, 2 * TOKENS
    keys_values = [wide(batch, 3 * TOKENS, 3, dim) for dim in dims]
    outs = [torch.empty_like(x) for x in keys_values]
    staging = launched(_plan_run((start, stop), *strided(keys_values)), keys_values, outs)
    want = torch.cat([x[:, start:stop].transpose(0, 1).flatten(2) for x in keys_values], 2)
    assert torch.equal(staging[0], want)
    assert all(bool((out == -1).all()) for out in outs)  # no token is this rank's own


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
def test_each_rank_gets_its_tokens_of_a_sum(calls):
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


def test_heads_that_are_no_neighbours_are_packed_one_by_one():
    ranks, own, shape = 2, OwnTokens(0, ((0, TOKENS, 0),)), (3, 64)
    x = torch.randn(1, ranks * 3, TOKENS, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    pieces = x.unflatten(2, (ranks, 3)).permute(2, 1, 0, 3, 4)
    out = wide(TOKENS, 1, *shape)
    views = [SendViews(view_of(pieces, x), view_of(out, out))]
    assert PackPlan((ranks, TOKENS, 1, 3 * 64), own, views)._fused is None
    check_one_by_one(SendTensor(pieces, out), own, pieces)


pytest.importorskip("ds_usp.training.logits_triton", exc_type=ImportError)
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 5e-4}  # the gradient's dtype


@pytest.mark.parametrize("words", [1, 24, 4096, 50257])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_losses_and_gradient_are_those_in_fp64(dtype, words):
    tokens = 37
    scores = (5 * torch.randn(tokens, words + 8, device="cuda")).to(dtype)[:, :words]
    scores[0] += 300  # large as a whole: the losses are not
    labels = torch.randint(0, words, (tokens,), device="cuda")
    labels[1::5] = words + 3  # other ranks' words: no part of the loss here
    dlosses = torch.rand(tokens, device="cuda")
    dlosses[2] = 0
    wide = scores.double().requires_grad_()
    mine = labels < words
    aimed = wide.gather(1, torch.where(mine, labels, 0).unsqueeze(1)).squeeze(1)
    largest = wide.detach().max(dim=1).values  # what a label elsewhere is not compared with
    losses = wide.logsumexp(dim=1) - torch.where(mine, aimed, largest)
    (want,) = torch.autograd.grad(losses, wide, dlosses.double())
    logits = Logits(scores, labels, None)
    assert relative_error(logits.losses, losses.detach()) < 2e-6
    actual = logits.gradient(dlosses)
    assert actual.data_ptr() == scores.data_ptr() and actual.dtype == dtype
    assert relative_error(actual, want) < LIMITS[dtype]


def test_what_is_no_number_stays_one():
    scores = torch.randn(3, 5000, device="cuda")
    scores[1, 4500] = float("nan")
    losses = Logits(scores, torch.zeros(3, dtype=torch.int64, device="cuda"), None).losses
    assert losses.isnan().tolist() == [False, True, False]


def test_words_that_cannot_be_do_not_count():
    """A whole block of them, with which a row begins."""
    scores = torch.randn(2, 9000, device="cuda")
    scores[:, :5000] = float("-inf")
    want = scores.double().softmax(dim=1)
    labels = torch.tensor([8000, 6000], device="cuda")
    losses = torch.nn.functional.cross_entropy(scores.double(), labels, reduction="none")
    logits = Logits(scores, labels, None)
    assert relative_error(logits.losses, losses) < 2e-6
    want[torch.arange(2, device="cuda"), labels] -= 1
    assert relative_error(logits.gradient(torch.ones(2, device="cuda")), want) < 2e-6


triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _scaled(out, x, count, factor, BLOCK: tl.constexpr, TWICE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count) * factor
    if TWICE:
        value += value
    tl.store(out + at, value, mask=at < count)


def test_every_launch_computes_with_its_own_arguments():
    launch = CachedLauncher(_scaled)
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            for count, factor in ((64, 1), (64, 16), (63, 3), (640, 2**33)):
                for first in (0, 1, 8):
                    for twice in (False, True):
                        x = torch.randint(-8, 8, (count + 8,), device="cuda").to(dtype)[first:]
                        x, out = x[:count], torch.zeros(count, device="cuda", dtype=dtype)
                        grid = (triton.cdiv(count, 32),)
                        launch(grid, (out, x), (count, factor), BLOCK=32, TWICE=twice)
                        assert torch.equal(out, (x.double() * factor * (1 + twice)).to(dtype))
    assert len(launch._cache) == 8
    assert sum(len(prepared._compiled) for prepared in launch._cache.values()) == 32
