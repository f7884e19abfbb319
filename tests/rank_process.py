"""What a rank of the tests arranges for itself: its end, and how often it wakes."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_the_server() -> None:
    """A rank that rests would not see that the tests have been killed. Their end ends the server,
    if no rank holds the pipe by which it sees that, and the server's end its ranks."""
    if sys.platform == "linux":
        if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
            raise OSError("this rank could outlive the tests: prctl(PR_SET_PDEATHSIG) is refused")
        os.close(forkserver._forkserver._forkserver_alive_fd)
        forkserver._forkserver._forkserver_alive_fd = None
        os.setpgid(0, 0)  # a shell that ends would hang up on a group of which some have stopped


class _GlooOfOneThread(c10d.ProcessGroupGloo):
    """All groups of a rank on one device: each has a thread that wakes a hundred times a second,
    and a trainer makes twenty groups."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = c10d.ProcessGroupGloo._Options()
        options._devices, options._timeout = [_device()], timeout
        super().__init__(store, rank, size, options)


@functools.cache
def _device() -> Any:
    return c10d.ProcessGroupGloo.create_default_device()


def take_one_gloo_thread() -> None:
    """From here on, for every group of this rank."""
    c10d.ProcessGroupGloo = _GlooOfOneThread
