"""The scripts of examples_deepspeed/transformers_sft: golden commands, refusals, a run.

``python tests/examples/test_transformers_sft.py`` writes the golden files anew.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from harness import RankContext, fork_world
from programs import ROOT, python, run_script

from ds_usp.planner.emit import emit
from ds_usp.planner.models import ModelShape, load_model
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.training import prepare_deepspeed

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


def parsed(ctx: RankContext, flags: list[str]) -> tuple[object, ...]:
    """What sft.py reads of flags."""
    sys.path.insert(0, str(FOLDER))
    sft = import_module("sft")
    parser = sft.hf.HfArgumentParser((sft.Flags, sft.USPFlags, sft.trl.SFTConfig))
    read, usp, args = parser.parse_args_into_dataclasses(flags)
    batch = args.per_device_train_batch_size, args.gradient_accumulation_steps
    degrees = read.sequence_parallel_size, read.ulysses_degree
    return (
        *degrees,
        args.max_length,
        *batch,
        usp.usp_recompute,
        usp.usp_loss_chunks,
        args.deepspeed,
    )


@pytest.mark.transformers
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_what_the_planner_emits_is_read_by_sft(pool):
    work = Workload(load_model("openai/gpt-oss-20b"), 65536, 8)
    config = ParallelConfig(
        ulysses=2, ring=2, dp=2, zero=3, recompute="attention", fused_loss=True, micro_batch=2
    )
    command = emit("transformers", work, config).replace("\\\n", "")
    words = shlex.split(command, comments=True)
    flags = words[words.index("--model") :]
    flags[1], flags[3] = "tiny", ""
    (read,) = pool.run(parsed, 1, flags=[*flags, "--use_cpu", "true"])
    *numbers, deepspeed = read
    assert numbers == [4, 2, 65536, 2, 2, "attention", 32]
    engine = json.loads(deepspeed) if isinstance(deepspeed, str) else deepspeed
    assert engine["zero_optimization"]["stage"] == 3
    assert engine["gradient_accumulation_steps"] == 2


def train_emitted(ctx: RankContext, flags: list[str]) -> int:
    """The exit code of sft.py under DeepSpeed, without an operator that only CPUs would compile."""
    prepare_deepspeed()
    with mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
        return run_sft(ctx, flags)[0]


@pytest.mark.transformers
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_what_the_planner_emits_trains_as_one_rank_does(tmp_path):
    shape = ModelShape("tiny", 2, 64, 128, 8, 2, 257)
    plan = ParallelConfig(ulysses=2, ring=2, zero=3, recompute="attention", fused_loss=True)
    logs = []
    for ranks, config in ((1, ParallelConfig()), (4, plan)):
        command = emit("transformers", Workload(shape, 128, 2), config).replace("\\\n", "")
        words = shlex.split(command, comments=True)
        flags = words[words.index("--model") :]
        flags[1], flags[3] = "tiny", ""
        folder = tmp_path / str(ranks)
        flags += ["--output_dir", str(folder), "--use_cpu", "true", "--max_steps", "2"]
        flags += ["--logging_steps", "1", "--report_to", "none", "--learning_rate", "1e-3"]
        assert fork_world(train_emitted, ranks, flags=flags) == [0] * ranks
        logs.append(json.loads((folder / "trainer_state.json").read_text())["log_history"])
    for alone, sharded in zip(*(log[:2] for log in logs), strict=True):
        # Rounding to bf16; a mean over ranks or micro batches too many is a factor of 2 or 4.
        assert sharded["loss"] == pytest.approx(alone["loss"], rel=2e-3)
        assert sharded["grad_norm"] == pytest.approx(alone["grad_norm"], rel=2e-2)


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
