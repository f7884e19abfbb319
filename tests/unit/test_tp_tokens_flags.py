"""``--usp-tp-shard-tokens`` of the trainer: what ``on`` refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ds_usp import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples_deepspeed" / "sequence_parallel"))

from usp_trainer.arguments import parse
from usp_trainer.auto_args import planned_run
from usp_trainer.engine import deepspeed_config
from usp_trainer.validate_args import validate_and_derive

REFUSED = {
    "": "needs --tensor-model-parallel-size 2 or more, which is 1: raise it, or --usp-tp-shard-",
    "--tensor-model-parallel-size 4 --seq-length 1026": (
        "shards the 1026 tokens of a sequence-parallel rank over --tensor-model-parallel-size 4, "
        "which does not divide them. Use --seq-length 1028, or --usp-tp-shard-tokens off"
    ),
    "--tensor-model-parallel-size 4 --seq-length 64 --usp-mlp-chunks 17": (
        "leaves 16 tokens of a sequence to a tensor-parallel rank: use --usp-mlp-chunks of 0 to"
    ),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_on_is_refused_with_the_numbers_and_the_fix(flags: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate_and_derive(parse(["--usp-tp-shard-tokens", "on", *flags.split()]), 8)
    assert str(refused.value).startswith("--usp-tp-shard-tokens on ")
    assert REFUSED[flags] in str(refused.value)
    validate_and_derive(parse(flags.split()), 8)


def test_the_planner_knows_the_shards_and_a_pipeline_sends_them_whole() -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --usp-tp-shard-tokens"
    for choice, sharded in (("on", True), ("off", False)):
        args = validate_and_derive(parse([*flags.split(), choice]), 4)
        assert planned_run(args).parallel_config().tp_sequence is sharded
        assert ("pipeline" in deepspeed_config(args)) is sharded
