"""The trainer's losses and gradient norms: one rank's on every mesh, with every setting."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_data
from golden_curves import STEPS
from harness import RankContext, fork_world
from trainer_runs import (
    ADAM,
    PLAIN_SGD,
    degrees,
    numbers_on_rank,
    pretrain,
    relative_difference,
    start,
    train,
)

from ds_usp import ConfigError
from ds_usp.training import GradientRule, gradient_rule

LIMIT = 1e-5
GRIDS = {"sp4": {"sp": 4, "u": 2}, "ring4": {"sp": 4, "u": 1}, "dp2-sp2": {"sp": 2, "u": 2}}
CLIPPED = PLAIN_SGD.replace("--clip-grad 0", "--clip-grad 0.5")
PACKED = " --reset-attention-mask --reset-position-ids --eod-mask-loss"
# What differs from the tiny model: flags, and ZeRO stages of its grids.
VARIANTS = {
    "": {"sp4": [0, 3], "dp2-sp2": range(4)},
    " --no-use-rotary-position-embeddings --no-swiglu --normalization layernorm"
    " --no-disable-bias-linear": {"sp4": [3], "ring4": [1]},
    " --no-untie-embeddings-and-output-weights": {"sp4": [3]},
    " --num-key-value-heads 1 --usp-layout striped": {"ring4": [1]},
    " --seq-length 67 --usp-layout contiguous": {"sp4": [1]},
}


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``.bin/.idx`` pair whose documents are mostly shorter than a sequence."""
    torch.manual_seed(0)
    documents = [[*torch.randint(0, 256, (length,)).tolist(), 256] for length in range(1, 120)]
    return trainer_data.write_pair(tmp_path_factory.mktemp("data") / "short", documents)


@pytest.fixture(scope="module")
def of_variants(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Numbers by (flags, grid, stage), and of one rank by flags: two starts of ranks for all."""
    folder = tmp_path_factory.mktemp("variants")
    cases = [
        (PLAIN_SGD + v, g, z) for v, of in VARIANTS.items() for g, zs in of.items() for z in zs
    ]
    cases += [(CLIPPED, "dp2-sp2", zero) for zero in (0, 3)] + [(ADAM, "sp4", 1)]
    ones = list(dict.fromkeys(flags for flags, _, _ in cases))
    runs = [degrees(zero=zero, **GRIDS[grid]) + flags for flags, grid, zero in cases]
    numbers = dict(zip(cases, train(4, *runs, output_dir=folder), strict=True))
    one_rank = train(1, *(degrees() + flags for flags in ones), output_dir=folder)
    return numbers, dict(zip(ones, one_rank, strict=True))


def test_every_mesh_and_zero_stage_trains_as_one_rank(of_variants):
    numbers, one_rank = of_variants
    assert len(numbers) == 14 and len({x[0] for x in one_rank.values()}) == len(VARIANTS)
    assert relative_difference(one_rank[CLIPPED], one_rank[PLAIN_SGD]) > 100 * LIMIT
    for (flags, grid, zero), found in numbers.items():
        assert relative_difference(found, one_rank[flags]) < LIMIT, (flags, grid, zero)


def test_twenty_steps_are_the_recorded_ones(golden, tmp_path):
    # The trainer's own text is Python's documentation, which its versions change.
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{n} squared is {n * n}." for n in range(2000)))
    flags = degrees(sp=2, u=1, zero=1) + ADAM + f" --data-path {text}"
    (numbers,) = train(2, flags, output_dir=tmp_path, steps=STEPS)
    golden.check("GPT trainer, 1x2, ZeRO-1, Adam", *zip(*numbers, strict=True))


def masked_attention(q: Any, k: Any, v: Any, *, mask: Any, **unused: Any) -> torch.Tensor:
    """Dense attention under a mask that is written out from the borders alone."""
    owner = torch.zeros(q.shape[:2], dtype=torch.int64)
    for sample, borders in enumerate(mask.documents):
        for border in borders[1:-1]:
            owner[sample, border:] += 1
    seen = (owner[:, :, None] == owner[:, None, :]).tril()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None], enable_gqa=True
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("positions", ["", " --no-use-rotary-position-embeddings"])
def test_packed_documents_train_as_each_document_alone(positions, short_documents, tmp_path):
    flags = f"{PLAIN_SGD}{positions} --data-path {short_documents} --vocab-size 257"
    four_at_once = degrees() + flags + " --micro-batch-size 4"
    one, plain = train(
        1, four_at_once + PACKED, four_at_once + " --eod-mask-loss", output_dir=tmp_path
    )
    assert relative_difference(one, plain) > 100 * LIMIT, "documents change nothing"
    patches = {"usp_trainer.model.usp_attention": masked_attention}
    (dense,) = train(1, degrees() + flags + PACKED, output_dir=tmp_path, patches=patches)
    # Micro batches of one sample have other numbers of loss tokens than four at once.
    grids = [degrees(zero=1, **GRIDS["sp4"]), degrees(zero=2, **GRIDS["dp2-sp2"])]
    for found in (
        dense,
        *train(4, *(grid + flags + PACKED for grid in grids), output_dir=tmp_path),
    ):
        assert relative_difference(found, one) < LIMIT


WAIT, CHUNKS = "--usp-offload-ratio 0.6", "--usp-loss-chunks 3 --usp-mlp-chunks 5"
FULL = "--usp-recompute full"
BOTH_STAGES = [f"--usp-recompute attention {WAIT}", f"{FULL} --usp-checkpoint-layers 2 {WAIT}"]
POLICIES = {
    1: [*BOTH_STAGES, "--usp-recompute gemm-last", FULL, WAIT, "--usp-states-on-host"],
    3: [*BOTH_STAGES, "--usp-states-on-host"],
}


@pytest.mark.parametrize("zero", POLICIES)
def test_every_memory_setting_trains_alike(zero, tmp_path):
    """To the bit, but for chunks, whose sums are taken in another order."""
    flags = degrees(zero=zero, sp=2, u=1) + ADAM + " --num-layers 3 --global-batch-size 1 "
    chunks = [f"{policy} {CHUNKS}" for policy in ("--usp-recompute gemm-last", BOTH_STAGES[0])]
    policies = [*POLICIES[zero], *chunks]
    plain, *others = train(2, *(flags + policy for policy in ("", *policies)), output_dir=tmp_path)
    for policy, found in zip(policies, others, strict=True):
        limit = 2e-5 if CHUNKS in policy else 0.0
        assert relative_difference(found, plain) <= limit, policy


def note_bytes(states: Any, away: list[int], *_: object) -> None:
    away.append(states.bytes_away)


def flop_and_bytes_away(ctx: RankContext, *, policies: list[str], folder: str) -> list[Any]:
    """FLOP of a step, bytes of states in host memory in its forward pass, and parameters."""
    from torch.utils.flop_counter import FlopCounterMode

    found = []
    for policy in policies:
        trainer, away = start(f"{degrees(sp=2, zero=1)}{ADAM} --bf16 {policy}", folder), [0]
        trainer.train(1e-3)
        if trainer.states:
            note = partial(note_bytes, trainer.states, away)
            trainer.engine.module.register_forward_hook(note)
        with FlopCounterMode(display=False) as flops:
            trainer.train(1e-3)
        found.append((flops.get_total_flops(), max(away), trainer.num_parameters))
    return found


def test_recomputation_computes_and_states_leave(tmp_path):
    policies = ["", "--usp-recompute gemm-last", FULL, "--usp-states-on-host"]
    for rank in fork_world(flop_and_bytes_away, 2, policies=policies, folder=str(tmp_path)):
        (plain, none, size), (gemm_last, *_), (full, *_), (host, away, _) = rank
        assert plain == gemm_last == host < full and none == 0
        assert away == pytest.approx(12 * size / 2, rel=0.02)  # masters and moments, of two ranks


def test_bf16_stays_near_fp32(tmp_path):
    (fp32,) = train(1, degrees() + ADAM, output_dir=tmp_path)
    runs = [degrees(sp=2, zero=zero) + ADAM + " --bf16" for zero in (1, 2, 3)]
    for numbers in train(2, *runs, output_dir=tmp_path):
        assert relative_difference(numbers, fp32) < 2e-2


def test_auto_takes_the_planners_degree(tmp_path):
    flags = degrees(sp=2, u="auto", zero=1) + PLAIN_SGD + " --usp-cluster h100"
    (one,) = train(1, degrees() + PLAIN_SGD, output_dir=tmp_path)
    (two,) = train(2, flags, output_dir=tmp_path)
    assert relative_difference(two, one) < LIMIT


def zero3_scaled_like_zero2(stage: int, groups: Any) -> GradientRule:
    return GradientRule("sp_dp", gradient_rule(2, groups).divisor)


def zero3_over_data_parallel_only(stage: int, groups: Any) -> GradientRule:
    return gradient_rule(2, groups)


@pytest.mark.parametrize(
    ("wrong_rule", "factor"), [(zero3_scaled_like_zero2, 1 / 4), (zero3_over_data_parallel_only, 0)]
)
def test_another_gradient_rule_trains_wrongly(wrong_rule, factor, of_variants, tmp_path):
    runs = [degrees(zero=3, **GRIDS["sp4"]) + PLAIN_SGD]
    patches = {"ds_usp.training.deepspeed.gradient_rule": wrong_rule}
    options = {"runs": runs, "output_dir": str(tmp_path), "steps": 1, "patches": patches}
    right = of_variants[1][PLAIN_SGD][0][1]
    for (((_, norm),),) in fork_world(numbers_on_rank, 4, **options):
        if factor:
            assert norm / right == pytest.approx(factor)
        else:
            assert abs(norm / right - 1) > 0.5


def test_what_is_not_finite_or_contradicts_deepspeed_ends_on_every_rank(tmp_path):
    """A learning rate that ends in NaN saves nothing; keys with which DeepSpeed would sum gradients
    over some of the ranks are refused."""
    mesh_route = tmp_path / "ds_config.json"
    mesh_route.write_text('{"sequence_parallel_size": 2}')
    in_bits = tmp_path / "in_bits.json"
    in_bits.write_text('{"zero_optimization": {"zero_quantized_gradients": true}}')
    run = f"{degrees(sp=2, zero=1)} --output-dir {tmp_path} --train-iters 5"
    runs = [
        f"{run} --optimizer sgd --clip-grad 0 --lr 1e30 --save {tmp_path / 'save'}",
        f"{run} --deepspeed_config {mesh_route}",
        f"{run} --deepspeed_config {in_bits}",
    ]
    not_finite, refused, rounded = pretrain(2, *runs)
    for error, _, _ in not_finite:
        assert type(error).__name__ == "NotFiniteError" and "norm inf" in str(error)
    assert not (tmp_path / "save").exists()
    for error, _, _ in refused:
        assert isinstance(error, ConfigError) and "sequence_parallel_size=2" in str(error)
    assert all("zero_quantized_gradients=True" in str(error) for error, _, _ in rounded)
