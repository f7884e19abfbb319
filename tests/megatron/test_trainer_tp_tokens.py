"""``--usp-tp-shard-tokens on`` trains what one rank trains; what cannot be sharded is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_runs import PLAIN_SGD, degrees, relative_difference, train

LIMIT = 1e-5
ON = " --usp-tp-shard-tokens on"
BIASES = (
    " --no-use-rotary-position-embeddings --no-swiglu --normalization layernorm"
    " --no-disable-bias-linear --no-untie-embeddings-and-output-weights"
    " --num-key-value-heads 4 --make-vocab-size-divisible-by 4"
)
TP2_SP2 = {"sp": 2, "u": 2, "tp": 2}
# Of runs on 4 ranks beside one rank's with the same first flags.
RUNS = {
    PLAIN_SGD: [
        degrees(zero=0, **TP2_SP2) + " --usp-recompute attention",
        degrees(zero=3, **TP2_SP2) + " --usp-recompute gemm-last",
        degrees(zero=2, sp=2, u=1, tp=2)
        + " --usp-loss-chunks 3 --usp-recompute full --usp-checkpoint-layers 2",
        degrees(zero=1, tp=2, pp=2) + " --usp-loss-chunks 2",
    ],
    PLAIN_SGD + BIASES: [
        degrees(zero=1, tp=2) + " --usp-mlp-chunks 5",
        degrees(zero=0, tp=2, pp=2),
        degrees(zero=1, tp=4) + " --usp-recompute gemm-last",
    ],
}


@pytest.mark.parametrize("flags", RUNS, ids=["norms", "biases, tied"])
def test_sharded_tokens_train_what_one_rank_trains(flags: str, tmp_path: Path) -> None:
    (one,) = train(1, degrees() + flags, output_dir=tmp_path)
    runs = [run + flags + ON for run in RUNS[flags]]
    for run, numbers in zip(runs, train(4, *runs, output_dir=tmp_path), strict=True):
        assert relative_difference(numbers, one) < LIMIT, (run, numbers, one)
