"""Starting the ranks: under a launcher as one of its ranks, otherwise by starting them here.

The one file of the trainer that writes environment variables, and reads them with torch at hand.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
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

EXPLAINED = (USPError, OSError)  # errors that say all in one line; others show where they arose
GRACE_S = 10.0  # for the other ranks to fail by themselves after the first one did

Main = Callable[[Namespace], None]


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
    # megatron-core names absent optional packages, DeepSpeed calls what torch is about to rename.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    return device


def run_rank(main: Main, args: Namespace) -> int:
    """Run ``main`` as the rank that a launcher made of this process."""
    try:
        _join(args, "env://")
        main(args)
        dist.destroy_process_group()
    except EXPLAINED as error:
        print(f"[rank {os.environ['RANK']}] {_brief(error)}", file=sys.stderr)
        return 1
    return 0


def run_on_gpus(script: str, argv: list[str], processes: int | None) -> int:
    """Start a process for each GPU through torchrun, which runs ``script`` again in it."""
    from torch.distributed.run import main as torchrun

    processes = processes or torch.cuda.device_count()
    torchrun(["--standalone", f"--nproc-per-node={processes}", script, *argv])
    return 0


def run_forked(main: Main, args: Namespace, processes: int) -> int:
    """Fork the ranks from this process, whose imports they share; they meet in a file.

    Returns:
        0, or 1 if a rank failed; what they reported stands on stderr, equal reports once.
    """
    prepare_deepspeed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the ranks too
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
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            for process, _ in ranks.values():
                process.kill()
                process.join()
    for text in dict.fromkeys(reports.values()):
        failed = sorted(rank for rank, report in reports.items() if report == text)
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the ranks
    try:
        _join(args, f"file://{folder}/store")
        main(args)
        dist.destroy_process_group()
    except EXPLAINED as error:
        pipe.send(_brief(error))
        sys.exit(1)
    except Exception:
        pipe.send(traceback.format_exc())
        sys.exit(1)


def _join(args: Namespace, init_method: str) -> None:
    prepare_deepspeed()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group(
        backend="nccl" if args.device == "cuda" else "gloo",
        init_method=init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def from_rank0(make: Callable[[], Any]) -> Any:
    """What ``make`` returns on rank 0, on every rank; what it raises there, raised everywhere."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = make()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
