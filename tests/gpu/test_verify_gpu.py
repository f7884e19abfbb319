"""``ds-usp verify`` over NCCL, on all GPUs that are here, as a user starts it."""

import pytest
import torch
from programs import torchrun

pytestmark = pytest.mark.several_gpus


def test_the_sweep_is_exact_on_all_gpus():
    """With one GPU it checks the kernel alone, and the command."""
    done = torchrun(torch.cuda.device_count(), "-m", "ds_usp", "verify")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{torch.cuda.device_count()} ranks, NCCL on" in done.stdout
    assert "0 WRONG, 0 refused" in done.stdout.splitlines()[-1]
