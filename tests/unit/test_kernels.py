"""Every kernel against the fp64 oracle: on tiles, blocks that are merged, documents and score
modifiers. Kernels of GPU libraries compute with stubs of these (fake_flash.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import (
    BLOCKS,
    HEADS,
    PACKED,
    SPLITS,
    TOKENS,
    TOLERANCE,
    Block,
    Subject,
    Tensors,
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
from stub_machine import FLASH2, MAKERS, Machine, efficient, flash4

from ds_usp import MaskSpec
from ds_usp import testing as oracle
from ds_usp.geometry.tiles import Tile
from ds_usp.kernels.api import PaddedHeadDimKernel
from ds_usp.kernels.eager import EagerKernel
from ds_usp.kernels.score_mod import SOFTCAP, BoundScoreMod, GlobalPositions, ScoreMod
from ds_usp.kernels.sdpa import SdpaKernel
from ds_usp.kernels.sinks import apply_sinks, sink_gradient

CAUSAL = MaskSpec.causal()
# What every kernel takes, but for the rectangle where causal masks are aligned to the top left.
BASIC = {"everything", "full", "causal", "causal inside", "causal rectangle"}


@every_kernel
@pytest.mark.parametrize("name", BLOCKS)
def test_a_tile_is_the_oracles(subject: Subject, name: str) -> None:
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


@every_cpu_kernel
@pytest.mark.parametrize("head_dim", [1, 3, 16, 17, 80, 128])
def test_any_head_dim(subject: Subject, head_dim: int) -> None:
    kernel, dtype, tolerance = subject
    x = tensors(HEADS["GQA"], head_dim, dtype, TOKENS)
    block, scale = BLOCKS["causal"], head_dim**-0.5
    check(run_tile(kernel, x, block.tile, scale), reference(x, block.allowed, scale), tolerance)


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
def test_views_give_the_same_as_copies(subject: Subject, view: str) -> None:
    kernel, dtype, tolerance = subject
    x = tensors(HEADS["GQA"], 16, dtype, TOKENS)
    viewed = {name: VIEWS[view](tensor) for name, tensor in x.items()}
    assert not any(tensor.is_contiguous() for tensor in viewed.values())
    actual, want = (run_tile(kernel, t, BLOCKS["causal inside"].tile, 0.25) for t in (viewed, x))
    check(actual, want, tolerance)


@every_cpu_kernel
def test_autocast_changes_nothing(subject: Subject) -> None:
    kernel, dtype, tolerance = subject
    with torch.autocast("cpu", torch.bfloat16):
        check_block(kernel, tensors(HEADS["GQA"], 16, dtype, TOKENS), BLOCKS["causal"], tolerance)


@every_kernel
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "mask",
    [CAUSAL, MaskSpec.full(), MaskSpec.window(9, 2), MaskSpec(3, 2), MaskSpec(None, 3)],
    ids=str,
)
def test_blocks_merged_are_dense_forward_and_backward(
    subject: Subject, split: str, mask: MaskSpec
) -> None:
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
def test_scores_of_any_size_stay_exact(subject: Subject, exponent: int) -> None:
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
def test_gradients_have_the_inputs_dtype(subject: Subject, dtype: torch.dtype) -> None:
    x = tensors(HEADS["MQA"], 16, dtype, TOKENS)
    actual = check_block(subject.kernel, x, BLOCKS["causal"], TOLERANCE[dtype])
    assert actual["lse"].dtype == torch.float32
    assert {actual[name].dtype for name in ("out", "dq", "dk", "dv")} == {dtype}


@pytest.mark.parametrize("make", FLASH2)
def test_flash2_reads_tall_bands_wrongly_and_is_not_asked(machine: Machine, make: Any) -> None:
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
def test_documents_are_the_oracles(subject: Subject, case: str) -> None:
    check_packed(subject.kernel, PACKED[case], subject.dtype, subject.tolerance)


@pytest.mark.parametrize("make", [make for make in MAKERS if make is not efficient])
def test_documents_are_one_library_call(machine: Machine, make: Any) -> None:
    kernel, case, lengths = make(machine), PACKED["documents of each sample"], []
    assert kernel.caps.varlen
    inner = kernel.tile_forward

    def counted(*args: Any) -> Any:
        lengths.append(args[3])
        return inner(*args)

    machine.patch.setattr(kernel, "tile_forward", counted)
    check_packed(kernel, case, torch.float32, 2e-6)
    assert len(lengths) == len(case.calls(kernel)) and None not in lengths


# ------------------------------------------------------------------ score modifiers


CAP = BoundScoreMod(ScoreMod(softcap=0.7))  # bends scores of about 1


@every_library
@pytest.mark.parametrize("name", ["causal", "full", "both sides", "causal rectangle"])
def test_a_capped_tile_is_the_oracles(subject: Subject, name: str) -> None:
    kernel, block = subject.kernel, BLOCKS[name]
    x = tensors((6, 2), 16, torch.float32, TOKENS)
    if SOFTCAP in kernel.caps.score_features and serves(kernel, block):
        check_block(kernel.with_score_mod(CAP), x, block, 2e-6, {"softcap": 0.7})
        check_block(kernel, x, block, 2e-6)  # the kernel itself is unchanged


@every_library
@pytest.mark.parametrize("name", ["documents of each sample", "windows", "stripes, with gaps"])
def test_documents_are_capped_and_have_values_of_their_own_head_dim(
    subject: Subject, name: str
) -> None:
    kernel = subject.kernel
    padded = kernel if kernel.caps.head_dims.any_pair else PaddedHeadDimKernel(kernel, (32, 32))
    check_packed(padded, PACKED[name], torch.float32, 2e-6, value_dim=24)
    if SOFTCAP in kernel.caps.score_features:
        capped = kernel.with_score_mod(CAP)
        check_packed(capped, PACKED[name], torch.float32, 2e-6, softcap=0.7)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["causal", "both sides", "full"])
def test_all_score_modifiers_together_are_the_oracles(name: str, dtype: torch.dtype) -> None:
    slopes, block = torch.linspace(0.05, 0.5, 6), BLOCKS[name]
    rows, columns = torch.arange(TOKENS), torch.arange(0, 3 * TOKENS, 3)
    positions = GlobalPositions(torch.arange(2), rows, columns, torch.arange(6), slopes, 7)
    score_mod = BoundScoreMod(ScoreMod(softcap=0.7, alibi=True, dropout_p=0.4), positions)
    weights = oracle.dropout(7, (2, 6, 3 * TOKENS, 3 * TOKENS), 0.4)[..., :TOKENS, ::3]
    bias = oracle.alibi(slopes, range(3 * TOKENS))[:, :TOKENS, ::3]
    want_of = {
        "softcap": 0.7,
        "bias": bias[:, block.q_slice, block.k_slice],
        "weights": weights[:, :, block.q_slice, block.k_slice],
    }
    x = tensors((6, 2), 16, dtype, TOKENS)
    check_block(EagerKernel().with_score_mod(score_mod), x, block, TOLERANCE[dtype], want_of)


def test_dropout_drops_its_fraction_evenly_and_by_seed() -> None:
    tokens = torch.arange(256)
    positions = [GlobalPositions(tokens[:2], tokens, tokens, tokens[:2], None, n) for n in (0, 1)]
    first, second = (
        BoundScoreMod(ScoreMod(dropout_p=0.25), at).dropout_multiplier(torch.float64)
        for at in positions
    )
    assert first is not None and second is not None
    assert set(first.unique().tolist()) == {0.0, 1 / 0.75}
    same = (first > 0) == (second > 0)  # seeds are independent
    for kept, expected in ((first > 0, 0.75), (second > 0, 0.75), (same, 0.625)):
        fraction = kept.double()
        assert abs(float(fraction.mean()) - expected) < 0.005
        for dims in [(0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)]:  # by key, query, sample, head
            assert float((fraction.mean(dims) - expected).abs().max()) < 0.07
    lag = [(first[:, :, 1:] > 0) == (first[:, :, :-1] > 0)]
    lag += [(first[..., 1:] > 0) == (first[..., :-1] > 0), (first[:, 1] > 0) == (first[:, 0] > 0)]
    assert all(abs(float(equal.double().mean()) - 0.625) < 0.005 for equal in lag)


@every_library
def test_backward_is_deterministic_where_torch_is(subject: Subject) -> None:
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
def test_values_have_a_head_dim_of_their_own(
    subject: Subject, dims: tuple[int, int], name: str
) -> None:
    kernel: Any = subject.kernel
    if not kernel.caps.head_dims.any_pair:
        kernel = PaddedHeadDimKernel(kernel, (max(dims), max(dims)))
    check_two_head_dims(kernel, dims, BLOCKS[name], torch.float32, 2e-6)


@pytest.mark.parametrize("dims", [*DIMS, (3, 5)], ids=str)
@pytest.mark.parametrize("kernel", [EagerKernel(), SdpaKernel()], ids=lambda kernel: kernel.name)
def test_cpu_kernels_take_any_two_head_dims(kernel: Any, dims: tuple[int, int]) -> None:
    if kernel.name == "sdpa":
        kernel = PaddedHeadDimKernel(kernel, (max(dims) + 3, max(dims) + 3))
    check_two_head_dims(kernel, dims, BLOCKS["left window"], torch.float64, 1e-13)


@pytest.mark.parametrize("heads", [(6, 2), (3, 3)], ids=str)
def test_flash4_takes_the_head_dims_of_mla(machine: Machine, heads: tuple[int, int]) -> None:
    """Without padding, but for grouped heads, which the stub refuses as the library does."""
    x = tensors(heads, (192, 128), torch.float32, TOKENS)
    check_block(flash4(machine), x, BLOCKS["causal"], 2e-6)


def test_sinks_are_a_key_without_value() -> None:
    x: Tensors = tensors((6, 2), 16, torch.float64, TOKENS)
    q, k, v = (x[n].requires_grad_() for n in "qkv")
    sinks = torch.linspace(-40.0, 40.0, 6, dtype=torch.float64, requires_grad=True)
    allowed = oracle.causal(range(TOKENS), range(TOKENS))
    out, lse = oracle.dense_attention(q, k, v, allowed, 0.3)
    actual, got_lse = apply_sinks(out.detach().clone(), lse.detach(), sinks.detach())
    want, want_lse = oracle.dense_attention(q, k, v, allowed, 0.3, sinks=sinks)
    assert oracle.relative_error(actual, want) < 1e-14
    assert oracle.relative_error(got_lse, want_lse) < 1e-14
    (want_grad,) = torch.autograd.grad(want, sinks, x["dout"])
    assert (
        oracle.relative_error(sink_gradient(x["dout"], actual, got_lse, sinks), want_grad) < 1e-13
    )


def test_rows_that_attend_to_no_key_give_all_to_the_sink() -> None:
    out, lse = apply_sinks(
        torch.zeros(1, 2, 1, 4), torch.full((1, 1, 2), -torch.inf), torch.ones(1)
    )
    assert not out.any() and bool((lse == 1.0).all())
