"""Process groups of ``ds-usp verify``: ranks forked from this process, or started by torchrun."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from ds_usp.config import TorchrunEnv

Progress = Callable[[str], None]
Work = Callable[[TorchrunEnv, torch.device, Progress], Any]  # what every rank runs

_TIMEOUT = timedelta(seconds=300)  # of one collective, on a loaded machine
_SHUTDOWN_TIMEOUT_S = 10.0  # for the other ranks to fail by themselves once one has


class RankError(Exception):
    """A rank raised or died; the message names it and holds its traceback."""


def run_launched(work: Work, env: TorchrunEnv, cuda: bool, progress: Progress) -> Any:
    """Run ``work`` in this process, one of a launcher's ranks: NCCL on a GPU, or gloo."""
    device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=_TIMEOUT)
    result = work(env, device, progress)
    dist.barrier(device_ids=[env.local_rank] if cuda else None)
    dist.destroy_process_group()  # not after an error: it would wait for the other ranks
    return result


def run_forked(work: Work, world: int, progress: Progress) -> Any:
    """Fork gloo ranks on the CPUs, with this process's imports; returns rank 0's result.

    Raises:
        RankError: a rank raised or died; the others are killed.
    """
    context = multiprocessing.get_context("fork")
    ranks: dict[Connection, int] = {}
    processes = []
    with tempfile.TemporaryDirectory(prefix="ds_usp_ranks_") as folder:
        try:
            for rank in range(world):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_forked, args=(work, rank, world, f"{folder}/store", sender), daemon=True
                )
                process.start()
                sender.close()
                processes.append(process)
                ranks[receiver] = rank
            return _collect(ranks, progress)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _forked(work: Work, rank: int, world: int, store: str, sender: Connection) -> None:
    """A forked CPU rank: joins a gloo group, runs ``work``, sends rank 0's result or an error."""

    def progress(line: str) -> None:
        sender.send(("progress", line))

    try:
        torch.set_num_threads(1)  # the ranks share the cores
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=_TIMEOUT
        )
        env = TorchrunEnv(rank, world, rank, world)
        result = work(env, torch.device("cpu"), progress)
        dist.barrier()
        sender.send(("result", result if rank == 0 else None))
    except KeyboardInterrupt:
        return
    except BaseException:
        sender.send(("error", (time.monotonic(), traceback.format_exc())))


def _collect(ranks: Mapping[Connection, int], progress: Progress) -> Any:
    """Rank 0's result once all ranks are done, or the first error."""
    running, result = dict(ranks), None
    errors: list[tuple[float, int, str]] = []  # time, rank; the others fail because of the first
    deadline: float | None = None
    while running and (deadline is None or time.monotonic() < deadline):
        for kind, rank, content in _messages(running):
            if kind == "progress":
                progress(content)
            elif kind == "result":
                result = content if rank == 0 else result
            else:
                when, text = content
                errors.append((when, rank, text))
                deadline = deadline or time.monotonic() + _SHUTDOWN_TIMEOUT_S
    if errors:
        _, rank, text = min(errors)
        raise RankError(f"rank {rank} failed:\n{text}")
    return result


def _messages(running: dict[Connection, int]) -> Iterator[tuple[str, int, Any]]:
    """Received messages; ranks that have finished are removed from ``running``."""
    for receiver in wait(list(running), timeout=1.0):
        if not isinstance(receiver, Connection):
            continue
        rank = running[receiver]
        kind: str
        content: Any
        kind, content = "error", (0.0, "its process died without a message\n")
        with contextlib.suppress(EOFError, ConnectionResetError):
            kind, content = receiver.recv()
        if kind != "progress":
            del running[receiver]
        yield kind, rank, content
