"""Every kernel that runs on CPUs against the fp64 oracle, and blocks merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from cases import RESULTS

from ds_usp import MaskSpec, UnsupportedAttentionError
from ds_usp.comm.channel import split_features
from ds_usp.geometry.kernel_calls import KernelCall
from ds_usp.geometry.segments import Segment
from ds_usp.geometry.tiles import Tile, plan_tiles
from ds_usp.kernels import registry
from ds_usp.kernels.api import AttentionKernel, BackwardInputs, KernelRequest
from ds_usp.kernels.merge import GradAccumulator, OutputAccumulator
from ds_usp.kernels.registry import AUTO, KERNELS, KernelEntry, select_kernel

# Relative errors. bf16 rounds its inputs to 8 bits of mantissa and its results once more.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}
CAUSAL = MaskSpec.causal()
Tensors = dict[str, torch.Tensor]


def request(dtype: torch.dtype, head_dim: int = 16, device: str = "cpu") -> KernelRequest:
    return KernelRequest(device, dtype, head_dim, MaskSpec.window(3))


def cpu_kernels(dtype: torch.dtype) -> list[AttentionKernel]:
    """Every registered kernel that serves the dtype on CPUs."""
    kernels = []
    for row in KERNELS:
        try:
            kernels.append(select_kernel(request(dtype), row.name))
        except UnsupportedAttentionError:
            continue
    return kernels


@dataclass(frozen=True)
class Block:
    """A rectangle inside two shards of 20 tokens, with a window aligned to its bottom right."""

    rows: int
    columns: int
    left: int | None
    right: int | None
    q_start: int = 0
    k_start: int = 0

    @property
    def tile(self) -> Tile:
        shift, move = self.columns - self.rows, self.k_start - self.q_start
        low = 1 - self.rows if self.left is None else shift - self.left
        high = self.columns - 1 if self.right is None else shift + self.right
        rows, columns = self.q_start + self.rows, self.k_start + self.columns
        return Tile(self.q_start, rows, self.k_start, columns, low + move, high + move)

    @property
    def allowed(self) -> torch.Tensor:
        shift = self.columns - self.rows
        queries = range(shift, shift + self.rows)
        return oracle.window(queries, range(self.columns), self.left, self.right)


TOKENS = 20
BLOCKS = {
    "everything": Block(TOKENS, TOKENS, None, None),
    "one pair": Block(1, 1, None, None, 3, 7),
    "full": Block(12, 9, None, None, 4, 0),
    "causal": Block(TOKENS, TOKENS, None, 0),
    "causal inside": Block(11, 11, None, 0, 5, 2),
    "causal rectangle": Block(7, 15, None, 0, 6, 3),
    "left window": Block(14, 14, 4, 0, 2, 6),
    "both sides": Block(13, 13, 3, 2, 1, 1),
    "ahead": Block(12, 12, None, 3, 8, 8),
    "back only": Block(12, 12, 2, None, 0, 4),
    "wide window": Block(6, 10, 5, 1, 9, 9),
    "tall window": Block(10, 6, 2, 6, 0, 5),
    "diagonal": Block(9, 9, 0, 0, 3, 0),
}
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (5, 1)}


def serves(kernel: AttentionKernel, block: Block) -> bool:
    """Whether one call of the kernel takes the block: what the planner asks for, and no more."""
    segments = [[Segment(0, n)] for n in (block.rows, block.columns)]
    shift = block.columns - block.rows
    # The same band as a mask over positions: rows stand `shift` after the columns.
    right = None if block.right is None else block.right + shift
    left = None if block.left is None else block.left - shift
    if (left or 0) < 0 or (right or 0) < 0:
        return kernel.caps.tiles.window
    return len(plan_tiles(*segments, MaskSpec(left, right), kernel.caps.tiles)) == 1


def tensors(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, tokens: int) -> Tensors:
    """Random q, k, v and dout ``[2, tokens, heads, head_dim]``."""
    counts = {"q": heads[0], "k": heads[1], "v": heads[1], "dout": heads[0]}
    return {n: torch.randn(2, tokens, h, head_dim).to(dtype) for n, h in counts.items()}


def truth(
    x: Tensors,
    allowed: torch.Tensor,
    scale: float,
    rows: slice = slice(None),
    columns: slice = slice(None),
    **changes: Any,
) -> Tensors:
    """The oracle's results for some rows and columns of the tensors, its scores changed or not."""
    q = x["q"][:, rows].double().requires_grad_()
    k, v = (x[n][:, columns].double().requires_grad_() for n in "kv")
    out, lse = oracle.dense_attention(q, k, v, allowed, scale, **changes)
    grads = torch.autograd.grad(out, (q, k, v), x["dout"][:, rows].double())
    return dict(zip(RESULTS, (out, lse, *grads), strict=True))


def run_tile(kernel: AttentionKernel, x: Tensors, tile: Tile, scale: float) -> Tensors:
    """One kernel call, forward and backward, as the ring makes them."""
    q, k, v, dout = (x[n] for n in ("q", "k", "v", "dout"))
    part, part_lse = kernel.forward((q, k, v), KernelCall.of(tile), scale=scale)
    out = torch.full_like(dout, float("nan"))  # rows outside the tile must not be read
    lse = torch.full((2, q.shape[2], q.shape[1]), float("nan"), dtype=part_lse.dtype)
    out[:, tile.q_start : tile.q_stop] = part.to(q.dtype)
    lse[:, :, tile.q_start : tile.q_stop] = part_lse
    given = BackwardInputs(dout, q, k, v, out, lse), KernelCall.of(tile)
    grads = kernel.backward(*given, scale=scale)
    if kernel.caps.writes_grads_in_place:
        check_places(kernel, given, scale, grads)
    return dict(zip(RESULTS, (part, part_lse, *grads), strict=True))


def check_places(
    kernel: AttentionKernel, given: tuple[Any, ...], scale: float, want: tuple[torch.Tensor, ...]
) -> None:
    """The same gradients where they are wanted, side by side in memory; dq there or apart."""
    shapes = tuple((x.shape[2], x.shape[3]) for x in want)
    tokens, batch = max(x.shape[1] for x in want), want[0].shape[0]
    room = want[0].new_full((tokens, batch, sum(h * d for h, d in shapes)), float("nan"))
    parts = split_features(room, shapes, tokens_first=True)
    dq, dk, dv = (part[:, : x.shape[1]] for part, x in zip(parts, want, strict=True))
    for places in ((None, dk, dv), (dq, dk, dv)):
        room.fill_(float("nan"))
        got = kernel.backward(*given, scale=scale, grad_buffers=places)
        for x, place, same in zip(got, places, want, strict=True):
            assert torch.equal(x, same)
            assert place is None or torch.equal(place, same)


def check(got: Tensors, want: Tensors, tolerance: float) -> None:
    """Relative errors; where the truth is zero (a diagonal's dq and dk) the absolute ones."""
    for name in RESULTS:
        if want[name].abs().max() > 1e-9:
            error = oracle.relative_error(got[name], want[name])
        else:
            error = float(got[name].abs().max()) / 10
        assert error <= tolerance, f"{name}: {error:.2e}"


def lse_rounding(dtype: torch.dtype, size: float) -> float:
    """What a log-sum-exp of that size, rounded to the dtype, does to the weights exp(s - lse)."""
    return 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * abs(size)


CALLS = [
    pytest.param(kernel, dtype, block, id=f"{kernel.name}-{str(dtype)[6:]}-{name}")
    for dtype in TOLERANCE
    for kernel in cpu_kernels(dtype)
    for name, block in BLOCKS.items()
    if serves(kernel, block)
]


@pytest.mark.parametrize(("kernel", "dtype", "block"), CALLS)
def test_a_tile_is_the_oracles(kernel: AttentionKernel, dtype: torch.dtype, block: Block) -> None:
    tile = block.tile
    assert (tile.window, tile.rows) == ((block.left, block.right), block.rows)
    rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
    for heads in HEADS.values():
        x = tensors(heads, 16, dtype, TOKENS)
        got = run_tile(kernel, x, tile, scale=0.3)
        wide = torch.promote_types(dtype, torch.float32)
        assert got["lse"].dtype == wide and got["dk"].shape[1:3] == (tile.columns, heads[1])
        check(got, truth(x, block.allowed, 0.3, rows, columns), TOLERANCE[dtype])


KERNEL_DTYPES = [
    pytest.param(kernel, dtype, id=f"{kernel.name}-{str(dtype)[6:]}")
    for dtype in TOLERANCE
    for kernel in cpu_kernels(dtype)
]


@pytest.mark.parametrize("head_dim", [1, 3, 16, 17, 80, 128])
@pytest.mark.parametrize(("kernel", "dtype"), KERNEL_DTYPES)
def test_any_head_dim(kernel: AttentionKernel, dtype: torch.dtype, head_dim: int) -> None:
    block = BLOCKS["causal"]
    x = tensors(HEADS["GQA"], head_dim, dtype, TOKENS)
    scale = head_dim**-0.5
    check(run_tile(kernel, x, block.tile, scale), truth(x, block.allowed, scale), TOLERANCE[dtype])


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "[s, b, h, d]": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "[b, h, s, d]": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a packed projection": lambda x: torch.cat([x, x, x], -1)[..., : x.shape[-1]],
    "every other head": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "every other token": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every other feature": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "odd offset": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("kernel", "dtype"), KERNEL_DTYPES)
def test_views_give_the_same_as_copies(
    kernel: AttentionKernel, dtype: torch.dtype, view: str
) -> None:
    block = BLOCKS["causal inside"]
    x = tensors(HEADS["GQA"], 16, dtype, TOKENS)
    viewed = {name: VIEWS[view](each) for name, each in x.items()}
    assert not any(each.is_contiguous() for each in viewed.values())
    got, want = (run_tile(kernel, each, block.tile, 0.25) for each in (viewed, x))
    check(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize(("kernel", "dtype"), KERNEL_DTYPES)
def test_autocast_changes_nothing(kernel: AttentionKernel, dtype: torch.dtype) -> None:
    block = BLOCKS["causal"]
    x = tensors(HEADS["GQA"], 16, dtype, TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        got = run_tile(kernel, x, block.tile, 0.3)
    check(got, truth(x, block.allowed, 0.3), TOLERANCE[dtype])


def blockwise(
    kernel: AttentionKernel, x: Tensors, blocks: Sequence[tuple[int, int]], mask: MaskSpec
) -> Tensors:
    """Attention over key blocks that come one after the other, as on a ring."""
    q, k, v, dout = (x[n] for n in ("q", "k", "v", "dout"))
    plans = {
        (start, stop): plan_tiles(
            [Segment(0, q.shape[1])], [Segment(start, stop - start)], mask, kernel.caps.tiles
        )
        for start, stop in blocks
    }
    total = OutputAccumulator(q)
    for (start, stop), tiles in plans.items():
        for tile in tiles:
            qkv = q, k[:, start:stop], v[:, start:stop]
            part = kernel.forward(qkv, KernelCall.of(tile), scale=0.25)
            total.add(*part, (tile.q_start, tile.q_stop))
    out, lse = total.result()
    sums = tuple(GradAccumulator(each) for each in (q, k, v))
    for (start, stop), tiles in plans.items():
        keys, values = k[:, start:stop], v[:, start:stop]
        for tile in tiles:
            saved = BackwardInputs(dout, q, keys, values, out, lse)
            parts = kernel.backward(saved, KernelCall.of(tile), scale=0.25)
            columns = (start + tile.k_start, start + tile.k_stop)
            spans = ((tile.q_start, tile.q_stop), columns, columns)
            for total, part, span in zip(sums, parts, spans, strict=True):
                total.add(part, [span])
    return dict(zip(RESULTS, (out, lse, *(total.result() for total in sums)), strict=True))


SPLITS = {
    "in order": [(0, 10), (10, 24)],
    "own block first": [(16, 24), (0, 8), (8, 16)],
    "backwards": [(16, 24), (8, 16), (0, 8)],
    "by one": [(0, 1), (1, 23), (23, 24)],
}


@pytest.mark.parametrize(
    "mask", [CAUSAL, MaskSpec.full(), MaskSpec.window(9, 2), MaskSpec(None, 3)], ids=str
)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("kernel", "dtype"), KERNEL_DTYPES)
def test_blocks_merged_are_dense_forward_and_backward(
    kernel: AttentionKernel, dtype: torch.dtype, split: str, mask: MaskSpec
) -> None:
    x = tensors(HEADS["GQA"], 16, dtype, 24)
    want = truth(x, oracle.window(range(24), range(24), mask.left, mask.right), 0.25)
    got = blockwise(kernel, x, SPLITS[split], mask)
    assert got["out"].dtype == dtype
    check(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("exponent", [-60, 8])
@pytest.mark.parametrize(("kernel", "dtype"), KERNEL_DTYPES)
def test_scores_of_any_size_stay_exact(
    kernel: AttentionKernel, dtype: torch.dtype, exponent: int
) -> None:
    # Signs times a power of two: the scores are exact in every dtype, and many of them are equal.
    x = tensors(HEADS["MHA"], 16, dtype, 24)
    x["q"], x["k"] = torch.sign(x["q"]) * 2.0**exponent, torch.sign(x["k"])
    want = truth(x, oracle.causal(range(24), range(24)), 0.25)
    tolerance = TOLERANCE[dtype] + lse_rounding(dtype, float(want["lse"].detach().abs().max()))
    check(blockwise(kernel, x, SPLITS["own block first"], CAUSAL), want, tolerance)


def test_the_registrys_names_are_the_kernels() -> None:
    for row in KERNELS:
        kernel, reason = registry._load(row)
        assert (kernel is None) != (reason is None)
        assert kernel is None or kernel.name == row.name
    assert len({row.name for row in KERNELS}) == len(KERNELS)


@pytest.mark.parametrize(
    ("asked", "name", "chosen"),
    [
        (request(torch.float32), AUTO, "sdpa"),
        (request(torch.float64, 3), AUTO, "sdpa"),
        (request(torch.float16), AUTO, "eager"),
        (request(torch.float32), "eager", "eager"),
        (request(torch.float32, 128, "cuda"), AUTO, "eager"),
        (request(torch.float32, 16, "xpu"), AUTO, "eager"),
    ],
    ids=str,
)
def test_auto_takes_the_best_that_serves(asked: KernelRequest, name: str, chosen: str) -> None:
    assert select_kernel(asked, name).name == chosen


def test_no_kernel_lists_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    row = KernelEntry("missing", "ds_usp.kernels.missing", "MissingKernel")
    monkeypatch.setattr(registry, "KERNELS", (*KERNELS, row))
    with pytest.raises(UnsupportedAttentionError) as caught:
        select_kernel(KernelRequest("cpu", torch.int8, 24, CAUSAL))
    lines = str(caught.value).splitlines()
    assert all(word in lines[0] for word in ("torch.int8", "cpu", "24", "causal"))
    reasons = dict(line.strip().split(": ", 1) for line in lines[1:])
    assert list(reasons) == [row.name for row in registry.KERNELS]
    assert reasons["flash2"] == "runs on cuda, not cpu"
    assert (
        reasons["eager"].endswith("not int8") and "bfloat16, float16, float32" in reasons["eager"]
    )
    assert reasons["missing"].startswith("cannot be imported: No module named")


@pytest.mark.parametrize(
    ("head_dim", "reason"), [(12, "multiples of 8, not 12"), (264, "up to 256, not 264")]
)
def test_a_named_kernel_that_cannot_says_why(head_dim: int, reason: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match=reason):
        select_kernel(request(torch.bfloat16, head_dim, "cuda"), "flash2")


def test_unknown_kernels_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedAttentionError) as caught:
        select_kernel(request(torch.float32), "flash9")
    assert "'flash9'" in str(caught.value)
    assert ", ".join([AUTO, *(row.name for row in KERNELS)]) in str(caught.value)
