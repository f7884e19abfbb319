"""Which kind of communication each GPU event of a trace belongs to, and what every call sent.

What launched an event decides: the range of an exchange around the launch, else NCCL's metadata
(name and description of the process group), else the kernel's name. Copy engines are driven by
calls that a trace does not always record: their copies are known by the range that the profiler
draws on their stream, else by the exchange that was posted when they were launched: CUPTI numbers
the calls of a process in order, so the call with the next number came right after.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from ds_usp.comm.channel import PREFIX
from ds_usp.profiling.exposed_calls import LAUNCH
from ds_usp.profiling.exposed_kinds import (
    COMPUTE,
    FROM_HOST,
    OTHER,
    TO_HOST,
    gathered_bytes,
    kind_of_call,
    kind_of_kernel,
    kind_of_range,
    operation_of,
    role_of_description,
    sent_bytes,
)
from ds_usp.profiling.exposed_trace import (
    COPY,
    CPU,
    GPU_RANGE,
    KERNEL,
    PARAM_COMMS,
    RUNTIME,
    SET,
    TraceEvent,
)
from ds_usp.profiling.intervals import Interval

STEP = "ds_usp.step"  # the range of a traced step
_PROFILER_STEP = "ProfilerStep#"
_OPERATORS = "c10d::"  # torch's operators through which C++ calls a process group
_ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long"), 8),
}


_FLOATING = ("Half", "BFloat16", "Float", "Double")  # beginnings of dtype names


class GpuEvent(NamedTuple):
    """A kernel or a copy, times in nanoseconds.

    Attributes:
        kind: of communication, or ``kernels``.
        launched: when the CPU's call that launched it returned, or the next call began; None:
            unknown.
    """

    name: str
    kind: str
    start: int
    stop: int
    launched: int | None


class Call(NamedTuple):
    """One exchange, collective or copy: its kind, and what this rank sent; None: unknown."""

    kind: str
    sent_bytes: int | None


@dataclass(frozen=True)
class StepTrace:
    """A step: its GPU events by start, and its calls.

    Args:
        beside: events of other steps, cut to the time from this step's first event to its last.
        has_step: the range of the step is in the trace.
        steps: names of the steps that torch's profiler marked.
    """

    gpu: tuple[GpuEvent, ...]
    calls: tuple[Call, ...]
    beside: tuple[GpuEvent, ...] = ()
    has_step: bool = False
    steps: tuple[str, ...] = ()


def classify(
    events: Iterable[TraceEvent], roles: Mapping[str, str] | None = None, step: str = STEP
) -> StepTrace:
    """The step in these events.

    Args:
        events: of one rank.
        roles: what process groups are for, by their name in NCCL's metadata; of others by
            :func:`ds_usp.profiling.exposed_kinds.role_of_description`.
        step: the name of the CPU range that is the step; the last one if there are several, all
            events if there is none.
    """
    return _Classifier(tuple(events), roles or {}, step).result()


class _Classifier:
    """The events of one rank, indexed by what launched what."""

    def __init__(self, events: Sequence[TraceEvent], roles: Mapping[str, str], step: str) -> None:
        self._roles = roles
        steps = [(e.start, e.stop) for e in events if e.category == CPU and e.name == step]
        self._step = steps[-1] if steps else None
        names = (e.name for e in events if e.category == CPU and e.name.startswith(_PROFILER_STEP))
        self._step_names = tuple(dict.fromkeys(names))
        self._on_gpu = [e for e in events if e.category in (KERNEL, COPY, SET)]
        self._cpu_by_id = {e.external: e for e in events if e.category == CPU and e.external}
        self._runtime = sorted(
            (e for e in events if e.category == RUNTIME and e.correlation),
            key=attrgetter("correlation"),
        )
        self._ranges = _Ranges(e for e in events if e.category == CPU and e.name.startswith(PREFIX))
        self._gpu_ranges = _Ranges(
            (e for e in events if e.category == GPU_RANGE and e.name.startswith(PREFIX)),
            key=attrgetter("stream"),
        )
        self._metadata = [e for e in events if e.name == PARAM_COMMS and e.args]
        self._operators = _Ranges(
            e for e in events if e.category == CPU and e.name.startswith(_OPERATORS)
        )

    def result(self) -> StepTrace:
        gpu, beside, calls = [], [], []
        for event in sorted(self._on_gpu, key=lambda event: event.start):
            launch = self._launch(event)
            kind = self._kind(event, launch)
            launched = None if launch is None else launch[1]
            classified = GpuEvent(event.name, kind, event.start, event.stop, launched)
            if not self._in_step(event.start if launch is None else launch[0]):
                beside.append(classified)
                continue
            gpu.append(classified)
            if kind in (FROM_HOST, TO_HOST):
                calls.append(Call(kind, event.args.get("bytes")))
        for inner in self._ranges.outermost():
            kind, sent = parse_range(inner.name)
            if sent is not None and self._in_step(inner.start):
                calls.append(Call(kind, sent))
        for event in self._metadata:
            if self._in_step(event.start) and not self._ranges.around(event.thread, event.start):
                calls.append(self._call_of_metadata(event.args))
        calls += self._calls_of_operators()
        return StepTrace(
            tuple(gpu),
            tuple(calls),
            tuple(_within(beside, gpu)),
            self._step is not None,
            self._step_names,
        )

    def _launch(self, event: TraceEvent) -> Interval | None:
        """When the CPU launched a GPU event; a moment of no length if it is that of the next call,
        None if unknown."""
        index = bisect_left(self._runtime, event.correlation, key=attrgetter("correlation"))
        if not event.correlation or index == len(self._runtime):
            return None
        call = self._runtime[index]
        exact = call.correlation == event.correlation
        if not exact and call.start > event.start:  # another thread's, or none for long
            return None
        return call.start, call.stop if exact else call.start

    def _in_step(self, time: int) -> bool:
        return self._step is None or self._step[0] <= time <= self._step[1]

    def _kind(self, event: TraceEvent, launch: Interval | None) -> str:
        """The kind of a GPU event."""
        if event.category == COPY:
            if "HtoD" in event.name:
                return FROM_HOST
            if "DtoH" in event.name:
                return TO_HOST
        elif event.category != KERNEL or kind_of_kernel(event.name) is None:
            return COMPUTE
        cpu = self._cpu_by_id.get(event.external)
        around = (
            self._gpu_ranges.around(event.stream, event.start)
            or (launch and self._range_of_launch(event, launch[0]))
            or (cpu and self._ranges.around(cpu.thread, cpu.start))
        )
        if around:
            return parse_range(around.name)[0]
        if event.category == COPY:
            return OTHER if "PtoP" in event.name else COMPUTE
        for args in (event.args, cpu.args if cpu else {}):
            if args.get("Collective name"):
                return self._call_of_metadata(args).kind
        return kind_of_kernel(event.name) or COMPUTE

    def _range_of_launch(self, event: TraceEvent, time: int) -> TraceEvent | None:
        """The range around a launch: on its own thread, where the trace knows that, else on any."""
        index = bisect_left(self._runtime, event.correlation, key=attrgetter("correlation"))
        call, cpu = self._runtime[index], self._cpu_by_id.get(event.external)
        threads = [call.thread] if call.correlation == event.correlation else []
        threads += [cpu.thread] if cpu else []
        own = (self._ranges.around(thread, time) for thread in threads)
        return next(filter(None, own), None) or self._ranges.on_any_thread(time)

    def _calls_of_operators(self) -> list[Call]:
        """Calls of C++ that have neither a range nor NCCL's metadata, such as those of gloo from
        DistributedDataParallel's reducer: their bytes are unknown."""
        around = (self._operators.around(event.thread, event.start) for event in self._metadata)
        described = {id(operator) for operator in around}
        return [
            Call(kind_of_call("", operation_of(event.name.removeprefix(_OPERATORS)), None), None)
            for event in self._operators.outermost()
            if id(event) not in described
            and self._in_step(event.start)
            and not self._ranges.around(event.thread, event.start)
        ]

    def _call_of_metadata(self, args: Mapping[str, Any]) -> Call:
        """The call that NCCL's metadata describes."""
        name = str(args.get("Process Group Name", ""))
        role = self._roles.get(name) or role_of_description(
            str(args.get("Process Group Description", ""))
        )
        operation = operation_of(str(args["Collective name"])) if "Collective name" in args else ""
        size = _ITEM_BYTES.get(str(args.get("dtype", "")))
        elements = int(args.get("In msg nelems", 0))
        if size is None:
            return Call(kind_of_call(role, operation, None), None)
        ranks, floating = int(args.get("Group size", 2)), str(args["dtype"]).startswith(_FLOATING)
        whole = gathered_bytes(operation, size * elements, ranks, floating)
        kind = kind_of_call(role, operation, whole)
        if operation == "alltoall" and not _even(args.get("In split size")):
            return Call(kind, None)  # the metadata does not tell which part is the rank's own
        return Call(kind, sent_bytes(operation, size * elements, ranks))


def _even(split_sizes: object) -> bool:
    """Whether an all-to-all sends as much to every rank; kineto cuts long lists."""
    text = str(split_sizes or "")
    return "..." not in text and len(set(re.findall(r"\d+", text))) <= 1


def _within(events: Iterable[GpuEvent], step: Sequence[GpuEvent]) -> Iterator[GpuEvent]:
    """The events cut to the time of a step's."""
    begin = min((event.start for event in step), default=0)
    end = max((event.stop for event in step), default=0)
    for event in events:
        if event.start < end and event.stop > begin:
            yield event._replace(start=max(event.start, begin), stop=min(event.stop, end))


def parse_range(name: str) -> tuple[str, int | None]:
    """Kind and sent bytes in the name of a range; None for one that only launches."""
    kind, _, sent = name.removeprefix(PREFIX).rpartition("/")
    return kind_of_range(kind), None if sent == LAUNCH or not sent.isdecimal() else int(sent)


class _Ranges:
    """The ranges of exchanges of each thread or stream, the outermost ones: a range inside another
    one is the same exchange, named by a lower layer."""

    def __init__(
        self,
        events: Iterable[TraceEvent],
        key: Callable[[TraceEvent], int] = attrgetter("thread"),
    ) -> None:
        self._by_thread: dict[int, list[TraceEvent]] = defaultdict(list)
        for event in sorted(events, key=lambda event: (event.start, -event.stop)):
            known = self._by_thread[key(event)]
            if not known or event.start >= known[-1].stop:
                known.append(event)

    def outermost(self) -> list[TraceEvent]:
        """All of them."""
        return [event for events in self._by_thread.values() for event in events]

    def around(self, thread: int, time: int) -> TraceEvent | None:
        """The range of this thread at this time."""
        events = self._by_thread.get(thread, [])
        index = bisect_right(events, time, key=attrgetter("start")) - 1
        return events[index] if index >= 0 and time <= events[index].stop else None

    def on_any_thread(self, time: int) -> TraceEvent | None:
        """The range of some thread at this time."""
        ranges = (self.around(thread, time) for thread in self._by_thread)
        return next((event for event in ranges if event), None)
