"""Every kernel of this GPU on tiles and documents, against the reference kernel in fp64."""

from __future__ import annotations

import pytest
import torch
from oracle import relative_error

from ds_usp import MaskSpec
from ds_usp.geometry.kernel_calls import KernelCall, kernel_calls_from_tiles
from ds_usp.geometry.segments import Segment
from ds_usp.geometry.tiles import plan_tiles
from ds_usp.kernels.api import BackwardInputs, KernelRequest
from ds_usp.kernels.eager import EagerKernel
from ds_usp.kernels.merge import GradAccumulator, OutputAccumulator
from ds_usp.kernels.registry import _load, available_kernels

SCALE = 0.2
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
KERNELS = [_load(row)[0] for row in available_kernels("cuda")]
DOCUMENTS = [0, 1, 8, 136, 265, 266, 400]
# Queries, keys, the position of the first query (keys begin at 0), the mask.
SHAPES = {
    "causal": (200, 200, 0, MaskSpec.causal()),
    "causal, wide": (70, 200, 130, MaskSpec.causal()),
    "causal, tall": (300, 40, 0, MaskSpec.causal()),
    "full": (130, 67, 500, MaskSpec.causal()),
    "one pair": (1, 1, 0, MaskSpec.causal()),
    "window": (200, 200, 0, MaskSpec.window(33)),
    "window, both sides": (200, 200, 0, MaskSpec.window(33, 9)),
    "window, tall": (230, 40, 0, MaskSpec.window(200)),
    "window, wide": (40, 300, 130, MaskSpec.window(70, 50)),
    "window that leaves": (90, 40, 40, MaskSpec.window(90)),
    "ahead": (128, 128, 0, MaskSpec(None, 17)),
    "ahead, tall": (300, 40, 0, MaskSpec(None, 17)),
    "documents": (400, 400, 0, MaskSpec.causal(DOCUMENTS)),
    "full documents": (400, 400, 0, MaskSpec.full(DOCUMENTS)),
    "documents, the later half": (200, 400, 200, MaskSpec.causal(DOCUMENTS)),
    "windows in documents": (400, 400, 0, MaskSpec.window(33, documents=DOCUMENTS)),
}


def attend(kernel, tensors, shape):  # type: ignore[no-untyped-def]
    """Out, lse and gradients of the queries with these keys alone."""
    q, k, v, dout = tensors
    rows, columns, start, mask = shape
    segments = [Segment(start, rows)], [Segment(0, columns)]
    tiles = plan_tiles(*segments, mask, kernel.caps.tiles)
    calls = (
        kernel_calls_from_tiles([tiles], rows, columns)
        if mask.documents
        else map(KernelCall.of, tiles)
    )
    calls = tuple(calls)
    total = OutputAccumulator(q)
    for call in calls:
        total.add(*kernel.forward((q, k, v), call, scale=SCALE), call.q_span)
    out, lse = total.result()
    sums = tuple(GradAccumulator(each) for each in (q, k, v))
    for call in calls:
        parts = kernel.backward(BackwardInputs(dout, q, k, v, out, lse), call, scale=SCALE)
        for each, part, span in zip(sums, parts, (call.q_span, *[call.k_span] * 2), strict=True):
            each.add(part, [span])
    return out, lse, *(each.result() for each in sums)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_tile_is_the_references(kernel, dtype, shape, heads) -> None:  # type: ignore[no-untyped-def]
    rows, columns, _, mask = SHAPES[shape]
    if dtype not in kernel.caps.dtypes or (mask.left is not None and not kernel.caps.tiles.window):
        pytest.skip("the kernel does not claim it")
    for head_dim in (64, kernel.caps.max_head_dim or 256):
        counts = ((rows, heads[0]), (columns, heads[1]), (columns, heads[1]), (rows, heads[0]))
        tensors = [torch.randn(2, *n, head_dim, device="cuda").to(dtype) for n in counts]
        got = attend(kernel, tensors, SHAPES[shape])
        want = attend(EagerKernel(), [each.double() for each in tensors], SHAPES[shape])
        for name, mine, true in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            if true.abs().max() > 1e-9:  # nothing flows back to q and k through a single pair
                error = relative_error(mine.cpu(), true.cpu())
                assert error <= (1e-5 if name == "lse" else TOLERANCE[dtype]), f"{name}: {error}"


@pytest.mark.parametrize("head_dim", [8, 32, 40, 56, 72, 80, 96, 112, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_head_dim_that_is_claimed(kernel, head_dim) -> None:  # type: ignore[no-untyped-def]
    asked = KernelRequest("cuda", torch.bfloat16, head_dim, MaskSpec.causal())
    if kernel.caps.refusal(asked):
        pytest.skip("the kernel does not claim it")
    for heads in ((2, 2), (6, 2)):
        counts = ((300, heads[0]), (300, heads[1]), (300, heads[1]), (300, heads[0]))
        tensors = [torch.randn(2, *n, head_dim, device="cuda").bfloat16() for n in counts]
        got = attend(kernel, tensors, (300, 300, 0, MaskSpec.causal()))
        exact = [each.double() for each in tensors]
        want = attend(EagerKernel(), exact, (300, 300, 0, MaskSpec.causal()))
        for name, mine, true in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            error = relative_error(mine.cpu(), true.cpu())
            assert error <= (1e-5 if name == "lse" else 2e-2), f"{name}: {error}"


# eager is cuBLAS's, which torch lets be deterministic by an environment variable at start only.
EXACT = [kernel for kernel in KERNELS if kernel.caps.deterministic and kernel.name != "eager"]


@pytest.mark.parametrize("kernel", EXACT, ids=lambda kernel: kernel.name)
def test_a_deterministic_backward_repeats_its_bits(kernel) -> None:  # type: ignore[no-untyped-def]
    shape = (2048, 2048, 0, MaskSpec.causal())
    tensors = [
        torch.randn(2, 2048, heads, 128, device="cuda", dtype=torch.bfloat16)
        for heads in (8, 2, 2, 8)
    ]
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (attend(kernel, tensors, shape) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
