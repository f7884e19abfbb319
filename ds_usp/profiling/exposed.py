"""Where a step's time goes: which communication is hidden under kernels, and which is exposed.

    with ds_usp.profiling.exposed.report("report", groups={"data": data_parallel_group}):
        train_step()

One step is traced on every rank by torch's profiler. Communication is *exposed* while it runs and
no kernel does that computes; NCCL's kernels count as communication while they wait for their peer.
Rank 0 prints a table and writes ``communication.csv`` and ``communication.png``. Without a GPU
calls and bytes are counted.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ds_usp.comm.channel import profiler_enabled
from ds_usp.errors import ConfigError
from ds_usp.profiling import exposed_plot, exposed_table
from ds_usp.profiling.exposed_calls import named_calls
from ds_usp.profiling.exposed_classify import STEP, Call, StepTrace, classify
from ds_usp.profiling.exposed_kinds import check_role
from ds_usp.profiling.exposed_step import StepTimes, step_times
from ds_usp.profiling.exposed_trace import FileRank, events_of_file, events_of_profiler

__all__ = ["CommunicationReport", "read_traces", "report"]

CSV, PICTURE, TRACE = "communication.csv", "communication.png", "trace.json.gz"
T = TypeVar("T")
Groups = Mapping[str, "dist.ProcessGroup | Sequence[dist.ProcessGroup | None] | None"]


@dataclass
class CommunicationReport:
    """The communication of a traced step.

    Args:
        ranks: times, calls and bytes of each rank.
        trace: this rank's events.
        title: what was traced.
        numbers: of the ranks, where ``ranks`` does not hold all of 0, 1, 2 ...
        world_size: ranks of the program; 0: as many as ``ranks``.
    """

    ranks: tuple[StepTimes, ...] = ()
    trace: StepTrace = field(default_factory=lambda: StepTrace((), ()))
    title: str = ""
    numbers: tuple[int, ...] = ()
    world_size: int = 0

    def table(self) -> str:
        """The report as text."""
        return "\n".join(exposed_table.table(*self._arguments()))

    def write(self, folder: str | Path) -> list[Path]:
        """Write the CSV file, and the picture where a GPU was traced and matplotlib is installed.

        Returns:
            What was written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"{folder} is no folder: give one for the report") from error
        written = [folder / CSV]
        exposed_table.write_csv(written[0], *self._arguments())
        if self.trace.gpu and importlib.util.find_spec("matplotlib") is not None:
            written.append(folder / PICTURE)
            exposed_plot.draw(
                self.trace,
                written[1],
                f"{self.title or 'one step'}, rank {min(self.numbers, default=0)}",
            )
        return written

    def _arguments(self) -> tuple[tuple[StepTimes, ...], str, tuple[int, ...], int]:
        return self.ranks, self.title, self.numbers, self.world_size


@contextlib.contextmanager
def report(
    folder: str | Path | None = None,
    *,
    groups: Groups | None = None,
    title: str = "",
    keep_trace: bool = False,
    print_line: Callable[[str], None] = print,
) -> Iterator[CommunicationReport]:
    """Trace what runs within this context and report its communication. Collective over all ranks.

    The yielded report is filled at the end. Rank 0 prints its table and writes to ``folder``. The
    profiler makes the CPU slower, by a tenth and more where it launches many short kernels.

    Args:
        folder: for the CSV file and the picture; None: nothing is written.
        groups: what process groups are for: ``tensor``, ``pipeline``, ``sequence`` or ``data`` ->
            a group or several; of one that has two roles the first counts. Those of other programs
            are known by the description that megatron-core and torch's DeviceMesh set, else
            by the collective: reductions are gradients', all-gathers parameters'. ds_usp's own
            exchanges need no group.
        keep_trace: also write rank 0's trace for a viewer to ``folder``.
        print_line: takes rank 0's lines.

    Raises:
        ConfigError: on every rank, if on one of them a role is none of these, or a profiler
            records already.
    """
    roles = _agreed_roles(groups or {})
    result = CommunicationReport(title=title)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities):  # the first one takes seconds to start
            torch.cuda.synchronize()
    with named_calls(roles) as unrecorded, profile(activities=activities) as profiler:
        _wait_for_all_ranks()
        unrecorded.clear()
        with record_function(STEP):
            yield result
            _synchronize()
    trace = classify(events_of_profiler(profiler), roles)
    calls = (*trace.calls, *(Call(*call) for call in unrecorded))
    result.trace = replace(trace, calls=calls)
    result.ranks = tuple(_of_all_ranks(step_times(result.trace)))
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    print_line(result.table())
    if folder is not None:
        for path in result.write(folder):
            print_line(f"written  {path}")
        if keep_trace:
            profiler.export_chrome_trace(str(Path(folder) / TRACE))
            print_line(f"written  {Path(folder) / TRACE}")


def read_traces(
    paths: Sequence[str | Path], *, groups: Mapping[str, str] | None = None, step: str | None = None
) -> CommunicationReport:
    """The report of trace files, one of each rank, by ``torch.profiler``'s ``export_chrome_trace``.

    Args:
        paths: of the ranks, in any order if the files name their ranks, as those of a program with
            process groups do.
        groups: ``Process Group Name`` in NCCL's metadata -> what the group is for.
        step: the CPU range that is the step, such as ``ProfilerStep#5``; None: that of
            :func:`report` where the files have it, else all of each file.

    Raises:
        ConfigError: a file is missing, cut or no trace; a file has not the step; two files are of
            one rank; a role is none.
    """
    roles = {name: check_role(role) for name, role in (groups or {}).items()}
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise ConfigError("a trace file was given twice: give one of each rank")
    traces, labels = [], []
    for path in map(Path, paths):
        known: list[FileRank] = []
        traces.append(classify(events_of_file(path, known.append), roles, step or STEP))
        labels.append(known[0] if known else None)
    _check_steps(traces, paths, step)
    order, world_size = _order_of_ranks(labels, paths)
    return CommunicationReport(
        tuple(step_times(traces[index]) for index in order.values()),
        traces[next(iter(order.values()))],
        step or (Path(paths[0]).name if len(paths) == 1 else "whole traces"),
        tuple(order),
        world_size,
    )


def _check_steps(
    traces: Sequence[StepTrace], paths: Sequence[str | Path], step: str | None
) -> None:
    """Every file has the step, or none was asked for and none has it."""
    if step is None and not any(trace.has_step for trace in traces):
        return
    for trace, path in zip(traces, paths, strict=True):
        if not trace.has_step:
            names = ", ".join(trace.steps) or "no ProfilerStep"
            raise ConfigError(f"{path} has no step {step or STEP!r}; it has {names}")


def _order_of_ranks(
    labels: Sequence[FileRank | None], paths: Sequence[str | Path]
) -> tuple[dict[int, int], int]:
    """Rank -> index of its file, by rank, and the number of ranks of the program. Files that do
    not all name their ranks are taken in the order given."""
    known = [label for label in labels if label is not None]
    named = len(known) == len(labels)
    order: dict[int, int] = {}
    for index, path in enumerate(paths):
        rank = known[index].rank if named else index
        if rank in order:
            raise ConfigError(f"{paths[order[rank]]} and {path} are both of rank {rank}")
        order[rank] = index
    size = max((label.world_size for label in known), default=0) if named else 0
    return dict(sorted(order.items())), max(size, len(labels))


def _agreed_roles(groups: Groups) -> dict[str, str]:
    """What groups are for, by their name; all ranks raise if one of them cannot be traced."""
    roles: dict[str, str] = {}
    problem = ""
    try:
        roles = _roles(groups)
        if profiler_enabled():
            problem = "a profiler records already: report outside of it, or read its trace"
    except ConfigError as error:
        problem = str(error)
    problems = _of_all_ranks(problem)
    if any(problems):
        rank, text = next((rank, text) for rank, text in enumerate(problems) if text)
        raise ConfigError(text if all(problems) else f"rank {rank}: {text}")
    return roles


def _roles(groups: Groups) -> dict[str, str]:
    """What groups are for, by their name."""
    roles: dict[str, str] = {}
    for role, value in groups.items():
        check_role(role)
        members = value if isinstance(value, Sequence) else [value]
        for group in members:
            if group is not None:
                roles.setdefault(group.group_name, role)
    return roles


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _wait_for_all_ranks() -> None:
    """Ranks begin the step together: their profilers have started one after the other."""
    _synchronize()
    if dist.is_initialized():
        dist.barrier()
        _synchronize()


def _of_all_ranks(value: T) -> list[T]:
    """Every rank's value; collective."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
