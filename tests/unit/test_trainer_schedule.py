"""Learning rate and weight decay of the trainer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

TRAINER = Path(__file__).resolve().parents[2] / "examples_deepspeed" / "sequence_parallel"
sys.path.insert(0, str(TRAINER))

from usp_trainer.arguments import parse  # noqa: E402
from usp_trainer.engine import learning_rate, make_optimizer  # noqa: E402
from usp_trainer.validate_args import validate_and_derive  # noqa: E402


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.882843, 0.6, 0.317157, 0.2]),
    ],
)
def test_warm_up_then_decay_to_the_end_and_no_further(style: str, expected: list[float]) -> None:
    flags = f"--lr 1 --min-lr 0.2 --lr-warmup-iters 2 --lr-decay-iters 6 --lr-decay-style {style}"
    args = validate_and_derive(parse(flags.split()), 1)
    rates = [learning_rate(args, step) for step in range(9)]
    assert rates == pytest.approx([*expected, expected[-1], expected[-1]], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_weight_decay_is_for_matrices(optimizer: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    args = validate_and_derive(parse(["--weight-decay", "0.3", "--optimizer", optimizer]), 1)
    decay = {
        id(p): group["weight_decay"]
        for group in make_optimizer(args, model).param_groups
        for p in group["params"]
    }
    assert [decay[id(p)] for p in model.parameters()] == [0.3, 0.0, 0.0, 0.0]
