"""With any degrees Megatron-LM trains as one rank of the unpatched checkout does.

Plain gradient descent without clipping or decay: Adam and clipping hide a wrong gradient scale.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from lm_runs import SGD, SGD_BY_ADAM, TrainingServer, flags, losses_of, relative_difference

LIMIT = 1e-5  # fp32, losses and gradient norms, at every step
ROPE = "--position-embedding-type rope"
GQA = "--group-query-attention --num-query-groups 2"
MODELS = {
    "gpt": "",
    "rope": f"{ROPE} --rotary-percent 0.5",
    "gqa": GQA,
    "llama": f"{ROPE} {GQA} --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights",
    "window": "--window-size 16,0 --no-create-attention-mask-in-dataloader",
    "sinks": f"{GQA} --softmax-type learnable",
    "off-by-one": "--softmax-type off-by-one --window-size 24,0 --window-attn-skip-freq 2 "
    "--no-create-attention-mask-in-dataloader",
}
# gpt-oss has windows in every second layer, learnable sinks, YaRN and grouped queries.
RECOMPUTE = {
    "": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "usp": "--usp-recompute attention",
}
DISTRIBUTED = f"{SGD_BY_ADAM} --use-distributed-optimizer"
# name: (of all ranks, of the one rank)
OPTIMIZERS = {
    "sgd": (SGD, SGD),
    "overlap": (f"{SGD} --overlap-grad-reduce", SGD),
    "distributed": (DISTRIBUTED, SGD_BY_ADAM),
    "distributed-overlap": (
        f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather",
        SGD_BY_ADAM,
    ),
    "clip": (f"{SGD} --clip-grad 1", f"{SGD} --clip-grad 1"),
    "distributed-clip": (f"{DISTRIBUTED} --clip-grad 1", f"{SGD_BY_ADAM} --clip-grad 1"),
}
# name: (ranks, degrees); the data-parallel degree is the rest
GRIDS: dict[str, tuple[int, dict[str, int]]] = {
    "u2": (2, {"u": 2}),
    "r2": (2, {"r": 2}),
    "u2r2": (4, {"u": 2, "r": 2}),
    "u4": (4, {"u": 4}),
    "r4": (4, {"r": 4}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2v": (2, {"pp": 2, "virtual": 1}),
    "u2-dp2": (4, {"u": 2}),
    "r2-dp2": (4, {"r": 2}),
    "u2-tp2": (4, {"u": 2, "tp": 2}),
    "r2-tp2": (4, {"r": 2, "tp": 2}),
    "u2-pp2v": (4, {"u": 2, "pp": 2, "virtual": 1}),
    "r2-pp2": (4, {"r": 2, "pp": 2}),
    "tp2-pp2v": (4, {"tp": 2, "pp": 2, "virtual": 1}),
    "tp2-dp2": (4, {"tp": 2}),
    "pp2v-dp2": (4, {"pp": 2, "virtual": 1}),
    "u2r2-tp2": (8, {"u": 2, "r": 2, "tp": 2}),
    "u2r2-pp2v": (8, {"u": 2, "r": 2, "pp": 2, "virtual": 1}),
    "u2r2-dp2": (8, {"u": 2, "r": 2}),
    "u4-tp2": (8, {"u": 4, "tp": 2}),
    "r4-tp2": (8, {"r": 4, "tp": 2}),
    "u4-pp2": (8, {"u": 4, "pp": 2}),
    "r4-pp2v": (8, {"r": 4, "pp": 2, "virtual": 1}),
    "u4-dp2": (8, {"u": 4}),
    "r4-dp2": (8, {"r": 4}),
    "u2-tp2-pp2v": (8, {"u": 2, "tp": 2, "pp": 2, "virtual": 1}),
    "r2-tp2-pp2": (8, {"r": 2, "tp": 2, "pp": 2}),
    "r2-tp2-dp2": (8, {"r": 2, "tp": 2}),
    "u2-pp2v-dp2": (8, {"u": 2, "pp": 2, "virtual": 1}),
    "tp2-pp2v-dp2": (8, {"tp": 2, "pp": 2, "virtual": 1}),
}


def measure(
    server: TrainingServer, world: int, text: str, **options: Any
) -> tuple[list[float], list[float]]:
    """Losses and evaluations, and gradient norms."""
    ranks = server.run(world, text, **options)
    for seen in ranks:
        assert seen["norms"] == ranks[0]["norms"]
    return losses_of(ranks), ranks[0]["norms"]


@functools.cache
def one_rank(server: TrainingServer, more: str) -> tuple[list[float], list[float]]:
    """As :func:`measure`, of one rank of the checkout without patches but those of CPUs."""
    return measure(server, 1, flags(more=more), patched=False)


def check(
    server: TrainingServer,
    grid: str,
    model: str = "gpt",
    optimizer: str = "sgd",
    more: str = "",
    reference: str = "",
) -> None:
    """Train over a grid, and compare with one rank that gets the flags ``reference`` too."""
    world, degrees = GRIDS[grid]
    with_tp = "--sequence-parallel" if "tp" in grid and "u" in grid else ""
    optimizer_flags, reference_optimizer = OPTIMIZERS[optimizer]
    text = flags(more=f"{MODELS[model]} {optimizer_flags} {with_tp} {reference} {more}", **degrees)
    losses, norms = measure(server, world, text)
    expected = one_rank(server, f"{MODELS[model]} {reference_optimizer} {reference}")
    assert relative_difference(losses, expected[0]) < LIMIT
    assert relative_difference(norms, expected[1]) < LIMIT


@pytest.mark.parametrize(
    ("grid", "model", "optimizer", "recompute"),
    [
        ("u2", "gpt", "sgd", "full"),
        ("u2r2", "llama", "clip", ""),
        ("r4", "rope", "sgd", "selective"),
        ("u4", "sinks", "sgd", ""),
        ("r2-dp2", "llama", "distributed-overlap", ""),
        ("u2-tp2", "llama", "distributed-overlap", "selective"),
        ("r2-tp2", "window", "sgd", "usp"),
        ("u2-pp2v", "llama", "distributed-overlap", ""),
        ("r2-pp2", "gpt", "distributed-clip", "full"),
        ("u2-tp2-pp2v", "llama", "overlap", ""),
    ],
)
def test_it_trains_as_one_rank_does(
    server: TrainingServer, grid: str, model: str, optimizer: str, recompute: str
) -> None:
    check(server, grid, model, optimizer, RECOMPUTE[recompute])


def test_lengths_that_do_not_divide_are_refused(server: TrainingServer) -> None:
    """By Megatron-LM itself, on every rank and before it makes groups."""
    for seen in server.attempt(2, flags(r=2, more="--seq-length 62 --train-iters 1")):
        assert "multiple of 2 * context-parallel-size" in seen["traceback"]


def test_bf16_stays_within_its_rounding_error(server: TrainingServer) -> None:
    more = f"{MODELS['llama']} --bf16"
    losses, norms = measure(server, 4, flags(u=2, r=2, more=more))
    expected_losses, expected_norms = one_rank(server, more)
    fp32, _ = one_rank(server, MODELS["llama"])
    assert relative_difference(losses, expected_losses) < 1e-3
    assert relative_difference(norms, expected_norms) < 5e-3
    # Without bf16 one rank would equal fp32.
    assert 1e-5 < relative_difference(expected_losses, fp32) < 5e-3


MLA = (
    f"{ROPE} --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8"
)


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["u2r2", "r4", "u2-pp2v", "r4-dp2"])
def test_latent_attention(server: TrainingServer, grid: str) -> None:
    """The stock local attention takes no ``k_channels``, so that one rank has ds_usp's too."""
    world, degrees = GRIDS[grid]
    expected = measure(server, 1, flags(more=f"{MLA} --usp-recompute attention"))
    losses, norms = measure(server, world, flags(more=MLA, **degrees))
    assert relative_difference(losses, expected[0]) < LIMIT
    assert relative_difference(norms, expected[1]) < LIMIT


def full_matrix() -> Iterator[tuple[str, str, str, str]]:
    """(grid, model, optimizer, recompute)."""
    for grid, model in itertools.product(GRIDS, MODELS):
        yield grid, model, "sgd", ""
    for grid, optimizer in itertools.product(GRIDS, list(OPTIMIZERS)[1:]):
        yield grid, "llama", optimizer, ""
    for grid, recompute in itertools.product(GRIDS, list(RECOMPUTE)[1:]):
        yield grid, "gpt", "distributed-overlap", recompute


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "model", "optimizer", "recompute"), list(full_matrix()))
def test_the_full_matrix(
    server: TrainingServer, grid: str, model: str, optimizer: str, recompute: str
) -> None:
    check(server, grid, model, optimizer, RECOMPUTE[recompute])
