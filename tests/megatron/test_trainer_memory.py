"""Every memory policy of the trainer trains as the plain one does, on every kind of grid."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_runs import PLAIN_SGD, degrees, relative_difference, train

from ds_usp.memory import RECOMPUTE

LIMIT = 2e-5
GRIDS = {
    "sp4": {"sp": 4, "u": 2, "zero": 1},
    "zero3": {"sp": 4, "u": 2, "zero": 3},
    "pp2-sp2": {"sp": 2, "u": 1, "pp": 2, "zero": 1},
    "tp2-sp2": {"sp": 2, "u": 2, "tp": 2, "zero": 2},
}


@pytest.mark.parametrize("grid", GRIDS)
def test_every_policy_trains_alike(grid: str, tmp_path: Path) -> None:
    runs = [
        degrees(**GRIDS[grid]) + PLAIN_SGD + f" --usp-recompute {recompute}"
        for recompute in RECOMPUTE
    ]
    plain, *others = train(4, *runs, output_dir=tmp_path)
    for recompute, numbers in zip(RECOMPUTE[1:], others, strict=True):
        assert relative_difference(numbers, plain) < LIMIT, recompute


def test_biases_and_layernorm(tmp_path: Path) -> None:
    more = " --normalization layernorm --no-swiglu --no-disable-bias-linear"
    runs = [
        degrees(sp=2, u=1, zero=1) + PLAIN_SGD + more + f" --usp-recompute {recompute}"
        for recompute in ("none", "gemm-last")
    ]
    plain, gemm_last = train(2, *runs, output_dir=tmp_path)
    assert relative_difference(gemm_last, plain) < LIMIT
