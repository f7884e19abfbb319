"""Kernel calls of several documents, on every kernel that runs on CPUs, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import RESULTS
from test_kernels import HEADS, KERNEL_DTYPES, TOLERANCE, check, tensors, truth

from ds_usp import MaskSpec
from ds_usp.geometry.kernel_calls import KernelCall, kernel_calls_from_tiles
from ds_usp.geometry.segments import Segment
from ds_usp.geometry.tiles import plan_tiles
from ds_usp.kernels.api import AttentionKernel, BackwardInputs
from ds_usp.kernels.merge import GradAccumulator, OutputAccumulator


@dataclass(frozen=True)
class PackedCase:
    """Queries and keys of two shards of a packed sequence, as segments, and the mask."""

    queries: tuple[Segment, ...]
    keys: tuple[Segment, ...]
    mask: MaskSpec


def one_run(start: int, length: int, stride: int = 1) -> tuple[Segment, ...]:
    return (Segment(start, length, stride),)


BORDERS = [0, 3, 4, 11, 20]
PACKED = {
    "documents": PackedCase(one_run(0, 20), one_run(0, 20), MaskSpec.causal(BORDERS)),
    "full documents": PackedCase(one_run(0, 20), one_run(0, 20), MaskSpec.full(BORDERS)),
    "documents of each sample": PackedCase(
        one_run(0, 20), one_run(0, 20), MaskSpec.causal([BORDERS, [0, 9, 20]])
    ),
    "samples of which one sees nothing": PackedCase(
        one_run(10, 10), one_run(0, 10), MaskSpec.causal([[0, 10, 20], [0, 4, 15, 20]])
    ),
    "windows": PackedCase(one_run(0, 20), one_run(0, 20), MaskSpec.window(3, 2, BORDERS)),
    "the later half": PackedCase(one_run(8, 12), one_run(0, 20), MaskSpec.causal(BORDERS)),
    "stripes, with gaps": PackedCase(
        one_run(0, 20, 2), one_run(1, 20, 2), MaskSpec.causal([0, 6, 12, 18, 26, 40])
    ),
}


def packed_calls(kernel: AttentionKernel, case: PackedCase) -> tuple[KernelCall, ...]:
    """The calls that the planner would make."""
    samples = range(len(case.mask.documents))
    shards, caps = (case.queries, case.keys), kernel.caps.tiles
    tiles = [plan_tiles(*shards, case.mask, caps, sample) for sample in samples]
    rows, columns = (sum(each.length for each in shard) for shard in shards)
    return kernel_calls_from_tiles(tiles, rows, columns)


def check_packed(
    kernel: AttentionKernel,
    case: PackedCase,
    dtype: torch.dtype,
    tolerance: float,
    value_dim: int = 32,
    **changes: Any,
) -> None:
    """Forward and backward of all calls, summed, against the oracle, its scores changed or not;
    rows that see nothing are left out of the truth and must be empty."""
    if case.mask.left is not None and not kernel.caps.tiles.window:
        return
    q_at, k_at = ([p for run in runs for p in run.positions] for runs in (case.queries, case.keys))
    # Wide gaps between documents split a call; these shards are small, so nothing is far.
    x = tensors(HEADS["GQA"], 32, dtype, len(k_at))
    for name in ("q", "dout"):
        x[name] = x[name][:, : len(q_at)].contiguous()
    for name in ("v", "dout"):
        x[name] = x[name][..., :value_dim].contiguous()
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    calls = packed_calls(kernel, case)
    total, sums = (
        OutputAccumulator(q, value_dim),
        tuple(GradAccumulator(each) for each in (q, k, v)),
    )
    for call in calls:
        part = kernel.forward((q, k, v), call, scale=0.3)
        assert part[0].shape[1] == part[1].shape[2] == call.q_stop - call.q_start
        total.add(*part, call.q_span)
    out, lse = total.result()
    for call in calls:
        parts = kernel.backward(BackwardInputs(dout, q, k, v, out, lse), call, scale=0.3)
        for each, part, span in zip(sums, parts, (call.q_span, *[call.k_span] * 2), strict=True):
            each.add(part, [span])
    got = dict(zip(RESULTS, (out, lse, *(each.result() for each in sums)), strict=True))
    for sample in range(2):
        allowed = torch.tensor(
            [[case.mask.allows(i, j, sample) for j in k_at] for i in q_at], dtype=torch.bool
        )
        rows = allowed.any(1)
        mine = {name: each[sample : sample + 1] for name, each in x.items()}
        empty = got["out"][sample, ~rows], got["dq"][sample, ~rows]
        assert not any(each.any() for each in empty)
        assert bool((got["lse"][sample, :, ~rows] == float("-inf")).all())
        if not rows.any():
            assert not got["dk"][sample].any() and not got["dv"][sample].any()
            continue
        want = truth(
            {**mine, "q": mine["q"][:, rows], "dout": mine["dout"][:, rows]},
            allowed[rows],
            0.3,
            **changes,
        )
        found = {name: each[sample : sample + 1] for name, each in got.items()}
        found |= {name: found[name][:, rows] for name in ("out", "dq")}
        check({**found, "lse": found["lse"][:, :, rows]}, want, tolerance)


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize(("kernel", "dtype"), KERNEL_DTYPES)
def test_documents_are_the_oracles(kernel: AttentionKernel, dtype: torch.dtype, case: str) -> None:
    check_packed(kernel, PACKED[case], dtype, TOLERANCE[dtype])
