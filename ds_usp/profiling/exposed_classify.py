"""Which kind of communication each call and each GPU event of a trace belongs to.

What launched an event decides: the range of an exchange around the launch, else NCCL's metadata
(name and description of the process group), else the kernel's name. Copy engines are driven by
calls that a trace does not always record: their copies are known by the range that the profiler
draws on their stream, else by the exchange that was posted when they were launched: CUPTI numbers
the calls of a process in order, so the call with the next number came right after.
"""

from __future__ import annotations

import contextlib
import functools
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from ds_usp.comm.channel import PREFIX, exchange_range, profiler_enabled
from ds_usp.errors import ConfigError
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

# ------------------------------------------------------------------ kinds

ALL_TO_ALL, RING, STATES = "all-to-all", "ring", "states and halos"
GRADIENTS, PARAMETERS = "gradient reduction", "parameter gather"
TENSOR, PIPELINE = "tensor parallel", "pipeline"
P2P, OTHER = "point to point", "other collectives"
FROM_HOST, TO_HOST = "copies from the host", "copies to the host"
COMPUTE = "kernels"
# In the order of the table.
KINDS = (
    *(ALL_TO_ALL, RING, STATES, GRADIENTS, PARAMETERS, TENSOR, PIPELINE, P2P, OTHER),
    *(FROM_HOST, TO_HOST),
)
BETWEEN_RANKS = KINDS[:-2]
ROLES = ("tensor", "pipeline", "sequence", "data")

# The ledger's kinds, which name the ranges of ds_usp's own exchanges.
_OF_LEDGER: Mapping[str, str] = MappingProxyType(
    {
        "all_to_all": ALL_TO_ALL,
        **dict.fromkeys(("ring_kv", "ring_dkv"), RING),
        **dict.fromkeys(("states", "halo"), STATES),  # of layers that carry a state
    }
)
# Operations by what their names contain without underscores; the first that matches. The names are
# those of c10d's methods, of NCCL's metadata in traces, and of NCCL's kernels.
_OPERATIONS = (
    *("reducescatter", "allreduce", "allgather", "alltoall", "sendrecv", "send", "recv"),
    *("broadcast", "barrier", "gather", "scatter", "reduce", "coalesced"),
)
# Kernels that communicate: the kind by name, "" where the operation in the name decides. The first
# that matches; TransformerEngine's, DeepEP's and vLLM's run without NCCL.
_KERNELS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (TENSOR, r"userbuffers|cross_device_reduce"),
        (ALL_TO_ALL, r"deep_ep"),
        ("", r"nccl|symm_mem|multimem|(one|two)_shot_(all|reduce)"),
        (OTHER, r"nvshmem|symmetric_memory|(wait|put)_signal_kernel"),
    )
)
# Up to so many bytes: norms, losses and flags, no gradients and no parameters.
_SCALARS_BYTES = 4096
# Descriptions of groups, as megatron-core and torch's DeviceMesh give them; the first that matches.
_DESCRIPTIONS = tuple(
    (role, re.compile(pattern, re.IGNORECASE))
    for role, pattern in (
        ("", r"^TENSOR_AND_|^EXPERT_MODEL|TENSOR_MODEL_PIPELINE|^mesh_\w+_tp\b|^mesh_tp_"),
        ("data", r"data_parallel|embedding_group|_(dp|fsdp|hsdp|ddp)\b|_dp_|^mesh_data\b"),
        ("data", r"^mesh_(shard|replicate)\b"),
        ("tensor", r"tensor_model|tensor_parallel|_tp\b|^mesh_tensor\b"),
        ("pipeline", r"pipeline|_pp\b"),
        (
            "sequence",
            r"context_parallel|sequence_parallel|\bulysses|_ulysses|_(cp|sp|ring)\b|\bring(\b|_)",
        ),
    )
)


def operation_of(name: str) -> str:
    """The operation that a method, a metadata entry or a kernel names; "" for none."""
    text = name.lower().replace("_", "")
    return next((operation for operation in _OPERATIONS if operation in text), "")


def role_of_description(description: str) -> str:
    """What a group is for, by the description that its program gave it; "" if it names no role."""
    return next((role for role, pattern in _DESCRIPTIONS if pattern.search(description)), "")


def check_role(role: str) -> str:
    """The role, unless it is none (``ConfigError``)."""
    if role not in ROLES:
        raise ConfigError(f"a group's role must be one of {', '.join(ROLES)}, not {role!r}")
    return role


def _kind_of_kernel(name: str) -> str | None:
    """The kind of a kernel by its name alone; None for one that computes."""
    kind = next((kind for kind, pattern in _KERNELS if pattern.search(name)), None)
    return kind_of_call("", operation_of(name), None) if kind == "" else kind


def kind_of_call(role: str, operation: str, num_bytes: int | None) -> str:
    """The kind of a collective or transfer of NCCL or gloo.

    Args:
        role: of its group, one of :data:`ROLES`; "": unknown.
        operation: as :func:`operation_of` returns it.
        num_bytes: of the call; None: unknown.
    """
    if role == "tensor":
        return TENSOR
    if operation in ("sendrecv", "send", "recv", "coalesced"):
        return {"pipeline": PIPELINE, "sequence": RING}.get(role, P2P)
    if operation == "alltoall":
        return ALL_TO_ALL
    if operation in ("", "barrier") or (num_bytes is not None and num_bytes <= _SCALARS_BYTES):
        return OTHER
    if role == "sequence":  # all-gathered KV, and its gradients
        return RING
    return GRADIENTS if operation in ("reducescatter", "allreduce", "reduce") else PARAMETERS


def gathered_bytes(operation: str, input_bytes: int, ranks: int, floating: bool) -> int:
    """The size by which :func:`kind_of_call` knows parameters from flags: for an all-gather of
    floating-point numbers that of all ranks' parts, as parts of parameters become small where the
    ranks are many; integers are objects and flags."""
    return input_bytes * ranks if operation == "allgather" and floating else input_bytes


def sent_bytes(operation: str, input_bytes: int, ranks: int) -> int:
    """Bytes that a rank sends to others in a call, by the algorithm that sends least: a ring.

    Args:
        input_bytes: of this rank's input.
        ranks: of the group.
    """
    if ranks < 2 or operation in ("recv", "barrier", "coalesced"):
        return 0
    others = ranks - 1
    factors = {
        "allreduce": 2 * others / ranks,
        "reducescatter": others / ranks,
        "alltoall": others / ranks,
        "scatter": others / ranks,  # of the root; the input of other ranks is empty
        "allgather": others,
    }
    return round(input_bytes * factors.get(operation, 1))


# ------------------------------------------------------------------ ranges around calls

# Methods of ProcessGroup: the number of the argument that this rank sends.
_INPUT_FIRST = """
    allreduce allreduce_coalesced reduce broadcast send recv recv_anysource barrier
"""
_OUTPUT_FIRST = """
    allgather _allgather_base all_gather_single allgather_coalesced
    allgather_into_tensor_coalesced all_gather_single_coalesced
    reduce_scatter _reduce_scatter_base reduce_scatter_single
    reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced
    alltoall alltoall_base all_to_all_single gather scatter
"""
_METHODS: Mapping[str, int] = MappingProxyType(
    {**dict.fromkeys(_INPUT_FIRST.split(), 0), **dict.fromkeys(_OUTPUT_FIRST.split(), 1)}
)


class Call(NamedTuple):
    """One exchange, collective or copy: its kind, and what this rank sent; None: unknown."""

    kind: str
    sent_bytes: int | None


@contextlib.contextmanager
def named_calls(roles: Mapping[str, str]) -> Iterator[list[Call]]:
    """Within this context every call that Python makes of a process group has a range: NCCL's
    kernels do not hold for which of a program's groups they run.

    The profiler records ranges on the thread that started it and on autograd's. Calls of C++
    (DistributedDataParallel's reducer, functional collectives) pass these methods by.

    Args:
        roles: what groups are for, by ``ProcessGroup.group_name``.

    Yields:
        The calls on threads that the profiler does not record.
    """
    unrecorded: list[Call] = []
    last_kinds: dict[str, str] = {}  # of the last call by group: that of the launch after it

    def named(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        operation, number = operation_of(name), _METHODS[name]

        @functools.wraps(original)
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            inputs = args[number] if len(args) > number else None
            # Only the root has a scatter's input: by the output every rank finds the same kind.
            num_bytes = _num_bytes(args[0] if operation == "scatter" and args else inputs)
            role = roles.get(group.group_name) or role_of_description(group.group_desc)
            size = gathered_bytes(operation, num_bytes, group.size(), _is_floating(inputs))
            kind = kind_of_call(role, operation, size) if group.size() > 1 else OTHER
            last_kinds[group.group_name] = kind
            sent = _sent_by_this_rank(operation, group, inputs, args)
            if not profiler_enabled():
                unrecorded.append(Call(kind, sent))
            with exchange_range(kind, sent):
                return original(group, *args, **kwargs)

        return call

    end_coalescing = dist.ProcessGroup._end_coalescing

    @functools.wraps(end_coalescing)
    def launch(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        """NCCL launches the kernel of the calls before it, which were counted: no bytes."""
        kind = last_kinds.get(group.group_name)
        with record_function(f"{PREFIX}{kind}/launch") if kind else contextlib.nullcontext():
            return end_coalescing(group, *args, **kwargs)

    originals = {name: m for name, m in vars(dist.ProcessGroup).items() if name in _METHODS}
    originals["_end_coalescing"] = vars(dist.ProcessGroup)["_end_coalescing"]
    try:
        for name in originals:
            wrapped = named(getattr(dist.ProcessGroup, name), name) if name in _METHODS else launch
            setattr(dist.ProcessGroup, name, wrapped)
        yield unrecorded
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def _sent_by_this_rank(
    operation: str, group: dist.ProcessGroup, inputs: Any, args: Sequence[Any]
) -> int:
    """Bytes to others in a call with these arguments, of which parts may be uneven."""
    num_bytes = _num_bytes(inputs)
    if operation == "alltoall" and isinstance(inputs, (list, tuple)):
        return num_bytes - _num_bytes(inputs[group.rank()])
    if operation == "alltoall" and len(args) > 3 and args[3] and num_bytes:
        own_rows = int(args[3][group.rank()])  # args[3]: rows for each rank; empty: even
        return num_bytes - own_rows * (num_bytes // inputs.shape[0])
    if operation == "gather" and len(args) > 2 and args[2].rootRank == group.rank():
        return 0
    return sent_bytes(operation, num_bytes, group.size())


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_num_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _is_floating(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, (list, tuple)) and bool(value) and _is_floating(value[0])


# ------------------------------------------------------------------ a step of a trace

STEP = "ds_usp.step"  # the range of a traced step
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


@dataclass(frozen=True)
class StepTrace:
    """A step: its GPU events by start, and its calls.

    Args:
        beside: events of other steps, cut to the time from this step's first event to its last.
        has_step: the range of the step is in the trace.
        steps: names of the steps that torch's profiler marked.
    """

    gpu: tuple[GpuEvent, ...] = ()
    calls: tuple[Call, ...] = ()
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
            :func:`role_of_description`.
        step: the name of the CPU range that is the step; the last one if there are several, all
            events if there is none.
    """
    return _Classifier(tuple(events), roles or {}, step).result()


class _Classifier:
    def __init__(self, events: Sequence[TraceEvent], roles: Mapping[str, str], step: str) -> None:
        self._roles = roles
        on_cpu = [e for e in events if e.category == CPU]
        steps = [(e.start, e.stop) for e in on_cpu if e.name == step]
        self._step = steps[-1] if steps else None
        names = (e.name for e in on_cpu if e.name.startswith("ProfilerStep#"))
        self._step_names = tuple(dict.fromkeys(names))
        self._on_gpu = [e for e in events if e.category in (KERNEL, COPY, SET)]
        self._cpu_by_id = {e.external: e for e in on_cpu if e.external}
        self._runtime = sorted(
            (e for e in events if e.category == RUNTIME and e.correlation),
            key=attrgetter("correlation"),
        )
        self._ranges = _Ranges(e for e in on_cpu if e.name.startswith(PREFIX))
        self._gpu_ranges = _Ranges(
            (e for e in events if e.category == GPU_RANGE and e.name.startswith(PREFIX)),
            key=attrgetter("stream"),
        )
        self._metadata = [e for e in events if e.name == PARAM_COMMS and e.args]
        self._operators = _Ranges(e for e in on_cpu if e.name.startswith(_OPERATORS))

    def result(self) -> StepTrace:
        gpu, beside, calls = [], [], []
        for event in sorted(self._on_gpu, key=attrgetter("start")):
            call = self._launch(event)
            exact = call is not None and call.correlation == event.correlation
            launched = None if call is None else call.stop if exact else call.start
            kind = self._kind(event, call)
            classified = GpuEvent(event.name, kind, event.start, event.stop, launched)
            if not self._in_step((call or event).start):
                beside.append(classified)
                continue
            gpu.append(classified)
            if kind in (FROM_HOST, TO_HOST):
                calls.append(Call(kind, event.args.get("bytes")))
        for inner in self._ranges.outermost():
            kind, sent = _parse_range(inner.name)
            if sent is not None and self._in_step(inner.start):
                calls.append(Call(kind, sent))
        calls += [self._call_of_metadata(e.args) for e in self._metadata if self._is_unnamed(e)]
        calls += self._calls_of_operators()
        begin = min((event.start for event in gpu), default=0)
        end = max((event.stop for event in gpu), default=0)
        cut = (
            event._replace(start=max(event.start, begin), stop=min(event.stop, end))
            for event in beside
            if event.start < end and event.stop > begin
        )
        has_step = self._step is not None
        return StepTrace(tuple(gpu), tuple(calls), tuple(cut), has_step, self._step_names)

    def _launch(self, event: TraceEvent) -> TraceEvent | None:
        """The CPU's call that launched a GPU event, or the next one; None if unknown."""
        index = bisect_left(self._runtime, event.correlation, key=attrgetter("correlation"))
        if not event.correlation or index == len(self._runtime):
            return None
        call = self._runtime[index]
        if call.correlation != event.correlation and call.start > event.start:
            return None  # another thread's, or none for long
        return call

    def _in_step(self, time: int) -> bool:
        return self._step is None or self._step[0] <= time <= self._step[1]

    def _is_unnamed(self, event: TraceEvent) -> bool:
        return self._in_step(event.start) and not self._ranges.around(event.thread, event.start)

    def _kind(self, event: TraceEvent, call: TraceEvent | None) -> str:
        """The kind of a GPU event; ``call``: what launched it, or the next call.

        By what is certain first: copies with the host; kernels that no library names as
        communication; else the range of an exchange on the event's stream, on the thread that
        launched it, or around its operator; then NCCL's metadata; then the kernel's name.
        """
        if event.category == COPY:
            if "HtoD" in event.name:
                return FROM_HOST
            if "DtoH" in event.name:
                return TO_HOST
        elif event.category != KERNEL or _kind_of_kernel(event.name) is None:
            return COMPUTE
        cpu = self._cpu_by_id.get(event.external)
        around = self._gpu_ranges.around(event.stream, event.start)
        if around is None and call is not None:  # on its own thread, where the trace knows that
            # The next call may be another thread's.
            threads = [call.thread] if call.correlation == event.correlation else []
            threads += [cpu.thread] if cpu else []
            own = (self._ranges.around(thread, call.start) for thread in threads)
            around = next(filter(None, own), None) or self._ranges.on_any_thread(call.start)
        if around is None and cpu is not None:
            around = self._ranges.around(cpu.thread, cpu.start)
        if around is not None:
            return _parse_range(around.name)[0]
        if event.category == COPY:  # in no exchange: another program's between GPUs, or local
            return OTHER if "PtoP" in event.name else COMPUTE
        for args in (event.args, cpu.args if cpu else {}):
            if args.get("Collective name"):
                return self._call_of_metadata(args).kind
        return _kind_of_kernel(event.name) or COMPUTE

    def _calls_of_operators(self) -> list[Call]:
        """Calls of C++ that have neither a range nor NCCL's metadata, such as those of gloo from
        DistributedDataParallel's reducer: their bytes are unknown."""
        around = (self._operators.around(event.thread, event.start) for event in self._metadata)
        described = {id(operator) for operator in around}
        return [
            Call(kind_of_call("", operation_of(event.name.removeprefix(_OPERATORS)), None), None)
            for event in self._operators.outermost()
            if id(event) not in described and self._is_unnamed(event)
        ]

    def _call_of_metadata(self, args: Mapping[str, Any]) -> Call:
        name = str(args.get("Process Group Name", ""))
        description = str(args.get("Process Group Description", ""))
        role = self._roles.get(name) or role_of_description(description)
        operation = operation_of(str(args["Collective name"])) if "Collective name" in args else ""
        item = _ITEM_BYTES.get(str(args.get("dtype", "")))
        if item is None:
            return Call(kind_of_call(role, operation, None), None)
        size = item * int(args.get("In msg nelems", 0))
        ranks, floating = int(args.get("Group size", 2)), str(args["dtype"]).startswith(_FLOATING)
        whole = gathered_bytes(operation, size, ranks, floating)
        kind = kind_of_call(role, operation, whole)
        # Of an uneven all-to-all the metadata does not tell the rank's own part; kineto cuts long
        # lists.
        parts = str(args.get("In split size") or "")
        if operation == "alltoall" and ("..." in parts or len(set(re.findall(r"\d+", parts))) > 1):
            return Call(kind, None)
        return Call(kind, sent_bytes(operation, size, ranks))


def _parse_range(name: str) -> tuple[str, int | None]:
    """Kind and sent bytes in the name of a range; None for one that only launches."""
    kind, _, sent = name.removeprefix(PREFIX).rpartition("/")
    kind = _OF_LEDGER.get(kind, kind if kind in KINDS else OTHER)
    return kind, int(sent) if sent.isdecimal() else None


class _Ranges:
    """The ranges of exchanges of each thread or stream, the outermost ones: a range inside another
    one is the same exchange, named by a lower layer."""

    def __init__(
        self, events: Iterable[TraceEvent], key: Callable[[TraceEvent], int] = attrgetter("thread")
    ) -> None:
        self._by_thread: dict[int, list[TraceEvent]] = defaultdict(list)
        for event in sorted(events, key=lambda event: (event.start, -event.stop)):
            known = self._by_thread[key(event)]
            if not known or event.start >= known[-1].stop:
                known.append(event)

    def outermost(self) -> list[TraceEvent]:
        return [event for events in self._by_thread.values() for event in events]

    def around(self, thread: int, time: int) -> TraceEvent | None:
        events = self._by_thread.get(thread, [])
        index = bisect_right(events, time, key=attrgetter("start")) - 1
        return events[index] if index >= 0 and time <= events[index].stop else None

    def on_any_thread(self, time: int) -> TraceEvent | None:
        ranges = (self.around(thread, time) for thread in self._by_thread)
        return next((event for event in ranges if event), None)
