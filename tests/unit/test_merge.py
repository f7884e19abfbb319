"""Sums over blocks: each row is the sum of what covers it, in fp32, and is rounded once."""

from __future__ import annotations

import random
from itertools import pairwise

import oracle
import pytest
import torch

from ds_usp.kernels.merge import GradAccumulator, OutputAccumulator

# Relative errors of sums that are rounded once.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}
DTYPES = tuple(TOLERANCE)
B, TOKENS, HEADS, DIM = 2, 20, 3, 8
Span = tuple[int, int]


def random_spans(draw: random.Random) -> list[Span]:
    """Disjoint, ascending runs of rows, of which some are skipped."""
    edges = sorted(draw.sample(range(TOKENS + 1), draw.randint(2, 7)))
    spans = [span for span in pairwise(edges) if draw.random() < 0.7]
    return spans or [(edges[0], edges[-1])]


def rows_of(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def spread(part: torch.Tensor, spans: list[Span], dim: int, empty: float) -> torch.Tensor:
    """The rows of a part, in fp64, where they stand among all tokens."""
    shape = list(part.shape)
    shape[dim] = TOKENS
    whole = torch.full(shape, empty, dtype=torch.float64)
    at = 0
    for start, stop in spans:
        whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, at, stop - start))
        at += stop - start
    return whole


def rounded_once(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """Each element is within half a unit in the last place of the truth, as one rounding leaves
    it, besides what sums in fp32 lose."""
    half = torch.finfo(dtype).eps / 2
    lost = 2e-6 if dtype != torch.float64 else 1e-13
    return bool(((got.double() - want).abs() <= half * want.abs() + lost).all())


# As many calls as a ring makes; the first and the last one are kept and folded differently.
CALLS = [0, 1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("calls", CALLS)
def test_an_output_is_the_softmax_over_what_covers_each_row(calls: int, dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    for seed in range(40):
        draw = random.Random(seed)
        total = OutputAccumulator(torch.zeros(B, TOKENS, HEADS, DIM, dtype=dtype))
        values, sums = [], []
        for _ in range(calls):
            # Whole shards, halves as of a zigzag, and rows here and there.
            spans = draw.choice([[(0, TOKENS)], [(TOKENS // 2, TOKENS)], random_spans(draw)])
            part = torch.randn(B, rows_of(spans), HEADS, DIM).to(dtype)
            lse = 3 * torch.randn(B, HEADS, rows_of(spans), dtype=wide)
            values.append(spread(part, spans, 1, 0.0))
            sums.append(spread(lse, spans, 2, float("-inf")))
            # A call's rows are all between the outermost; those of no tile have no sum.
            hull = (spans[0][0], spans[-1][1])
            rows = slice(*hull)
            mine = values[-1][:, rows].to(dtype), sums[-1][:, :, rows].to(wide)
            total.add(*(x.clone() for x in mine), hull)  # which may write to it
        out, lse = total.result()
        assert out.shape == (B, TOKENS, HEADS, DIM) and out.dtype == dtype and lse.dtype == wide
        if not calls:
            assert not out.any() and bool((lse == float("-inf")).all())
            continue
        want_lse = torch.stack(sums).logsumexp(0)
        covered = want_lse > float("-inf")
        assert torch.equal(lse > float("-inf"), covered)
        assert oracle.relative_error(lse[covered], want_lse[covered]) < TOLERANCE[wide]
        weights = (torch.stack(sums) - want_lse).exp().nan_to_num(0.0)
        want = (weights.transpose(2, 3).unsqueeze(-1) * torch.stack(values)).sum(0)
        assert oracle.relative_error(out, want) < TOLERANCE[dtype]
        assert rounded_once(out, want, dtype)
        assert not out[~covered.transpose(1, 2)].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide_parts", [False, True], ids=["as the shard", "wide"])
@pytest.mark.parametrize("calls", CALLS)
def test_a_gradient_is_the_sum_of_what_covers_each_row(
    calls: int, wide_parts: bool, dtype: torch.dtype
) -> None:
    given = torch.promote_types(dtype, torch.float32) if wide_parts else dtype
    for seed in range(40):
        draw = random.Random(seed)
        total = GradAccumulator(torch.zeros(B, TOKENS, HEADS, DIM, dtype=dtype))
        want = torch.zeros(B, TOKENS, HEADS, DIM, dtype=torch.float64)
        for _ in range(calls):
            spans = draw.choice([[(0, TOKENS)], [(0, TOKENS // 2)], random_spans(draw)])
            part = torch.randn(B, rows_of(spans), HEADS, DIM).to(given)
            want += spread(part, spans, 1, 0.0)
            total.add(part, spans)
        got, place = total.result(), torch.full_like(want, float("nan"), dtype=dtype)
        total.write(place)
        assert got.dtype == dtype and torch.equal(place, got)
        assert oracle.relative_error(got, want) < TOLERANCE[dtype]
        assert rounded_once(got, want, dtype), (calls, seed)
        assert torch.equal(got == 0, want == 0)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32], ids=str)
def test_two_gradients_in_bf16_are_the_exact_sum_rounded(given: torch.dtype) -> None:
    first, second = (torch.randn(1, 4096, 1, 1).to(given) for _ in "ab")
    total = GradAccumulator(first.bfloat16())
    total.add(first, [(0, 4096)])
    total.add(second, [(0, 4096)])
    assert torch.equal(total.result(), (first.double() + second.double()).bfloat16())


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_call_may_cover_a_token_many_times(dtype: torch.dtype, before: int) -> None:
    # Tiles have rows of their own, but may see the same keys: four spans over the same tokens.
    spans = [(0, 12), (4, 16), (5, 9), (5, TOKENS)]
    total = GradAccumulator(torch.zeros(B, TOKENS, HEADS, DIM, dtype=dtype))
    want = torch.zeros(B, TOKENS, HEADS, DIM, dtype=torch.float64)
    for _ in range(before):
        part = torch.randn(B, TOKENS, HEADS, DIM).to(dtype)
        total.add(part, [(0, TOKENS)])
        want += part.double()
    part = torch.randn(B, rows_of(spans), HEADS, DIM).to(dtype)
    at = 0
    for start, stop in spans:
        want[:, start:stop] += part[:, at : at + stop - start].double()
        at += stop - start
    total.add(part, spans)
    assert rounded_once(total.result(), want, dtype)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("borrowed", [{0}, {1}, {1, 3}, {0, 1, 2, 3, 4}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_that_comes_again_may_be_written_over(
    dtype: torch.dtype, borrowed: set[int], parts: int
) -> None:
    total = GradAccumulator(torch.zeros(B, TOKENS, HEADS, DIM, dtype=dtype))
    want = torch.zeros(B, TOKENS, HEADS, DIM, dtype=torch.float64)
    for index in range(parts):
        start, stop = (0, TOKENS) if index % 2 == 0 else (3, 17)
        part = torch.randn(B, stop - start, HEADS, DIM).to(dtype)
        want[:, start:stop] += part.double()
        total.add(part, [(start, stop)], sum_now=index in borrowed)
        if index in borrowed:
            part.fill_(float("nan"))
    assert rounded_once(total.result(), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_that_wait_are_summed_with_those_that_do_not(dtype: torch.dtype) -> None:
    for seed in range(100):
        draw = random.Random(seed)
        total = GradAccumulator(torch.zeros(B, TOKENS, HEADS, DIM, dtype=dtype))
        want = torch.zeros(B, TOKENS, HEADS, DIM, dtype=torch.float64)
        for _ in range(draw.randint(1, 6)):
            spans = random_spans(draw)
            part = torch.randn(B, rows_of(spans), HEADS, DIM).to(dtype)
            want += spread(part, spans, 1, 0.0)
            borrowed = draw.random() < 0.3
            total.add(part, spans, sum_now=borrowed, defer=not borrowed and draw.random() < 0.5)
            if borrowed:
                part.fill_(float("nan"))
        assert rounded_once(total.result(), want, dtype), seed


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_one_call_for_the_whole_shard_is_taken_over_as_it_is() -> None:
    part, lse = torch.randn(B, TOKENS, HEADS, DIM), torch.randn(B, HEADS, TOKENS)
    total, grads = OutputAccumulator(part), GradAccumulator(part)
    total.add(part, lse, (0, TOKENS))
    grads.add(part, [(0, TOKENS)])
    assert all(map(shares_memory, (*total.result(), grads.result()), (part, lse, part)))


def test_what_the_first_call_alone_covers_is_not_copied() -> None:
    part, lse = torch.randn(B, TOKENS, HEADS, DIM), torch.randn(B, HEADS, TOKENS)
    alone, rest = part[:, :3].clone(), slice(3, TOKENS)
    total = OutputAccumulator(part)
    total.add(part, lse, (0, TOKENS))
    total.add(torch.randn_like(part[:, rest]), torch.randn_like(lse[:, :, rest]), (3, TOKENS))
    out, sums = total.result()
    assert shares_memory(out, part) and shares_memory(sums, lse)
    assert torch.equal(out[:, :3], alone)


def test_a_padded_first_call_is_not_what_is_kept() -> None:
    padded, lse = torch.randn(B, TOKENS, HEADS, 2 * DIM), torch.randn(B, HEADS, TOKENS)
    total = OutputAccumulator(padded[..., :DIM], DIM)
    for _ in range(2):
        total.add(padded[..., :DIM], lse.clone(), (0, TOKENS))
    out, _ = total.result()
    assert out.untyped_storage().nbytes() == out.numel() * out.element_size()


def lse_rounding(dtype: torch.dtype, size: float) -> float:
    """What a log-sum-exp of that size, rounded to the dtype, does to the weights exp(s - lse)."""
    return 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * abs(size)


# Log-sum-exps of three blocks, from all alike to so far apart that exp would overflow or vanish.
SUMS = [
    (0.0, 0.0, 0.0),
    (-3.0, 0.5, 2.0),
    (88.0, 89.5, 90.0),
    (-105.0, -104.0, -103.5),
    (1e4, 1e4 + 1, -1e4),
    (-1e4, 3.0, 1e4),
    (1e30, -1e30, 0.0),
    (-1e30, 1e30, -1e30),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("sums", SUMS, ids=str)
def test_merge_weighs_blocks_by_their_sums_however_far_apart(
    sums: tuple[float, ...], order: tuple[int, ...], dtype: torch.dtype
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    parts = torch.randn(3, 1, TOKENS, 2, 4).to(dtype)
    lses = torch.tensor(sums, dtype=wide).view(3, 1, 1, 1).expand(3, 1, 2, TOKENS).clone()
    total = OutputAccumulator(parts[0])
    for index in order:
        total.add(parts[index].clone(), lses[index].clone(), (0, TOKENS))
    out, lse = total.result()
    weights = torch.softmax(lses.double(), 0).transpose(2, 3).unsqueeze(-1)
    first, second = sorted(sums)[:0:-1]
    tolerance = TOLERANCE[dtype] + (lse_rounding(wide, first) if first - second < 50 else 0)
    assert oracle.relative_error(out, (weights * parts.double()).sum(0)) < tolerance
    assert oracle.relative_error(lse, torch.logsumexp(lses.double(), 0)) < TOLERANCE[wide]


def test_rows_that_no_block_touches_are_empty() -> None:
    q = torch.randn(1, 4, 2, 3)
    out, lse = OutputAccumulator(q).result()
    assert not out.any() and bool((lse == float("-inf")).all())
    total = OutputAccumulator(q)
    total.add(torch.ones(1, 2, 2, 3), torch.zeros(1, 2, 2), (2, 4))
    out, lse = total.result()
    assert torch.equal(out[0, :, 0, 0], torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert lse[0, 0].tolist() == [float("-inf")] * 2 + [0.0] * 2
    assert torch.equal(GradAccumulator(q).result(), torch.zeros_like(q))


def test_gradients_are_summed_wide_and_rounded_once() -> None:
    total = GradAccumulator(torch.zeros(1, 4, 1, 1, dtype=torch.bfloat16))
    total.add(torch.ones(1, 4, 1, 1, dtype=torch.bfloat16), [(0, 4)])
    for _ in range(4):  # each of them alone vanishes beside 1 in bf16
        total.add(torch.full((1, 3, 1, 1), 2.0**-9, dtype=torch.bfloat16), [(0, 1), (2, 4)])
    expected = torch.tensor([1 + 2.0**-7, 1, 1 + 2.0**-7, 1 + 2.0**-7])
    assert torch.equal(total.result().flatten(), expected.bfloat16())


def test_sums_are_dense_in_their_features_whatever_the_shard_is() -> None:
    # The fused sums read features as neighbours.
    strided = torch.randn(1, 8, 4, 6).transpose(2, 3)
    out, gradient = OutputAccumulator(strided), GradAccumulator(strided)
    for start, stop in ((0, 8), (2, 6), (2, 6)):
        part = torch.randn(1, stop - start, 6, 4)
        out.add(part, torch.randn(1, 6, stop - start), (start, stop))
        gradient.add(part, [(start, stop)])
    assert out.result()[0].stride(-1) == 1
    assert gradient.result().stride(-1) == 1
    assert OutputAccumulator(strided).result()[0].stride(-1) == 1
