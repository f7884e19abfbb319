"""The scripts of examples_deepspeed/transformers_sft: golden commands, refusals, a run.

``python tests/examples/test_transformers_sft.py`` writes the golden files anew.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness import RankContext
from programs import ROOT, python, run_script

from ds_usp.planner.emit import emit
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload

FOLDER = ROOT / "examples_deepspeed" / "transformers_sft"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("sft_*.sh"))


def bash(name: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return run_script(FOLDER / f"{name}.sh", *arguments, timeout=300, **settings)


def golden(name: str) -> Path:
    return Path(__file__).resolve().parent / "golden" / f"{name}.txt"


def printed(name: str, *arguments: str, **settings: str) -> str:
    done = bash(name, *arguments, DRY_RUN="1", **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(str(ROOT), "$ROOT")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_dry_run_prints_the_golden_command(name):
    assert printed(name) == golden(name).read_text()


def test_there_are_scripts_for_2_4_and_8_gpus_and_for_the_cpu():
    ranks = {re.findall(r"--nproc-per-node (\d)", golden(name).read_text())[-1] for name in SCRIPTS}
    assert len(SCRIPTS) == 4 and ranks == {"2", "4", "8"}


def test_settings_are_overridden_by_their_names_in_capitals():
    text = printed("sft_llama3_8B_usp_64k_4gpu", "--learning_rate", "1", SP_SIZE="2", FSDP="true")
    assert "--sequence_parallel_size 2" in text and "--gradient_accumulation_steps 2" in text
    assert '--fsdp_config \\{\\"version\\":\\ 2\\}' in text
    assert "--deepspeed" not in text and text.rstrip().endswith("--learning_rate 1")
    assert "--deepspeed" not in printed("sft_llama3_8B_usp_64k_4gpu", ZERO_STAGE="")


REFUSED = [
    ({"SP_SIZE": "3"}, "SP_SIZE=3 must divide NUM_GPUS=4"),
    ({"ULYSSES_DEGREE": "3"}, "ULYSSES_DEGREE=3 must divide SP_SIZE=4"),
    ({"GLOBAL_BATCH_SIZE": "3", "BATCH_SIZE": "2"}, "GLOBAL_BATCH_SIZE=3 must be a multiple of"),
    ({"ZERO_STAGE": "4"}, "ZERO_STAGE='4' must be 0, 1, 2, 3 or empty"),
    ({"SEQ_LENGHT": "65536"}, "SEQ_LENGHT is no setting; did you mean SEQ_LENGTH?"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_bad_settings_are_refused(settings, message):
    done = bash("sft_llama3_8B_usp_64k_4gpu", **settings)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr


def run_sft(ctx: RankContext, flags: list[str]) -> tuple[int, str]:
    """The exit code and the output of sft.py on this rank; accelerate leaves its options behind."""
    sys.path.insert(0, str(FOLDER))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # asked for, and not used
    size = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    with (
        mock.patch.dict(os.environ, meeting | size),
        mock.patch.object(sys, "argv", ["sft.py", *flags]),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        code = import_module("sft").main()
    return code, out.getvalue()


@pytest.mark.transformers
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_the_tiny_script_trains_as_transformers_does_on_one_rank(pool, tmp_path):
    """Its two programs on ranks of the pool, with the flags that DRY_RUN=1 prints."""
    done = bash("sft_tiny_usp_cpu", DRY_RUN="1", OUTPUT_HOME=str(tmp_path), TRAIN_ITERS="3")
    lines = done.stdout.replace(" \\\n   ", "").splitlines()
    for ranks, line in zip((1, 4), lines, strict=True):
        _, start, flags = line.partition(f"--nproc-per-node {ranks} {FOLDER}/sft.py ")
        assert start, line
        results = pool.run(run_sft, ranks, flags=shlex.split(flags))
        assert [code for code, _ in results] == [0] * ranks, results
    assert "6 losses and gradient norms agree" in results[0][1]
    assert (tmp_path / "tiny_s512_g4_sp4_u2" / "model.safetensors").exists()


def run_emitted(ctx: RankContext, text: str) -> tuple[Any, ...]:
    """The loss of a tiny Llama after the lines of a plan; its mesh; what a Trainer is given."""
    import torch
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 257}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2)
    names: dict[str, Any] = {"torch": torch, "model": transformers.LlamaForCausalLM(config)}
    names["TrainingArguments"] = partial(transformers.TrainingArguments, use_cpu=True)
    enabled, _, others = text.partition("# a Trainer")
    trainer, _, loop = others.partition("# or a loop")
    ids = torch.arange(128)[None] % 257
    if ctx.world == 1:
        return (names["model"](input_ids=ids, labels=ids).loss.item(),)
    exec(enabled, names)
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # of the group that there is
    with mock.patch.dict(os.environ, meeting):
        exec(trainer.partition("\n")[2].partition("attach(")[0], names)
    mesh, args = names["mesh"], names["args"]
    if "deepspeed" in loop:  # whose start is tested with the engine
        return mesh.ulysses_degree, mesh.sp_degree, args.deepspeed
    exec(loop.partition("\n")[2], names)
    loss = names["model"](input_ids=ids, labels=ids).loss
    loss.backward()
    batch = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return loss.item(), mesh.ulysses_degree, mesh.sp_degree, *batch, bool(args.fsdp)


@pytest.mark.transformers
def test_the_lines_of_a_plan_run(pool):
    """FSDP2 in a loop, on every mesh of the ranks; DeepSpeed's configuration by the Trainer."""
    work = Workload(ModelShape("tiny", 2, 64, 128, 8, 2, 257), 128, 4)
    plan = ParallelConfig(ulysses=2, dp=2, zero=3, fsdp2=True, recompute="attention")
    plan = plan.replace(fused_loss=True, mlp_chunks=2)
    ((alone,),) = pool.run(run_emitted, 1, text="")
    meshes = {(2, 2, 1, 2): plan, (2, 4, 1, 4): plan.replace(ring=2, dp=1)}
    meshes[1, 1, 1, 1] = plan.replace(ulysses=1, dp=4)
    for mesh, config in meshes.items():
        for loss, *made in pool.run(run_emitted, 4, text=emit("transformers", work, config)):
            assert made == [*mesh, True]
            assert loss == pytest.approx(alone, rel=5e-3)  # computed in bf16
    sharded = plan.replace(fsdp2=False, zero=2, micro_batch=2)
    for ulysses, sp, engine in pool.run(run_emitted, 4, text=emit("transformers", work, sharded)):
        assert (ulysses, sp, engine["zero_optimization"]["stage"]) == (2, 2, 2)


@pytest.mark.transformers
@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="Accelerate is not installed")
def test_accelerate_launch_trains_as_one_process_does(tmp_path):
    program = FOLDER / "accelerate_trainer.py"
    launcher = ("-m", "accelerate.commands.launch", "--config_file", FOLDER / "accelerate.yaml")
    several, one = tmp_path / "several", tmp_path / "one"
    done = python(*launcher, program, "--output_dir", several)
    assert done.returncode == 0, done.stderr
    done = python(program, "--output_dir", one, "--compare_with", several)
    assert done.returncode == 0, done.stderr
    assert "6 losses and gradient norms agree" in done.stdout
    # Another step: the comparison finds it.
    flags = ("--learning_rate", "0.5", "--output_dir", one, "--compare_with", several)
    done = python(program, *flags)
    assert done.returncode == 1 and "DO NOT AGREE" in done.stdout, done.stderr


if __name__ == "__main__":
    for script in SCRIPTS:
        golden(script).write_text(printed(script))
