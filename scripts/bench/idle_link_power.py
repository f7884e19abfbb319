"""Kernel slowdown caused by active NVLinks.

    torchrun --nproc-per-node 2 scripts/bench/idle_link_power.py --out idle_link_power.csv

While the single-GPU kernel runs, each rank reads 4 KiB from the next rank every N milliseconds with
a copy engine: too little to compete for bandwidth. Active links draw power, and a power-limited GPU
lowers its clock. The measured slowdown is therefore the minimum for any method that communicates.
On CPUs (--device cpu) nothing is read: it shows that the script runs.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial

import torch
from baselines import parse_baseline_args, shape_flags, single_gpu_baseline
from bench_harness import (
    Session,
    Step,
    Table,
    common_flags,
    comparison_flags,
    steps_in_a_row,
    warm_up_seconds,
)
from bench_links import DTYPE, empty, peer_buffer
from shapes import Shape, requested_shapes

_BYTES = 4096


class BackgroundPulls:
    """Thread that reads a few bytes from the next rank in a fixed interval.

    Attributes:
        every_ms: the interval in milliseconds; 0: no reads.
    """

    def __init__(self, session: Session) -> None:
        self.every_ms = 0.0
        self._session, self._ended, self._changed = session, False, threading.Event()
        count = _BYTES // DTYPE.itemsize
        self._recv = self._peer = empty(session, count)
        if session.on_gpu:
            self._peer, self._kept = peer_buffer(session, count)
        session.synchronize()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set(self, every_ms: float) -> None:
        """Change the interval."""
        if every_ms != self.every_ms:
            self.every_ms = every_ms
            self._changed.set()

    def close(self) -> None:
        """Stop and join the thread."""
        self._ended = True
        self._changed.set()
        self._thread.join()
        self._session.synchronize()

    def _run(self) -> None:
        """The thread's loop: pull every ``every_ms``, wait without a limit while that is 0."""
        if self._session.on_gpu:
            torch.cuda.set_device(self._session.device)
            torch.cuda.set_stream(torch.cuda.Stream())
        while not self._ended:
            if self.every_ms:
                self._recv.copy_(self._peer, non_blocking=True)
            self._changed.wait(self.every_ms / 1e3 or None)
            self._changed.clear()


def running_beside(pulls: BackgroundPulls, step: Step, every_ms: float) -> None:
    """Run a step while ``pulls`` reads every ``every_ms``."""
    pulls.set(every_ms)
    step()


def main() -> None:
    """Time each kernel with and without background reads; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    if session.world < 2:
        raise SystemExit("a link has two ends: run at least two ranks")
    columns = ("shape", "kernel", "pull_every_ms", "ms", "tflop_per_s_per_gpu", "share")
    note = f"bf16, causal, batch 1, forward + backward; {_BYTES} bytes a pull; the slowest rank"
    table = Table(session, args.out, columns, note)
    with closing(BackgroundPulls(session)) as pulls:
        for shape in requested_shapes(args):
            for kernel in args.kernels:
                step = single_gpu_baseline(kernel).prepared(session, shape)
                if step is not None:
                    measure(
                        session, args, table, (shape, kernel), partial(running_beside, pulls, step)
                    )
    session.close()


def measure(
    session: Session,
    args: argparse.Namespace,
    table: Table,
    case: tuple[Shape, str],
    step: Callable[[float], None],
) -> None:
    """Rows of one shape and kernel; ``step`` takes the interval of the background reads in ms."""
    shape, kernel = case
    steps = {f"{every_ms:g}": partial(step, every_ms) for every_ms in (0, *args.every)}
    medians = session.medians(steps, args.rounds, steps_in_a_row(args), warm_up_seconds(args))
    for every, seconds in medians.items():
        rate, share = shape.tflop / seconds / session.world, medians["0"] / seconds
        interval = "never" if every == "0" else every
        row = [str(shape), kernel, interval, f"{seconds * 1e3:.3f}", f"{rate:.1f}", f"{share:.4f}"]
        table.add(row)
        session.print0(f"{shape}  {kernel:8} {interval:>6} {seconds * 1e3:9.3f} ms {share:7.1%}")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    shape_flags(parser, "32768:32:32:128")
    parser.add_argument(
        "--every", nargs="+", type=float, default=[1, 20, 60, 200], help="milliseconds"
    )
    comparison_flags(parser)
    return parse_baseline_args(parser)


if __name__ == "__main__":
    main()
