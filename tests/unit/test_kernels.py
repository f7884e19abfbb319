"""Every kernel against the fp64 oracle, the oracle itself, and accumulators of kernel calls."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BLOCKS,
    HEADS,
    PACKED,
    SPLITS,
    TOKENS,
    TOLERANCE,
    Block,
    attend,
    check,
    check_block,
    check_packed,
    every_cpu_kernel,
    every_kernel,
    every_library,
    reference,
    ring_blocks,
    run_tile,
    serves,
    tensors,
)
from stub_machine import FLASH2, MAKERS, efficient, flash4
from torch.nn.functional import scaled_dot_product_attention

import ds_usp
from ds_usp import MaskSpec
from ds_usp import testing as oracle
from ds_usp.geometry.layout import KINDS, ORDERS
from ds_usp.geometry.tiles import Tile
from ds_usp.kernels.api import PaddedHeadDimKernel
from ds_usp.kernels.eager import EagerKernel
from ds_usp.kernels.merge import GradAccumulator, OutputAccumulator
from ds_usp.kernels.sdpa import SdpaKernel
from ds_usp.kernels.sinks import apply_sinks

CAUSAL = MaskSpec.causal()
# What every kernel takes, but for the rectangle where causal masks are aligned to the top left.
BASIC = {"everything", "full", "causal", "causal inside", "causal rectangle"}


@every_kernel
@pytest.mark.parametrize("name", BLOCKS)
def test_a_tile_is_the_oracles(subject, name):
    (kernel, dtype, tolerance), block = subject, BLOCKS[name]
    if not serves(kernel, block):
        rectangular = name != "causal rectangle" or kernel.caps.tiles.rectangular
        assert name not in BASIC or not rectangular
        return
    tile = block.tile
    assert (tile.window, tile.rows) == ((block.left, block.right), block.rows)
    for heads in HEADS.values():
        actual = check_block(kernel, tensors(heads, 16, dtype, TOKENS), block, tolerance)
        assert actual["lse"].dtype == torch.promote_types(dtype, torch.float32)
        assert actual["dk"].shape[1:3] == (tile.columns, heads[1])


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "[s, b, h, d]": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "[b, h, s, d]": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "slice of a packed projection": lambda x: torch.cat([x, x, x], -1)[..., : x.shape[-1]],
    "every other head": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "every other token": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every other feature": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "odd offset": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
}


@every_kernel
@pytest.mark.parametrize("view", VIEWS)
def test_views_give_the_same_as_copies(subject, view):
    kernel, dtype, tolerance = subject
    x = tensors(HEADS["GQA"], 16, dtype, TOKENS)
    viewed = {name: VIEWS[view](tensor) for name, tensor in x.items()}
    assert not any(tensor.is_contiguous() for tensor in viewed.values())
    actual, want = (run_tile(kernel, t, BLOCKS["causal inside"].tile, 0.25) for t in (viewed, x))
    check(actual, want, tolerance)


@every_cpu_kernel
def test_autocast_changes_nothing(subject):
    kernel, dtype, tolerance = subject
    with torch.autocast("cpu", torch.bfloat16):
        check_block(kernel, tensors(HEADS["GQA"], 16, dtype, TOKENS), BLOCKS["causal"], tolerance)


MERGED_MASKS = (CAUSAL, MaskSpec.full(), MaskSpec.window(9, 2), MaskSpec(3, 2), MaskSpec(None, 3))


@every_kernel
@pytest.mark.parametrize(
    ("split", "mask"),
    [
        (split, mask)
        for at, (split, mask) in enumerate(product(SPLITS, MERGED_MASKS))
        if at % 2 == 0  # every other pair: two splits or three of each mask
    ],
    ids=str,
)
def test_blocks_merged_are_dense_forward_and_backward(subject, split, mask):
    kernel, dtype, tolerance = subject
    if mask.left is not None and not kernel.caps.tiles.window:
        return
    x = tensors(HEADS["GQA"], 16, dtype, 24)
    want = reference(x, oracle.window(range(24), range(24), mask.left, mask.right), 0.25)
    actual = attend(kernel, x, ring_blocks(kernel, 24, SPLITS[split], mask), 0.25)
    assert actual["out"].dtype == dtype
    check(actual, want, tolerance)


@every_cpu_kernel
@pytest.mark.parametrize("exponent", [-60, 8])
def test_scores_of_any_size_stay_exact(subject, exponent):
    # Signs times a power of two: the scores are exact in every dtype, and many of them are equal.
    kernel, dtype, tolerance = subject
    x = tensors(HEADS["MHA"], 16, dtype, 24)
    x["q"], x["k"] = torch.sign(x["q"]) * 2.0**exponent, torch.sign(x["k"])
    want = reference(x, oracle.causal(range(24), range(24)), 0.25)
    # What a rounded log-sum-exp of that size does to the weights exp(score - lse).
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    tolerance += 4 * eps * float(want["lse"].detach().abs().max())
    blocks = ring_blocks(kernel, 24, SPLITS["local block first"], CAUSAL)
    check(attend(kernel, x, blocks, 0.25), want, tolerance)


@every_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_have_the_inputs_dtype(subject, dtype):
    x = tensors(HEADS["MQA"], 16, dtype, TOKENS)
    actual = check_block(subject.kernel, x, BLOCKS["causal"], TOLERANCE[dtype])
    assert actual["lse"].dtype == torch.float32
    assert {actual[name].dtype for name in ("out", "dq", "dk", "dv")} == {dtype}


@pytest.mark.parametrize("make", FLASH2)
def test_flash2_reads_tall_bands_wrongly_and_is_not_asked(machine, make):
    # 10 queries, of which the first attends to 1 of 4 keys and the fourth to all.
    kernel, block = make(machine), Block(10, 4, None, 6)
    assert block.tile == Tile(0, 10, 0, 4, -9, 0) and not serves(kernel, block)
    x = tensors(HEADS["MHA"], 16, torch.float32, TOKENS)
    actual = run_tile(kernel, x, block.tile, 0.3)
    want = reference(x, block.allowed, 0.3, slice(10), slice(4))
    assert oracle.relative_error(actual["out"], want["out"]) > 0.1


# ------------------------------------------------------------------ documents


@every_kernel
@pytest.mark.parametrize("case", PACKED)
def test_documents_are_the_oracles(subject, case):
    check_packed(subject.kernel, PACKED[case], subject.dtype, subject.tolerance)


@pytest.mark.parametrize("make", [make for make in MAKERS if make is not efficient])
def test_documents_are_one_library_call(machine, make):
    kernel, case, lengths = make(machine), PACKED["documents of each sample"], []
    assert kernel.caps.varlen
    inner = kernel.tile_forward

    def counted(*args: Any) -> Any:
        lengths.append(args[3])
        return inner(*args)

    machine.patch.setattr(kernel, "tile_forward", counted)
    check_packed(kernel, case, torch.float32, 2e-6)
    assert len(lengths) == len(case.calls(kernel)) and None not in lengths


# ------------------------------------------------------------------ soft cap and sinks


CAP = 0.7  # bends scores of about 1


@every_library
@pytest.mark.parametrize("name", ["causal", "full", "both sides", "causal rectangle"])
def test_a_capped_tile_is_the_oracles(subject, name):
    kernel, block = subject.kernel, BLOCKS[name]
    x = tensors((6, 2), 16, torch.float32, TOKENS)
    if kernel.caps.softcap and serves(kernel, block):
        check_block(kernel.with_softcap(CAP), x, block, 2e-6, {"softcap": CAP})
        check_block(kernel, x, block, 2e-6)  # the kernel itself is unchanged


@every_library
@pytest.mark.parametrize("name", ["documents of each sample", "windows", "stripes, with gaps"])
def test_documents_are_capped_and_have_values_of_their_own_head_dim(subject, name):
    kernel: Any = subject.kernel
    if not kernel.caps.head_dims.any_pair:
        kernel = PaddedHeadDimKernel(kernel, (32, 32))
    cap = {"softcap": CAP} if kernel.caps.softcap else {}
    capped = kernel.with_softcap(CAP) if cap else kernel
    check_packed(capped, PACKED[name], torch.float32, 2e-6, value_dim=24, **cap)


@every_library
def test_backward_is_deterministic_where_torch_is(subject):
    assert subject.kernel.caps.deterministic
    x = tensors((6, 2), 16, torch.float32, TOKENS)
    torch.use_deterministic_algorithms(True)  # the stubs compare it with their argument
    try:
        check_block(subject.kernel, x, BLOCKS["causal"], 2e-6)
    finally:
        torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------ head dims of values, sinks


def check_two_head_dims(
    kernel: Any, dims: tuple[int, int], block: Block, dtype: torch.dtype, tolerance: float
) -> None:
    actual = check_block(kernel, tensors((6, 2), dims, dtype, TOKENS), block, tolerance)
    shapes = {name: actual[name].shape[3] for name in ("dq", "dk", "out", "dv")}
    assert shapes == {"dq": dims[0], "dk": dims[0], "out": dims[1], "dv": dims[1]}


DIMS = [(24, 16), (16, 24), (192, 128)]


@every_library
@pytest.mark.parametrize("name", ["causal", "full"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_values_have_a_head_dim_of_their_own(subject, dims, name):
    kernel: Any = subject.kernel
    if not kernel.caps.head_dims.any_pair:
        kernel = PaddedHeadDimKernel(kernel, (max(dims), max(dims)))
    check_two_head_dims(kernel, dims, BLOCKS[name], torch.float32, 2e-6)


@pytest.mark.parametrize("dims", [*DIMS, (1, 1), (17, 17), (3, 5)], ids=str)
@pytest.mark.parametrize("kernel", [EagerKernel(), SdpaKernel()], ids=lambda kernel: kernel.name)
def test_cpu_kernels_take_any_two_head_dims(kernel, dims):
    if kernel.name == "sdpa":
        kernel = PaddedHeadDimKernel(kernel, (max(dims) + 3, max(dims) + 3))
    check_two_head_dims(kernel, dims, BLOCKS["left window"], torch.float64, 1e-13)


@pytest.mark.parametrize("heads", [(6, 2), (3, 3)], ids=str)
def test_flash4_takes_the_head_dims_of_mla(machine, heads):
    """Without padding, but for grouped heads, which the stub refuses as the library does."""
    x = tensors(heads, (192, 128), torch.float32, TOKENS)
    check_block(flash4(machine), x, BLOCKS["causal"], 2e-6)


def test_rows_that_attend_to_no_key_give_all_to_the_sink():
    out, lse = apply_sinks(
        torch.zeros(1, 2, 1, 4), torch.full((1, 1, 2), -torch.inf), torch.ones(1)
    )
    assert not out.any() and bool((lse == 1.0).all())


# Relative errors of sums that are rounded once.
ROUNDED = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}
DTYPES = tuple(ROUNDED)
B, ROWS, MERGED_HEADS, DIM = 2, 20, 3, 8

BOUNDS = st.tuples(st.integers(0, ROWS), st.integers(0, ROWS))
SPANS = st.just((0, ROWS)) | BOUNDS.filter(lambda x: x[0] != x[1]).map(lambda x: tuple(sorted(x)))
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
    st.lists(st.tuples(SPANS, st.sets(st.integers(0, ROWS - 1))), max_size=MAX_CALLS),
)
def test_an_output_is_the_softmax_over_what_covers_each_row(dtype, calls):
    """Calls of row spans, of which some rows attend to no key."""
    acc_dtype = torch.promote_types(dtype, torch.float32)
    total = OutputAccumulator(torch.zeros(B, ROWS, MERGED_HEADS, DIM, dtype=dtype))
    values, lses = [], [torch.full((B, MERGED_HEADS, ROWS), float("-inf"), dtype=torch.float64)]
    for (start, stop), empty in calls:
        value = torch.randn(B, stop - start, MERGED_HEADS, DIM).to(dtype)
        lse = 4 * torch.randn(B, MERGED_HEADS, stop - start, dtype=acc_dtype)
        hidden = [row - start for row in empty if start <= row < stop]
        value[:, hidden], lse[:, :, hidden] = 0.0, float("-inf")
        values.append(torch.zeros(B, ROWS, MERGED_HEADS, DIM, dtype=torch.float64))
        values[-1][:, start:stop] = value
        lses.append(lses[0].clone())
        lses[-1][:, :, start:stop] = lse
        total.add(value, lse, (start, stop))
    out, lse = total.result()
    assert (
        out.shape == (B, ROWS, MERGED_HEADS, DIM) and out.dtype == dtype and lse.dtype == acc_dtype
    )
    want_lse = torch.stack(lses).logsumexp(0)
    covered = want_lse > float("-inf")
    assert torch.equal(lse > float("-inf"), covered)
    assert not out[~covered.transpose(1, 2)].any()
    assert oracle.relative_error(lse[covered], want_lse[covered]) < ROUNDED[acc_dtype]
    weights = (torch.stack(lses) - want_lse).exp().nan_to_num(0.0).transpose(2, 3).unsqueeze(-1)
    want = sum((w * x for w, x in zip(weights[1:], values, strict=True)), torch.zeros(out.shape))
    assert oracle.relative_error(out, want) < ROUNDED[dtype]
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
    st.integers(0, ROWS - 1),
)
def test_a_gradient_is_the_sum_of_what_covers_each_row(dtype, fp32_grads, calls, first):
    """Spans of a call may overlap: tiles have rows of their own, but may attend to the same keys.
    What is summed at once may be overwritten; what is deferred may not."""
    partial_dtype = torch.promote_types(dtype, torch.float32) if fp32_grads else dtype
    shard = torch.full((B, ROWS, MERGED_HEADS, DIM), float("nan"), dtype=dtype)
    total, source = GradAccumulator(shard), GradAccumulator(shard)
    want = torch.zeros(B, ROWS, MERGED_HEADS, DIM, dtype=torch.float64)
    for spans, mode in calls:
        pieces = [torch.randn(B, stop - start, MERGED_HEADS, DIM) for start, stop in spans]
        grad = torch.cat(pieces, 1).to(partial_dtype)
        for (start, stop), piece in zip(spans, pieces, strict=True):
            want[:, start:stop] += piece.to(partial_dtype).double()
        source.add(grad.clone(), spans, **({mode: True} if mode else {}))
        total.add(grad, spans, **({mode: True} if mode else {}))
        if mode == "sum_now":
            grad.fill_(float("nan"))
    rest = GradAccumulator(torch.zeros(B, ROWS - first, MERGED_HEADS, DIM, dtype=dtype))
    source.transfer_to(first, rest)
    sums = {"transferred": rest.result(), "all": shard.clone(), "later": shard[:, first:].clone()}
    total.write(sums["all"])
    total.write(sums["later"], first)
    sums["result"] = total.result()  # last: it may be written to what was added
    for name, actual in sums.items():
        expected = want[:, ROWS - actual.shape[1] :]
        assert actual.dtype == dtype and rounded_once(actual, expected, dtype), name
        assert oracle.relative_error(actual, expected) < ROUNDED[dtype]
        assert torch.equal(actual == 0, expected == 0)


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_one_call_for_the_whole_shard_is_taken_over_as_it_is():
    partial, lse = torch.randn(B, ROWS, MERGED_HEADS, DIM), torch.randn(B, MERGED_HEADS, ROWS)
    total, grads = OutputAccumulator(partial), GradAccumulator(partial)
    total.add(partial, lse, (0, ROWS))
    grads.add(partial, [(0, ROWS)])
    assert all(map(shares_memory, (*total.result(), grads.result()), (partial, lse, partial)))


def test_what_the_first_call_alone_covers_is_not_copied():
    partial, lse = torch.randn(B, ROWS, MERGED_HEADS, DIM), torch.randn(B, MERGED_HEADS, ROWS)
    alone, rest = partial[:, :3].clone(), slice(3, ROWS)
    total, grads, gradient = OutputAccumulator(partial), GradAccumulator(partial), partial.clone()
    total.add(partial, lse, (0, ROWS))
    total.add(torch.randn_like(partial[:, rest]), torch.randn_like(lse[:, :, rest]), (3, ROWS))
    grads.add(gradient, [(0, ROWS)])
    grads.add(torch.randn_like(gradient[:, rest]), [(3, ROWS)])
    out, sums = total.result()
    assert shares_memory(out, partial) and shares_memory(sums, lse)
    assert shares_memory(grads.result(), gradient) and torch.equal(gradient[:, :3], alone)
    assert torch.equal(out[:, :3], alone)


@pytest.mark.parametrize("where", [(..., slice(DIM)), slice(B)], ids=["padded", "of more samples"])
def test_a_first_call_in_a_larger_buffer_is_not_what_is_kept(where):
    buffer = torch.randn(2 * B, ROWS, MERGED_HEADS, 2 * DIM)
    buffer = buffer[:B] if where != slice(B) else buffer[..., :DIM].contiguous()
    partial, lse = buffer[where], torch.randn(B, MERGED_HEADS, ROWS)
    total, grads = OutputAccumulator(partial, DIM), GradAccumulator(partial)
    for _ in range(2):
        total.add(partial, lse.clone(), (0, ROWS))
    grads.add(partial, [(0, ROWS)])
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
def test_merge_weighs_blocks_by_their_sums_however_far_apart(sums, order, dtype):
    acc_dtype = torch.promote_types(dtype, torch.float32)
    partials = torch.randn(3, 1, ROWS, 2, 4).to(dtype)
    lses = torch.tensor(sums, dtype=acc_dtype).view(3, 1, 1, 1).expand(3, 1, 2, ROWS).clone()
    total = OutputAccumulator(partials[0])
    for index in order:
        total.add(partials[index].clone(), lses[index].clone(), (0, ROWS))
    out, lse = total.result()
    weights = torch.softmax(lses.double(), 0).transpose(2, 3).unsqueeze(-1)
    first, second = sorted(sums)[:0:-1]
    # A log-sum-exp of that size, rounded to the dtype, changes the weights exp(s - lse).
    lse_rounding = 4 * torch.finfo(acc_dtype).eps * abs(first) if first - second < 50 else 0
    tolerance = ROUNDED[dtype] + lse_rounding
    assert oracle.relative_error(out, (weights * partials.double()).sum(0)) < tolerance
    assert oracle.relative_error(lse, torch.logsumexp(lses.double(), 0)) < ROUNDED[acc_dtype]


def test_sums_are_dense_in_their_features_whatever_the_shard_is():
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


@pytest.mark.parametrize("left, right", [(None, 0), (None, None), (2, 0), (1, 3), (0, 1)])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_dense_attention_is_torchs(kv_heads, left, right):
    q = torch.randn(2, 7, 6, 5, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 2, 7, kv_heads, 5, dtype=torch.float64).requires_grad_()
    allowed = oracle.window(range(7), range(7), left, right)
    out, lse = oracle.dense_attention(q, k, v, allowed, 0.3)
    keys = k.repeat_interleave(6 // kv_heads, 2)
    scores = 0.3 * torch.einsum("bshd,bthd->bhst", q, keys).masked_fill(~allowed, -math.inf)
    assert oracle.relative_error(lse, scores.exp().sum(-1).log()) < 1e-13
    reference = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=allowed, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    dout = torch.randn_like(out)
    actual = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    want = [reference, *torch.autograd.grad(reference, (q, k, v), dout)]
    assert max(oracle.relative_error(a, b) for a, b in zip(actual, want, strict=True)) < 1e-13


def test_masks_follow_positions_not_storage():
    assert oracle.causal([3, 0], [0, 3, 1]).tolist() == [[True, True, True], [True, False, False]]
    assert oracle.window([2], range(5), 1, 1).tolist() == [[False, True, True, True, False]]
    assert bool(oracle.full([0], [5, 9]).all())


def test_what_has_no_answer_is_refused():
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="2 kv heads do not divide 3"):
        oracle.dense_attention(x, x[:, :, :2], x[:, :, :2], oracle.full([0, 1], [0, 1]))
    with pytest.raises(ValueError, match="no key"):
        oracle.dense_attention(x, x, x, oracle.causal([0, 1], [1, 1]))
    with pytest.raises(ValueError, match="shapes differ"):
        oracle.relative_error(torch.zeros(1), torch.zeros(2))


def test_relative_error_is_a_ratio_of_norms():
    assert oracle.relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == 0.1
    assert oracle.relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert oracle.relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert oracle.relative_error(torch.tensor([math.nan]), torch.ones(1)) == math.inf
    assert oracle.relative_error(torch.ones(1), torch.tensor([math.nan])) == math.inf


@pytest.mark.parametrize(
    ("bounds", "documents", "softcap"),
    [
        ((None, 0, 0), (), None),
        ((None, None, 0), (), None),
        ((5, 2, 0), (), None),
        ((None, 0, 9), (), 2.0),
        ((None, 0, 0), ((1, 13, 10), (20, 4)), None),
        ((4, 0, 0), ((7, 17),), None),
    ],
    ids=["causal", "full", "window", "prefix", "documents", "documents of all samples"],
)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "sinks"])
def test_blocks_make_the_whole(bounds, documents, softcap, extras):
    left, right, prefix = bounds

    def allowed(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        inside = [oracle.same_document(query, key, each) for each in documents]
        visible = oracle.window(query, key, left, right) | (key < prefix)
        return visible & torch.stack(inside) if inside else visible[None]

    batch, length, heads, kv_heads = 2, 24, 4, 2
    q, dout = torch.randn(batch, length, heads, 8).double(), torch.randn(batch, length, heads, 6)
    k, v = torch.randn(batch, length, kv_heads, 8), torch.randn(batch, length, kv_heads, 6)
    sinks = torch.randn(heads) if extras else None
    tensors = oracle.Tensors(q, k, v, dout, sinks)
    blocks = oracle.attention_in_blocks(
        tensors, allowed, scale=0.3, softcap=softcap, block_elements=200 * length
    )
    everywhere = torch.arange(length)
    wanted = [x.double().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    out, lse = oracle.dense_attention(
        *wanted[:3],
        allowed(everywhere, everywhere),
        0.3,
        softcap=softcap,
        sinks=wanted[3] if extras else None,
    )
    grads = torch.autograd.grad(out, wanted, dout.double())
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    for name, wanted_value in zip(names, (out, lse, *grads), strict=False):
        assert oracle.relative_error(blocks[name], wanted_value) <= 1e-12, name
    assert len(blocks) == 2 + len(grads)
    forward = oracle.attention_in_blocks(
        tensors, allowed, scale=0.3, softcap=softcap, backward=False
    )
    assert set(forward) == {"out", "lse"}
    assert oracle.relative_error(forward["lse"], blocks["lse"]) <= 1e-14


def test_gradients_are_the_formulas():
    """Of softmax, soft cap and sinks, written out: autograd is not asked."""
    q, k, v, dout = torch.randn(4, 1, 5, 1, 3, dtype=torch.float64)
    sinks, cap = torch.tensor([0.3], dtype=torch.float64), 2.0
    tensors = oracle.Tensors(q, k, v, dout, sinks=sinks)
    blocks = oracle.attention_in_blocks(tensors, oracle.causal, scale=0.7, softcap=cap)
    q, k, v, dout = (x[0, :, 0] for x in (q, k, v, dout))
    capped = cap * torch.tanh(0.7 * q @ k.T / cap)
    weights = torch.exp(capped).tril()
    total = weights.sum(1) + sinks.exp()
    weights = weights / total[:, None]
    out = weights @ v
    delta = (dout * out).sum(1)
    dscores = weights * (dout @ v.T - delta[:, None]) * (1 - (capped / cap) ** 2)
    wanted = {"dq": 0.7 * dscores @ k, "dk": 0.7 * dscores.T @ q, "dv": weights.T @ dout}
    for name, gradient in wanted.items():
        assert oracle.relative_error(blocks[name][0, :, 0], gradient) <= 1e-13, name
    dsinks = -(sinks.exp() / total * delta).sum()
    assert float(blocks["dsinks"]) == pytest.approx(float(dsinks), rel=1e-12)


def test_expected_positions_are_the_documented_ones():
    for kind in KINDS:
        for order in ORDERS:
            for length, ulysses, ring in ((64, 2, 2), (67, 3, 2), (41, 1, 4), (16, 4, 1)):
                expected = oracle.expected_positions(kind, length, ulysses, ring, order)
                if kind == "balanced":
                    assert expected is None
                    continue
                layout = ds_usp.TokenLayout(kind, length, ulysses, ring, order)
                claimed = [list(layout.positions(rank)) for rank in range(ulysses * ring)]
                assert [x.tolist() for x in expected or ()] == claimed
    zigzag = oracle.expected_positions("zigzag", 8, 1, 2, ORDERS[0])
    assert [x.tolist() for x in zigzag or ()] == [[0, 1, 6, 7], [2, 3, 4, 5]]
