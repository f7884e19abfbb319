"""Ranks of which each has a GPU: spawned, because a process that has used CUDA cannot be forked."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from programs import free_port


def run_on_gpus(fn: Callable[..., None], world: int, *args: Any) -> None:
    """Run the module-level ``fn(rank, world, *args)`` on fresh ranks, over NCCL."""
    mp.spawn(_rank_main, (world, free_port(), fn, args), nprocs=world)


def _rank_main(
    rank: int, world: int, port: str, fn: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    fn(rank, world, *args)
    dist.destroy_process_group()
