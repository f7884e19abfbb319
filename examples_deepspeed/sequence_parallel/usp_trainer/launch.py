"""Starting the ranks: under a launcher as one of its ranks, otherwise by starting them here.

The one file of the trainer that reads and writes environment variables.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from ds_usp import ConfigError, USPError
from ds_usp.training import prepare_deepspeed

GRACE_S = 10.0  # for the other ranks to fail by themselves after the first one did

Main = Callable[[Namespace], None]


def under_launcher() -> bool:
    """Whether torchrun or the deepspeed launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def select_device(device: str) -> str:
    """``cuda`` or ``cpu``, and DeepSpeed told so; call it before DeepSpeed is imported.

    Raises:
        ConfigError: GPUs were asked for and there are none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here. Use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ["DS_ACCELERATOR"] = device
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", module="megatron")  # which optional packages are missing
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed"
    )  # DeepSpeed's
    return device


def run_rank(main: Main, args: Namespace) -> int:
    """Run ``main`` as the rank that a launcher made of this process."""
    try:
        _join(args, "env://")
        main(args)
    except USPError as error:
        print(f"[rank {os.environ['RANK']}] {_brief(error)}", file=sys.stderr)
        return 1
    finally:
        _leave()
    return 0


def run_on_gpus(script: str, argv: list[str], processes: int) -> int:
    """Start one process a GPU through torchrun, which runs ``script`` again in each."""
    from torch.distributed.run import main as torchrun

    torchrun(["--standalone", f"--nproc-per-node={processes}", script, *argv])
    return 0


def run_forked(main: Main, args: Namespace, processes: int) -> int:
    """Fork the ranks from this process, whose imports they share; they meet in a file.

    Returns:
        0, or 1 if a rank failed; what they reported stands on stderr, equal reports once.
    """
    prepare_deepspeed()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="usp_ranks_") as folder:
        ranks = {}
        for rank in range(processes):
            parent, child = context.Pipe(duplex=False)
            process = context.Process(
                target=_forked_rank, args=(main, args, rank, processes, folder, child)
            )
            process.start()
            child.close()
            ranks[rank] = (process, parent)
        try:
            reports = _wait_for(ranks)
        finally:
            for process, _ in ranks.values():
                process.kill()
                process.join()
    for text in dict.fromkeys(reports.values()):
        failed = [rank for rank, report in reports.items() if report == text]
        print(f"\n[rank {', '.join(map(str, failed))}] {text}", file=sys.stderr)
    return 1 if reports else 0


def _wait_for(ranks: Mapping[int, tuple[Any, Connection]]) -> dict[int, str]:
    """What each failed rank reports; after the first failure the rest get a grace period."""
    reports: dict[int, str] = {}
    running, deadline = dict(ranks), None
    while running and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        sentinels = {process.sentinel: rank for rank, (process, _) in running.items()}
        for sentinel in wait(list(sentinels), left):
            rank = sentinels[sentinel]
            process, pipe = running.pop(rank)
            process.join()
            if process.exitcode:
                reports[rank] = f"ended with exit code {process.exitcode}"
                with contextlib.suppress(EOFError):  # it died without a word
                    reports[rank] = pipe.recv()
                deadline = deadline or time.monotonic() + GRACE_S
    return reports


def _forked_rank(
    main: Main, args: Namespace, rank: int, world_size: int, folder: str, pipe: Connection
) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        _join(args, f"file://{folder}/store")
        main(args)
    except USPError as error:
        pipe.send(_brief(error))
        sys.exit(1)
    except BaseException:
        pipe.send(traceback.format_exc())
        sys.exit(1)
    finally:
        _leave()


def _join(args: Namespace, init_method: str) -> None:
    prepare_deepspeed()
    torch.set_num_threads(1 if args.device == "cpu" else torch.get_num_threads())
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        backend="nccl" if args.device == "cuda" else "gloo",
        init_method=init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _brief(error: USPError) -> str:
    return f"{type(error).__name__}: {error}"


def from_rank0(make: Callable[[], Any]) -> Any:
    """What ``make`` returns on rank 0, on every rank; what it raises there, raised everywhere."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = make()
        except USPError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
