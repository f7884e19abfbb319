"""The training scripts: what they start, what they refuse, and the tiny one to its end.

``python tests/examples/test_sequence_parallel_scripts.py`` writes the golden files anew.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples_deepspeed" / "sequence_parallel"
CHECKOUT = os.environ.get("MEGATRON_DEEPSPEED_PATH", "")
STAND_IN = Path(__file__).resolve().parent / "checkout"  # has a pretrain_gpt.py
GOLDEN = Path(__file__).resolve().parent / "golden"
SCRIPTS = {
    "1.3B": "ds_pretrain_gpt_1.3B_usp_32k.sh",
    "30B": "ds_pretrain_gpt_30B_usp_32k.sh",
    "6.7B": "ds_pretrain_gpt_6.7B_usp_128k.sh",
    "tiny": "ds_pretrain_gpt_tiny_usp_cpu.sh",
}
# The program that is started -> what the environment says.
PROGRAMS = {
    "trainer": {},
    "megatron_deepspeed": {"MEGATRON_DEEPSPEED_PATH": str(STAND_IN)},
}
CASES = [(size, program) for size in SCRIPTS for program in PROGRAMS]
HOST_ONLY = {
    "--checkpoint-activations",
    "--data-impl",
    "--deepspeed",
    "--deepspeed-activation-checkpointing",
    "--deepspeed_config",
    "--distributed-backend",
    "--merge-file",
    "--no-async-tensor-model-parallel-allreduce",
    "--no-bias-dropout-fusion",
    "--no-bias-gelu-fusion",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-pipeline-parallel",
    "--num-workers",
    "--override-opt_param-scheduler",
    "--rotary-position-embeddings-theta",
    "--tokenizer-type",
    "--vocab-file",
}


def bash(
    size: str, *arguments: str, cwd: Path | None = None, timeout: float = 60, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a script, with nothing in its environment but what it needs."""
    kept = ("HOME", "LANG", "TMPDIR", "USP_NO_INSTALL")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", str(FOLDER / SCRIPTS[size]), *arguments],
        cwd=cwd or ROOT,
        env={**env, **settings},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def dry_run(size: str, program: str = "trainer", *arguments: str, **settings: str) -> str:
    settings = {"DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": "", **PROGRAMS[program], **settings}
    done = bash(size, *arguments, **settings)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.replace(str(STAND_IN), "/checkouts/Megatron-DeepSpeed")
    return printed.replace(str(ROOT), "$ROOT")


def words(printed: str) -> list[str]:
    """The command of a dry run, without the configuration behind it."""
    return shlex.split(printed.partition("\n\n")[0].replace("\\\n", " "))


def flags(printed: str) -> list[str]:
    """What the training program gets."""
    command = words(printed)
    script = max(index for index, word in enumerate(command) if word.endswith(".py"))
    return command[script + 1 :]


def golden(size: str, program: str) -> Path:
    return GOLDEN / f"{size}.{program}.txt"


def write_golden() -> None:
    for size, program in CASES:
        # A machine with GPUs would count its own.
        golden(size, program).write_text(dry_run(size, program, **_gpus(size)))


def _gpus(size: str) -> dict[str, str]:
    return {"NUM_GPUS": {"1.3B": "4", "30B": "16", "6.7B": "8", "tiny": "4"}[size]}


@pytest.mark.parametrize(("size", "program"), CASES)
def test_a_dry_run_prints_the_golden_command(size: str, program: str) -> None:
    assert dry_run(size, program, **_gpus(size)) == golden(size, program).read_text()


@pytest.mark.parametrize(("size", "program"), CASES)
def test_the_trainer_knows_every_flag(size: str, program: str) -> None:
    """Of Megatron-DeepSpeed's, those that both have; the rest are listed above."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    from usp_trainer.arguments import build_parser
    from usp_trainer.validate_args import validate_and_derive

    printed = dry_run(size, program, **_gpus(size))
    args, unknown = build_parser().parse_known_args(flags(printed))
    ranks = int(_gpus(size)["NUM_GPUS"])
    assert (
        validate_and_derive(args, ranks).data_parallel_size
        == ranks // args.ds_sequence_parallel_size
    )
    assert {word for word in unknown if word.startswith("--")} <= HOST_ONLY
    if program == "trainer":
        assert unknown == []


@pytest.mark.megatron_deepspeed
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_DEEPSPEED_PATH is not set")
def test_megatron_deepspeed_knows_every_flag() -> None:
    """Its own parser, with the flags that the patches add."""
    program = (
        "import json, sys; from pathlib import Path; import megatron_patches as m\n"
        "host = 'megatron_deepspeed'; m.prepare(host, Path(sys.argv[1])); m.apply(host)\n"
        "from megatron.arguments import parse_args\n"
        "for sys.argv[1:] in json.loads(sys.argv[2]):\n"
        "    args = parse_args()\n"
        "    print('parsed', args.num_layers, args.ulysses_degree, args.usp_layout)\n"
    )
    given = [flags(dry_run(size, "megatron_deepspeed")) for size in SCRIPTS]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, CHECKOUT, json.dumps(given)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    parsed = [line for line in done.stdout.splitlines() if line.startswith("parsed")]
    degrees = ("24 2", "64 4", "32 4", "2 2")
    assert parsed == [f"parsed {each} zigzag" for each in degrees], done.stderr


@pytest.mark.parametrize("size", SCRIPTS)
def test_deepspeeds_configuration_says_what_the_flags_say(size: str) -> None:
    printed = dry_run(size, "megatron_deepspeed")
    config = json.loads(printed.partition("{")[1] + printed.partition("{")[2])
    given = dict(itertools.pairwise(flags(printed)))
    assert config["train_batch_size"] == int(given["--global-batch-size"])
    assert config["train_micro_batch_size_per_gpu"] == int(given["--micro-batch-size"])
    assert config["zero_optimization"]["stage"] == int(given["--zero-stage"])
    assert config["gradient_clipping"] == float(given["--clip-grad"])
    assert config["bf16"]["enabled"] is ("--bf16" in given)


@pytest.mark.parametrize("name", SCRIPTS.values())
def test_scripts_are_settings_only(name: str) -> None:
    *lines, last = (FOLDER / name).read_text().splitlines()
    assert last == '. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"'
    for line in lines:
        assert not line or line.startswith("#") or re.fullmatch(r"[a-z_]+=\S*", line), line


def test_every_setting_can_be_overridden() -> None:
    given = {"SEQ_LENGTH": "65536", "ULYSSES_DEGREE": "1", "MP_SIZE": "2", "NUM_GPUS": "16"}
    assert {
        "--seq-length 65536",
        "--max-position-embeddings 65536",
        "--ulysses-degree 1",
        "--tensor-model-parallel-size 2",
        "--num_gpus 16",
        "--lr 0.5",
    } <= set(re.findall(r"--\S+ \S+", dry_run("1.3B", LR="0.5", **given)))


def test_arguments_go_to_the_program() -> None:
    assert flags(dry_run("1.3B", "trainer", "--eod-mask-loss"))[-1] == "--eod-mask-loss"


def test_steps_shorten_warm_up_and_decay() -> None:
    printed = dry_run("1.3B", TRAIN_ITERS="1000")
    for flag in ("--train-iters 1000", "--lr-decay-iters 1000", "--lr-warmup-iters 10"):
        assert flag in printed


def test_the_ulysses_degree_is_as_large_as_the_heads_allow_if_none_is_given() -> None:
    printed = dry_run("1.3B", ULYSSES_DEGREE="", SP_SIZE="32", MP_SIZE="2", BATCH_SIZE="2")
    assert "--ulysses-degree 8 " in printed


def test_the_gpus_of_this_machine_are_counted(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nseq 8\n")
    smi.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    assert "--num_gpus 8" in dry_run("1.3B", PATH=path)


def test_visible_gpus_are_counted_and_left_to_the_launcher() -> None:
    printed = dry_run("1.3B", CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert "--num_gpus" not in printed
    assert "_g4_" in printed


def test_several_nodes_come_from_a_host_file(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("worker-0 slots=8\nworker-1 slots=8\n")
    printed = dry_run("30B", HOSTFILE=str(hosts))
    assert f"--hostfile {hosts}" in printed
    assert "--num_gpus" not in printed
    assert "_g16_" in printed


REFUSED = {
    "ranks": ({"NUM_GPUS": "6"}, "6 GPUs cannot hold MP_SIZE 1 x SP_SIZE 4 x PP_SIZE 1 = 4 ranks"),
    "ulysses": ({"ULYSSES_DEGREE": "3"}, "Possible: 4 (ring 1), 2 (ring 2), 1 (ring 4)"),
    "no ulysses": ({"ULYSSES_DEGREE": "0"}, "ULYSSES_DEGREE=0 must divide SP_SIZE=4"),
    "heads": (
        {"ULYSSES_DEGREE": "4", "MP_SIZE": "8"},
        "not exceed the 2 heads of a rank (16 heads, MP_SIZE=8). Possible: 2 (ring 2)",
    ),
    "tensor": ({"MP_SIZE": "3"}, "NUM_ATTN_HEADS=16 is not a multiple of MP_SIZE=3"),
    "batch": ({"NUM_GPUS": "16"}, "Use GLOBAL_BATCH_SIZE=4"),
    "zero": ({"ZERO_STAGE": "3", "PP_SIZE": "2"}, "Use ZERO_STAGE=1 or PP_SIZE=1"),
    "a number": ({"SEQ_LENGTH": "32k"}, "SEQ_LENGTH='32k' must be a whole number"),
    "tokens": ({"TRAIN_TOKENS_IN_BILLION": "0.5"}, "or give TRAIN_ITERS"),
    "a switch": ({"ACTIVATION_CHECKPOINT": "1"}, "ACTIVATION_CHECKPOINT='1' must be true or false"),
    "rotary": ({"ROTARY": "yes"}, "ROTARY='yes' must be true or false"),
    "a dry run": ({"DRY_RUN": "yes"}, "DRY_RUN='yes' must be 0 or 1"),
    "a device": ({"DEVICE": "gpu"}, "DEVICE='gpu' must be auto, cpu or cuda"),
    "a negative": ({"CLIP_GRAD": "-1"}, "CLIP_GRAD='-1' must be a number of 0 or more"),
    "not a number": ({"LR": "nan"}, "LR='nan' must be a number of 0 or more"),
    "never": ({"SAVE_INTERVAL": "0"}, "SAVE_INTERVAL='0' must be a whole number of 1 or more"),
    "precision": ({"PRECISION": "fp16"}, "PRECISION='fp16' must be bf16 or fp32"),
    "host file": ({"HOSTFILE": "/none"}, "HOSTFILE=/none does not exist"),
    "host file and GPUs": ({"HOSTFILE": "/none", "NUM_GPUS": "4"}, "leave NUM_GPUS out"),
    "two numbers of GPUs": (
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "NUM_GPUS": "8"},
        "CUDA_VISIBLE_DEVICES names the GPUs: leave NUM_GPUS out",
    ),
    "no GPU": ({"DRY_RUN": "0", "DATA_PATH": __file__}, "no GPU here. Set NUM_GPUS"),
    "no data": ({"DRY_RUN": "0", "NUM_GPUS": "4"}, "set DATA_PATH to a UTF-8 text file"),
    "lost data": (
        {"NUM_GPUS": "4", "DATA_PATH": "/none"},
        "DATA_PATH=/none is no file, and there is no /none.bin. Make it: python tools/preprocess",
    ),
    "lost data of a blend": (
        {"NUM_GPUS": "4", "DATA_PATH": "0.5 @data@ 0.5 /none"},
        "DATA_PATH=/none is no file",
    ),
    "a path without weight": (
        {"NUM_GPUS": "4", "DATA_PATH": "0.5 @data@ 0.5"},
        "begins with a weight: every path needs one before it",
    ),
    "launcher": ({"LAUNCHER": "mpirun"}, "LAUNCHER='mpirun' must be deepspeed, torchrun or srun"),
    "nodes of DeepSpeed": ({"NNODES": "2"}, "DeepSpeed's launcher needs HOSTFILE"),
    "torchrun's host file": ({"LAUNCHER": "torchrun", "HOSTFILE": "h"}, "not torchrun"),
    "torchrun's nodes": (
        {"LAUNCHER": "torchrun", "NNODES": "2"},
        "NNODES=2 needs MASTER_ADDR, a name of the first node, and NODE_RANK, from 0 to 1",
    ),
    "torchrun's rank": (
        {"LAUNCHER": "torchrun", "NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"},
        "NODE_RANK=2 must be from 0 to 1",
    ),
    "warm-up of Megatron-DeepSpeed": (
        {"TRAIN_ITERS": "5", "LR_WARMUP_ITERS": "5", "MEGATRON_DEEPSPEED_PATH": str(STAND_IN)},
        "LR_WARMUP_ITERS=5 must be below LR_DECAY_ITERS=5 (Megatron-DeepSpeed). Use LR_WARMUP_IT",
    ),
    "no job": ({"DRY_RUN": "0", "LAUNCHER": "srun", "NUM_GPUS": "4"}, "needs a SLURM job"),
    "text for Megatron-DeepSpeed": (
        {"DATA_PATH": __file__, "NUM_GPUS": "4", "MEGATRON_DEEPSPEED_PATH": "/none"},
        "Megatron-DeepSpeed reads encoded data",
    ),
    "no tokenizer": (
        {"DRY_RUN": "0", "DATA_PATH": "@data@", "NUM_GPUS": "4", "MEGATRON_DEEPSPEED_PATH": "/n"},
        "set VOCAB_PATH and MERGE_PATH",
    ),
    "no checkout": (
        {
            "DATA_PATH": "@data@",
            "TOKENIZER_TYPE": "NullTokenizer",
            "NUM_GPUS": "4",
            "MEGATRON_DEEPSPEED_PATH": "/none",
        },
        "MEGATRON_DEEPSPEED_PATH=/none has no pretrain_gpt.py",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    settings, told = REFUSED[name]
    (tmp_path / "data.bin").touch()
    settings = {k: v.replace("@data@", str(tmp_path / "data")) for k, v in settings.items()}
    done = bash("1.3B", cwd=tmp_path, **{"DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": "", **settings})
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert told in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data.bin"]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_the_tiny_script_trains_to_its_end(tmp_path: Path) -> None:
    done = bash("tiny", cwd=tmp_path, timeout=300, MASTER_PORT=free_port())
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = tmp_path.glob("usp_output/*/metrics.jsonl")
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    assert (tmp_path / "usp_output/checkpoint" / metrics.parent.name / "latest").exists()
    (log,) = tmp_path.glob("usp_output/log/*.log")
    assert "step 20/20" in log.read_text()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    write_golden()
