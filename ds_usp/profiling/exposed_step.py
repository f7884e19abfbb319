"""Time of one rank's step by kind: hidden under kernels, exposed, and idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from ds_usp.profiling.exposed_classify import StepTrace
from ds_usp.profiling.exposed_kinds import BETWEEN_RANKS, COMPUTE, KINDS
from ds_usp.profiling.intervals import (
    Interval,
    gaps,
    merge_intervals,
    subtract_intervals,
    total_length,
)

# A GPU starts what it is given within this time; what it waits longer for is not the launch.
_LAUNCH_NS = 10_000


@dataclass(frozen=True)
class KindTimes:
    """One kind in a step.

    Args:
        calls: exchanges, collectives or copies.
        sent_bytes: by this rank to others, or copied; None: not in the trace.
        busy_ns: while at least one of the kind ran on the GPU.
        exposed_ns: of these, under no kernel that computes.
    """

    calls: int
    sent_bytes: int | None
    busy_ns: int = 0
    exposed_ns: int = 0

    @property
    def hidden_ns(self) -> int:
        """Under a kernel that computes."""
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


def step_times(trace: StepTrace) -> StepTimes:
    """The times of a classified step."""
    lanes, compute = lanes_of(trace), compute_of(trace)
    lanes.pop(COMPUTE, None)
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
    pauses = {name: total_length(intervals) for name, intervals in idle(trace).items()}
    return StepTimes(
        kinds,
        step_ns=max(e.stop for e in trace.gpu) - min(e.start for e in trace.gpu),
        compute_ns=total_length(compute),
        communication_ns=total_length(communication),
        exposed_ns=total_length(subtract_intervals(communication, compute)),
        host_ns=pauses["host"],
        ranks_ns=pauses["ranks"],
        other_ns=pauses["other"],
    )


def lanes_of(trace: StepTrace) -> dict[str, list[Interval]]:
    """The union of the GPU events of each kind, and of the kernels that compute."""
    lanes: dict[str, list[Interval]] = defaultdict(list)
    for event in trace.gpu:
        lanes[event.kind].append((event.start, event.stop))
    return {kind: merge_intervals(intervals) for kind, intervals in lanes.items()}


def compute_of(trace: StepTrace) -> list[Interval]:
    """While a kernel computed: of this step, or of another one that runs within it."""
    events = (event for event in (*trace.gpu, *trace.beside) if event.kind == COMPUTE)
    return merge_intervals([(event.start, event.stop) for event in events])


def idle(trace: StepTrace) -> dict[str, list[Interval]]:
    """While nothing ran: ``host``, ``ranks`` and ``other``, see :class:`StepTimes`.

    A pause belongs to the CPU until the call that launched what ends the pause has returned.
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
            launched = stop
        pauses["host"].append((start, launched))
        # NCCL's kernels wait for other ranks while they run, copies before they start.
        is_copy = after.kind in BETWEEN_RANKS and after.name.startswith("Memcpy")
        pauses["ranks" if is_copy else "other"].append((launched, stop))
    return pauses
