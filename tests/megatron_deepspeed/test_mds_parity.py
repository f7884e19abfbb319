"""With any degrees Megatron-DeepSpeed trains as one rank does.

SGD without momentum, clipping or decay: Adam and clipping hide a wrong gradient scale.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mds_runs import TrainingServer, flags, losses_of, relative_difference

LIMIT = 1e-5  # fp32, losses and gradient norms, at every step
STEPS = 4
ROPE = "--use-rotary-position-embeddings"
GQA = "--num-key-value-heads 2"
LLAMA = (
    f"{ROPE} {GQA} --swiglu --normalization rmsnorm --untie-embeddings-and-output-weights "
    "--disable-bias-linear"
)
MODELS = {"gpt": "", "rope": ROPE, "gqa": GQA, "llama": LLAMA, "odd": "--seq-length 61"}
RECOMPUTE = {
    "": "",
    "deepspeed": "--checkpoint-activations --deepspeed-activation-checkpointing",
    "full": "--recompute-granularity full --recompute-method uniform",
}
PACKED = "--reset-attention-mask --reset-position-ids --eod-mask-loss --seq-length 512 "
PACKED += "--max-position-embeddings 512"
ATTENTION = "megatron_patches.megatron_deepspeed.attention:SequenceParallelAttention.forward"
# name: (ranks, degrees)
GRIDS = {
    "u2": (2, {"sp": 2, "u": 2}),
    "r2": (2, {"sp": 2, "u": 1}),
    "u2r2": (4, {"sp": 4, "u": 2}),
    "u4": (4, {"sp": 4, "u": 4}),
    "r4": (4, {"sp": 4, "u": 1}),
    "r2-dp2": (4, {"sp": 2, "u": 1}),
    "u2-tp2": (4, {"sp": 2, "u": 2, "tp": 2}),
    "r2-tp2": (4, {"sp": 2, "u": 1, "tp": 2}),
    "u2-pp2": (4, {"sp": 2, "u": 2, "pp": 2}),
    "r2-pp2": (4, {"sp": 2, "u": 1, "pp": 2}),
    "u2r2-pipe": (4, {"sp": 4, "u": 2, "pipe": True}),
    "u2-tp2-pp2": (8, {"sp": 2, "u": 2, "tp": 2, "pp": 2}),
    "r2-tp2-pp2": (8, {"sp": 2, "u": 1, "tp": 2, "pp": 2}),
    "u2r2-tp2": (8, {"sp": 4, "u": 2, "tp": 2}),
    "u2r2-pp2": (8, {"sp": 4, "u": 2, "pp": 2}),
}


def measure(
    server: TrainingServer, grid: str, zero: int, model: str, more: str, steps: int
) -> tuple[list[float], list[float]]:
    """Losses and evaluations, and gradient norms."""
    world, degrees = GRIDS[grid]
    if "dp2" in grid:
        more += " --micro-batch-size 1"  # the same global batch
    text = flags(zero=zero, more=f"{MODELS[model]} --train-iters {steps} {more}", **degrees)
    ranks = server.run(world, text)
    return losses_of(ranks), ranks[0]["norms"]


@functools.cache
def one_rank(
    server: TrainingServer, model: str, more: str, steps: int
) -> tuple[list[float], list[float]]:
    """As :func:`measure`, of one rank at ZeRO-1, where DeepSpeed reports a norm."""
    text = flags(zero=1, more=f"{MODELS[model]} --train-iters {steps} {more}")
    ranks = server.run(1, text)
    return losses_of(ranks), ranks[0]["norms"]


def check(
    server: TrainingServer,
    grid: str,
    zero: int,
    model: str = "gpt",
    more: str = "",
    steps: int = STEPS,
) -> None:
    losses, norms = measure(server, grid, zero, model, more, steps)
    expected_losses, expected_norms = one_rank(server, model, "", steps)
    assert relative_difference(losses, expected_losses) < LIMIT
    assert relative_difference(norms, expected_norms) < LIMIT


@pytest.mark.parametrize(
    ("grid", "zero", "model", "recompute"),
    [
        ("u2", 0, "gpt", ""),
        ("u2r2", 0, "rope", "full"),
        ("r4", 1, "odd", ""),
        ("u4", 2, "gqa", ""),
        ("u2r2", 3, "llama", "deepspeed"),
        ("r2-dp2", 3, "gpt", ""),
        ("r2-dp2", 2, "llama", ""),
        ("u2-tp2", 1, "llama", "deepspeed"),
        ("r2-tp2", 0, "gpt", ""),
        ("u2-pp2", 0, "llama", "deepspeed"),
        ("r2-pp2", 1, "gpt", ""),
        ("u2r2-pipe", 1, "rope", ""),
        ("r2-tp2-pp2", 0, "llama", ""),
        ("u2-tp2-pp2", 1, "gpt", "deepspeed"),
    ],
)
def test_it_trains_as_one_rank_does(
    server: TrainingServer, grid: str, zero: int, model: str, recompute: str
) -> None:
    check(server, grid, zero, model, RECOMPUTE[recompute])


@pytest.mark.parametrize(
    ("grid", "zero", "model", "more"),
    [
        (
            "u2r2",
            1,
            "llama",
            "--usp-recompute gemm-last --usp-loss-chunks 3 --usp-offload-ratio 0.5",
        ),
        ("u2r2", 3, "gpt", "--usp-recompute gemm-last --usp-loss-chunks 2"),
        ("u2r2", 3, "gpt", "--usp-recompute gemm-last --usp-mlp-chunks 5 --usp-states-on-host"),
        ("r2-pp2", 1, "llama", "--usp-recompute attention --usp-offload-ratio 1"),
        ("u2-tp2", 2, "gpt", "--usp-recompute attention --usp-loss-chunks 5 --usp-mlp-chunks 2"),
        ("u2r2", 3, "llama", "--usp-recompute attention --deepspeed-activation-checkpointing"),
        (
            "u2-pp2",
            1,
            "gpt",
            "--usp-recompute full --usp-checkpoint-layers 2 --usp-mlp-chunks 3 "
            "--usp-states-on-host",
        ),
    ],
)
def test_every_memory_policy_trains_as_one_rank_does(
    server: TrainingServer, grid: str, zero: int, model: str, more: str
) -> None:
    check(server, grid, zero, model, more)


def test_saved_attention_sends_what_a_plain_run_does(server: TrainingServer) -> None:
    plain, saved, full = (
        server.run(4, flags(sp=4, u=2, zero=1, more=f"--train-iters 2 --usp-recompute {recompute}"))
        for recompute in ("none", "attention", "full")
    )
    for rank in range(4):
        assert 0 < plain[rank]["sent"] == saved[rank]["sent"] < full[rank]["sent"]


OUTPUTS: list[int] = []  # on a rank: bytes of what layers return when they are recomputed


def watch_checkpoint(original: Any, run: Any, *args: Any) -> Any:
    """``tensor_parallel.checkpoint``: a recomputation, and none else, has gradients enabled."""

    def watched(*inputs: Any) -> Any:
        out = run(*inputs)
        if torch.is_grad_enabled():
            tensors = out if isinstance(out, tuple) else (out,)
            OUTPUTS.extend(x.untyped_storage().nbytes() for x in tensors)
        return out

    return original(watched, *args)


def check_outputs(original: Any, *args: Any) -> Any:
    """``train``: each output is in the memory of one element."""
    result = original(*args)
    assert OUTPUTS and max(OUTPUTS) <= 4, OUTPUTS
    return result


def test_recomputed_layers_keep_no_output(server: TrainingServer) -> None:
    wraps = {
        "megatron.core.tensor_parallel:checkpoint": watch_checkpoint,
        "megatron.training:train": check_outputs,
    }
    text = flags(zero=1, more="--train-iters 1 --usp-recompute full")
    server.run(1, text, extra=tuple(wraps.items()))


def refuse_plain(original: Any, *args: Any) -> None:
    """``SequenceParallelAttention.forward`` where projections are to be under its exchanges."""
    raise AssertionError("attention was called between its projections")


@pytest.mark.parametrize(
    ("grid", "zero", "model", "more"),
    [
        ("u2", 0, "gpt", RECOMPUTE["deepspeed"]),
        ("u2r2", 3, "llama", ""),
        ("u4", 2, "gqa", "--usp-recompute full --usp-checkpoint-layers 2 --usp-mlp-chunks 3"),
        ("r4", 3, "rope", "--usp-recompute full --usp-offload-ratio 1"),
        ("r2-pp2", 1, "gpt", "--usp-layout contiguous"),
        ("u2", 1, "rope", PACKED),
    ],
)
def test_projections_under_the_exchanges_train_the_same(
    server: TrainingServer, grid: str, zero: int, model: str, more: str
) -> None:
    world, degrees = GRIDS[grid]
    # Without it ZeRO-3 keeps parameters of this size whole.
    partition = {"zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0}}
    plain, again = (
        server.run(
            world,
            flags(
                zero=zero,
                config=partition,
                more=f"{MODELS[model]} {more} --usp-projection-overlap {overlap}",
                **degrees,
            ),
            extra=((ATTENTION, refuse_plain),) if overlap != "off" else (),
        )
        for overlap in ("off", "recompute")
    )
    assert relative_difference(losses_of(again), losses_of(plain)) < 1e-6
    assert relative_difference(again[0]["norms"], plain[0]["norms"]) < 1e-6
    assert (again[0]["sent"] > plain[0]["sent"]) == ("u" in grid)


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_layout_changes_nothing(server: TrainingServer, model: str) -> None:
    check(server, "u2r2", 1, model, "--usp-layout contiguous")


@pytest.mark.parametrize(
    ("grid", "zero", "model", "recompute"),
    [("u2r2", 1, "gpt", ""), ("r4", 3, "rope", "deepspeed"), ("r2-tp2", 0, "gpt", "")],
)
def test_packed_documents(
    server: TrainingServer, grid: str, zero: int, model: str, recompute: str
) -> None:
    losses, norms = measure(server, grid, zero, model, f"{PACKED} {RECOMPUTE[recompute]}", STEPS)
    # With learned positions one rank has Megatron-DeepSpeed's own attention and its dense mask.
    expected_losses, expected_norms = one_rank(server, model, PACKED, STEPS)
    assert relative_difference(losses, expected_losses) < LIMIT
    assert relative_difference(norms, expected_norms) < LIMIT
    plain = PACKED.replace("--reset-attention-mask --reset-position-ids", "")
    assert relative_difference(losses, one_rank(server, model, plain, STEPS)[0]) > LIMIT


@pytest.mark.parametrize("grid", ["u2r2", "r2-pp2"])
def test_bf16_stays_within_its_rounding_error(server: TrainingServer, grid: str) -> None:
    losses, norms = measure(server, grid, 1, "gpt", "--bf16", STEPS)
    expected_losses, expected_norms = one_rank(server, "gpt", "--bf16", STEPS)
    fp32, _ = one_rank(server, "gpt", "", STEPS)
    assert relative_difference(losses, expected_losses) < 2e-4
    assert relative_difference(norms, expected_norms) < 2e-3
    # Without bf16 one rank would equal fp32.
    assert 1e-5 < relative_difference(expected_losses, fp32) < 2e-3


def test_adam_and_clipping_over_stages(server: TrainingServer) -> None:
    """DeepSpeed's own clipping at ZeRO-0 is wrong over pipeline stages."""
    adam = "--optimizer adam --lr 1e-3 --clip-grad 0.5"
    losses, norms = measure(server, "r2-pp2", 0, "gpt", adam, STEPS)
    expected_losses, expected_norms = one_rank(server, "gpt", adam, STEPS)
    assert relative_difference(losses, expected_losses) < LIMIT
    assert relative_difference(norms, expected_norms) < LIMIT


ZERO = {
    "z3-buckets": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 1000,
        "stage3_param_persistence_threshold": 10,
    },
    "z3-all-reduce": {"stage": 3, "reduce_scatter": False},
    "z3-offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "z2-buckets": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1000},
    "z2-all-reduce": {"stage": 2, "reduce_scatter": False},
    "z2-offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "z1-all-reduce": {"stage": 1, "reduce_scatter": False},
    "z1-buckets": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 1000},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", ZERO)
def test_other_reduction_settings_of_zero(server: TrainingServer, options: str) -> None:
    zero = ZERO[options]
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    text = flags(sp=2, u=1, zero=zero["stage"], config=config, more="--micro-batch-size 1")
    ranks = server.run(4, text)
    losses, norms = one_rank(server, "gpt", "", STEPS)
    assert relative_difference(losses_of(ranks), losses) < LIMIT
    assert relative_difference(ranks[0]["norms"], norms) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["prescale_gradients", "gradient_predivide_factor"])
@pytest.mark.parametrize("zero", [0, 1])
def test_scaling_before_the_sum(server: TrainingServer, zero: int, scaling: str) -> None:
    config = {scaling: True if scaling.startswith("pre") else 2.0}
    text = flags(sp=2, u=1, zero=zero, config=config, more="--micro-batch-size 1")
    assert (
        relative_difference(losses_of(server.run(4, text)), one_rank(server, "gpt", "", STEPS)[0])
        < LIMIT
    )


def full_matrix() -> Iterator[tuple[str, int, str, str, str]]:
    """(grid, ZeRO stage, model, recompute, layout)."""
    for grid, (_, degrees) in GRIDS.items():
        stages = range(2 if degrees.get("pp", 1) > 1 or "pipe" in degrees else 4)
        for zero, model in itertools.product(stages, MODELS):
            yield grid, zero, model, "", "zigzag"
        for model in ("gpt", "llama"):
            yield grid, stages[-1], model, "deepspeed", "zigzag"
            if "r" in grid:
                yield grid, stages[-1], model, "", "contiguous"


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "zero", "model", "recompute", "layout"), list(full_matrix()))
def test_the_full_matrix(
    server: TrainingServer, grid: str, zero: int, model: str, recompute: str, layout: str
) -> None:
    check(server, grid, zero, model, f"{RECOMPUTE[recompute]} --usp-layout {layout}", steps=10)
