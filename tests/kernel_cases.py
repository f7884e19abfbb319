"""Kernels of this CPU and of stub libraries, and the calls that they are tested with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from cases import RESULTS
from stub_machine import MAKERS

from ds_usp import MaskSpec, UnsupportedAttentionError
from ds_usp import testing as oracle
from ds_usp.comm.channel import split_features
from ds_usp.geometry.segments import Segment
from ds_usp.geometry.tiles import KernelCall, Tile, kernel_calls_from_tiles, plan_tiles
from ds_usp.kernels import registry
from ds_usp.kernels.api import AttentionKernel, BackwardInputs, KernelRequest
from ds_usp.kernels.merge import GradAccumulator, OutputAccumulator

# Relative errors. bf16 rounds its inputs to 8 bits of mantissa and its results once more.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
Tensors = dict[str, torch.Tensor]


class Subject(NamedTuple):
    """A kernel under test, with the dtype of its inputs and the relative error that is allowed."""

    kernel: AttentionKernel
    dtype: torch.dtype
    tolerance: float


def cpu_kernels(dtype: torch.dtype) -> list[AttentionKernel]:
    """Every registered kernel that serves the dtype on CPUs."""
    kernels = []
    for row in registry.KERNELS:
        try:
            request = KernelRequest("cpu", dtype, 16, MaskSpec.window(3))
            kernels.append(registry.select_kernel(request, row.name))
        except UnsupportedAttentionError:
            continue
    return kernels


CPU = [
    pytest.param(Subject(kernel, dtype, TOLERANCE[dtype]), id=f"{kernel.name}-{str(dtype)[6:]}")
    for dtype in DTYPES
    for kernel in cpu_kernels(dtype)
]
LIBRARIES = [pytest.param(make, id=make.__name__) for make in MAKERS]


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """A kernel of this CPU, or one of a stub library. The libraries compute fp32 too, so a wrong
    argument does not hide behind a rounding."""
    if isinstance(request.param, Subject):
        return request.param
    return Subject(request.param(request.getfixturevalue("machine")), torch.float32, 2e-6)


every_cpu_kernel = pytest.mark.parametrize("subject", CPU, indirect=True)
every_library = pytest.mark.parametrize("subject", LIBRARIES, indirect=True)
every_kernel = pytest.mark.parametrize("subject", [*CPU, *LIBRARIES], indirect=True)

# ------------------------------------------------------------------ tiles


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
    def q_slice(self) -> slice:
        return slice(self.q_start, self.q_start + self.rows)

    @property
    def k_slice(self) -> slice:
        return slice(self.k_start, self.k_start + self.columns)

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
    # The same band as a mask over positions: rows are `shift` after the columns.
    right = None if block.right is None else block.right + shift
    left = None if block.left is None else block.left - shift
    if block.left is not None and not kernel.caps.tiles.window:
        return False
    if (left or 0) < 0 or (right or 0) < 0:
        return kernel.caps.tiles.window
    return len(plan_tiles(*segments, MaskSpec(left, right), kernel.caps.tiles)) == 1


def tensors(
    heads: tuple[int, int],
    dims: int | tuple[int, int],
    dtype: torch.dtype,
    tokens: int,
    kv_tokens: int | None = None,
) -> Tensors:
    """Random q, k, v and dout ``[2, tokens, heads, dim]``; dims of keys and of values."""
    keys, values = (dims, dims) if isinstance(dims, int) else dims
    shapes = {
        "q": (tokens, heads[0], keys),
        "k": (kv_tokens or tokens, heads[1], keys),
        "v": (kv_tokens or tokens, heads[1], values),
        "dout": (tokens, heads[0], values),
    }
    return {name: torch.randn(2, *shape).to(dtype) for name, shape in shapes.items()}


def reference(
    x: Tensors,
    allowed: torch.Tensor,
    scale: float,
    rows: slice = slice(None),
    columns: slice = slice(None),
    **scores: Any,
) -> Tensors:
    """The oracle's results for some rows and columns of the tensors."""
    q = x["q"][:, rows].double().requires_grad_()
    k, v = (x[n][:, columns].double().requires_grad_() for n in "kv")
    out, lse = oracle.dense_attention(q, k, v, allowed, scale, **scores)
    grads = torch.autograd.grad(out, (q, k, v), x["dout"][:, rows].double())
    return dict(zip(RESULTS, (out, lse, *grads), strict=True))


def run_tile(kernel: AttentionKernel, x: Tensors, tile: Tile, scale: float) -> Tensors:
    """One kernel call, forward and backward, as the ring makes them."""
    q, k, v, dout = (x[n] for n in ("q", "k", "v", "dout"))
    call = KernelCall.of(tile)
    tile_out, tile_lse = kernel.forward((q, k, v), call, scale=scale)
    out = torch.full_like(dout, float("nan"))  # rows outside the tile must not be read
    lse = torch.full((2, q.shape[2], q.shape[1]), float("nan"), dtype=tile_lse.dtype)
    out[:, tile.q_start : tile.q_stop] = tile_out.to(q.dtype)
    lse[:, :, tile.q_start : tile.q_stop] = tile_lse
    saved = BackwardInputs(dout, q, k, v, out, lse)
    grads = kernel.backward(saved, call, scale=scale)
    if kernel.caps.writes_grads_in_place:
        check_grad_buffers(kernel, saved, call, scale, grads)
    return dict(zip(RESULTS, (tile_out, tile_lse, *grads), strict=True))


def check_grad_buffers(
    kernel: AttentionKernel,
    saved: BackwardInputs,
    call: KernelCall,
    scale: float,
    want: tuple[torch.Tensor, ...],
) -> None:
    """The same gradients in buffers of the caller's, side by side in memory; dq there or not."""
    shapes = tuple((x.shape[2], x.shape[3]) for x in want)
    tokens, batch = max(x.shape[1] for x in want), want[0].shape[0]
    memory = want[0].new_full((tokens, batch, sum(h * d for h, d in shapes)), float("nan"))
    views = split_features(memory, shapes, tokens_first=True)
    dq, dk, dv = (view[:, : x.shape[1]] for view, x in zip(views, want, strict=True))
    for buffers in ((None, dk, dv), (dq, dk, dv)):
        memory.fill_(float("nan"))
        grads = kernel.backward(saved, call, scale=scale, grad_buffers=buffers)
        for grad, buffer, same in zip(grads, buffers, want, strict=True):
            assert torch.equal(grad, same)
            assert buffer is None or torch.equal(buffer, same)


def check(actual: Tensors, want: Tensors, tolerance: float) -> None:
    """Relative errors; where the reference is zero (a diagonal's dq and dk) the absolute ones."""
    for name in RESULTS:
        if want[name].abs().max() > 1e-9:
            error = oracle.relative_error(actual[name], want[name])
        else:
            error = float(actual[name].abs().max()) / 10
        assert error <= tolerance, f"{name}: {error:.2e}"


def check_block(
    kernel: AttentionKernel,
    x: Tensors,
    block: Block,
    tolerance: float,
    want_of: Mapping[str, Any] | None = None,
) -> Tensors:
    """One tile against the oracle, whose score modifiers are ``want_of``; its results."""
    actual = run_tile(kernel, x, block.tile, 0.3)
    want = reference(x, block.allowed, 0.3, block.q_slice, block.k_slice, **(want_of or {}))
    check(actual, want, tolerance)
    return actual


# ------------------------------------------------------------------ several calls, merged

Blocks = Mapping[tuple[int, int], Sequence[KernelCall]]


def attend(kernel: AttentionKernel, x: Tensors, blocks: Blocks, scale: float) -> Tensors:
    """Attention over key blocks (start, stop), each with its kernel calls, as on a ring."""
    q, k, v, dout = (x[n] for n in ("q", "k", "v", "dout"))
    total = OutputAccumulator(q, v.shape[3])
    for (start, stop), calls in blocks.items():
        for call in calls:
            out, lse = kernel.forward((q, k[:, start:stop], v[:, start:stop]), call, scale=scale)
            assert out.shape[1] == lse.shape[2] == call.q_stop - call.q_start
            total.add(out, lse, call.q_span)
    out, lse = total.result()
    sums = tuple(GradAccumulator(shard) for shard in (q, k, v))
    for (start, stop), calls in blocks.items():
        saved = BackwardInputs(dout, q, k[:, start:stop], v[:, start:stop], out, lse)
        for call in calls:
            columns = (start + call.k_start, start + call.k_stop)
            grads = kernel.backward(saved, call, scale=scale)
            for grad_sum, grad, span in zip(
                sums, grads, (call.q_span, columns, columns), strict=True
            ):
                grad_sum.add(grad, [span])
    return dict(zip(RESULTS, (out, lse, *(grad_sum.result() for grad_sum in sums)), strict=True))


def ring_blocks(
    kernel: AttentionKernel, tokens: int, blocks: Sequence[tuple[int, int]], mask: MaskSpec
) -> Blocks:
    """The calls of all queries with key blocks that come one after the other."""
    queries = [Segment(0, tokens)]
    return {
        (start, stop): [
            KernelCall.of(tile)
            for tile in plan_tiles(queries, [Segment(start, stop - start)], mask, kernel.caps.tiles)
        ]
        for start, stop in blocks
    }


SPLITS = {
    "in order": [(0, 10), (10, 24)],
    "local block first": [(16, 24), (0, 8), (8, 16)],
    "backwards": [(16, 24), (8, 16), (0, 8)],
    "by one": [(0, 1), (1, 23), (23, 24)],
}

# ------------------------------------------------------------------ documents


@dataclass(frozen=True)
class PackedCase:
    """Queries and keys of two shards of a packed sequence, and the mask."""

    queries: Segment
    keys: Segment
    mask: MaskSpec

    def calls(self, kernel: AttentionKernel) -> tuple[KernelCall, ...]:
        """The calls that the planner would make. Wide gaps between documents split a call; these
        shards are small, so nothing is far."""
        samples = range(len(self.mask.documents))
        shards = [self.queries], [self.keys]
        tiles = [plan_tiles(*shards, self.mask, kernel.caps.tiles, sample) for sample in samples]
        return kernel_calls_from_tiles(tiles, self.queries.length, self.keys.length)


BORDERS = [0, 3, 4, 11, 20]
TREE = [(0, 5, None), (5, 6, 0), (6, 9, 0), (9, 12, 2), (12, 13, 2), (13, 17, None), (17, 20, 0)]
_SHARD = Segment(0, 20)
PACKED = {
    "documents": PackedCase(_SHARD, _SHARD, MaskSpec.causal(BORDERS)),
    "full documents": PackedCase(_SHARD, _SHARD, MaskSpec.full(BORDERS)),
    "documents of each sample": PackedCase(_SHARD, _SHARD, MaskSpec.causal([BORDERS, [0, 9, 20]])),
    "samples of which one sees nothing": PackedCase(
        Segment(10, 10), Segment(0, 10), MaskSpec.causal([[0, 10, 20], [0, 4, 15, 20]])
    ),
    "windows": PackedCase(_SHARD, _SHARD, MaskSpec.window(3, 2, BORDERS)),
    "the later half": PackedCase(Segment(8, 12), _SHARD, MaskSpec.causal(BORDERS)),
    "a tree": PackedCase(_SHARD, _SHARD, MaskSpec.tree(TREE)),
    "the later half of a tree, and all of another": PackedCase(
        Segment(8, 12), _SHARD, MaskSpec.tree([TREE, [(0, 7, None), (7, 8, 0), (8, 20, 0)]])
    ),
    "stripes, with gaps": PackedCase(
        Segment(0, 20, 2), Segment(1, 20, 2), MaskSpec.causal([0, 6, 12, 18, 26, 40])
    ),
}


def check_packed(
    kernel: AttentionKernel,
    case: PackedCase,
    dtype: torch.dtype,
    tolerance: float,
    value_dim: int = 32,
    **scores: Any,
) -> None:
    """Forward and backward of all calls against the oracle; rows that attend to no key are not in
    the reference and must be empty."""
    if case.mask.left is not None and not kernel.caps.tiles.window:
        return
    q_at, k_at = list(case.queries.positions), list(case.keys.positions)
    x = tensors(HEADS["GQA"], (32, value_dim), dtype, len(q_at), len(k_at))
    actual = attend(kernel, x, {(0, len(k_at)): case.calls(kernel)}, 0.3)
    for sample in range(2):
        allowed = torch.tensor(
            [[case.mask.allows(i, j, sample) for j in k_at] for i in q_at], dtype=torch.bool
        )
        rows = allowed.any(1)
        assert not actual["out"][sample, ~rows].any() and not actual["dq"][sample, ~rows].any()
        assert bool((actual["lse"][sample, :, ~rows] == float("-inf")).all())
        if not rows.any():
            assert not actual["dk"][sample].any() and not actual["dv"][sample].any()
            continue
        one = {name: tensor[sample : sample + 1] for name, tensor in x.items()}
        one |= {name: one[name][:, rows] for name in ("q", "dout")}
        results = {name: tensor[sample : sample + 1] for name, tensor in actual.items()}
        results |= {name: results[name][:, rows] for name in ("out", "dq")}
        results["lse"] = results["lse"][:, :, rows]
        check(results, reference(one, allowed[rows], 0.3, **scores), tolerance)
