"""Ranks forked from one process: they report failures to it and end when it ends."""

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
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from usp_trainer.failures import Failure, exit_failure

SHUTDOWN_TIMEOUT_S = 10.0  # time for the other ranks to fail and report after the first failure
ON_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.5
_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Body = Callable[[int, str, Callable[[Failure], None]], None]


def end_with_parent(parent: int) -> None:
    """Have this process end when its parent ends for any reason: by the kernel on Linux, elsewhere
    by a thread that polls.

    Args:
        parent: the parent's process id, read while the parent was certainly alive.
    """
    if ON_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call above
            os._exit(1)
    else:
        threading.Thread(target=_exit_without_parent, args=(parent,), daemon=True).start()


def _exit_without_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def fork_and_wait(body: Body, processes: int) -> dict[int, Failure]:
    """Fork the ranks and wait for them; they are killed when this process ends for any reason.

    Args:
        body: runs in each rank with its number, a folder that all ranks share, and a function that
            sends its failure here before it exits with a code other than 0.

    Returns:
        The failure of each failed rank.

    Raises:
        SystemExit: on SIGTERM, SIGHUP or SIGQUIT, after the ranks were killed.
        KeyboardInterrupt: the same on SIGINT.
    """
    context = multiprocessing.get_context("fork")
    ranks: dict[int, tuple[Any, Connection]] = {}
    with tempfile.TemporaryDirectory(prefix="usp_ranks_") as folder, _caught_signals() as signals:
        try:
            for rank in range(processes):
                parent, child = context.Pipe(duplex=False)
                process = context.Process(
                    target=_spawned_rank, args=(body, rank, folder, child, os.getpid())
                )
                process.start()
                child.close()
                ranks[rank] = (process, parent)
            return _wait_for(ranks, signals)
        finally:
            for process, _ in ranks.values():
                process.kill()
                process.join()


@contextlib.contextmanager
def _caught_signals() -> Iterator[int]:
    """A pipe from which the numbers of termination signals are read, while it is open.

    A handler that raises could do so between a fork and its record, or in a destructor, where the
    exception is lost. Python's wakeup file descriptor is written when the signal arrives; a handler
    runs later, which is never if the signal arrives just before a call that waits.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    previous = {}
    for number in (*_TERMINATION_SIGNALS, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            previous[number] = signal.signal(number, lambda *_: None)
    previous_fd = signal.set_wakeup_fd(writing)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def _spawned_rank(body: Body, rank: int, folder: str, pipe: Connection, parent: int) -> None:
    """The forked process of a rank: the default signal handlers, and the end with its parent."""
    signal.set_wakeup_fd(-1)  # the pipe is the parent's
    for number in _TERMINATION_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent kills the ranks
    end_with_parent(parent)
    body(rank, folder, pipe.send)


def _wait_for(ranks: Mapping[int, tuple[Any, Connection]], signals: int) -> dict[int, Failure]:
    """The failure of each failed rank; after the first failure the others get a grace period."""
    failures: dict[int, Failure] = {}
    running, deadline = dict(ranks), None
    while running and (deadline is None or time.monotonic() < deadline):
        remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        sentinels = {process.sentinel: rank for rank, (process, _) in running.items()}
        ready = wait([*sentinels, signals], remaining_s)
        if signals in ready:
            _end_by_signal(os.read(signals, 1)[0])
            ready.remove(signals)
        for sentinel in ready:
            rank = sentinels[sentinel]
            process, pipe = running.pop(rank)
            process.join()
            if process.exitcode:
                failures[rank] = exit_failure(process.exitcode)
                with contextlib.suppress(EOFError):  # it exited without a report
                    failures[rank] = pipe.recv()
                deadline = deadline or time.monotonic() + SHUTDOWN_TIMEOUT_S
    return failures


def _end_by_signal(number: int) -> None:
    """Raise for SIGINT and the termination signals; other signals have handlers of their own."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number in _TERMINATION_SIGNALS:
        raise SystemExit(128 + number)
