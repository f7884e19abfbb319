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
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ds_usp.comm.profiler_ranges import profiler_enabled
from ds_usp.errors import ConfigError
from ds_usp.profiling import exposed_plot, exposed_table
from ds_usp.profiling.exposed_calls import named_calls
from ds_usp.profiling.exposed_classify import STEP, Call, StepTrace, classify
from ds_usp.profiling.exposed_kinds import check_role
from ds_usp.profiling.exposed_step import StepTimes, step_times
from ds_usp.profiling.exposed_trace import events_of_file, events_of_profiler

__all__ = ["CommunicationReport", "read_traces", "report"]

CSV, PICTURE, TRACE = "communication.csv", "communication.png", "trace.json.gz"
Groups = Mapping[str, "dist.ProcessGroup | Sequence[dist.ProcessGroup | None] | None"]


@dataclass
class CommunicationReport:
    """The communication of a traced step.

    Args:
        ranks: times, calls and bytes of each rank.
        trace: this rank's events.
        title: what was traced.
    """

    ranks: tuple[StepTimes, ...] = ()
    trace: StepTrace = field(default_factory=lambda: StepTrace((), ()))
    title: str = ""

    def table(self) -> str:
        """The report as text."""
        return "\n".join(exposed_table.table(self.ranks, self.title))

    def write(self, folder: str | Path) -> list[Path]:
        """Write the CSV file, and the picture where a GPU was traced and matplotlib is installed.

        Returns:
            What was written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / CSV]
        exposed_table.write_csv(self.ranks, written[0], self.title)
        if self.trace.gpu and importlib.util.find_spec("matplotlib") is not None:
            written.append(folder / PICTURE)
            exposed_plot.draw(self.trace, written[1], f"{self.title or 'one step'}, rank 0")
        return written


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
            are known by the description that megatron-core and torch's DeviceMesh give theirs, else
            by the collective: reductions are gradients', all-gathers parameters'. ds_usp's own
            exchanges need no group.
        keep_trace: also write rank 0's trace for a viewer to ``folder``.
        print_line: takes rank 0's lines.

    Raises:
        ConfigError: a role that is none of these, or a profiler that runs already.
    """
    if profiler_enabled():
        raise ConfigError("a profiler records already: report outside of it, or read its trace")
    roles = _roles(groups or {})
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
    paths: Sequence[str | Path], *, groups: Mapping[str, str] | None = None, step: str = STEP
) -> CommunicationReport:
    """The report of trace files, one of each rank, by ``torch.profiler``'s ``export_chrome_trace``.

    Args:
        paths: of the ranks, in order.
        groups: ``Process Group Name`` in NCCL's metadata -> what the group is for.
        step: the CPU range that is the step, such as ``ProfilerStep#5``; where there is none, all
            of the file is.

    Raises:
        ConfigError: a file is missing or holds no trace; a role is none.
    """
    roles = {name: check_role(role) for name, role in (groups or {}).items()}
    traces = [classify(events_of_file(Path(path)), roles, step) for path in paths]
    return CommunicationReport(tuple(map(step_times, traces)), traces[0], Path(paths[0]).name)


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


def _of_all_ranks(times: StepTimes) -> list[StepTimes]:
    """Every rank's times; collective."""
    if not dist.is_initialized():
        return [times]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, times)
    return gathered
