"""The function that transformers' models call for flash attention, over NCCL, against one GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import run_on_gpus
from harness import RankContext

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).resolve().parents[1] / "compat"))

from flash_forward_runs import LEFT, PACKED, PADDED_PACK, Case, compare

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.several_gpus,
]

CASES = [
    Case(kind, rows, ulysses, recompute)
    for kind, rows, recompute in (
        ("llama", LEFT, "plain"),
        ("gemma2", PACKED, "reentrant"),
        ("gpt_oss", PADDED_PACK, ""),
    )
    for ulysses in (1, 2)
]


def test_every_gradient_is_that_of_one_gpu():
    run_on_gpus(_compare, 2)


def _compare(rank: int, world: int, *_: Any) -> None:
    group = dist.group.WORLD
    assert group is not None
    outcomes = compare(RankContext(rank, world, group), cases=CASES)
    for case, out in zip(CASES, outcomes, strict=True):
        assert rank or out is not None
        if out is not None:
            assert out.error <= 1e-5, (case, out)
            assert out.gathers == 2, (case, out)
