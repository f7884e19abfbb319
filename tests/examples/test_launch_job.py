"""Settings of the training scripts: the command that they give, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from programs import (
    CHECKOUT,
    FOLDER,
    GPUS,
    PROGRAMS,
    ROOT,
    SCRIPTS,
    CheckRefused,
    start,
)

SRUN_RANK = f"{FOLDER}/srun_rank.sh"
TRAINER = f"{FOLDER}/pretrain_gpt_usp.py"
MEGATRON = f"megatron_patches.run {CHECKOUT}/pretrain_gpt.py"
REAL_CHECKOUT = os.environ.get("MEGATRON_DEEPSPEED_PATH", "")
MEGATRON_ONLY = set(
    """
    --checkpoint-activations --data-impl --deepspeed --deepspeed-activation-checkpointing
    --deepspeed_config --distributed-backend --merge-file
    --no-async-tensor-model-parallel-allreduce --no-bias-dropout-fusion --no-bias-gelu-fusion
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-pipeline-parallel
    --num-workers --override-opt_param-scheduler --rotary-position-embeddings-theta
    --tokenizer-type --vocab-file
    """.split()  # noqa: SIM905
)


@pytest.fixture(autouse=True)
def no_gpu_here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same counts on machines with GPUs."""
    command = tmp_path_factory.mktemp("bin") / "nvidia-smi"
    monkeypatch.setenv("PATH", executable(command, "exit 1"))


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str]):
    """Prints a script's command: the words up to the program, its flags, and the whole text."""

    def run(size: str, program: str = "trainer", *arguments: str, **settings: str):
        settings = {"DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": "", **PROGRAMS[program], **settings}
        code = start(size, *arguments, **settings)
        text, errors = capsys.readouterr()
        assert code == 0, errors
        words = shlex.split(text.partition("\n\n")[0].replace("\\\n", " "))
        first = 1 + max(index for index, word in enumerate(words) if word.endswith(".py"))
        return " ".join(words[:first]), words[first:], text

    return run


def values(flags: list[str]) -> dict[str, str]:
    """Each flag's first value."""
    return dict(pairwise(flags))


@pytest.mark.parametrize("size", SCRIPTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_trainer_knows_every_flag(size: str, program: str, dry_run) -> None:
    """Of Megatron-DeepSpeed's, those that both have; the rest are listed above."""
    from usp_trainer.arguments import build_parser
    from usp_trainer.validate_args import validate_and_derive

    _, flags, text = dry_run(size, program, NUM_GPUS=GPUS[size])
    args, unknown = build_parser().parse_known_args(flags)
    ranks = int(GPUS[size])
    validated = validate_and_derive(args, ranks)
    assert validated.data_parallel_size == ranks // args.ds_sequence_parallel_size
    assert {word for word in unknown if word.startswith("--")} <= MEGATRON_ONLY
    if program == "trainer":
        assert unknown == []
    else:  # DeepSpeed's configuration has the same values
        config = json.loads(text.partition("{")[1] + text.partition("{")[2])
        assert config["train_batch_size"] == args.global_batch_size
        assert config["train_micro_batch_size_per_gpu"] == args.micro_batch_size
        assert config["zero_optimization"]["stage"] == args.zero_stage
        assert config["gradient_clipping"] == args.clip_grad
        assert config["bf16"]["enabled"] is args.bf16


@pytest.mark.megatron_deepspeed
@pytest.mark.skipif(not REAL_CHECKOUT, reason="MEGATRON_DEEPSPEED_PATH is not set")
def test_megatron_deepspeed_knows_every_flag(dry_run) -> None:
    """Its own parser, with the flags that the patches add."""
    program = (
        "import json, sys; from pathlib import Path; import megatron_patches as m\n"
        "host = 'megatron_deepspeed'; m.prepare(host, Path(sys.argv[1])); m.apply(host)\n"
        "from megatron.arguments import parse_args\n"
        "for sys.argv[1:] in json.loads(sys.argv[2]):\n"
        "    args = parse_args()\n"
        "    print('parsed', args.num_layers, args.ulysses_degree, args.usp_layout)\n"
    )
    runs = [dry_run(size, "megatron_deepspeed")[1] for size in SCRIPTS]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, REAL_CHECKOUT, json.dumps(runs)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    parsed = [line for line in done.stdout.splitlines() if line.startswith("parsed")]
    degrees = ("24 2", "64 4", "32 4", "2 2")
    assert parsed == [f"parsed {pair} zigzag" for pair in degrees], done.stderr


NODES = {"NNODES": "2", "NUM_GPUS": "8", "MASTER_ADDR": "node-0"}


def test_torchrun_on_one_and_two_nodes(dry_run) -> None:
    start, *_ = dry_run("1.3B", LAUNCHER="torchrun", CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert start == (
        "torchrun --nnodes 1 --node-rank 0 --nproc-per-node 4 --master-addr 127.0.0.1 "
        f"--master-port 29500 {TRAINER}"
    )
    settings = {**NODES, "LAUNCHER": "torchrun", "NODE_RANK": "1", "MASTER_PORT": "29501"}
    launcher = (
        "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr node-0 "
        "--master-port 29501"
    )
    start, flags, _ = dry_run("30B", **settings)
    assert start == f"{launcher} {TRAINER}"
    assert flags == dry_run("30B", NUM_GPUS="16")[1]
    start, *_ = dry_run("30B", "megatron_deepspeed", **settings)
    assert start == f"{launcher} --module {MEGATRON}"


def executable(path: Path, *lines: str) -> str:
    """Write a shell script; PATH with its folder first."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return os.pathsep.join([str(path.parent), os.environ["PATH"]])


def test_srun_takes_the_nodes_of_the_job(tmp_path: Path, dry_run) -> None:
    nodes = '[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"'
    path = executable(tmp_path / "scontrol", nodes)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_NNODES": "2"}
    settings = {"LAUNCHER": "srun", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "PATH": path}
    start, flags, _ = dry_run("30B", **settings, **job)
    assert start == (
        "env MASTER_ADDR=n3 MASTER_PORT=29500 LOCAL_WORLD_SIZE=4 LOCAL_SIZE=4 srun --nodes 2 "
        f"--ntasks-per-node 4 --kill-on-bad-exit=1 bash {SRUN_RANK} python {TRAINER}"
    )
    assert flags == dry_run("30B", NUM_GPUS="8")[1]
    start, *_ = dry_run("30B", "megatron_deepspeed", LAUNCHER="srun", **NODES)
    assert start.endswith(f"python -m {MEGATRON}")


def test_gpus_are_counted(tmp_path: Path, dry_run) -> None:
    """Of this node, of CUDA_VISIBLE_DEVICES, or of a host file."""
    path = executable(tmp_path / "nvidia-smi", "seq 8")
    assert "--num_gpus 8" in dry_run("1.3B", PATH=path)[0]
    start, _, text = dry_run("1.3B", CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert "--num_gpus" not in start and "_g4_" in text
    nodes = tmp_path / "nodes"
    nodes.write_text("worker-0 slots=8\nworker-1 slots=8\n")
    start, _, text = dry_run("30B", HOSTFILE=str(nodes))
    assert f"--hostfile {nodes}" in start and "--num_gpus" not in start and "_g16_" in text


def test_every_setting_can_be_overridden(dry_run) -> None:
    settings = {"SEQ_LENGTH": "65536", "ULYSSES_DEGREE": "1", "MP_SIZE": "2", "NUM_GPUS": "16"}
    start, flags, _ = dry_run("1.3B", "trainer", "--eod-mask-loss", LR="0.5", **settings)
    assert "--num_gpus 16" in start and flags[-1] == "--eod-mask-loss"
    assert values(flags).items() >= {
        ("--seq-length", "65536"),
        ("--max-position-embeddings", "65536"),
        ("--ulysses-degree", "1"),
        ("--tensor-model-parallel-size", "2"),
        ("--lr", "0.5"),
    }
    logs = {"TENSORBOARD_DIR": "tb", "WANDB_PROJECT": "p", "EXIT_INTERVAL": "7"}
    for program in PROGRAMS:
        flags = dry_run("1.3B", program, **logs)[1]
        expected = {("--tensorboard-dir", "tb"), ("--wandb-project", "p"), ("--exit-interval", "7")}
        assert values(flags).items() >= expected
    assert "--log-timers-to-tensorboard" in flags


def test_derived_settings(dry_run) -> None:
    """Steps shorten warm-up and decay; without a Ulysses degree it is the largest that fits."""
    flags = values(dry_run("1.3B", TRAIN_ITERS="1000")[1])
    assert [flags[f"--{name}-iters"] for name in ("train", "lr-decay", "lr-warmup")] == [
        "1000",
        "1000",
        "10",
    ]
    settings = {"ULYSSES_DEGREE": "", "SP_SIZE": "32", "MP_SIZE": "2", "BATCH_SIZE": "2"}
    assert values(dry_run("1.3B", **settings)[1])["--ulysses-degree"] == "8"
    assert "_uauto_" in dry_run("1.3B", ULYSSES_DEGREE="auto")[2]


def test_data_with_weights_and_spaces(tmp_path: Path, dry_run) -> None:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_text("tokens")
        (tmp_path / name).with_suffix(".idx").touch()
    a, b, text = str(tmp_path / "a"), str(tmp_path / "b"), tmp_path / "with space.txt"
    flags = dry_run("1.3B", DATA_PATH=f"0.3 {a} 0.7 {b}")[1]
    first = flags.index("--data-path") + 1
    assert flags[first : first + 6] == ["0.3", a, "0.7", b, "--vocab-size", "50257"]
    text.write_text("text")
    flags = dry_run("1.3B", DATA_PATH=str(text))[1]
    first = flags.index("--data-path") + 1
    assert flags[first : first + 2] == [str(text), "--rotary-base"]


NO_GPUS = {"DRY_RUN": "0"}
CPU = {"DEVICE": "cpu", "PRECISION": "fp32"}
MDS = {"NUM_GPUS": "4", "MEGATRON_DEEPSPEED_PATH": str(CHECKOUT)}
REFUSED = [
    ({"NUM_GPUS": "6"}, "6 ranks cannot hold MP_SIZE=1 x SP_SIZE=4 x PP_SIZE=1 = 4 ranks"),
    ({"ULYSSES_DEGREE": "3"}, "ULYSSES_DEGREE=3 does not divide SP_SIZE=4. Use one of 4 (ring 1)"),
    ({"ULYSSES_DEGREE": "0"}, "ULYSSES_DEGREE='0' must be auto, or a whole number of 1 or more"),
    (
        {"ULYSSES_DEGREE": "4", "MP_SIZE": "8"},
        "at least 4 query heads on each tensor-parallel rank, there are 2 (16 heads, MP_SIZE=8)",
    ),
    ({"MP_SIZE": "3"}, "MP_SIZE=3 must divide the 16 query heads"),
    ({"NUM_GPUS": "16"}, "Use GLOBAL_BATCH_SIZE=4"),
    ({"ZERO_STAGE": "3", "PP_SIZE": "2"}, "Use ZERO_STAGE=1 or PP_SIZE=1"),
    ({"ZERO_STAGE": "4"}, "ZERO_STAGE='4' must be 0, 1, 2 or 3"),
    ({"SEQ_LENGTH": "32k"}, "SEQ_LENGTH='32k' must be a whole number of 1 or more"),
    ({"NUM_LAYERS": ""}, "NUM_LAYERS='' must be a whole number of 1 or more"),
    ({"TRAIN_TOKENS_IN_BILLION": "0.5"}, "TRAIN_TOKENS_IN_BILLION='0.5' must be a whole number"),
    ({"TRAIN_TOKENS_IN_BILLION": ""}, "TRAIN_TOKENS_IN_BILLION is not set; set it or TRAIN_ITERS"),
    ({"ACTIVATION_CHECKPOINT": "1"}, "ACTIVATION_CHECKPOINT='1' must be true or false"),
    ({"ROTARY": "yes"}, "ROTARY='yes' must be true or false"),
    ({"DRY_RUN": "yes"}, "DRY_RUN='yes' must be 0 or 1"),
    ({"DEVICE": "gpu"}, "DEVICE='gpu' must be auto, cpu or cuda"),
    ({"CLIP_GRAD": "-1"}, "CLIP_GRAD='-1' must be a finite number of 0 or more"),
    ({"LR": "nan"}, "LR='nan' must be a finite number of 0 or more"),
    ({"SAVE_INTERVAL": "0"}, "SAVE_INTERVAL='0' must be a whole number of 1 or more"),
    ({"PRECISION": "fp16"}, "PRECISION='fp16' must be bf16 or fp32"),
    ({"HOSTFILE": "/none"}, "HOSTFILE=/none does not exist"),
    ({"HOSTFILE": "/none", "NUM_GPUS": "4"}, "leave NUM_GPUS out"),
    (
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "NUM_GPUS": "8"},
        "CUDA_VISIBLE_DEVICES names the GPUs: leave NUM_GPUS out",
    ),
    ({**NO_GPUS, "DATA_PATH": __file__}, "no GPU here. Set NUM_GPUS"),
    ({**NO_GPUS, "NUM_GPUS": "4"}, "set DATA_PATH to a UTF-8 text file"),
    (
        {"DATA_PATH": "/none"},
        "DATA_PATH=/none: No such file or directory, and no /none.idx. Make it: python tools/prepr",
    ),
    ({"DATA_PATH": "0.5 @data@ 0.5 /none"}, "DATA_PATH=/none: No such file"),
    ({"DATA_PATH": "0.5 @data@ 0.5"}, "2 weights for 1 paths. Give each path a weight before it"),
    ({"LAUNCHER": "mpirun"}, "LAUNCHER='mpirun' must be deepspeed, torchrun or srun"),
    ({"NNODES": "2"}, "DeepSpeed's launcher needs HOSTFILE"),
    ({"NNODES": "0", "LAUNCHER": "torchrun"}, "NNODES='0' must be a whole number of 1 or more"),
    ({"LAUNCHER": "torchrun", "HOSTFILE": "h"}, "HOSTFILE is for LAUNCHER=deepspeed, not torchrun"),
    (
        {"LAUNCHER": "torchrun", "NNODES": "2"},
        "NNODES=2 needs MASTER_ADDR, a name of the first node, and NODE_RANK, from 0 to 1",
    ),
    (
        {"LAUNCHER": "torchrun", "NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"},
        "NODE_RANK=2 must be from 0 to 1",
    ),
    ({**NO_GPUS, "LAUNCHER": "srun", "NUM_GPUS": "4"}, "needs a SLURM job"),
    (
        {"TRAIN_ITERS": "5", "LR_WARMUP_ITERS": "5", **MDS},
        "LR_WARMUP_ITERS=5 must be below LR_DECAY_ITERS=5 (Megatron-DeepSpeed). Use LR_WARMUP_IT",
    ),
    ({"DATA_PATH": __file__, **MDS}, "Megatron-DeepSpeed reads encoded data, not"),
    ({"DRY_RUN": "0", **MDS}, "Megatron-DeepSpeed reads encoded data: set DATA_PATH"),
    ({"DRY_RUN": "0", "DATA_PATH": "@data@", **MDS}, "set VOCAB_PATH and MERGE_PATH"),
    ({**MDS, "MEGATRON_DEEPSPEED_PATH": "/none"}, "=/none has no pretrain_gpt.py"),
    (
        {"SEQ_LEN": "65536"},
        "SEQ_LEN is no setting; did you mean SEQ_LENGTH? The settings are in launch_settings.py",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[text[:50] for _, text in REFUSED])
def test_bad_settings_are_refused_before_anything_starts(
    settings: dict[str, str], message: str, check_refused: CheckRefused
) -> None:
    check_refused("1.3B", message, {"DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": "", **settings})


def test_megatron_deepspeed_without_tensorboard_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would train on without; the trainer refuses it by itself."""
    for suffix in (".bin", ".idx"):
        (tmp_path / "data").with_suffix(suffix).write_text("tokens")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("os.execvpe", lambda *_: pytest.fail("it was started"))
    settings = {"TENSORBOARD_DIR": "tb", "DATA_PATH": str(tmp_path / "data"), **MDS}
    assert start("tiny", **settings) == 2
    assert "TENSORBOARD_DIR tb needs the package tensorboard" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "settings", "present", "absent"),
    [
        (
            (),
            {},
            {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            ["CUDA_DEVICE_MAX_CONNECTIONS"],
        ),
        ((), {"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3"}, []),
        ((), {"MP_SIZE": "2", "NUM_GPUS": "8"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, []),
    ],
)
def test_the_launcher_starts_with_the_variables(
    arguments: tuple[str, ...],
    settings: dict[str, str],
    present: dict[str, str],
    absent: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []
    monkeypatch.setattr("os.execvpe", lambda *call: started.append(call) or 0)
    assert start("tiny", *arguments, OUTPUT_HOME=str(tmp_path), **settings) == 0
    ((_, words, variables),) = started
    assert words[4] == "deepspeed" and variables["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert variables.items() >= present.items() and not variables.keys() & set(absent)


MISSPELT = {
    "SEQ_LENGHT": "SEQ_LENGTH",
    "SEQ_LEN": "SEQ_LENGTH",
    "ULYSES_DEGRE": "ULYSSES_DEGREE",
    "SP_SIZ": "SP_SIZE",
    "TP_SIZE": "MP_SIZE",
    "MICRO_BATCH_SIZE": "BATCH_SIZE",
    "USP_LAYUOT": "USP_LAYOUT",
    "DRY_RUNN": "DRY_RUN",
    "MEGATRON_DEEPSPEED_PAHT": "MEGATRON_DEEPSPEED_PATH",
}
# What shells, containers, schedulers, CI, launchers and clouds export.
ORDINARY = """
    PATH HOME USER LOGNAME SHELL SHLVL PWD OLDPWD TERM LANG LC_ALL TZ HOSTNAME HOSTTYPE HOST MAIL
    EDITOR PAGER LESS LINES COLUMNS DISPLAY TMPDIR TMP TEMP PS1 MANPATH INFOPATH LD_LIBRARY_PATH
    LD_PRELOAD LIBRARY_PATH CPATH PKG_CONFIG_PATH PYTHONPATH PYTHONHOME PYTHONUNBUFFERED VIRTUAL_ENV
    CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_SHLVL MODULEPATH MODULESHOME LOADEDMODULES LMOD_DIR CC CXX
    CFLAGS LDFLAGS MAKEFLAGS SSH_CLIENT SSH_TTY SSH_CONNECTION SSH_AUTH_SOCK XDG_RUNTIME_DIR
    CUDA_HOME CUDA_PATH CUDA_VERSION CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING
    CUDA_DEVICE_MAX_CONNECTIONS NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NCCL_DEBUG
    NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_VERSION NCCL_P2P_LEVEL GLOO_SOCKET_IFNAME UCX_TLS
    TORCH_CUDA_ARCH_LIST TORCH_DISTRIBUTED_DEBUG TORCH_NCCL_ASYNC_ERROR_HANDLING TORCHELASTIC_RUN_ID
    PYTORCH_CUDA_ALLOC_CONF OMP_NUM_THREADS MKL_NUM_THREADS KMP_AFFINITY TRITON_CACHE_DIR
    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK
    ROLE_NAME ROLE_WORLD_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT NODE_RANK NNODES
    DS_ACCELERATOR DS_BUILD_OPS PDSH_RCMD_TYPE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMI_RANK
    PMI_SIZE PMIX_RANK SLURM_JOB_ID SLURM_JOBID SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS
    SLURM_NNODES SLURM_NPROCS SLURM_JOB_NODELIST SLURM_GPUS_ON_NODE SLURM_TASKS_PER_NODE
    SLURM_CPUS_PER_TASK SBATCH_ACCOUNT SRUN_DEBUG GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES PBS_JOBID
    PBS_NODEFILE LSB_JOBID LSB_HOSTS HF_HOME HF_TOKEN TRANSFORMERS_CACHE WANDB_API_KEY WANDB_MODE
    WANDB_PROJECT WANDB_DIR KUBERNETES_PORT KUBERNETES_SERVICE_HOST AWS_REGION AWS_DEFAULT_REGION
    GITHUB_ACTIONS GITHUB_SHA RUNNER_TEMP CI CI_JOB_ID BUILD_NUMBER JOB_NAME JENKINS_HOME NODE_NAME
    USP_NO_INSTALL USP_PYTHON FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED GIT_DIR GIT_EDITOR HTTP_PROXY
    HTTPS_PROXY NO_PROXY PIP_INDEX_URL SSL_CERT_FILE XLA_FLAGS TF_CPP_MIN_LOG_LEVEL NUM_CPUS NPROC
    JAVA_HOME GOPATH MODEL_NAME MODEL_PATH DATA_DIR DATASET_PATH OUTPUT_DIR LOG_DIR LOG_LEVEL
    EXPERIMENT_NAME PROJECT PARTITION ACCOUNT DEBUG VERBOSE SEED BATCH PORT VERSION MODE CONFIG
"""


def test_a_misspelt_setting_is_found_among_ordinary_variables() -> None:
    from launch_settings import misspelt_setting

    assert misspelt_setting(ORDINARY.split()) is None
    for folder in ("transformers_sft", "diffusion"):
        text = (ROOT / "examples_deepspeed" / folder / "launch.sh").read_text(encoding="utf-8")
        others = [name.upper() for name in re.findall(r"^setting (\w+)", text, re.MULTILINE)]
        assert "ULYSSES_DEGREE" in others and misspelt_setting(ORDINARY.split(), others) is None
    for variable, setting in MISSPELT.items():
        assert misspelt_setting([*ORDINARY.split(), variable]) == (variable, setting)
