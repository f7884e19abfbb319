"""The runs that the planner is judged by, and the table that they leave behind. No torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from ds_usp.planner import ModelShape, ParallelConfig, Workload, framework_caps, load_model

VOCABULARY = 50257


@dataclass(frozen=True)
class Case:
    """One training run of the trainer's GPT, one sequence a step, ZeRO-1, bf16.

    Args:
        model: a built-in GPT; ``layers`` of it.
        recompute: none | full.
    """

    model: str
    layers: int
    seq_len: int
    tp: int
    ulysses: int
    ring: int
    recompute: str

    @property
    def mesh(self) -> tuple[int, int, int]:
        """Degrees; runs of one mesh share its groups."""
        return self.tp, self.ulysses, self.ring

    @property
    def workload(self) -> tuple[str, int, int]:
        """What is trained; its parallel configurations are compared with each other."""
        return self.model, self.layers, self.seq_len

    def shape(self) -> ModelShape:
        """The model as the planner knows it."""
        return replace(shape_of(self.model), layers=self.layers)

    def plan(self) -> tuple[Workload, ParallelConfig]:
        """The run as the planner's workload and parallel configuration."""
        config = ParallelConfig(
            tp=self.tp,
            ulysses=self.ulysses,
            ring=self.ring,
            recompute=self.recompute,
            tp_sequence=False,
            unsharded_grad_reduce=framework_caps("megatron-deepspeed").unsharded_grad_reduce,
        )
        return Workload(self.shape(), self.seq_len), config

    def flags(self, device: str) -> list[str]:
        """The trainer's command line for this run."""
        shape = self.shape()
        values = {
            "tensor-model-parallel-size": self.tp,
            "ds-sequence-parallel-size": self.ulysses * self.ring,
            "ulysses-degree": self.ulysses,
            "num-layers": self.layers,
            "hidden-size": shape.hidden,
            "num-attention-heads": shape.heads,
            "seq-length": self.seq_len,
            "zero-stage": 1,
            "lr": 1e-5,
            "device": device,
        }
        flags = [f"--{name}={value}" for name, value in values.items()]
        return flags + (["--bf16"] if device == "cuda" else [])


def shape_of(model: str) -> ModelShape:
    """A built-in GPT, or ``tiny``, which a CPU can train."""
    if model != "tiny":
        return load_model(model)
    gpt = load_model("gpt-1.3b")
    return replace(gpt, name="tiny", layers=2, hidden=64, ffn=256, heads=4, kv_heads=4, head_dim=16)


def _configs(
    model: str, layers: int, seq_len: int, recompute: str, *meshes: tuple[int, int, int]
) -> list[Case]:
    return [Case(model, layers, seq_len, *mesh, recompute) for mesh in meshes]


_U4, _U2R2, _R4, _T2U2, _T2R2 = (1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2)
K = 1024
# Held out: no length is one that a profile measures.
CASES = (
    *_configs("gpt-1.3b", 8, 16 * K, "none", _U4, _U2R2, _R4),
    *_configs("gpt-1.3b", 8, 32 * K, "full", _U4, _U2R2, _T2U2, _T2R2),
    *_configs("gpt-1.3b", 8, 128 * K, "none", _U4, _U2R2, _R4),
    *_configs("gpt-6.7b", 4, 32 * K, "none", _U4, _U2R2, _R4, _T2U2),
    *_configs("gpt-6.7b", 4, 64 * K, "none", _U2R2, _T2U2),
    *_configs("gpt-6.7b", 4, 128 * K, "full", _U4, _U2R2, _T2R2),
)
# From these comes what a step costs beside its layers; their length is nobody's else, and long
# enough for GPUs not to wait for their hosts.
FITTED = (
    *_configs("gpt-1.3b", 2, 36 * K, "none", _U4, _T2U2),
    *_configs("gpt-1.3b", 8, 36 * K, "none", _U4, _T2U2),
    *_configs("gpt-6.7b", 4, 36 * K, "none", _U4, _T2U2),
)
TINY_CASES = (
    *_configs("tiny", 2, 256, "none", _U4, _U2R2, _R4, _T2U2),
    *_configs("tiny", 2, 512, "full", _U2R2, _T2R2),
)
TINY_FITTED = (
    *_configs("tiny", 1, 320, "none", _U4, _T2U2),
    *_configs("tiny", 3, 320, "none", _U4),
)


@dataclass(frozen=True)
class Measured:
    """A run, with the median seconds of its steps and the most bytes that a GPU allocated."""

    case: Case
    seconds: float
    memory_bytes: int


HEAD = (*(f.name for f in fields(Case)), "seconds", "memory_bytes")


def write(path: Path, comment: str, runs: Iterable[Measured]) -> None:
    """A table with where it is from."""
    with path.open("w", newline="", encoding="utf-8") as file:
        for line in comment.splitlines():
            file.write(f"# {line}\n")
        table = csv.writer(file, lineterminator="\n")
        table.writerow(HEAD)
        for run in runs:
            table.writerow([*astuple(run.case), f"{run.seconds:.6f}", run.memory_bytes])


def read(path: Path) -> Iterator[Measured]:
    """The runs of a table.

    Raises:
        ValueError: a table with other columns.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    table = csv.DictReader(line for line in lines if not line.startswith("#"))
    if tuple(table.fieldnames or ()) != HEAD:
        raise ValueError(f"{path} has the columns {table.fieldnames}, not {HEAD}")
    for row in table:
        cells = [row[f.name] for f in fields(Case)]
        numbers = list(map(int, cells[1:-1]))
        case = Case(cells[0], *numbers, cells[-1])
        yield Measured(case, float(row["seconds"]), int(row["memory_bytes"]))
