"""Where a step's time goes: which communication is hidden under kernels, and which is exposed.

    with ds_usp.profiling.exposed.report("report", groups={"data": data_parallel_group}):
        train_step()

One step is traced on every rank by torch's profiler. Communication is *exposed* while it runs and
no kernel does that computes; NCCL's kernels count as communication while they wait for their peer.
Rank 0 prints a table and writes ``communication.csv`` and ``communication_timeline.json``, a trace
for Perfetto. Without a GPU calls and bytes are counted.
"""

from __future__ import annotations

import contextlib
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ds_usp.comm.channel import profiler_enabled
from ds_usp.errors import ConfigError
from ds_usp.profiling.exposed_classify import (
    ALL_TO_ALL,
    BETWEEN_RANKS,
    COMPUTE,
    FROM_HOST,
    GRADIENTS,
    KINDS,
    PARAMETERS,
    PIPELINE,
    RING,
    STATES,
    STEP,
    TENSOR,
    TO_HOST,
    StepTrace,
    check_role,
    classify,
    named_calls,
)
from ds_usp.profiling.exposed_trace import FileRank, events_of_file, events_of_profiler

__all__ = ["CommunicationReport", "read_traces", "report"]

CSV, TIMELINE, TRACE = "communication.csv", "communication_timeline.json", "trace.json.gz"
COLUMNS = ("rank", "kind", "calls", "sent_bytes", "busy_ms", "hidden_ms", "exposed_ms", "of_step")
T = TypeVar("T")
Groups = Mapping[str, "dist.ProcessGroup | Sequence[dist.ProcessGroup | None] | None"]
Interval = tuple[int, int]  # half-open, nanoseconds

_MIB, _MS = 2**20, 1e6
# A GPU starts what it is given within this time; what it waits longer for is not the launch.
_LAUNCH_NS = 10_000
_HINT_SHARE = 0.02  # of the step, from which on a hint is printed
_HINTS: Mapping[str, str] = {
    ALL_TO_ALL: "longer sequences, more head chunks, or a ring over the slow link",
    RING: "longer sequences, or more Ulysses ranks",
    STATES: "longer sequences: their bytes do not grow with tokens",
    GRADIENTS: "overlap_comm of DeepSpeed's ZeRO-2, --overlap-grad-reduce of Megatron-LM",
    PARAMETERS: "--overlap-param-gather of Megatron-LM; larger prefetch buckets under ZeRO-3",
    TENSOR: "less tensor and more sequence parallelism",
    PIPELINE: "more micro batches a step",
    FROM_HOST: "pinned memory, a smaller offload ratio",
    TO_HOST: "a smaller offload ratio, fewer .item() calls in a step",
}
# Rows of the whole step, after those of the kinds: name, field of StepTimes.
_IDLE: Mapping[str, str] = {
    "idle: for the CPU": "host",
    "idle: for other ranks": "ranks",
    "idle: other": "other",
}
_TOTALS: Mapping[str, str] = {
    COMPUTE: "compute_ns",
    **{name: f"{reason}_ns" for name, reason in _IDLE.items()},
    "step": "step_ns",
}


@dataclass(frozen=True)
class KindTimes:
    """One kind of communication in a step.

    Args:
        calls: exchanges, collectives or copies.
        sent_bytes: by this rank to others, or copied; None: not in the trace.
        busy_ns: while at least one of the kind ran on the GPU.
        exposed_ns: of these, under no kernel that computes.
    """

    calls: int = 0
    sent_bytes: int | None = 0
    busy_ns: int = 0
    exposed_ns: int = 0

    @property
    def hidden_ns(self) -> int:
        return self.busy_ns - self.exposed_ns


@dataclass(frozen=True)
class StepTimes:
    """One rank's step. Times in nanoseconds; all 0 where no GPU was traced.

    Args:
        kinds: by name, those that occur.
        step_ns: from the first GPU event to the end of the last.
        compute_ns: while a kernel computed, those of other steps within this time among them.
        communication_ns, exposed_ns: of all kinds together, each moment counted once; that of other
            steps within this time among them, unlike in ``kinds``.
        host_ns: while nothing ran, as the CPU had not launched it.
        ranks_ns: while nothing ran that had been launched, and a copy from another rank was next.
        other_ns: while nothing ran for another reason: between kernels, for other streams.
    """

    kinds: Mapping[str, KindTimes]
    step_ns: int = 0
    compute_ns: int = 0
    communication_ns: int = 0
    exposed_ns: int = 0
    host_ns: int = 0
    ranks_ns: int = 0
    other_ns: int = 0


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
    trace: StepTrace = field(default_factory=StepTrace)
    title: str = ""
    numbers: tuple[int, ...] = ()
    world_size: int = 0

    def table(self) -> str:
        """The report as text: means over ranks, and the rank that a kind is exposed longest on."""
        kinds = {
            kind: [times.kinds.get(kind, KindTimes()) for times in self.ranks]
            for kind in KINDS
            if any(kind in times.kinds for times in self.ranks)
        }
        step = self._mean("step_ns")
        means = "milliseconds, means over ranks" if step else "calls and bytes are means over ranks"
        heads = ("busy", "hidden", "exposed", "of step", "most exposed") if step else ()
        lines = [
            f"communication of {self.title or 'one step'}, {self._ranks_text()}; {means}",
            _row("", "calls", "MiB", *heads),
        ]
        for kind, rows in kinds.items():
            cells = self._times(rows, step) if step else ()
            sent = [row.sent_bytes for row in rows if row.sent_bytes is not None]
            mib = f"{statistics.mean(sent) / _MIB:,.2f}" if len(sent) == len(rows) else "?"
            calls = statistics.mean(row.calls for row in rows)
            lines.append(_row(kind, f"{calls:,.0f}", mib, *cells))
        if not kinds:
            lines.append("  no communication was recorded")
        if any(row.sent_bytes is None for rows in kinds.values() for row in rows):
            lines.append("?: the trace does not hold the bytes of a call, such as one made by C++")
        if not step:
            return "\n".join([*lines, "times need a GPU: only calls and bytes are counted here"])
        busy, exposed = self._mean("communication_ns"), self._mean("exposed_ns")
        times = (f"{ns / _MS:,.2f}" for ns in (busy, busy - exposed, exposed))
        lines.append(_row("all communication", "", "", *times, f"{exposed / step:.1%}"))
        for name, total in _TOTALS.items():
            ns = self._mean(total)
            lines.append(_row(name, "", "", f"{ns / _MS:,.2f}", "", "", f"{ns / step:.1%}"))
        return "\n".join([*lines, *self._hints(kinds, step)])

    def _times(self, rows: Sequence[KindTimes], step: float) -> Iterator[str]:
        for name in ("busy_ns", "hidden_ns", "exposed_ns"):
            yield f"{statistics.mean(getattr(row, name) for row in rows) / _MS:,.2f}"
        yield f"{statistics.mean(row.exposed_ns for row in rows) / step:.1%}"
        longest = max(range(len(rows)), key=lambda index: rows[index].exposed_ns)
        number = self.numbers[longest] if self.numbers else longest
        yield f"{rows[longest].exposed_ns / _MS:,.2f} r{number}"

    def _hints(self, kinds: Mapping[str, Sequence[KindTimes]], step: float) -> Iterator[str]:
        shares = {
            kind: statistics.mean(row.exposed_ns for row in rows) / step
            for kind, rows in kinds.items()
            if kind in _HINTS
        }
        for kind in sorted(shares, key=lambda kind: -shares[kind]):
            if shares[kind] >= _HINT_SHARE:
                yield f"{kind}: {shares[kind]:.1%} of the step is exposed. Try {_HINTS[kind]}"
        host = self._mean("host_ns") / step
        if host >= _HINT_SHARE:
            yield (
                f"the GPU waits for the CPU {host:.1%} of the step, which the profiler makes "
                "longer. Try longer sequences, larger micro batches or CUDA graphs"
            )

    def _mean(self, name: str) -> float:
        return statistics.mean(getattr(times, name) for times in self.ranks)

    def _ranks_text(self) -> str:
        count, world = len(self.ranks), self.world_size
        of = f" of {world}" if world > count else ""
        return f"{count}{of} rank{'' if max(count, world) == 1 else 's'}"

    def write(self, folder: str | Path) -> list[Path]:
        """Write the CSV file, and the timeline where a GPU was traced.

        Returns:
            What was written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"{folder} is no folder: give one for the report") from error
        written = [folder / CSV, *([folder / TIMELINE] if self.trace.gpu else [])]
        for path in written:  # else a link that another user left there would be followed
            path.unlink(missing_ok=True)
        with written[0].open("x", encoding="utf-8", newline="") as file:
            few = f", {self._ranks_text()}" if self.world_size > len(self.ranks) else ""
            file.write(f"# communication of {self.title or 'one step'}{few}\n")
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self._csv_rows())
        if self.trace.gpu:
            rank = min(self.numbers, default=0)
            content = {
                "displayTimeUnit": "ms",
                "traceEvents": list(_timeline(self.trace, rank, self.title)),
            }
            with written[1].open("x", encoding="utf-8") as file:
                json.dump(content, file)
        return written

    def _csv_rows(self) -> Iterator[dict[str, object]]:
        """One row for each rank and kind, then the rank's totals. Times are empty without a GPU,
        bytes where the trace has none; ``of_step`` is the exposed part of the step, of totals their
        own part."""
        for rank, times in zip(self.numbers or range(len(self.ranks)), self.ranks, strict=True):
            for kind, row in times.kinds.items():
                cells: dict[str, object] = {"rank": rank, "kind": kind, "calls": row.calls}
                cells["sent_bytes"] = row.sent_bytes
                if times.step_ns:
                    for name in ("busy", "hidden", "exposed"):
                        cells[f"{name}_ms"] = f"{getattr(row, f'{name}_ns') / _MS:.4f}"
                    cells["of_step"] = f"{row.exposed_ns / times.step_ns:.5f}"
                yield cells
            for name, total in _TOTALS.items() if times.step_ns else ():
                ns = getattr(times, total)
                cells = {"rank": rank, "kind": name, "busy_ms": f"{ns / _MS:.4f}"}
                yield {**cells, "of_step": f"{ns / times.step_ns:.5f}"}


def _row(name: str, *cells: str) -> str:
    return f"  {name:22}" + "".join(f"{cell:>13}" for cell in cells)


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
        folder: for the CSV file and the timeline; None: nothing is written.
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
        _synchronize()
        if dist.is_initialized():  # ranks begin together: their profilers started one by one
            dist.barrier()
            _synchronize()
        unrecorded.clear()
        with record_function(STEP):
            yield result
            _synchronize()
    trace = classify(events_of_profiler(profiler), roles)
    result.trace = replace(trace, calls=(*trace.calls, *unrecorded))
    result.ranks = tuple(_of_all_ranks(step_times(result.trace)))
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    print_line(result.table())
    if folder is not None:
        for path in result.write(folder):
            print_line(f"written  {path}")
        if keep_trace:
            (Path(folder) / TRACE).unlink(missing_ok=True)
            profiler.export_chrome_trace(str(Path(folder) / TRACE))
            print_line(f"written  {Path(folder) / TRACE}")


def _agreed_roles(groups: Groups) -> dict[str, str]:
    """What groups are for, by their name; all ranks raise if one of them cannot be traced."""
    roles: dict[str, str] = {}
    problem = ""
    try:
        for role, value in groups.items():
            check_role(role)
            for group in value if isinstance(value, Sequence) else [value]:
                if group is not None:
                    roles.setdefault(group.group_name, role)
        if profiler_enabled():
            problem = "a profiler records already: report outside of it, or read its trace"
    except ConfigError as error:
        problem = str(error)
    problems = _of_all_ranks(problem)
    if any(problems):
        rank, text = next((rank, text) for rank, text in enumerate(problems) if text)
        raise ConfigError(text if all(problems) else f"rank {rank}: {text}")
    return roles


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _of_all_ranks(value: T) -> list[T]:
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


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
    for path in paths:
        events, label = events_of_file(Path(path))
        traces.append(classify(events, roles, step or STEP))
        labels.append(label)
    if step is not None or any(trace.has_step for trace in traces):
        for trace, path in zip(traces, paths, strict=True):
            if not trace.has_step:
                names = ", ".join(trace.steps) or "no ProfilerStep"
                raise ConfigError(f"{path} has no step {step or STEP!r}; it has {names}")
    order, world_size = _order_of_ranks(labels, paths)
    return CommunicationReport(
        tuple(step_times(traces[index]) for index in order.values()),
        traces[next(iter(order.values()))],
        step or (Path(paths[0]).name if len(paths) == 1 else "whole traces"),
        tuple(order),
        world_size,
    )


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


def step_times(trace: StepTrace) -> StepTimes:
    """The times of a classified step."""
    lanes, compute = _lanes(trace)
    calls: dict[str, list[int | None]] = defaultdict(list)
    for call in trace.calls:
        calls[call.kind].append(call.sent_bytes)
    kinds = {}
    for kind in KINDS:
        if kind in lanes or kind in calls:
            sent, busy = calls[kind], lanes.get(kind, [])
            known = [number for number in sent if number is not None]
            kinds[kind] = KindTimes(
                len(sent),
                sum(known) if len(known) == len(sent) else None,
                total_length(busy),
                total_length(subtract_intervals(busy, compute)),
            )
    if not trace.gpu:
        return StepTimes(kinds)
    communication = [interval for lane in lanes.values() for interval in lane]
    communication += [(e.start, e.stop) for e in trace.beside if e.kind != COMPUTE]
    return StepTimes(
        kinds,
        step_ns=max(e.stop for e in trace.gpu) - min(e.start for e in trace.gpu),
        compute_ns=total_length(compute),
        communication_ns=total_length(communication),
        exposed_ns=total_length(subtract_intervals(communication, compute)),
        **{f"{reason}_ns": total_length(pauses) for reason, pauses in idle(trace).items()},
    )


def _lanes(trace: StepTrace) -> tuple[dict[str, list[Interval]], list[Interval]]:
    """While each kind of communication of the step ran; and while a kernel computed, of this step
    or of another one that runs within it."""
    lanes: dict[str, list[Interval]] = defaultdict(list)
    for event in trace.gpu:
        lanes[event.kind].append((event.start, event.stop))
    compute = lanes.pop(COMPUTE, [])
    compute += [(event.start, event.stop) for event in trace.beside if event.kind == COMPUTE]
    return {kind: merge_intervals(lane) for kind, lane in lanes.items()}, merge_intervals(compute)


def idle(trace: StepTrace) -> dict[str, list[Interval]]:
    """While nothing ran: ``host``, ``ranks`` and ``other``, see :class:`StepTimes`.

    A pause belongs to the CPU until the call that launched what ends the pause has returned; the
    rest of it, to what that event waited for.
    """
    gpu = sorted(
        (event for event in (*trace.gpu, *trace.beside) if event.stop > event.start),
        key=attrgetter("start"),
    )
    first = {event.start: event for event in reversed(gpu)}
    pauses: dict[str, list[Interval]] = {"host": [], "ranks": [], "other": []}
    for start, stop in gaps([(event.start, event.stop) for event in gpu]):
        after = first[stop]
        launched = start if after.launched is None else min(max(start, after.launched), stop)
        if launched > start and stop - launched <= _LAUNCH_NS:
            launched = stop  # it started as soon as a GPU can
        pauses["host"].append((start, launched))
        # NCCL's kernels wait for other ranks while they run, copies before they start.
        is_copy = after.kind in BETWEEN_RANKS and after.name.startswith("Memcpy")
        pauses["ranks" if is_copy else "other"].append((launched, stop))
    return pauses


def _timeline(trace: StepTrace, rank: int, title: str) -> Iterator[dict[str, object]]:
    """Events in Chrome's trace format: a lane for kernels, one for each kind of communication, in
    which exposed and hidden time are slices of their own, and one for each reason to be idle."""
    lanes, compute = _lanes(trace)
    rows: dict[str, list[tuple[str, list[Interval]]]] = {COMPUTE: [(COMPUTE, compute)]}
    for kind in (kind for kind in KINDS if kind in lanes):
        exposed = subtract_intervals(lanes[kind], compute)
        rows[kind] = [("exposed", exposed), ("hidden", subtract_intervals(lanes[kind], exposed))]
    pauses = idle(trace)
    rows |= {name: [(name, merge_intervals(pauses[reason]))] for name, reason in _IDLE.items()}
    begin = min(event.start for event in trace.gpu)
    name = f"rank {rank}: {title or 'one step'}"
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
    for lane, (label, slices) in enumerate(rows.items()):
        at = {"pid": rank, "tid": lane}
        yield {"ph": "M", **at, "name": "thread_name", "args": {"name": label}}
        yield {"ph": "M", **at, "name": "thread_sort_index", "args": {"sort_index": lane}}
        for name, intervals in slices:
            for start, stop in intervals:  # microseconds
                times = {"ts": (start - begin) / 1e3, "dur": (stop - start) / 1e3}
                yield {"ph": "X", **at, "name": name, **times}


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals: sorted and disjoint, without those of no length."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def total_length(intervals: Iterable[Interval]) -> int:
    """Length of the union of intervals."""
    return sum(stop - start for start, stop in merge_intervals(intervals))


def subtract_intervals(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """What the union of ``first`` holds and that of ``second`` does not, sorted and disjoint."""
    holes = merge_intervals(second)
    left: list[Interval] = []
    index = 0
    for start, stop in merge_intervals(first):
        while index < len(holes) and holes[index][1] <= start:
            index += 1
        at, hole = start, index
        while hole < len(holes) and holes[hole][0] < stop:
            if holes[hole][0] > at:
                left.append((at, holes[hole][0]))
            at = holes[hole][1]
            hole += 1
        if at < stop:
            left.append((at, stop))
    return left


def gaps(intervals: Sequence[Interval]) -> list[Interval]:
    """The intervals between the first start and the last stop of which none is part."""
    if not intervals:
        return []
    whole = min(start for start, _ in intervals), max(stop for _, stop in intervals)
    return subtract_intervals([whole], intervals)
