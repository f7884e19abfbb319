"""The lines of ``ds-usp plan`` are started: on gloo ranks, with a tiny model, and trains
as one rank does.

Megatron-DeepSpeed itself is started by tests/megatron_deepspeed/test_mds_parity.py.
"""

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import RankContext, fork_world
from trainer_runs import (
    PLAIN_SGD,
    TRAINER,
    Numbers,
    degrees,
    relative_difference,
    train,
    trainer_of,
)

from ds_usp.planner import ModelShape, ParallelConfig, Workload
from ds_usp.planner.emit import ds_config, emit

LIMIT = 1e-5
SHAPE = ModelShape("tiny", 2, 32, 64, 4, 2, 64, rope_theta=500000.0, norm_epsilon=1e-3)
GPT = replace(SHAPE, gated=False, tied=True, learned_positions=True, biases=True)
PLAIN = ParallelConfig(tp_sequence=False)
SPREAD = PLAIN.replace(
    ulysses=2, ring=2, recompute="gemm-last", offload_ratio=0.5, offload_unit="layer"
)


def command(work: Workload, split: ParallelConfig, folder: Path) -> list[str]:
    """The trainer's flags that the emitted script comes to, as ``launch.sh`` prints them."""
    (folder / "launch.sh").write_text(f'. "{TRAINER}/launch.sh"\n')
    script = folder / "planned.sh"
    script.write_text(emit("trainer", work, split))
    settings = {
        "DRY_RUN": "1",
        "DEVICE": "cpu",
        "PRECISION": "fp32",
        "NUM_GPUS": str(split.gpus),
        "TRAIN_ITERS": "2",
    }
    kept = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    done = subprocess.run(
        ["bash", str(script)], env={**kept, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = shlex.split(done.stdout.replace("\\\n", " "))
    (start,) = (n for n, word in enumerate(printed) if word.endswith("pretrain_gpt_usp.py"))
    return printed[start + 1 :]


def trained(ctx: RankContext, *, runs: list[list[str]], folder: str) -> list[tuple[Numbers, Any]]:
    """Loss and gradient norm of two steps of every run, and its arguments."""
    from usp_trainer.arguments import parse

    outcomes = []
    for flags in runs:
        trainer = trainer_of(parse([*flags, "--quiet", "--output-dir", folder]))
        done = [trainer.train(1e-3) for _ in range(2)]
        outcomes.append(([(step.loss, step.grad_norm) for step in done], vars(trainer.args)))
    return outcomes


def test_the_script_starts_the_trainer(tmp_path):
    runs = {}
    for world, split in ((1, PLAIN), (4, SPREAD)):
        commands = [
            command(Workload(shape, 64, 2), split.replace(fused_loss=world > 1), tmp_path)
            for shape in (SHAPE, GPT)
        ]
        ranks = fork_world(trained, world, runs=commands, folder=str(tmp_path))
        runs[world] = ranks[0]
    for (expected, _), (numbers, args) in zip(runs[1], runs[4], strict=True):
        assert relative_difference(numbers, expected) < LIMIT
        assert (args["ulysses_degree"], args["ds_sequence_parallel_size"]) == (2, 4)
        assert (args["usp_recompute"], args["usp_offload_ratio"]) == ("gemm-last", 0.5)
        assert args["usp_loss_chunks"] == 1 and args["layernorm_epsilon"] == 1e-3
    llama, gpt = (args for _, args in runs[4])
    assert llama["rotary_base"] == 500000 and llama["use_rotary_position_embeddings"]
    assert (llama["swiglu"], llama["normalization"]) == (True, "rmsnorm")
    assert (gpt["swiglu"], gpt["normalization"]) == (False, "layernorm")
    assert llama["num_key_value_heads"] == 2 and llama["ffn_hidden_size"] == 64
    for fact in ("disable_bias_linear", "untie_embeddings_and_output_weights"):
        assert llama[fact] and not gpt[fact]
    assert not gpt["use_rotary_position_embeddings"]


@pytest.mark.parametrize("zero", [1, 3])
def test_the_configuration_starts_deepspeed(tmp_path, zero):
    """As the trainer's ``--deepspeed_config``."""
    config = ds_config(Workload(SHAPE, 64, 4), PLAIN.replace(ulysses=2, dp=2, zero=zero))
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    flags = degrees(sp=2, u=2, zero=zero) + PLAIN_SGD + " --bf16 --clip-grad 1.0"
    emitted_too = f"{flags} --deepspeed_config {tmp_path / 'ds_config.json'}"
    own, emitted = train(4, flags, emitted_too, output_dir=tmp_path)
    assert relative_difference(emitted, own) < LIMIT
