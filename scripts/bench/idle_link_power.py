"""What it costs a kernel that the links between GPUs are awake.

    torchrun --nproc-per-node 2 scripts/bench/idle_link_power.py --out awake_links.csv

Beside the single-GPU kernel each rank pulls a few bytes from the next one, every so many
milliseconds, by its copy engine: too little to be in the way. Links that are awake take power all
the same, which a GPU at its limit takes from its clock. So much slower is the same kernel beside
any exchange. On CPUs (--device cpu) nothing is pulled: it shows that the script runs.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial

import torch
from baselines import Shape, one_gpu, parsed, shape_flags
from bench_harness import Session, Step, Table, flags, race_flags, settling
from bench_links import TYPE, empty, of_next_rank

_BYTES = 4096


class Pulls:
    """A thread that lets a few bytes come from the next rank.

    Attributes:
        every_ms: so often; 0: never.
    """

    def __init__(self, session: Session) -> None:
        self.every_ms = 0.0
        self._session, self._ended, self._changed = session, False, threading.Event()
        count = _BYTES // TYPE.itemsize
        self._own = self._theirs = empty(session, count)
        if session.on_gpu:
            self._theirs, self._kept = of_next_rank(session, count)
        session.synchronize()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set(self, every_ms: float) -> None:
        """So often from now on."""
        if every_ms != self.every_ms:
            self.every_ms = every_ms
            self._changed.set()

    def close(self) -> None:
        """No more of them."""
        self._ended = True
        self._changed.set()
        self._thread.join()
        self._session.synchronize()

    def _run(self) -> None:
        if self._session.on_gpu:
            torch.cuda.set_device(self._session.device)
            torch.cuda.set_stream(torch.cuda.Stream())
        while not self._ended:
            if self.every_ms:
                self._own.copy_(self._theirs, non_blocking=True)
            self._changed.wait(self.every_ms / 1e3 or None)
            self._changed.clear()


def beside(pulls: Pulls, step: Step, every_ms: float) -> None:
    """A step, with pulls so often from now on."""
    pulls.set(every_ms)
    step()


def main() -> None:
    """Time each kernel alone and beside pulls; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    if session.world < 2:
        raise SystemExit("a link has two ends: run at least two ranks")
    columns = ("shape", "kernel", "pull_every_ms", "ms", "tflop_per_s_per_gpu", "share")
    note = f"bf16, causal, batch 1, forward + backward; {_BYTES} bytes a pull; the slowest rank"
    table = Table(session, args.out, columns, note)
    with closing(Pulls(session)) as pulls:
        for shape in map(Shape.parse, args.shapes):
            for kernel in args.kernels:
                step = one_gpu(kernel).prepared(session, shape, False)
                if step is not None:
                    measure(session, args, table, (shape, kernel), partial(beside, pulls, step))
    session.close()


def measure(
    session: Session,
    args: argparse.Namespace,
    table: Table,
    what: tuple[Shape, str],
    step: Callable[[float], None],
) -> None:
    """The rows of a shape and a kernel, whose step is told how often something is pulled."""
    shape, kernel = what
    steps = {f"{each:g}": partial(step, each) for each in (0, *args.every)}
    found = session.medians(steps, args.rounds, args.in_a_row, settling(args))
    for every, seconds in found.items():
        rate, share = shape.tflop / seconds / session.world, found["0"] / seconds
        often = "never" if every == "0" else every
        row = [str(shape), kernel, often, f"{seconds * 1e3:.3f}", f"{rate:.1f}", f"{share:.4f}"]
        table.add(row)
        session.say(f"{shape}  {kernel:8} {often:>6} {seconds * 1e3:9.3f} ms {share:7.1%}")


def parse() -> argparse.Namespace:
    """The flags."""
    parser = flags(__doc__)
    shape_flags(parser, "32768:32:32:128")
    parser.add_argument(
        "--every", nargs="+", type=float, default=[1, 20, 60, 200], help="milliseconds"
    )
    race_flags(parser)
    return parsed(parser)


if __name__ == "__main__":
    main()
