"""Losses and gradient norms of the trainer equal one rank's; each trap, unhandled, shows."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from golden_curves import STEPS
from harness import RankContext, RankError, fork_world
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from trainer_runs import (
    ADAM,
    PLAIN_SGD,
    Numbers,
    degrees,
    errors,
    on_each_rank,
    relative_difference,
    train,
)

from ds_usp import ConfigError
from ds_usp.training import GradientRule, gradient_rule, prepare_deepspeed

LIMIT = 1e-5
GRIDS: dict[str, dict[str, int]] = {
    "sp4": {"sp": 4, "u": 2},
    "dp2-sp2": {"sp": 2, "u": 1},
    "tp2-sp2": {"sp": 2, "u": 2, "tp": 2},
    "pp2-sp2": {"sp": 2, "u": 2, "pp": 2},
    "tp2-pp2-sp2": {"sp": 2, "u": 1, "tp": 2, "pp": 2},
}
WORLD = {name: 8 if name == "tp2-pp2-sp2" else 4 for name in GRIDS}
STAGES = {name: range(2 if "pp2" in name else 4) for name in GRIDS}
CASES = [(grid, zero) for grid in GRIDS for zero in STAGES[grid]]


@pytest.fixture(scope="module")
def numbers_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Numbers by (grid, flags), one for each ZeRO stage; a world of ranks is started once each."""

    @cache
    def run(grid: str, flags: str) -> list[Numbers]:
        folder = tmp_path_factory.mktemp(grid)
        # Adam's first update has one size whatever the gradient's: clipping shows in the second's.
        steps = 2 if "sgd" in flags else 3
        if grid == "one rank":
            return train(1, degrees() + flags, output_dir=folder, steps=steps)
        runs = [degrees(zero=zero, **GRIDS[grid]) + flags for zero in STAGES[grid]]
        return train(WORLD[grid], *runs, output_dir=folder, steps=steps)

    return run


@pytest.mark.parametrize(("grid", "zero"), CASES)
def test_sgd_without_clipping_equals_one_rank(grid, zero, numbers_of):
    expected = numbers_of("one rank", PLAIN_SGD)[0]
    assert relative_difference(numbers_of(grid, PLAIN_SGD)[zero], expected) < LIMIT


@pytest.mark.parametrize(
    ("grid", "zero"), [("dp2-sp2", zero) for zero in range(4)] + [("pp2-sp2", 0), ("pp2-sp2", 1)]
)
def test_adam_with_clipping_equals_one_rank(grid, zero, numbers_of):
    expected = numbers_of("one rank", ADAM)[0]
    assert relative_difference(numbers_of(grid, ADAM)[zero], expected) < LIMIT


def test_twenty_steps_are_the_recorded_ones(golden, tmp_path):
    # The trainer's own text is Python's documentation, which its versions change.
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{n} squared is {n * n}." for n in range(2000)))
    flags = degrees(sp=2, u=1, zero=1) + ADAM + f" --data-path {text}"
    (numbers,) = train(2, flags, output_dir=tmp_path, steps=STEPS)
    golden.check("GPT trainer, 1x2, ZeRO-1, Adam", *zip(*numbers, strict=True))


def test_another_clipping_shows(numbers_of, tmp_path):
    flags = degrees(zero=1, **GRIDS["dp2-sp2"]) + ADAM.replace("--clip-grad 0.5", "--clip-grad 0")
    (unclipped,) = train(4, flags, output_dir=tmp_path, steps=3)
    assert relative_difference(unclipped, numbers_of("one rank", ADAM)[0]) > 10 * LIMIT


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a ``.bin/.idx`` pair whose documents are mostly shorter than a sequence."""
    prefix = tmp_path_factory.mktemp("data") / "short"
    torch.manual_seed(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in range(1, 120):
        builder.add_item(torch.tensor([*torch.randint(0, 256, (length,)).tolist(), 256]))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_micro_batches_with_unequal_numbers_of_loss_tokens_equal_one_batch(
    short_documents, tmp_path
):
    flags = PLAIN_SGD + f" --eod-mask-loss --data-path {short_documents} --vocab-size 257"
    (one,) = train(1, degrees() + flags + " --micro-batch-size 4", output_dir=tmp_path)
    (four,) = train(4, degrees(zero=1, **GRIDS["dp2-sp2"]) + flags, output_dir=tmp_path)
    assert relative_difference(four, one) < LIMIT


PACKED = " --reset-attention-mask --reset-position-ids --eod-mask-loss"


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_packed_documents_equal_one_rank(positions, short_documents, tmp_path):
    flags = PLAIN_SGD + PACKED + f" --data-path {short_documents} --vocab-size 257"
    if positions == "learned":
        flags += " --no-use-rotary-position-embeddings"
    unpacked = degrees() + flags.replace(PACKED, " --eod-mask-loss")
    packed = degrees() + flags + " --micro-batch-size 4"
    one, plain = train(1, packed, unpacked, output_dir=tmp_path)
    assert relative_difference(one, plain) > 100 * LIMIT, "documents change nothing"
    runs = [degrees(zero=1, **GRIDS["sp4"]), degrees(zero=1, sp=4, u=1) + " --micro-batch-size 2"]
    for four in train(4, *(run + flags for run in runs), output_dir=tmp_path):
        assert relative_difference(four, one) < LIMIT


def test_one_rank_of_packed_documents_is_each_document_alone(short_documents, tmp_path):
    """Against a mask of tokens x tokens: what one rank trains on is right itself."""
    flags = PLAIN_SGD + PACKED + f" --data-path {short_documents} --vocab-size 257"
    (one,) = train(1, degrees() + flags, output_dir=tmp_path)
    patches = {"ds_usp.usp_attention": masked_attention}
    (dense,) = train(1, degrees() + flags, output_dir=tmp_path, patches=patches)
    assert relative_difference(one, dense) < LIMIT


def test_a_window_equals_one_rank(tmp_path):
    flags = PLAIN_SGD + " --window-size 7"
    one, plain = train(1, degrees() + flags, degrees() + PLAIN_SGD, output_dir=tmp_path)
    assert relative_difference(one, plain) > 100 * LIMIT, "the window changes nothing"
    (four,) = train(4, degrees(zero=1, **GRIDS["sp4"]) + flags, output_dir=tmp_path)
    assert relative_difference(four, one) < LIMIT


def masked_attention(q: Any, k: Any, v: Any, *, mask: Any, **unused: Any) -> torch.Tensor:
    """Dense attention under a mask that is written out from the borders alone."""
    tokens = q.shape[1]
    owner = torch.zeros(q.shape[0], tokens, dtype=torch.int64)
    for sample, borders in enumerate(mask.documents):
        for border in borders[1:-1]:
            owner[sample, border:] += 1
    seen = (owner[:, :, None] == owner[:, None, :]) & torch.ones(tokens, tokens).tril().bool()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None], enable_gqa=True
    )
    return out.transpose(1, 2)


# ------------------------------------------------- what each handling is for, by leaving it out


def zero3_scaled_like_zero2(stage: int, groups: Any) -> GradientRule:
    return GradientRule("sp_dp", gradient_rule(2, groups).divisor)


def zero3_over_data_parallel_only(stage: int, groups: Any) -> GradientRule:
    return gradient_rule(2, groups)


def pipeline_divided_by_data_parallel(stage: int, groups: Any) -> GradientRule:
    return GradientRule("dp", 1)


@pytest.mark.parametrize(
    ("grid", "zero", "wrong_rule", "norm_factor"),
    [
        ("sp4", 3, zero3_scaled_like_zero2, 1 / 4),
        ("sp4", 3, zero3_over_data_parallel_only, None),
        ("pp2-sp2", 0, pipeline_divided_by_data_parallel, 1 / 2),
        ("pp2-sp2", 1, pipeline_divided_by_data_parallel, 1 / 2),
    ],
)
def test_another_gradient_rule_trains_wrongly(
    grid, zero, wrong_rule, norm_factor, numbers_of, tmp_path
):
    ranks = on_each_rank(
        WORLD[grid],
        [degrees(zero=zero, **GRIDS[grid]) + PLAIN_SGD],
        tmp_path,
        steps=1,
        patches={"ds_usp.training.deepspeed.gradient_rule": wrong_rule},
    )
    expected = numbers_of("one rank", PLAIN_SGD)[0][0][1]
    for (((_, norm),),) in ranks:
        if norm_factor:
            assert norm / expected == pytest.approx(norm_factor)
        else:
            assert abs(norm / expected - 1) > 0.5


def mesh_route_config(args: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.accumulation_steps,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": args.zero_stage},
        "zero_allow_untested_optimizer": True,
        "sequence_parallel_size": 4,
        "data_parallel_size": 1,
    }


def no_check(config: Any) -> None:
    pass


def no_mpu(groups: Any, rule: Any) -> None:
    pass


MESH_ROUTE = {"usp_trainer.engine.deepspeed_config": mesh_route_config}


def test_the_mesh_route_is_refused_on_every_rank(tmp_path):
    flags = degrees(zero=1, **GRIDS["sp4"]) + PLAIN_SGD
    for error in errors(4, flags, tmp_path, MESH_ROUTE):
        assert isinstance(error, ConfigError)
        assert "sequence_parallel_size=4" in str(error)
        assert "mpu" in str(error)


def test_the_mesh_route_is_refused_in_backward_where_nothing_checks_it_before(tmp_path):
    unchecked = {
        **MESH_ROUTE,
        "ds_usp.training.deepspeed._check_config": no_check,
        "ds_usp.training.deepspeed.deepspeed_mpu": no_mpu,
    }
    with pytest.raises(RankError, match="sums gradients over the global ranks"):
        on_each_rank(4, [degrees(zero=1, **GRIDS["sp4"]) + PLAIN_SGD], tmp_path, patches=unchecked)


def deepspeeds_clipping(config: Any, optimizer: Any, groups: Any) -> Any:
    optimizer._global_grad_norm = float("nan")  # DeepSpeed measures none at ZeRO-0
    return config


def test_deepspeeds_clipping_at_zero0_is_wrong_over_stages(tmp_path):
    # DeepSpeed counts what tensor-parallel ranks share on the first stage only: norms, here.
    clipped = (
        " --optimizer sgd --lr 0.5 --clip-grad 0.5 --weight-decay 0"
        " --normalization layernorm --init-method-std 0.3"
    )
    (one,) = train(1, degrees() + clipped, output_dir=tmp_path)
    runs = [degrees(zero=0, **GRIDS["pp2-sp2"]) + clipped]
    (clipped_here,) = train(4, *runs, output_dir=tmp_path)
    assert relative_difference(clipped_here, one) < LIMIT
    unhandled = {"ds_usp.training.deepspeed.own_clipping": deepspeeds_clipping}
    runs = [f"{runs[0]} --no-check-for-nan-in-loss-and-grad"]  # DeepSpeed's norm is none here
    ((clipped_by_deepspeed,), *_) = on_each_rank(4, runs, tmp_path, patches=unhandled)
    assert abs(clipped_by_deepspeed[1][0] / one[1][0] - 1) > 50 * LIMIT


def compiled_ops(ctx: RankContext, *, prepare: bool) -> int:
    """How often DeepSpeed builds its shared-memory op when it starts."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    built: list[str] = []
    builder = SimpleNamespace(
        NAME="deepspeed_shm_comm", absolute_name=str, load=lambda: built.append("compiled")
    )
    deepspeed.ops.__compatible_ops__[builder.NAME] = True  # as where there is a C++ compiler
    if prepare:
        prepare_deepspeed()
    with mock.patch.object(get_accelerator(), "create_op_builder", lambda name: builder):
        deepspeed.init_distributed("gloo", verbose=False)
    return len(built)


@pytest.mark.parametrize(("prepare", "times"), [(True, 0), (False, 1)])
def test_no_op_is_compiled_at_the_start(prepare, times):
    assert fork_world(compiled_ops, 1, prepare=prepare) == [times]
