"""Benchmark harness: the process group, CUDA-event timers and the CSV table of a run."""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Step = Callable[[], object]
ResultT = TypeVar("ResultT")

# A program that dies while it uses NVLink multicast can leave all GPUs of its node unusable.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
RECORDED = (
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "MAGI_ATTENTION_CATGQA",
)
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True)
class Session:
    """This process among the ranks of a benchmark, and the device that it measures."""

    device: torch.device
    rank: int
    world: int

    @classmethod
    def start(cls, kind: str, timeout_s: float = 120) -> Session:
        """Join the ranks that torchrun started, on "cuda" or "cpu"."""
        os.environ.update(NO_MULTICAST)
        device = torch.device(kind)
        if kind == "cuda":
            device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group(BACKENDS[kind], timeout=datetime.timedelta(seconds=timeout_s))
        return cls(device, dist.get_rank(), dist.get_world_size())

    @property
    def on_gpu(self) -> bool:
        """Whether there are streams to wait for and an allocator that counts."""
        return self.device.type == "cuda"

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()

    def print0(self, line: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(line, flush=True)

    def synchronize(self) -> None:
        """Synchronize this rank's device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def all_reduced(
        self, values: Sequence[float], op: dist.ReduceOp = dist.ReduceOp.SUM
    ) -> list[float]:
        """All-reduce of a few numbers in fp64."""
        tensor = torch.tensor(values, device=self.device, dtype=torch.float64)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    def try_all_ranks(self, make: Callable[[], ResultT]) -> ResultT | str:
        """Run ``make`` on all ranks; its result, or if any rank fails the first error message."""
        reason = ""
        try:
            result = make()
            self.synchronize()
        except Exception as error:  # other libraries may raise anything
            first_line = next(iter(str(error).splitlines()), "")
            reason = f"{type(error).__name__}: {first_line[:160]}"
        reasons: list[str] = [""] * self.world
        dist.all_gather_object(reasons, reason)
        return next(filter(None, reasons)) if any(reasons) else result

    def seconds(self, step: Step, repeats: int = 1) -> float:
        """Seconds per step over ``repeats`` consecutive steps, maximum over ranks."""
        dist.barrier()
        self.synchronize()
        spent = (_gpu_seconds if self.on_gpu else _cpu_seconds)(step, repeats)
        return self.all_reduced([spent / repeats], dist.ReduceOp.MAX)[0]

    def warm_up_clock(self, step: Step, seconds: float) -> None:
        """Run a step for ``seconds``: a GPU at its power limit keeps for a while the clock that
        the previous kernel left."""
        for _ in range(math.ceil(seconds / self.seconds(step)) if seconds else 0):
            step()

    def capture_graph(self, step: Step) -> Step:
        """Capture a step that has run eagerly before in a CUDA graph; returns its replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return partial(_launch, graph, step)

    def medians(
        self, steps: Mapping[str, Step], rounds: int, repeats: int = 1, warm_up_s: float = 0.0
    ) -> dict[str, float]:
        """Median seconds of each step; steps run interleaved, so a drifting clock affects all.

        Args:
            warm_up_s: seconds for which each step runs before each measurement.
        """
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                self.warm_up_clock(step, warm_up_s)
                seconds[name].append(self.seconds(step, repeats))
        return {name: statistics.median(values) for name, values in seconds.items()}

    def extra_bytes(self, step: Step) -> float:
        """Peak bytes that a step allocates above the allocation before it, maximum over ranks."""
        if not self.on_gpu:
            return float("nan")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return self.all_reduced([torch.cuda.max_memory_allocated() - before], dist.ReduceOp.MAX)[0]


class Table:
    """CSV file written by rank 0; its header has command, date, hardware and versions.

    Each row is written as soon as it is measured, so a run that is cut off keeps its rows.
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
        """Append one row."""
        if self._path:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(row)


def start_ranks(arguments: Sequence[str], ranks: int, timeout_s: float) -> int:
    """Run this program again as the ranks of torchrun, with more arguments; its exit code."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-W", "ignore", *launcher, *sys.argv, *arguments]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **NO_MULTICAST, "PYTHONPATH": path}
    with subprocess.Popen(command, env=environment) as launched:
        try:
            return launched.wait(timeout_s)
        except subprocess.TimeoutExpired:
            launched.terminate()  # the launcher ends its ranks
            return launched.wait()


def append_row(
    session: Session, path: Path, row: Mapping[str, Any], packages: Sequence[str], note: str
) -> None:
    """On rank 0: append a row to a file of JSON lines, with the run that it is of."""
    if session.rank:
        return
    versions = ", ".join(map(_version_of, packages))
    command_line, hardware = header(session, f"{versions}; {note}")
    run = {"world": session.world, "run": hardware, "command": command_line}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, **run, "time": int(time.time())}) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _version_of(package: str) -> str:
    """A package with its version, if it is installed."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def header(session: Session, note: str) -> list[str]:
    """Header lines: the command; the date, hardware and versions."""
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
    """Command line of this run; absolute folders are removed from its arguments."""
    settings = [f"{name}={environment[name]}" for name in RECORDED if name in environment]
    arguments = [_strip_folder(argument) for argument in argv[1:]]
    script = f"scripts/bench/{Path(argv[0]).name}"
    return " ".join([*settings, f"torchrun --nproc-per-node {world}", script, *arguments])


def warm_up_seconds(args: argparse.Namespace) -> float:
    """Warm-up seconds before each measurement: ``--settle``; default 0.3 on GPUs, 0 on CPUs."""
    requested: float | None = args.settle
    return (0.3 if args.device == "cuda" else 0.0) if requested is None else requested


def steps_in_a_row(args: argparse.Namespace, tflop_per_gpu: float = math.inf) -> int:
    """Steps of a round: ``--in-a-row``; default 4, on GPUs up to 40 of a step below 5 ms."""
    requested: int | None = args.in_a_row
    if requested is not None:
        return requested
    steps = 0.02 / (tflop_per_gpu / 500) if args.device == "cuda" else 0  # 20 ms at 500 TFLOP/s
    return min(max(math.ceil(steps), 4), 40)


def comparison_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of timed comparisons: rounds, steps of a round, warm-up."""
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--in-a-row", type=int, help="steps of a round (default: 4, more of short steps on GPUs)"
    )
    parser.add_argument(
        "--settle",
        type=float,
        help="warm-up seconds before each measurement (default: 0.3 on GPUs, 0 on CPUs)",
    )


def common_flags(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=BACKENDS, default="cuda")
    parser.add_argument("--out", type=Path, help="the CSV file to write")
    return parser


def _strip_folder(flag: str) -> str:
    name, equals, value = flag.rpartition("=")
    return name + equals + Path(value).name if "/" in value and ":" not in flag else flag


def _launch(graph: torch.cuda.CUDAGraph, step: Step) -> None:
    """Replay a graph; ``step`` keeps the captured tensors alive."""
    graph.replay()


def _gpu_seconds(step: Step, repeats: int) -> float:
    """Seconds of all repeats together on the current stream, by CUDA events; launch gaps count."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def _cpu_seconds(step: Step, repeats: int) -> float:
    """Seconds of all repeats together, by the wall clock."""
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    return time.perf_counter() - begin
