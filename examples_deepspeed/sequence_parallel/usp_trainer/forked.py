"""Ranks that are forked from one process, and end with it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from usp_trainer.failures import Failure, ended

GRACE_S = 10.0  # for the other ranks to fail by themselves after the first one did
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Body = Callable[[int, str, Callable[[Failure], None]], None]


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent ends in whatever way; on Linux.

    Args:
        parent: the parent's process id, as known before this process could outlive it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def run_ranks(body: Body, processes: int) -> dict[int, Failure]:
    """Fork the ranks and wait for them; whatever ends this process ends them too.

    Args:
        body: what a rank runs: its number, a folder that all ranks share, and where to send its
            failure before it exits with another code than 0.

    Returns:
        How each failed rank ended.

    Raises:
        SystemExit: on SIGTERM, SIGHUP or SIGQUIT, after the ranks have been ended.
        KeyboardInterrupt: the same on SIGINT.
    """
    _exit_on_signals()
    context = multiprocessing.get_context("fork")
    reading, writing = os.pipe()  # closed at its writing end when this process is gone
    with tempfile.TemporaryDirectory(prefix="usp_ranks_") as folder:
        ranks: dict[int, tuple[Any, Connection]] = {}
        try:
            for rank in range(processes):
                parent, child = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank, args=(body, rank, folder, child, os.getpid(), reading, writing)
                )
                process.start()
                child.close()
                ranks[rank] = (process, parent)
            return _wait_for(ranks)
        finally:
            for process, _ in ranks.values():
                process.kill()
                process.join()
            os.close(reading)
            os.close(writing)


def _exit_on_signals() -> None:
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def _rank(
    body: Body,
    rank: int,
    folder: str,
    pipe: Connection,
    parent: int,
    reading: int,
    writing: int,
) -> None:
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the ranks
    os.close(writing)
    end_with_parent(parent)
    threading.Thread(target=_end_at_end_of, args=(reading,), daemon=True).start()
    body(rank, folder, pipe.send)


def _end_at_end_of(pipe: int) -> None:
    """For systems without prctl: nothing is ever written, so reading ends with the parent."""
    os.read(pipe, 1)
    os._exit(1)


def _wait_for(ranks: Mapping[int, tuple[Any, Connection]]) -> dict[int, Failure]:
    """How each failed rank ended; after the first failure the rest get a grace period."""
    failures: dict[int, Failure] = {}
    running, deadline = dict(ranks), None
    while running and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        sentinels = {process.sentinel: rank for rank, (process, _) in running.items()}
        for sentinel in wait(list(sentinels), left):
            rank = sentinels[sentinel]
            process, pipe = running.pop(rank)
            process.join()
            if process.exitcode:
                failures[rank] = ended(process.exitcode)
                with contextlib.suppress(EOFError):  # it died without a word
                    failures[rank] = pipe.recv()
                deadline = deadline or time.monotonic() + GRACE_S
    return failures
