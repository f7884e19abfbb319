"""Ranks of which each has a GPU: spawned, because a process that has used CUDA cannot be forked."""

import faulthandler
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = torch.cuda.device_count()
LIMIT_S = 240.0  # of all that a test's ranks do, with kernels that they compile
WORLDS = [world for world in (2, 4) if world <= HERE] or [1]
# To parametrize a test: worlds that do not fit are skipped, and counted.
EVERY_WORLD = [
    *WORLDS,
    *(
        pytest.param(world, marks=pytest.mark.skip(reason=f"needs {world} GPUs"))
        for world in (2, 4)
        if world > HERE
    ),
]
needs_two = pytest.mark.skipif(HERE < 2, reason="needs 2 GPUs")


def run_on_gpus(fn: Callable[..., None], world: int, *args: Any) -> None:
    """Run the module-level ``fn(rank, world, *args)`` on fresh ranks, over NCCL."""
    store = new_store()
    mp.spawn(join_and_run, (world, store.port, fn, args), nprocs=world)


def new_store() -> dist.TCPStore:
    """Where ranks meet. It listens before they start: of a port that was merely free when it was
    looked for, another test beside this one may have made its own store."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join_and_run(
    rank: int, world: int, port: int, fn: Callable[..., None], args: tuple[Any, ...]
) -> None:
    """One rank, in a process that is started for it."""
    faulthandler.enable()  # a rank that crashes leaves its stack
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a rank that hangs fails its test
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
    fn(rank, world, *args)
    dist.destroy_process_group()
