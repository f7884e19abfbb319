"""``--usp-tp-overlap`` of the trainer: what ``auto`` takes, and what ``on`` refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ds_usp import ConfigError, TokenLayout

sys.path.insert(0, str(Path(__file__).parents[2] / "examples_deepspeed" / "sequence_parallel"))

from usp_trainer import tp_overlap
from usp_trainer.arguments import parse
from usp_trainer.auto_args import planned_run
from usp_trainer.engine import deepspeed_config
from usp_trainer.validate_args import validate_and_derive

LARGE = """
    --tensor-model-parallel-size 2 --ds-sequence-parallel-size 2 --hidden-size 2048 --bf16
    --seq-length 8192 --transformer-impl local
"""
NOT_WORTH_IT = {
    "one rank": "--tensor-model-parallel-size 1",
    "narrow": "--hidden-size 1024",
    "few tokens": "--seq-length 4096",
    "uneven": "--seq-length 8198",
    "fp32": "--no-bf16",
}
REFUSED = {
    "": "needs --tensor-model-parallel-size 2 or more, which is 1: raise it, or --usp-tp-overlap",
    "--tensor-model-parallel-size 4 --seq-length 1026": (
        "shards the 1026 tokens of a sequence-parallel rank over --tensor-model-parallel-size 4, "
        "which does not divide them. Use --seq-length 1028, or --usp-tp-overlap off"
    ),
    "--tensor-model-parallel-size 4 --seq-length 64 --usp-mlp-chunks 17": (
        "leaves 16 tokens of a sequence to a tensor-parallel rank: use --usp-mlp-chunks of 0 to"
    ),
}


def worth_it(flags: str = "", **values: Any) -> bool:
    args = validate_and_derive(parse([*LARGE.split(), *flags.split()]), 4)
    vars(args).update({"device": "cuda", "transformer_impl": "local", **values})
    sizes = args.seq_length, args.ulysses_degree, args.ring_degree
    return tp_overlap.is_worth_it(args, TokenLayout(args.usp_layout, *sizes))


def test_auto_is_for_large_layers() -> None:
    assert worth_it()
    assert worth_it("--seq-length 4096 --micro-batch-size 2")
    assert not worth_it(device="cpu")
    assert not worth_it(transformer_impl="transformer_engine")
    for name, flags in NOT_WORTH_IT.items():
        assert not worth_it(flags), name


@pytest.mark.parametrize("flags", REFUSED)
def test_on_is_refused_with_the_numbers_and_the_fix(flags: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate_and_derive(parse(["--usp-tp-overlap", "on", *flags.split()]), 8)
    assert str(refused.value).startswith("--usp-tp-overlap on ")
    assert REFUSED[flags] in str(refused.value)
    validate_and_derive(parse(flags.split()), 8)


def test_the_planner_knows_the_shards_and_a_pipeline_sends_them_whole() -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --usp-tp-overlap"
    for choice, sharded in (("on", True), ("off", False)):
        args = validate_and_derive(parse([*flags.split(), choice]), 4)
        assert planned_run(args).parallel_config().tp_sequence is sharded
        assert ("pipeline" in deepspeed_config(args)) is sharded
