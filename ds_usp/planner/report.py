"""Prints for the planner's commands: rows for programs, and tables of these rows for people.

A command makes a :class:`Result`; :meth:`Command.run` alone writes it, as JSON or as text. A table
has no numbers of its own: its columns are formats of the rows that ``--json`` prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from shutil import get_terminal_size
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from ds_usp.planner.arguments import counted, flag
from ds_usp.planner.hardware import Cluster, load_cluster
from ds_usp.planner.max_length import LengthQuestion, MaxLength
from ds_usp.planner.memory import Memory
from ds_usp.planner.parallel_config import ParallelConfig
from ds_usp.planner.search import GIB, Plan, SearchResult
from ds_usp.settings import LENGTH_SETTINGS

Json: TypeAlias = dict[str, Any]
Cell: TypeAlias = "str | Callable[[Json], str]"
DEFAULT_CLUSTER = "h100"


class Result(NamedTuple):
    """Holds what a command has found.

    Attributes:
        content: what ``--json`` prints.
        text: for people: lines and tables.
        status: the exit code.
    """

    content: object
    text: Iterable[object]
    status: int = 0


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command; its docstring is its help."""

    json: bool = flag("print JSON, for programs", False)

    def result(self) -> Result:
        raise NotImplementedError

    def run(self) -> int:
        content, text, status = self.result()
        print(json.dumps(content, indent=2) if self.json else "\n".join(map(str, text)))
        return status


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """``--cluster``, of the commands that need the hardware's rates or memory."""

    cluster: str | None = flag(
        f"built-in name, or a JSON file of its numbers (default: {DEFAULT_CLUSTER})", None
    )

    def load_cluster(self) -> tuple[Cluster, str]:
        cluster = load_cluster(self.cluster or DEFAULT_CLUSTER)
        return cluster, f"cluster {cluster.name}" + ("" if self.cluster else " (default)")


@dataclass(frozen=True)
class Table:
    """Rows as aligned text, the first column to the left.

    Args:
        rows: as ``--json`` prints them.
        columns: title -> the cell of a row: a format of its keys, or a function of it.
    """

    rows: Sequence[Json]
    columns: Mapping[str, Cell]

    def __str__(self) -> str:
        columns = [
            [title, *(c.format_map(row) if isinstance(c, str) else c(row) for row in self.rows)]
            for title, c in self.columns.items()
        ]
        widths = [max(map(len, column)) for column in columns]
        fits = sum(widths) + 2 * len(widths) < get_terminal_size().columns
        if fits and sys.stdout.isatty() and find_spec("rich"):
            return _by_rich(columns)
        lines = []
        for first, *others in zip(*columns, strict=True):
            cells = map(str.rjust, others, widths[1:])
            lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(lines)


def _by_rich(columns: Sequence[Sequence[str]]) -> str:
    """Columns, each with its title, as ``rich`` draws them in a terminal."""
    from rich import box, console, table

    drawn = table.Table(box=box.SIMPLE_HEAD)
    for number, (title, *_) in enumerate(columns):
        drawn.add_column(title, justify="right" if number else "left", overflow="fold")
    for cells in zip(*(cells for _, *cells in columns), strict=True):
        drawn.add_row(*cells)
    terminal = console.Console(highlight=False)
    with terminal.capture() as text:
        terminal.print(drawn)
    return text.get().strip("\n")


def number(keys: str, unit: float = GIB, digits: int = 1) -> Callable[[Json], str]:
    """The cell of a number in a unit, "" where a row has none; ``keys``: of nested rows."""

    def cell(row: Json) -> str:
        value: Any = row
        for key in keys.split("."):
            value = value.get(key, {})
        return "" if value == {} else f"{value / unit:.{digits}f}"

    return cell


def attributes(source: object, *names: str) -> Json:
    """Name -> value; blanks separate names, too."""
    return {name: getattr(source, name) for name in " ".join(names).split()}


# ------------------------------------------------------------------ memory


def memory_row(memory: Memory) -> Json:
    """Bytes of each component, ``total_bytes`` and what is not in it."""
    sizes = {"total": memory.total, **memory.components()}
    sizes |= attributes(memory, "formula offloaded host_states")
    return {f"{name}_bytes": round(size) for name, size in sizes.items()} | {
        "pipeline_stage": memory.stage
    }


def memory_text(memory: Memory) -> Iterator[object]:
    """The components of one GPU's memory."""
    sizes = memory.components() | {"total": memory.total}
    rows = [{"name": name, "bytes": size} for name, size in sizes.items() if size >= 1]
    title = f"rank of pipeline stage {memory.stage}"
    yield Table(rows, {title: "{name}", "GiB": number("bytes", digits=2)})
    if memory.host:
        states = f", {memory.host_states / GIB:.2f} GiB of them optimizer states"
        in_all = f"in host memory: {memory.host / GIB:.2f} GiB a GPU"
        yield in_all + (states if memory.host_states else "")


def _pipeline(row: Json) -> str:
    stages = row.get("virtual_stages", 1)
    return f"{row['pp']}" + (f" x {stages}" if stages > 1 else "")


_DEGREES: Mapping[str, Cell] = MappingProxyType(
    {"ulysses x ring": "{ulysses} x {ring}", "tp": "{tp}", "pp": _pipeline}
)


def degree_columns(configs: Iterable[ParallelConfig]) -> dict[str, Cell]:
    """Columns of the degrees; of tensor and pipeline parallelism where a row has some."""
    used = list(configs)
    shown = ("ulysses x ring", *(x for x in ("tp", "pp") if any(getattr(c, x) > 1 for c in used)))
    return {title: _DEGREES[title] for title in shown}


# ------------------------------------------------------------------ longest sequences


def max_length_row(row: MaxLength) -> Json:
    """One way to save memory: its longest sequence, what that needs, and what ends it."""
    degrees = "tp ulysses ring pp dp recompute offload_ratio fused_loss"
    content = attributes(row.config, degrees, *(setting.name for setting in LENGTH_SETTINGS))
    return content | attributes(row, "added seq_len limit") | memory_row(row.memory_needed)


def max_length_text(asked: LengthQuestion, rows: Sequence[MaxLength]) -> Iterator[object]:
    """A row for each way to save memory by its longest sequence; components in GiB, but for those
    that are in none of them."""
    rows = sorted(rows, key=lambda row: row.seq_len)
    config, contents = rows[-1].config, [max_length_row(row) for row in rows]
    one_mesh = len({(x.config.tp, *x.config.split, x.config.pp) for x in rows}) == 1
    yield (
        f"{asked.model.name}, {config.gpus} x {asked.cluster.name} of "
        f"{asked.cluster.budget_bytes / GIB:.1f} GiB, {asked.framework.name}, {config.sharding}: "
        f"a sequence on {counted(config.gpus // config.dp, 'GPU')}"
        + (f", {config.dp} such" if config.dp > 1 else "")
        + (f", Ulysses {config.ulysses} x ring {config.ring}" if one_mesh else "")
        + ". GiB of a GPU at the longest sequence"
    )
    columns: dict[str, Cell] = {"recompute": "{recompute}", "offload": "{offload_ratio:.0%}"}
    columns |= {"+ setting": "{added}"} if any(row.added for row in rows) else {}
    columns |= {} if one_mesh else degree_columns(row.config for row in rows)
    columns["tokens"] = lambda row: f"{row['seq_len']:,}" if row["seq_len"] else "none"
    for name in rows[0].memory_needed.components():
        if name != "workspace" and any(content[f"{name}_bytes"] for content in contents):
            columns[name] = number(f"{name}_bytes")
    columns["GPU"] = number("total_bytes")
    columns["host"] = lambda row: f"{(row['offloaded_bytes'] + row['host_states_bytes']) / GIB:.1f}"
    yield Table(contents, columns | {"ends with": "{limit}"})
    yield (
        f"the last row is {config}; a setting is kept in the rows below it\n"
        "transient: what lives while one layer is computed: its recomputed activations, gradients "
        "and, where they are sharded, gathered weights"
    )


# ------------------------------------------------------------------ plans


def plan_row(result: SearchResult, plan: Plan) -> Json:
    """One plan: its degrees and settings, predicted time, MFU and memory."""
    config, work = plan.config, result.work
    return {
        **attributes(config, "tp ulysses ring pp"),
        "virtual_stages": config.virtual_stages(work.model),
        "layers_per_virtual_stage": config.chunk_layers(work.model),
        **attributes(config, "dp zero sharding recompute offload_ratio fused_loss micro_batch"),
        **attributes(config, *(setting.name for setting in LENGTH_SETTINGS)),
        "micro_batches": config.micro_batches(work.global_batch),
        "mfu": plan.mfu,
        "step_s": plan.time.total,
        "tokens_per_s_per_gpu": work.global_batch * work.seq_len / config.gpus / plan.time.total,
        "time_s": plan.time.components(),
        "memory": memory_row(plan.memory),
        "lacks_bytes": round(plan.over_budget_bytes),
    }


PLANS: Mapping[str, Cell] = MappingProxyType(
    {
        "dp": "{dp}",
        "sharding": "{sharding}",
        "mb": "{micro_batch}",
        "loss": lambda row: "chunks" if row["fused_loss"] else "whole",
        "recompute": "{recompute}",
        "offload": "{offload_ratio:.0%}",
        "MFU": "{mfu:.1%}",
        "step s": "{step_s:.2f}",
        "tok/s/GPU": "{tokens_per_s_per_gpu:.0f}",
        "GiB": number("memory.total_bytes"),
        "taken": "{taken}",
    }
)
