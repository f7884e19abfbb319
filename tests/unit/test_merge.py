"""Accumulators of kernel calls: each row is the sum of what covers it, in fp32, rounded once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_usp import testing as oracle
from ds_usp.kernels.merge import GradAccumulator, OutputAccumulator

# Relative errors of sums that are rounded once.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}
DTYPES = tuple(TOLERANCE)
B, TOKENS, HEADS, DIM = 2, 20, 3, 8

BOUNDS = st.tuples(st.integers(0, TOKENS), st.integers(0, TOKENS))
SPANS = st.just((0, TOKENS)) | BOUNDS.filter(lambda x: x[0] != x[1]).map(lambda x: tuple(sorted(x)))
# As many calls as a ring makes; the first ones are kept, more are summed into an accumulator.
MAX_CALLS = 7


def rounded_once(actual: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """Each element is within half a unit in the last place of the reference, as one rounding leaves
    it, besides what sums in fp32 lose."""
    half = torch.finfo(dtype).eps / 2
    lost = 2e-6 if dtype != torch.float64 else 1e-13
    return bool(((actual.double() - want).abs() <= half * want.abs() + lost).all())


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.tuples(SPANS, st.sets(st.integers(0, TOKENS - 1))), max_size=MAX_CALLS),
)
def test_an_output_is_the_softmax_over_what_covers_each_row(
    dtype: torch.dtype, calls: list[tuple[tuple[int, int], set[int]]]
) -> None:
    """Calls of row spans, of which some rows attend to no key."""
    acc_dtype = torch.promote_types(dtype, torch.float32)
    total = OutputAccumulator(torch.zeros(B, TOKENS, HEADS, DIM, dtype=dtype))
    values, lses = [], [torch.full((B, HEADS, TOKENS), float("-inf"), dtype=torch.float64)]
    for (start, stop), empty in calls:
        value = torch.randn(B, stop - start, HEADS, DIM).to(dtype)
        lse = 4 * torch.randn(B, HEADS, stop - start, dtype=acc_dtype)
        hidden = [row - start for row in empty if start <= row < stop]
        value[:, hidden], lse[:, :, hidden] = 0.0, float("-inf")
        values.append(torch.zeros(B, TOKENS, HEADS, DIM, dtype=torch.float64))
        values[-1][:, start:stop] = value
        lses.append(lses[0].clone())
        lses[-1][:, :, start:stop] = lse
        total.add(value, lse, (start, stop))
    out, lse = total.result()
    assert out.shape == (B, TOKENS, HEADS, DIM) and out.dtype == dtype and lse.dtype == acc_dtype
    want_lse = torch.stack(lses).logsumexp(0)
    covered = want_lse > float("-inf")
    assert torch.equal(lse > float("-inf"), covered)
    assert not out[~covered.transpose(1, 2)].any()
    assert oracle.relative_error(lse[covered], want_lse[covered]) < TOLERANCE[acc_dtype]
    weights = (torch.stack(lses) - want_lse).exp().nan_to_num(0.0).transpose(2, 3).unsqueeze(-1)
    want = sum((w * x for w, x in zip(weights[1:], values, strict=True)), torch.zeros(out.shape))
    assert oracle.relative_error(out, want) < TOLERANCE[dtype]
    assert rounded_once(out, want, dtype)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    st.sampled_from(DTYPES),
    st.booleans(),
    st.lists(
        st.tuples(
            st.lists(SPANS, min_size=1, max_size=4), st.sampled_from(["", "sum_now", "defer"])
        ),
        max_size=MAX_CALLS,
    ),
    st.integers(0, TOKENS - 1),
)
def test_a_gradient_is_the_sum_of_what_covers_each_row(
    dtype: torch.dtype, fp32_grads: bool, calls: list[tuple[list[tuple[int, int]], str]], first: int
) -> None:
    """Spans of a call may overlap: tiles have rows of their own, but may attend to the same keys.
    What is summed at once may be overwritten; what is deferred may not."""
    partial_dtype = torch.promote_types(dtype, torch.float32) if fp32_grads else dtype
    total = GradAccumulator(torch.zeros(B, TOKENS, HEADS, DIM, dtype=dtype))
    want = torch.zeros(B, TOKENS, HEADS, DIM, dtype=torch.float64)
    for spans, mode in calls:
        pieces = [torch.randn(B, stop - start, HEADS, DIM) for start, stop in spans]
        grad = torch.cat(pieces, 1).to(partial_dtype)
        for (start, stop), piece in zip(spans, pieces, strict=True):
            want[:, start:stop] += piece.to(partial_dtype).double()
        total.add(grad, spans, **({mode: True} if mode else {}))
        if mode == "sum_now":
            grad.fill_(float("nan"))
    rest = GradAccumulator(torch.zeros(B, TOKENS - first, HEADS, DIM, dtype=dtype))
    total.transfer_to(first, rest)
    sums = {"result": total.result(), "transferred": rest.result()}
    sums |= {name: torch.full_like(sums["result"], float("nan")) for name in ("all", "later")}
    sums["later"] = sums["later"][:, first:]
    total.write(sums["all"])
    total.write(sums["later"], first)
    for name, actual in sums.items():
        expected = want[:, TOKENS - actual.shape[1] :]
        assert actual.dtype == dtype and rounded_once(actual, expected, dtype), name
        assert oracle.relative_error(actual, expected) < TOLERANCE[dtype]
        assert torch.equal(actual == 0, expected == 0)


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_one_call_for_the_whole_shard_is_taken_over_as_it_is() -> None:
    partial, lse = torch.randn(B, TOKENS, HEADS, DIM), torch.randn(B, HEADS, TOKENS)
    total, grads = OutputAccumulator(partial), GradAccumulator(partial)
    total.add(partial, lse, (0, TOKENS))
    grads.add(partial, [(0, TOKENS)])
    assert all(map(shares_memory, (*total.result(), grads.result()), (partial, lse, partial)))


def test_what_the_first_call_alone_covers_is_not_copied() -> None:
    partial, lse = torch.randn(B, TOKENS, HEADS, DIM), torch.randn(B, HEADS, TOKENS)
    alone, rest = partial[:, :3].clone(), slice(3, TOKENS)
    total = OutputAccumulator(partial)
    total.add(partial, lse, (0, TOKENS))
    total.add(torch.randn_like(partial[:, rest]), torch.randn_like(lse[:, :, rest]), (3, TOKENS))
    out, sums = total.result()
    assert shares_memory(out, partial) and shares_memory(sums, lse)
    assert torch.equal(out[:, :3], alone)


def test_a_padded_first_call_is_not_what_is_kept() -> None:
    padded, lse = torch.randn(B, TOKENS, HEADS, 2 * DIM), torch.randn(B, HEADS, TOKENS)
    total = OutputAccumulator(padded[..., :DIM], DIM)
    for _ in range(2):
        total.add(padded[..., :DIM], lse.clone(), (0, TOKENS))
    grads = GradAccumulator(padded[..., :DIM])
    grads.add(padded[..., :DIM], [(0, TOKENS)])
    for x in (total.result()[0], grads.result()):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


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
    acc_dtype = torch.promote_types(dtype, torch.float32)
    partials = torch.randn(3, 1, TOKENS, 2, 4).to(dtype)
    lses = torch.tensor(sums, dtype=acc_dtype).view(3, 1, 1, 1).expand(3, 1, 2, TOKENS).clone()
    total = OutputAccumulator(partials[0])
    for index in order:
        total.add(partials[index].clone(), lses[index].clone(), (0, TOKENS))
    out, lse = total.result()
    weights = torch.softmax(lses.double(), 0).transpose(2, 3).unsqueeze(-1)
    first, second = sorted(sums)[:0:-1]
    # A log-sum-exp of that size, rounded to the dtype, changes the weights exp(s - lse).
    lse_rounding = 4 * torch.finfo(acc_dtype).eps * abs(first) if first - second < 50 else 0
    tolerance = TOLERANCE[dtype] + lse_rounding
    assert oracle.relative_error(out, (weights * partials.double()).sum(0)) < tolerance
    assert oracle.relative_error(lse, torch.logsumexp(lses.double(), 0)) < TOLERANCE[acc_dtype]


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
        partial = torch.randn(1, stop - start, 6, 4)
        out.add(partial, torch.randn(1, 6, stop - start), (start, stop))
        gradient.add(partial, [(start, stop)])
    assert out.result()[0].stride(-1) == 1
    assert gradient.result().stride(-1) == 1
    assert OutputAccumulator(strided).result()[0].stride(-1) == 1
