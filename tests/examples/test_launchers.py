"""LAUNCHER=torchrun and srun, slips in settings, and what a refused or a second start leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_sequence_parallel_scripts import (
    FOLDER,
    SCRIPTS,
    STAND_IN,
    bash,
    dry_run,
    flags,
    free_port,
    words,
)

SRUN_RANK = "$ROOT/examples_deepspeed/sequence_parallel/srun_rank.sh"
TRAINER = "$ROOT/examples_deepspeed/sequence_parallel/pretrain_gpt_usp.py"
NODES = {"NNODES": "2", "NUM_GPUS": "8", "MASTER_ADDR": "node-0"}


def before_the_program(printed: str) -> str:
    command = words(printed)
    return " ".join(command[: len(command) - len(flags(printed))])


def test_torchrun_on_two_nodes() -> None:
    settings = {**NODES, "LAUNCHER": "torchrun", "NODE_RANK": "1", "MASTER_PORT": "29501"}
    start = "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr node-0"
    printed = dry_run("30B", **settings)
    assert before_the_program(printed) == f"{start} --master-port 29501 {TRAINER}"
    assert flags(printed) == flags(dry_run("30B", NUM_GPUS="16"))
    hosted = before_the_program(dry_run("30B", "megatron_deepspeed", **settings))
    assert hosted == (
        f"{start} --master-port 29501 --module megatron_patches.run "
        "/checkouts/Megatron-DeepSpeed/pretrain_gpt.py"
    )


def test_torchrun_on_one_node() -> None:
    printed = dry_run("1.3B", LAUNCHER="torchrun", CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert before_the_program(printed) == (
        "torchrun --nnodes 1 --node-rank 0 --nproc-per-node 4 --master-addr 127.0.0.1 "
        f"--master-port 29500 {TRAINER}"
    )


def test_srun_takes_the_nodes_of_the_job(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"\n')
    scontrol.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_NNODES": "2"}
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = dry_run("30B", LAUNCHER="srun", CUDA_VISIBLE_DEVICES="0,1,2,3", PATH=path, **job)
    start = (
        "env MASTER_ADDR=n3 MASTER_PORT=29500 LOCAL_WORLD_SIZE=4 LOCAL_SIZE=4 srun --nodes 2 "
        f"--ntasks-per-node 4 --kill-on-bad-exit=1 bash {SRUN_RANK} python"
    )
    assert before_the_program(printed) == f"{start} {TRAINER}"
    assert flags(printed) == flags(dry_run("30B", NUM_GPUS="8"))
    hosted = before_the_program(dry_run("30B", "megatron_deepspeed", LAUNCHER="srun", **NODES))
    assert hosted.endswith(
        "python -m megatron_patches.run /checkouts/Megatron-DeepSpeed/pretrain_gpt.py"
    )


def test_a_task_of_srun_is_a_rank() -> None:
    program = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')))"
    task = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16"}
    done = subprocess.run(
        ["bash", str(FOLDER / "srun_rank.sh"), sys.executable, "-S", "-c", program],
        env={**os.environ, **task},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "9 1 16\n", done.stderr


SLIPS = {
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


def asked(*names: str) -> str:
    """What the check of the names of the environment says."""
    lines = (FOLDER / "launch.sh").read_text().split("defaults=(", 1)[1].split(")", 1)[0]
    settings = f"{' '.join(lines.split())} dry_run megatron_deepspeed_path"
    done = subprocess.run(
        ["awk", "-v", f"settings={settings}", "-f", str(FOLDER / "settings.awk")],
        input="\n".join(names),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_refused_with_the_nearest_setting(slip: str) -> None:
    assert asked("PATH", slip) == f"{slip} is no setting; did you mean {SLIPS[slip]}?\n"


def test_no_slip_is_seen_in_ordinary_environments() -> None:
    assert asked(*ORDINARY.split()) == ""


def test_a_slip_ends_the_script(tmp_path: Path) -> None:
    done = bash("tiny", cwd=tmp_path, SEQ_LENGHT="65536")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: SEQ_LENGHT is no setting; did you mean SEQ_LENGTH? ")
    assert list(tmp_path.iterdir()) == []


def test_a_refused_flag_touches_no_folder(tmp_path: Path) -> None:
    done = bash("tiny", "--seq-lenght", "64", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean --seq-length?" in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_second_start_keeps_the_first_ones_log(tmp_path: Path) -> None:
    """A launcher that says when it is started stands for torchrun."""
    programs, output = tmp_path / "programs", tmp_path / "output"
    programs.mkdir()
    (programs / "torchrun").write_text('#!/bin/sh\necho "started with $2 node"\n')
    (programs / "torchrun").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    for _ in range(2):
        done = bash("tiny", LAUNCHER="torchrun", OUTPUT_HOME=str(output), PATH=path)
        assert done.returncode == 0, done.stderr
    (log,) = output.glob("log/*.log")
    lines = log.read_text().splitlines()
    assert [line[:4] for line in lines] == ["=== ", "star", "=== ", "star"]


def test_settings_of_logs_and_of_the_end(tmp_path: Path) -> None:
    settings = {"TENSORBOARD_DIR": "tb", "WANDB_PROJECT": "p", "EXIT_INTERVAL": "7"}
    for program in ("trainer", "megatron_deepspeed"):
        given = flags(dry_run("1.3B", program, **settings))
        for flag, value in (("--tensorboard-dir", "tb"), ("--exit-interval", "7")):
            assert given[given.index(flag) + 1] == value
    assert "--log-timers-to-tensorboard" in given


def test_megatron_deepspeed_without_tensorboard_is_refused(tmp_path: Path) -> None:
    python, data = tmp_path / "bin" / "python", tmp_path / "data"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 1\n")  # of no package
    python.chmod(0o755)
    data.with_suffix(".bin").touch()
    path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent)])
    settings = {"PATH": f"{path}:{os.environ['PATH']}", "MEGATRON_DEEPSPEED_PATH": str(STAND_IN)}
    settings |= {"TENSORBOARD_DIR": "tb", "DATA_PATH": str(data)}
    done = bash("tiny", cwd=tmp_path, **settings)
    assert done.returncode == 2 and not (tmp_path / "usp_output").exists()
    assert "TENSORBOARD_DIR=tb needs the package tensorboard, which is not inst" in done.stderr


def test_data_with_weights(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin", "with space.txt"):
        (tmp_path / name).touch()
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    given = flags(dry_run("1.3B", DATA_PATH=f"0.3 {a} 0.7 {b}"))
    first = given.index("--data-path") + 1
    assert given[first : first + 5] == ["0.3", a, "0.7", b, "--vocab-size"]
    spaced = flags(dry_run("1.3B", DATA_PATH=str(tmp_path / "with space.txt")))
    first = spaced.index("--data-path") + 1
    assert spaced[first : first + 2] == [str(tmp_path / "with space.txt"), "--rotary-base"]


def test_torchrun_trains_a_blend(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"what {name} says. " * 4000)
    settings = {"SP_SIZE": "2", "NUM_GPUS": "2", "TRAIN_ITERS": "1", "ULYSSES_DEGREE": "1"}
    settings |= {
        "LAUNCHER": "torchrun",
        "MASTER_PORT": free_port(),
        "EVAL_INTERVAL": "1",
        "SPLIT": "50,50,0",
    }
    settings |= {"NUM_LAYERS": "1", "SEQ_LENGTH": "64", "DATA_PATH": "0.3 a.txt 0.7 b.txt"}
    done = bash("tiny", cwd=tmp_path, timeout=300, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = tmp_path.glob("usp_output/*/metrics.jsonl")
    (row,) = map(json.loads, metrics.read_text().splitlines())
    losses = f"loss {row['loss']:.3f}, validation loss {row['valid_loss']:.3f}"
    assert f"step 1/1: {losses}, lr 0.001, gradient norm " in done.stdout
    assert "kernel sdpa (chosen by auto), fp32, head dim 16" in done.stdout
    assert "Ulysses 1 x Ring 2 (zigzag)" in done.stdout


def test_the_example_job_parses_and_names_a_script() -> None:
    job = FOLDER / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", str(job)]).returncode == 0
    (line,) = [line for line in job.read_text().splitlines() if line.startswith("bash ")]
    assert line.split()[1] in SCRIPTS.values()
