"""Every memory policy of the trainer trains as the plain one does, on every kind of grid."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_runs import PLAIN_SGD, degrees, relative_difference, train

LIMIT = 2e-5
GRIDS = {
    "sp4": {"sp": 4, "u": 2, "zero": 1},
    "zero3": {"sp": 4, "u": 2, "zero": 3},
    "pp2-sp2": {"sp": 2, "u": 1, "pp": 2, "zero": 1},
    "tp2-sp2": {"sp": 2, "u": 2, "tp": 2, "zero": 2},
}


POLICIES = {
    "none": "",
    "gemm-last": "--usp-recompute gemm-last",
    "attention": "--usp-recompute attention",
    "full, loss in chunks": "--usp-recompute full --usp-loss-chunks 3",
    "gemm-last, loss in chunks": "--usp-recompute gemm-last --usp-loss-chunks 1000",
    "offload": "--usp-offload-ratio 0.5",
    "all": "--usp-recompute attention --usp-offload-ratio 1 --usp-loss-chunks 2",
}


@pytest.mark.parametrize("grid", GRIDS)
def test_every_policy_trains_alike(grid: str, tmp_path: Path) -> None:
    runs = [f"{degrees(**GRIDS[grid])}{PLAIN_SGD} {policy}" for policy in POLICIES.values()]
    plain, *others = train(4, *runs, output_dir=tmp_path, steps=2)
    for policy, numbers in zip(list(POLICIES)[1:], others, strict=True):
        limit = 0.0 if policy == "offload" else LIMIT
        assert relative_difference(numbers, plain) <= limit, policy


def test_biases_layernorm_and_a_tied_output(tmp_path: Path) -> None:
    more = " --normalization layernorm --no-swiglu --no-disable-bias-linear"
    tied = " --no-untie-embeddings-and-output-weights"
    runs = [
        degrees(sp=2, u=1, zero=1) + PLAIN_SGD + more + tied + policy
        for policy in ("", " --usp-recompute gemm-last --usp-loss-chunks 2")
    ]
    plain, gemm_last = train(2, *runs, output_dir=tmp_path)
    assert relative_difference(gemm_last, plain) < LIMIT
