"""The function that transformers' models call for flash attention, over NCCL, against one GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import needs_two, run_on_gpus
from harness import RankContext

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).resolve().parents[1] / "compat"))

from flash_forward_runs import LEFT, PACKED, PADDED_PACK, Case, compare

pytestmark = [needs_two, pytest.mark.several_gpus]

CASES = [
    Case(kind, rows, ulysses, recompute)
    for kind, rows, recompute in (
        ("llama", LEFT, "plain"),
        ("gemma2", PACKED, "reentrant"),
        ("gemma2", PADDED_PACK, ""),
    )
    for ulysses in (1, 2)
]


def test_every_gradient_is_that_of_one_gpu():
    run_on_gpus(_compare, 2)


def _compare(rank: int, world: int, *_: Any) -> None:
    group = dist.group.WORLD
    assert group is not None
    # In fp64: the reference runs other kernels, whose rounding in fp32 is 1e-5 on GPUs.
    torch.set_default_dtype(torch.float64)
    outcomes = compare(RankContext(rank, world, group), cases=CASES)
    for case, out in zip(CASES, outcomes, strict=True):
        assert rank or out is not None
        if out is not None:
            assert out.error <= 1e-5, (case, out)
            assert out.gathers == 2, (case, out)
