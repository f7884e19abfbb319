"""The most bytes that live in a step of the trainer under ZeRO-3, against the planner's formula."""

from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankContext, fork_world
from memory_model import FusedNorm
from peak_memory import LiveBytes
from trainer_runs import start

# Llama 3 8B at 1/16 of every width: 1/256 of its elements, and of the tokens' tensors with as many
# tokens less. What DeepSpeed and the planner count in elements is as much smaller.
SCALE = 256
LLAMA = """
    --hidden-size 256 --num-attention-heads 8 --num-key-value-heads 2 --ffn-hidden-size 896
    --make-vocab-size-divisible-by 8016 --global-batch-size 1 --bf16 --zero-stage 3
    --ds-sequence-parallel-size 2 --optimizer adam --lr 1e-4
"""
RUNS = {
    "loss, all gathered": "--num-layers 2 --seq-length 2048",
    "loss": "--num-layers 6 --seq-length 2048",
    "layer": "--num-layers 2 --seq-length 4096 --usp-recompute full --usp-loss-chunks 64",
    "loss in chunks": """--num-layers 2 --seq-length 2048 --usp-recompute full --usp-mlp-chunks 4
        --usp-loss-chunks 64""",
    "step": "--num-layers 4 --seq-length 64",
}


def scaled(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration with its default sizes of ZeRO-3 for the smaller model."""
    config["zero_optimization"] |= {
        "stage3_prefetch_bucket_size": 50_000_000 // SCALE,
        "stage3_max_live_parameters": 1_000_000_000 // SCALE,
        "stage3_max_reuse_distance": 1_000_000_000 // SCALE,
        "stage3_param_persistence_threshold": 100_000 // SCALE,
    }
    return config


def measured_over_formula(ctx: RankContext, folder: str) -> dict[str, tuple[float, float]]:
    """Of each run, bytes at the peaks of two steps over the formula's."""
    from usp_trainer import engine
    from usp_trainer.auto_args import planned_run

    from ds_usp.planner import formulas
    from ds_usp.planner import memory as planned_memory

    original = engine.deepspeed_config
    ratios = {}
    with ExitStack() as stack:
        for module, name in (
            (formulas, "LEAST_BUCKET_ELEMENTS"),
            (planned_memory, "LIVE_ELEMENTS"),
        ):
            stack.enter_context(mock.patch.object(module, name, getattr(module, name) // SCALE))
        stack.enter_context(
            mock.patch.object(engine, "deepspeed_config", lambda args: scaled(original(args)))
        )
        stack.enter_context(mock.patch.object(torch.nn.RMSNorm, "forward", fused_norm))
        on_gpus = partial(torch.optim.AdamW, fused=True)
        stack.enter_context(mock.patch.object(torch.optim, "AdamW", on_gpus))
        for name, flags in RUNS.items():
            peaks = []
            with LiveBytes() as live:
                run = start(f"{LLAMA} {flags}", folder)
                for _ in range(2):
                    live.peak = 0
                    run.step()
                    peaks.append(live.peak)
            plan = planned_run(run.args)
            needs = planned_memory.memory(plan.workload(), plan.parallel_config())
            ratios[name] = peaks[0] / needs.formula, peaks[1] / needs.formula
    return ratios


def fused_norm(self: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """As on GPUs, whose kernel saves its input and one number a token."""
    result: torch.Tensor = FusedNorm.apply(x, self.weight)
    return result


def test_the_peak_of_a_step_under_zero3_is_the_formula(tmp_path):
    ratios, _ = fork_world(measured_over_formula, 2, folder=str(tmp_path))
    step, *_ = ratios.pop("step")
    # Of so few tokens a later step needs 5 % more, in the backward pass of the output projection,
    # which the formula leaves out.
    assert step == pytest.approx(1.0, abs=0.03)
    for name, (first, later) in ratios.items():
        assert later == pytest.approx(1.0, abs=0.03), name
        assert first < later - 0.05, name  # Adam's moments are not there yet
