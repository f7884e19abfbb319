"""The commands that users type."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mds_runs import HERE, TrainingServer, flags, losses_of, relative_difference

from ds_usp.planner import AUTO

LAUNCHERS = {
    "torchrun": "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_patches.run",
    "deepspeed": "-m deepspeed.launcher.runner --num_gpus 2 --master_port {port} "
    "--module megatron_patches.run",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_starts_the_script(
    server: TrainingServer, tmp_path: Path, launcher: str
) -> None:
    degree = AUTO if launcher == "torchrun" else 1
    arguments = server.arguments(flags(sp=2, u=degree, zero=1), tmp_path)
    command = LAUNCHERS[launcher].format(port=29600 + os.getpid() % 300).split()
    done = subprocess.run(
        [sys.executable, *command, str(server.checkout / "pretrain_gpt.py"), *arguments],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": str(HERE.parents[1]),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        timeout=300,
    )
    if degree == AUTO:
        assert done.stdout.count("planner: ulysses 1 x ring 2 on cpu (predicted step") == 1
    losses = [float(x) for x in re.findall(r"iteration .* lm loss: (\S+)", done.stdout)]
    assert len(losses) == 4, done.stdout[-2000:] + done.stderr[-2000:]
    ranks = server.run(2, flags(sp=2, u=1, zero=1), own_weights=True)
    assert relative_difference(losses, losses_of(ranks)[:4]) < 1e-6
