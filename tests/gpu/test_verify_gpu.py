"""``ds-usp verify`` over NCCL, on all GPUs that are here, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.several_gpus
ROOT = Path(__file__).resolve().parents[2]


def test_the_sweep_is_exact_on_all_gpus():
    """With one GPU it checks the kernel alone, and the command."""
    ranks = f"--nproc-per-node={torch.cuda.device_count()}"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", ranks)
    done = subprocess.run(
        [*torchrun, "-m", "ds_usp", "verify"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{torch.cuda.device_count()} ranks, NCCL on" in done.stdout
    assert "0 WRONG, 0 refused" in done.stdout.splitlines()[-1]
