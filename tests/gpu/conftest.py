"""What all tests on GPUs share.

FlashAttention-4 compiles a kernel for each kind of call, on one core. The tests of one GPU run
first, in many processes that share the GPUs and the files of compiled kernels; the tests of several
GPUs run after them, a few at a time, and find these files; those that measure times run last, one
after the other (``scripts/test.sh gpu``).
"""

import os

import torch

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if _worker and torch.cuda.device_count() > 1:  # counts by NVML: CUDA itself has not started
    torch.cuda.set_device(int(_worker.removeprefix("gw")) % torch.cuda.device_count())
