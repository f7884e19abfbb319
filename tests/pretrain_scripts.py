"""Runs of the training scripts: by bash, or through ``launch_job`` in this process."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples_deepspeed" / "sequence_parallel"
CHECKOUT = ROOT / "tests/examples/checkout"  # has a pretrain_gpt.py
SCRIPTS = {
    "1.3B": "ds_pretrain_gpt_1.3B_usp_32k.sh",
    "30B": "ds_pretrain_gpt_30B_usp_32k.sh",
    "6.7B": "ds_pretrain_gpt_6.7B_usp_128k.sh",
    "tiny": "ds_pretrain_gpt_tiny_usp_cpu.sh",
}
GPUS = {"1.3B": "4", "30B": "16", "6.7B": "8", "tiny": "4"}
MEGATRON_LM_FOLDER = ROOT / "examples_deepspeed" / "megatron_lm"
MEGATRON_LM_SCRIPTS = {
    "lm-1.3B": "pretrain_gpt_1.3B_usp_32k.sh",
    "lm-llama3": "llama3_8B_usp_128k.sh",
    "lm-tiny": "pretrain_gpt_tiny_usp_cpu.sh",
}
PATHS = {size: FOLDER / name for size, name in SCRIPTS.items()}
PATHS |= {size: MEGATRON_LM_FOLDER / name for size, name in MEGATRON_LM_SCRIPTS.items()}
# The program that is started -> the environment that selects it.
PROGRAMS = {"trainer": {}, "megatron_deepspeed": {"MEGATRON_DEEPSPEED_PATH": str(CHECKOUT)}}


def environment(**settings: str) -> dict[str, str]:
    """What a script needs of the environment, and settings."""
    kept = ("HOME", "LANG", "TMPDIR", "USP_NO_INSTALL")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**env, **settings}


def bash(
    size: str, *arguments: str, cwd: Path | None = None, timeout: float = 60, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of ``sequence_parallel`` or ``megatron_lm``."""
    return run_script(PATHS[size], *arguments, cwd=cwd, timeout=timeout, **settings)


def run_script(
    path: Path, *arguments: str, cwd: Path | None = None, timeout: float = 60, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run any script of the examples."""
    return subprocess.run(
        ["bash", str(path), *arguments],
        cwd=cwd or ROOT,
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def variables(size: str) -> list[str]:
    """The variables of a script as ``launch.sh`` passes them on."""
    lines = PATHS[size].read_text().splitlines()
    return [shlex.split(line)[0] for line in lines if re.match(r"[a-z_]+=", line)]


def start(size: str, *arguments: str, **settings: str) -> int:
    """What ``launch.sh`` starts, in this process; the exit code."""
    from launch_job import main

    return main([*variables(size), "--", *arguments], environment(**settings))


CheckRefused = Callable[[str, str, dict[str, str]], None]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
