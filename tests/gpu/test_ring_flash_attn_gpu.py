"""ring_flash_attn's functions over NCCL in bf16, as its own tests run them, against the oracle.

The tolerance is the kernel's own: at most 1.5 x the error of the same call on one GPU.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import needs_two, run_on_gpus
from harness import RankContext

sys.path.append(str(Path(__file__).resolve().parents[1] / "compat"))

from test_ring_flash_attn import NAMES, UNDER_ULYSSES, Where, errors

pytestmark = [needs_two, pytest.mark.several_gpus]


def test_every_function_is_as_exact_as_on_one_gpu():
    run_on_gpus(_compare, 2)


def _compare(rank: int, world: int, *_: Any) -> None:
    group = dist.group.WORLD
    assert group is not None
    alone = RankContext(0, 1, dist.new_group([rank], use_local_synchronization=True))
    ctx = RankContext(rank, world, group)
    for option in ("causal", "window"):
        where = Where(torch.bfloat16, "cuda", compared=(rank, world))
        dense = errors(alone, NAMES, 1, [option], where=where)
        for ulysses, names in ((1, NAMES), (2, UNDER_ULYSSES)):
            sharded = errors(ctx, names, ulysses, [option], where=Where(torch.bfloat16, "cuda"))
            worst = {call: error / dense[call] for call, error in sharded.items()}
            assert max(dense.values()) < 1e-2, dense
            assert max(worst.values()) <= 1.5, (ulysses, worst)
