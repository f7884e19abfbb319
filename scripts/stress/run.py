"""Stress test of the exchanges: random calls on worlds of gloo ranks until one hangs.

    python scripts/stress/run.py --calls 20000 --seconds 3000
    python scripts/stress/run.py --torch-only            the same messages without ds_usp
    python scripts/stress/run.py --beside 8              so many worlds side by side

Ranks are forked, and a fresh world takes over after ``--calls-per-world`` calls. A world in which
no rank ends a call or computes for ``--stall-s`` is examined (:mod:`hang`) and ended. Prints
counts every ten seconds; the exit code is 1 after a hang or an error.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

import torch
import torch._dynamo  # which ranks would import at their first call, all of them at once
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
import calls
from hang import diagnose, is_working

REPORT_S = 10.0
POLL_S = 0.2
_FORK = multiprocessing.get_context("fork")


class World:
    """Forked ranks that make calls ``0 .. count - 1`` of a seed.

    Attributes:
        progress: calls that each rank has ended.
        failure: why the world is over, "" if it went well; None while it runs.
    """

    def __init__(self, size: int, seed: int, args: argparse.Namespace) -> None:
        self.size, self.seed, self._args = size, seed, args
        self.failure: str | None = None
        self.progress = RawArray(ctypes.c_uint64, size)
        self._directory = tempfile.TemporaryDirectory(prefix="usp-stress-")
        self._folder = Path(self._directory.name)
        self._processes = [
            _FORK.Process(target=self._rank, args=(rank,), daemon=True) for rank in range(size)
        ]
        for process in self._processes:
            process.start()
        self._last, self._since = self._calls(), time.monotonic()

    @property
    def calls(self) -> int:
        """Calls that all ranks have ended."""
        return min(self._calls())

    def poll(self) -> None:
        """Look for the end, an error or a hang; sets :attr:`failure`."""
        codes = [process.exitcode for process in self._processes]
        errors = sorted(self._folder.glob("raised*"), key=lambda path: path.stat().st_mtime_ns)
        if errors:  # the other ranks' follow from the first
            self.failure = f"{self}: {errors[0].name}\n{errors[0].read_text()}"
        elif all(code == 0 for code in codes):
            self.failure = ""
        elif any(code not in (None, 0) for code in codes):
            texts = [self._stacks(rank).read_text() for rank in range(self.size)]
            self.failure = f"{self}: ranks died, exit codes {codes}\n" + "\n".join(texts)
        elif self._calls() != self._last:
            self._last, self._since = self._calls(), time.monotonic()
        elif time.monotonic() - self._since > self._args.stall_s:
            pids = [process.pid or 0 for process in self._processes]
            if is_working(pids):  # slowly
                self._since = time.monotonic()
                return
            stacks = [self._stacks(rank) for rank in range(self.size)]
            verdict, report = diagnose(pids, stacks, self._calls)
            self.failure = f"HANG, {self}\n{verdict}\n{report}\nHANG, {self}: {verdict}"

    def close(self) -> None:
        """End the ranks at once, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()
        self._directory.cleanup()

    def _calls(self) -> tuple[int, ...]:
        return tuple(self.progress)

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"stack{rank}"

    def _rank(self, rank: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
        stacks = open(self._stacks(rank), "w")  # noqa: SIM115 - open for life
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(stacks)  # for crashes
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # advice about layouts, of every rank
        torch.set_num_threads(1)

        def on_call() -> None:
            self.progress[rank] += 1

        try:
            store = dist.FileStore(str(self._folder / "store"), self.size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=self.size)
            calls.run(
                rank,
                self.size,
                self.seed,
                range(self._args.calls_per_world),
                self._args.pause_ms / 1e3,
                self._args.torch_only,
                on_call,
            )
            dist.barrier()
        except BaseException:
            text = self._folder / f"traceback{rank}"
            text.write_text(traceback.format_exc())
            text.rename(self._folder / f"raised on rank {rank}")  # whole, once it is there
            os._exit(1)
        os._exit(0)

    def __str__(self) -> str:
        what = "messages by torch alone"
        if not self._args.torch_only:
            what = str(calls.draw(calls.random_of(self.seed, self.calls), self.size))
        return f"world {self.size}, seed {self.seed}, call {self.calls} ({what})"


def run(args: argparse.Namespace) -> Counter[str]:
    """Run ``--beside`` worlds at a time until ``--calls`` calls have ended, ``--seconds`` are over
    or, with ``--first``, a world has failed.

    Prints each failure, and the counts every ten seconds and at the end. Worlds that still run
    at the end are killed; their calls count.

    Args:
        args: the flags of :func:`main`.

    Returns:
        Numbers of ``calls``, ``hangs``, ``errors`` and started ``worlds``.
    """
    sizes = [int(size) for size in args.worlds.split(",")]
    totals: Counter[str] = Counter(calls=0, hangs=0, errors=0, worlds=0)
    start = time.monotonic()
    running: list[World] = []
    next_report = start + REPORT_S
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [world.close() for world in running])
        while totals["calls"] < args.calls and time.monotonic() - start < args.seconds:
            if args.first and totals["hangs"] + totals["errors"]:
                break
            while len(running) < args.beside:
                started = totals["worlds"]
                running.append(World(sizes[started % len(sizes)], args.seed + started, args))
                totals["worlds"] += 1
            time.sleep(POLL_S)
            for world in list(running):
                world.poll()
                if world.failure is not None:
                    running.remove(world)
                    _count(totals, world)
                    world.close()
            if time.monotonic() > next_report:
                next_report += REPORT_S
                _print(totals, time.monotonic() - start)
        totals["calls"] += sum(world.calls for world in running)
    _print(totals, time.monotonic() - start)
    return totals


def _count(totals: Counter[str], world: World) -> None:
    totals["calls"] += world.calls
    if world.failure:
        totals["hangs" if world.failure.startswith("HANG") else "errors"] += 1
        print(world.failure, flush=True)


def _print(totals: Counter[str], seconds: float) -> None:
    counts = ", ".join(f"{count} {name}" for name, count in totals.items())
    print(f"{seconds:.0f} s: {counts}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--calls", type=int, default=20000, help="end after so many (default: 20000)")
    add("--seconds", type=float, default=3000.0, help="or after this time (default: 3000)")
    add("--worlds", default="3,4,2,6,5", help="sizes, in turn (default: 3,4,2,6,5)")
    add("--calls-per-world", type=int, default=100, help="default: 100")
    add("--beside", type=int, default=1, help="worlds that run side by side (default: 1)")
    add("--stall-s", type=float, default=60.0, help="a hang is so long (default: 60)")
    add("--pause-ms", type=float, default=0.0, help="random pauses of ranks up to this")
    add("--seed", type=int, default=0, help="of the first world (default: 0)")
    add("--first", action="store_true", help="end at the first hang or error")
    add("--torch-only", action="store_true", help="the messages of such calls, without ds_usp")
    args = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores")
    print(f"{platform.platform()}, {' '.join(platform.libc_ver())}", flush=True)
    totals = run(args)
    return int(bool(totals["hangs"] or totals["errors"]))


if __name__ == "__main__":
    raise SystemExit(main())
