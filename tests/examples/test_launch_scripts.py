"""The pretraining scripts: commands, settings, refusals, signals. They train in tests/megatron.

``PYTHONPATH=.:tests python tests/examples/test_launch_scripts.py`` writes the golden files anew.
"""

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from programs import (
    CHECKOUT,
    FOLDER,
    MEGATRON_LM_SCRIPTS,
    ROOT,
    SCRIPTS,
    bash,
    environment,
    free_port,
    python,
)

from ds_usp.planner import ParallelConfig, Workload, load_model
from ds_usp.planner.emit import megatron_lm

TRAINER = f"{FOLDER}/pretrain_gpt_usp.py"
MEGATRON_DEEPSPEED = os.environ.get("MEGATRON_DEEPSPEED_PATH", "")
MEGATRON_LM = os.environ.get("MEGATRON_LM_PATH", "")
DRY_RUN = {"DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": ""}
# The checkout is a stand-in that has a pretrain_gpt.py.
MDS = {"MEGATRON_DEEPSPEED_PATH": str(CHECKOUT)}
LM = {"MEGATRON_LM_PATH": str(CHECKOUT)}
GOLDEN = {"1.3B.megatron_deepspeed": ("1.3B", MDS), "lm-llama3.megatron_lm": ("lm-llama3", LM)}


def printed(size: str, *arguments: str, **settings: str) -> str:
    """The command of a script, and DeepSpeed's configuration."""
    done = bash(size, *arguments, **{**DRY_RUN, "NUM_GPUS": "16", **settings})
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(str(CHECKOUT), "/checkouts/Megatron").replace(str(ROOT), "$ROOT")


def command(size: str, *arguments: str, **settings: str) -> tuple[str, list[str]]:
    """The words up to the program, and its flags."""
    text = printed(size, *arguments, **settings).partition("\n\n")[0].replace("\\\n", " ")
    words = shlex.split(text)
    first = 1 + next(index for index, word in enumerate(words) if word.endswith(".py"))
    return " ".join(words[:first]).replace("$ROOT", str(ROOT)), words[first:]


def golden(name: str) -> Path:
    return Path(__file__).resolve().parent / "golden" / f"{name}.txt"


@pytest.mark.parametrize("name", GOLDEN)
def test_a_dry_run_prints_the_golden_command(name):
    size, settings = GOLDEN[name]
    assert printed(size, **settings) == golden(name).read_text()


# ------------------------------------------------------------------ every flag is known


@pytest.mark.parametrize("size", SCRIPTS)
def test_the_trainer_knows_every_flag(size):
    from usp_trainer.arguments import build_parser

    more = {"TENSORBOARD_DIR": "tb", "EXIT_INTERVAL": "7", "USP_KERNEL": "sdpa"}
    args, unknown = build_parser().parse_known_args(command(size, **more)[1])
    assert unknown == [] and args.exit_interval == 7 and args.usp_kernel == "sdpa"
    assert args.ds_sequence_parallel_size % args.ulysses_degree == 0
    assert args.max_position_embeddings == args.seq_length


def parsed(framework: str, parser: str, numbers: str, runs: list[list[str]]) -> list[str]:
    """Numbers of the arguments that the parser of a checkout, with the patches, reads of runs."""
    program = (
        "import json, sys; from pathlib import Path; import megatron_patches as m\n"
        f"m.prepare({framework!r}, Path(sys.argv[1])); m.apply({framework!r})\n"
        f"from {parser} import parse_args\n"
        "for sys.argv[1:] in json.loads(sys.argv[2]):\n"
        f"    args = parse_args(); print('parsed', {numbers})\n"
    )
    checkout = MEGATRON_LM if framework == "megatron_lm" else MEGATRON_DEEPSPEED
    done = python("-W", "ignore", "-c", program, checkout, json.dumps(runs), DS_ACCELERATOR="cpu")
    lines = [line for line in done.stdout.splitlines() if line.startswith("parsed ")]
    assert lines, done.stderr
    return [line.removeprefix("parsed ") for line in lines]


@pytest.mark.megatron_deepspeed
@pytest.mark.skipif(not MEGATRON_DEEPSPEED, reason="MEGATRON_DEEPSPEED_PATH is not set")
def test_megatron_deepspeed_knows_every_flag():
    runs = [command(size, **MDS)[1] for size in SCRIPTS]
    runs.append(command("1.3B", **MDS, MP_SIZE="2", PP_SIZE="2", TENSORBOARD_DIR="tb")[1])
    numbers = "args.num_layers, args.ulysses_degree, args.tensor_model_parallel_size"
    degrees = ["24 2 1", "64 4 1", "32 4 1", "2 2 1", "24 2 2"]
    assert parsed("megatron_deepspeed", "megatron.arguments", numbers, runs) == degrees


@pytest.mark.megatron_lm
@pytest.mark.skipif(not MEGATRON_LM, reason="MEGATRON_LM_PATH is not set")
def test_megatron_lm_knows_every_flag():
    """Also those of ``ds-usp plan --engine megatron-lm``."""
    local = {"TRANSFORMER_IMPL": "local", "ACTIVATION_CHECKPOINT": "true", "ZERO_STAGE": "0"}
    runs = [command(size, **LM)[1] for size in MEGATRON_LM_SCRIPTS]
    runs += [command("lm-1.3B", **LM, **local)[1]]
    work = Workload(load_model("llama3-8b"), 131072)
    degrees = {"tp": 2, "ulysses": 4, "ring": 2, "pp": 2, "layers_per_virtual_stage": 8}
    config = ParallelConfig(**degrees, zero=1, recompute="attention")
    runs.append(megatron_lm(work, config).replace("\\\n", " ").split())
    numbers = "args.num_layers, args.context_parallel_size, args.ulysses_degree"
    sizes = ["24 4 2", "32 4 2", "2 4 2", "24 4 2", "32 8 4"]
    assert parsed("megatron_lm", "megatron.training.arguments", numbers, runs) == sizes


# ------------------------------------------------------------------ settings and launchers


def test_settings_are_overridden_and_arguments_follow_the_flags():
    start, flags = command("1.3B", "--eod-mask-loss", LR="0.5", TRAIN_ITERS="1000", SP_SIZE="8")
    assert start == f"deepspeed --log_level error --master_port 29500 --num_gpus 16 {TRAINER}"
    expected = "--lr 0.5 --train-iters 1000 --lr-decay-iters 1000 --lr-warmup-iters 10"
    for flag, value in zip(*[iter(expected.split())] * 2, strict=True):
        assert flags[flags.index(flag) + 1] == value
    assert flags[-1] == "--eod-mask-loss" and "--data-path" not in flags
    assert "0.3 a 0.7 b" in " ".join(command("1.3B", **MDS, DATA_PATH="0.3 a 0.7 b")[1])
    assert "a b" in command("1.3B", DATA_PATH="a b")[1]  # a text file


def test_launchers_and_gpus(tmp_path):
    nodes = {"LAUNCHER": "torchrun", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0"}
    start, flags = command("30B", **nodes, NUM_GPUS="8")
    torchrun = "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr node-0"
    assert start == f"{torchrun} --master-port 29500 {TRAINER}" and flags == command("30B")[1]
    start, _ = command("30B", **MDS, **nodes)
    assert start.endswith("--module megatron_patches.run /checkouts/Megatron/pretrain_gpt.py")
    (tmp_path / "hosts").write_text("worker-0 slots=8\nworker-1 slots=4\n")
    text = printed("30B", HOSTFILE=str(tmp_path / "hosts"))
    assert f"--hostfile {tmp_path}/hosts" in text and "_g12_" in text and "--num_gpus" not in text
    text = printed("1.3B", CUDA_VISIBLE_DEVICES="4,5,6,7", NUM_GPUS="")
    assert "--num_gpus" not in text and "_g4_" in text
    assert "_g8_" in printed("30B", NUM_GPUS="")  # of a replica, where there is no GPU


REFUSED = [
    ("1.3B", {"MP_SIZE": "2"}, "MP_SIZE=2, PP_SIZE=1: the trainer of this folder has neither"),
    ("1.3B", {"PP_SIZE": "2"}, "MEGATRON_DEEPSPEED_PATH, a checkout, has both"),
    ("1.3B", {"SEQ_LENGTH": "32k"}, "SEQ_LENGTH='32k' must be a whole number above 0"),
    ("1.3B", {"NUM_LAYERS": ""}, "NUM_LAYERS is not set"),
    ("1.3B", {"ZERO_STAGE": "4"}, "ZERO_STAGE='4' must be one of: 0 1 2 3"),
    ("1.3B", {"ROTARY": "yes"}, "ROTARY='yes' must be one of: true false"),
    ("1.3B", {"TRAIN_TOKENS_IN_BILLION": "0.5"}, "TRAIN_TOKENS_IN_BILLION='0.5' must be a whole"),
    ("1.3B", {"DRY_RUN": "yes"}, "DRY_RUN='yes' must be 0 or 1"),
    ("1.3B", {"LAUNCHER": "srun"}, "LAUNCHER='srun' must be one of: deepspeed torchrun"),
    ("1.3B", {"NNODES": "2"}, "DeepSpeed's launcher needs HOSTFILE"),
    ("1.3B", {"HOSTFILE": "/none"}, "HOSTFILE=/none does not exist"),
    ("1.3B", {"LAUNCHER": "torchrun", "HOSTFILE": "h"}, "HOSTFILE is for LAUNCHER=deepspeed"),
    ("1.3B", {"LAUNCHER": "torchrun", "NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
    ("1.3B", {"MEGATRON_DEEPSPEED_PATH": "/none"}, "there is no pretrain_gpt.py in '/none'"),
    ("1.3B", MDS, "Megatron reads encoded data: set DATA_PATH"),
    ("1.3B", {"SEQ_LENGHT": "1"}, "SEQ_LENGHT is no setting; did you mean SEQ_LENGTH?"),
    ("lm-1.3B", {}, "let MEGATRON_LM_PATH name a checkout"),
    ("lm-1.3B", {**LM, "LAUNCHER": "deepspeed"}, "must be one of: torchrun"),
    ("lm-1.3B", {**LM, "ZERO_STAGE": "2"}, "ZERO_STAGE='2' must be one of: 0 1"),
]


@pytest.mark.parametrize(("size", "settings", "message"), REFUSED)
def test_bad_settings_are_refused_before_anything_starts(size, settings, message, tmp_path):
    done = bash(size, cwd=tmp_path, **{"NUM_GPUS": "4", **settings})
    assert done.returncode == 2 and done.stdout == "" and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith("error: ") and message in done.stderr, done.stderr


MISSPELT = {
    "SEQ_LEN": "SEQ_LENGTH",
    "ULYSES_DEGRE": "ULYSSES_DEGREE",
    "TP_SIZE": "MP_SIZE",
    "MICRO_BATCH_SIZE": "BATCH_SIZE",
    "MEGATRON_DEEPSPEED_PAHT": "MEGATRON_DEEPSPEED_PATH",
}
# Of shells, schedulers, launchers and clouds those that are most like a setting.
ORDINARY = """
    LOGNAME SHELL SHLVL HOSTNAME HOSTTYPE TERM LINES MANPATH INFOPATH LD_LIBRARY_PATH LIBRARY_PATH
    MODULEPATH CUDA_PATH CUDA_HOME CUDA_DEVICE_MAX_CONNECTIONS NCCL_DEBUG GLOO_SOCKET_IFNAME RANK
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE GROUP_RANK ROLE_RANK CROSS_RANK CROSS_SIZE
    MASTER_ADDR NODE_RANK SLURM_NNODES SLURM_NODEID NODE_NAME NUM_CPUS NPROC HF_HOME MODEL_NAME
    MODEL_PATH DATA_DIR DATASET_PATH OUTPUT_DIR LOG_DIR LOG_LEVEL EXPERIMENT_NAME PRECISION_MODE
    PARTITION SEED BATCH SPLIT VERSION MODE CONFIG DEVICE_ORDER TOKENIZERS_PARALLELISM WANDB_PROJECT
"""


def test_a_misspelt_setting_is_found_among_ordinary_variables():
    ordinary = dict.fromkeys(ORDINARY.split(), "0")
    assert printed("1.3B", **ordinary) == printed("1.3B", NODE_RANK="0", MASTER_ADDR="0", SEED="0")
    for variable, setting in MISSPELT.items():
        done = bash("1.3B", **ordinary, **DRY_RUN, **{variable: "1"})
        assert f"error: {variable} is no setting; did you mean {setting}?" in done.stderr


# ------------------------------------------------------------------ the start


def executable(path: Path, *lines: str) -> str:
    """Write a shell script; PATH with its folder first."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return os.pathsep.join([str(path.parent), environment()["PATH"]])


def test_a_launcher_gets_its_variables_and_a_log_of_all_starts(tmp_path):
    show = "$DS_ACCELERATOR $OMP_NUM_THREADS $CUDA_DEVICE_MAX_CONNECTIONS"
    path = executable(tmp_path / "torchrun", f'echo "started: {show}"; exit 7')
    settings = {"PATH": path, "OUTPUT_HOME": str(tmp_path / "out"), "NUM_GPUS": "8"}
    for size, one_queue, more in (
        ("tiny", "", {"LAUNCHER": "torchrun"}),
        ("tiny", "", {"LAUNCHER": "torchrun"}),
        ("lm-tiny", "1", {**LM, "MP_SIZE": "2"}),
    ):
        done = bash(size, **settings, **more)
        assert (done.returncode, done.stdout) == (7, f"started: cpu 1 {one_queue}\n"), done.stderr
    logs = sorted((tmp_path / "out" / "log").iterdir())
    assert [len(log.read_text().splitlines()) for log in logs] == [2, 1]


# DeepSpeed's launcher is a process that hands no signal on, and below it one that starts ranks.
LAUNCHER = """
import os, signal, subprocess, sys, time
role, folder = sys.argv[1:]
if role == "rank":
    def stop(*_):
        time.sleep(0.5)  # saves
        open(f"{folder}/saved{os.getpid()}", "w").close()
        sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    os.mkdir(f"{folder}/ready{os.getpid()}")
    time.sleep(60)
    sys.exit("no signal came")  # below here it would start ranks, which start ranks
below, count = ("agent", 1) if role == "deepspeed" else ("rank", 2)
if role == "agent":
    signal.signal(signal.SIGTERM, lambda *_: None)
command = [sys.executable, "-S", __file__, below, folder]
started = [subprocess.Popen(command) for _ in range(count)]
sys.exit(max(process.wait() for process in started))
"""


# One of each launcher; settings.sh has the trap for all.
SIGNALS = {
    "TERM": "sequence_parallel/ds_pretrain_gpt_tiny",
    "INT": "diffusion/generate_tiny",
    "USR1": "diffusion/generate_tiny",
}
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


def test_a_signal_to_a_script_reaches_its_ranks(tmp_path, request):
    """It ends after the last rank, which may save first, and does not answer 0; also where nobody
    asks for orphans that have ended, as in containers whose PID 1 does not."""
    adopt_orphans = partial(ctypes.CDLL(None).prctl, PR_SET_CHILD_SUBREAPER)
    request.addfinalizer(partial(adopt_orphans, 0, 0, 0, 0))
    assert adopt_orphans(1, 0, 0, 0) == 0
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    run = f"exec {sys.executable} -S {tmp_path}/launcher.py deepspeed $PWD"
    executable(tmp_path / "torchrun", run)
    settings = environment(PATH=executable(tmp_path / "deepspeed", run))
    started = {}
    for number, script in SIGNALS.items():
        (folder := tmp_path / number).mkdir()
        path = ROOT / "examples_deepspeed" / f"{script}_usp_cpu.sh"
        started[number] = subprocess.Popen(
            ["bash", str(path)],
            cwd=folder,
            env=settings,
            # In the background of a script tests ignore it, and so would a shell that they start.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    deadline = time.monotonic() + 40  # before the first rank gives up
    while len(list(tmp_path.glob("*/ready*"))) < 2 * len(started):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in started.values())
        time.sleep(0.05)
    for number, process in started.items():
        process.send_signal(signal.Signals[f"SIG{number}"])
    for number, process in started.items():
        assert process.wait(30) != 0, number
        assert len(list((tmp_path / number).glob("saved*"))) == 2, number


@pytest.mark.slow
def test_the_tiny_script_trains_and_continues_from_its_checkpoint(tmp_path):
    for steps, resumed in (("3", 0), ("6", 3)):
        run = {"TRAIN_ITERS": steps, "OUTPUT_HOME": str(tmp_path), "MASTER_PORT": free_port()}
        done = bash("tiny", timeout=300, LR_DECAY_ITERS="20", **run)
        assert done.returncode == 0, done.stdout[-3000:]
        assert (f"resumed from step {resumed}" in done.stdout) == bool(resumed)
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3


@pytest.mark.megatron_lm
@pytest.mark.slow
@pytest.mark.skipif(not MEGATRON_LM, reason="MEGATRON_LM_PATH is not set")
def test_that_of_megatron_lm_does_too(tmp_path):
    settings = {"MEGATRON_LM_PATH": MEGATRON_LM, "OUTPUT_HOME": str(tmp_path), "LOG_INTERVAL": "1"}
    settings |= {"LR_DECAY_ITERS": "20", "SAVE_INTERVAL": "3", "CUDA_VISIBLE_DEVICES": ""}
    losses: dict[int, float] = {}
    for steps in ("3", "6"):
        run = {**settings, "TRAIN_ITERS": steps, "MASTER_PORT": free_port()}
        done = bash("lm-tiny", timeout=600, **run)
        assert done.returncode == 0, done.stdout[-3000:]
        lines = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", done.stdout)
        assert not losses or min(int(step) for step, _ in lines) == 4
        losses |= {int(step): float(loss) for step, loss in lines}
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1] - 0.3


if __name__ == "__main__":
    for case, (script, its_settings) in GOLDEN.items():
        golden(case).write_text(printed(script, **its_settings))
