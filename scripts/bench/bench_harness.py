"""What every benchmark shares: the process group, the clock, and the table that is left behind."""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

Step = Callable[[], object]
Made = TypeVar("Made")

# A program that dies while it uses NVLink multicast can leave the GPUs of a whole host unusable.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
RECORDED = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True)
class Session:
    """This process among the ranks of a benchmark, and the device that it measures."""

    device: torch.device
    rank: int
    world: int

    @classmethod
    def start(cls, kind: str) -> Session:
        """Join the ranks that torchrun started, on "cuda" or "cpu"."""
        os.environ.update(NO_MULTICAST)
        device = torch.device(kind)
        if kind == "cuda":
            device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group(BACKENDS[kind], timeout=datetime.timedelta(seconds=120))
        return cls(device, dist.get_rank(), dist.get_world_size())

    @property
    def on_gpu(self) -> bool:
        """Whether there are streams to wait for and an allocator that counts."""
        return self.device.type == "cuda"

    def close(self) -> None:
        """Leave the ranks."""
        dist.destroy_process_group()

    def say(self, line: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(line, flush=True)

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def reduced(
        self, values: Sequence[float], op: dist.ReduceOp = dist.ReduceOp.SUM
    ) -> list[float]:
        """The values of all ranks in one, in fp64."""
        tensor = torch.tensor(values, device=self.device, dtype=torch.float64)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    def attempt(self, make: Callable[[], Made]) -> Made | str:
        """What ``make`` returns, or the reason why it fails on some rank; the same on all ranks."""
        reason = ""
        try:
            made = make()
            self.synchronize()
        except Exception as error:  # a peer may raise anything
            first = next(iter(str(error).splitlines()), "")
            reason = f"{type(error).__name__}: {first[:160]}"
        reasons: list[str] = [""] * self.world
        dist.all_gather_object(reasons, reason)
        return next(filter(None, reasons)) if any(reasons) else made

    def seconds(self, step: Step, repeats: int = 1) -> float:
        """Of one step, ``repeats`` of them in a row, on the slowest rank."""
        dist.barrier()
        self.synchronize()
        spent = (_gpu_seconds if self.on_gpu else _host_seconds)(step, repeats)
        return self.reduced([spent / repeats], dist.ReduceOp.MAX)[0]

    def settle(self, step: Step, seconds: float) -> None:
        """Let a step run for so long. A GPU at the limit of its power has, for a while, the clock
        that fits what ran before."""
        for _ in range(math.ceil(seconds / self.seconds(step)) if seconds else 0):
            step()

    def captured(self, step: Step) -> Step:
        """The launch of a CUDA graph of a step that has run before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return partial(_launch, graph, step)

    def medians(
        self, steps: Mapping[str, Step], rounds: int, repeats: int = 1, settle_s: float = 0.0
    ) -> dict[str, float]:
        """Median seconds of each step; they run interleaved, so a drifting clock meets all.

        Args:
            settle_s: so long each runs, every time, before it is measured.
        """
        found: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                self.settle(step, settle_s)
                found[name].append(self.seconds(step, repeats))
        return {name: statistics.median(each) for name, each in found.items()}

    def extra_bytes(self, step: Step) -> float:
        """Peak allocation of a step above what stands before it, on the worst rank."""
        if not self.on_gpu:
            return float("nan")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return self.reduced([torch.cuda.max_memory_allocated() - before], dist.ReduceOp.MAX)[0]


class Table:
    """A CSV file of rank 0, with what is needed to read it at its head.

    A row is on the disk as soon as it is measured: what a run has found outlives its end.
    """

    def __init__(
        self, session: Session, path: Path | None, columns: Sequence[str], note: str
    ) -> None:
        self._path = path if session.rank == 0 else None
        if self._path:
            lines = "".join(f"# {line}\n" for line in header(session, note))
            self._path.write_text(lines, encoding="utf-8")
        self.add(columns)

    def add(self, row: Sequence[str]) -> None:
        """One line more."""
        if self._path:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(row)


def header(session: Session, note: str) -> list[str]:
    """The command, then the date, the hardware and the versions."""
    versions = [f"torch {torch.__version__}"]
    name = "CPU"
    if session.on_gpu:
        name = torch.cuda.get_device_name()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions += [f"cuDNN {torch.backends.cudnn.version()}", f"NCCL {nccl}"]
    hardware = f"{session.world} x {name}"
    return [
        command(sys.argv, session.world, os.environ),
        f"{datetime.date.today()}, {hardware}, {', '.join(versions)}; {note}",
    ]


def command(argv: Sequence[str], world: int, environment: Mapping[str, str]) -> str:
    """The command line that was given, with no folder outside the repository in it."""
    settings = [f"{name}={environment[name]}" for name in RECORDED if name in environment]
    flags = [_file_name(flag) for flag in argv[1:]]
    script = f"scripts/bench/{Path(argv[0]).name}"
    return " ".join([*settings, f"torchrun --nproc-per-node {world}", script, *flags])


def settling(args: argparse.Namespace) -> float:
    """Seconds for which a step runs before it is measured; none on CPUs, unless asked for."""
    found: float | None = args.settle
    return (0.3 if args.device == "cuda" else 0.0) if found is None else found


def race_flags(parser: argparse.ArgumentParser) -> None:
    """How contenders of a race are timed."""
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--in-a-row", type=int, default=4, help="steps of a round")
    settle_flag(parser)


def settle_flag(parser: argparse.ArgumentParser) -> None:
    """What :func:`settling` reads."""
    parser.add_argument(
        "--settle", type=float, help="seconds that each runs before it is measured: 0.3 on GPUs"
    )


def flags(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=BACKENDS, default="cuda")
    parser.add_argument("--out", type=Path, help="the CSV file to write")
    return parser


def _file_name(flag: str) -> str:
    name, equals, value = flag.rpartition("=")
    return name + equals + Path(value).name if "/" in value else flag


def _launch(graph: torch.cuda.CUDAGraph, step: Step) -> None:
    """Launch the graph of a step, whose tensors it reads."""
    graph.replay()


def _gpu_seconds(step: Step, repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def _host_seconds(step: Step, repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    return time.perf_counter() - begin
