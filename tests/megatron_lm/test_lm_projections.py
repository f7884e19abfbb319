"""``--usp-projection-overlap`` changes neither losses nor gradients of Megatron-LM."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from lm_packed import PATCHES
from lm_runs import TrainingServer, flags, losses_of, relative_difference
from test_lm_parity import GRIDS, MODELS, OPTIMIZERS, RECOMPUTE, ROPE

LIMIT = 1e-6
PACKED = f"{ROPE} --sft --data-path any --split 50,25,25 --eval-iters 1"
MTP_AND_EXPERTS = f"{ROPE} --mtp-num-layers 1 --num-experts 4 --disable-bias-linear"
QKV_BIASES = f"{MODELS['rope']} --disable-bias-linear --add-qkv-bias"
SMALL_BUCKETS = "--ddp-bucket-size 1"  # no module waits for the weights of another one
OVERLAP, DISTRIBUTED = (OPTIMIZERS[name][0] for name in ("overlap", "distributed-overlap"))
CHECKPOINTS = "--usp-recompute full --usp-mlp-chunks 3"
# name: grid, flags
CASES = {
    "gathered weights": ("u2r2", f"{MODELS['llama']} {DISTRIBUTED} {SMALL_BUCKETS}"),
    "biases, checkpoints": ("u4", f"{OVERLAP} {CHECKPOINTS}"),
    "half rotated, its own checkpoints": ("r2", f"{QKV_BIASES} {RECOMPUTE['full']}"),
    "stages": ("u2-pp2v", f"{MODELS['llama']} {DISTRIBUTED}"),
    "window": ("r2-dp2", f"{MODELS['window']} {DISTRIBUTED}"),
    "sinks": ("u2r2", f"{MODELS['sinks']} {DISTRIBUTED}"),
    "experts": ("u2", MTP_AND_EXPERTS),
    "documents": ("u2r2", f"{PACKED} --calculate-per-token-loss"),
}
WHOLE = [grid for grid in GRIDS if {"u", "r"} & set(GRIDS[grid][1]) and "tp" not in grid]
SLOW = list(itertools.product(WHOLE, MODELS))


def refuse_plain(original: Any, *args: Any, **kwargs: Any) -> Any:
    """``Attention.forward``, which is not to be called."""
    raise AssertionError("a layer computed its projections by itself")


def check(server: TrainingServer, grid: str, more: str) -> None:
    """Compare a run that projects chunk by chunk of heads with one that does not."""
    world, degrees = GRIDS[grid]
    data = PATCHES if "--sft" in more else ()
    plain = server.run(world, flags(more=more, **degrees), extra=data)
    never = ("megatron.core.transformer.attention:Attention.forward", refuse_plain)
    text = flags(more=f"{more} --usp-projection-overlap recompute", **degrees)
    overlapped = server.run(world, text, extra=(*data, never))
    assert len(losses_of(plain)) >= 4
    assert relative_difference(losses_of(overlapped), losses_of(plain)) < LIMIT
    assert relative_difference(overlapped[0]["norms"], plain[0]["norms"]) < LIMIT


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_without(server: TrainingServer, name: str) -> None:
    check(server, *CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "model"), SLOW)
def test_the_full_matrix_of_projections(server: TrainingServer, grid: str, model: str) -> None:
    check(server, grid, f"{MODELS[model]} {DISTRIBUTED}")
