"""``ds-usp report-communication``: what of a traced program's communication no kernel hides.

Reads traces of ``torch.profiler``, of any program, without GPUs or ranks. HolisticTraceAnalysis
does so for kernels of NCCL, but leaves out what copy engines copy: the profiler records no call
that launched it. Here it is known by the range of ds_usp's exchange, which the profiler draws on
the stream of the copies.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_usp.comm.channel import PREFIX
from ds_usp.errors import ConfigError

Event = Mapping[str, Any]  # of Chrome's trace format
Interval = tuple[float, float]  # microseconds

_COMPUTE = "kernels"
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_EXCHANGE = re.compile(re.escape(PREFIX) + r"(\w+)/(\d+)")  # the ledger's kind, bytes sent


def main(argv: Sequence[str], print_line: Callable[..., None]) -> int:
    """Print a table for each trace; 0. ``ConfigError`` for a file that is no trace."""
    parser = argparse.ArgumentParser(prog="ds-usp report-communication", description=__doc__)
    text = "the .json or .json.gz that export_chrome_trace wrote on each rank"
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help=text)
    for path in parser.parse_args(argv).traces:
        for line in report(path):
            print_line(line)
    return 0


def report(path: Path) -> Iterator[str]:
    """The lines of one rank's table, in means over the steps that the profiler's schedule has
    marked: calls and bytes sent by exchanges of ds_usp, calls of other communication, and how long
    it ran on the GPU, beside kernels that compute (hidden) or alone (exposed).

    Raises:
        ConfigError: the file is missing, cut, or no trace.
    """
    events = _read(path)
    launches = _Launches(events)
    # By kind the bytes of each call: those of kinds without a range of ds_usp are counted as 0.
    sent, exchanges = launches.sent, frozenset(launches.sent)
    busy: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _GPU:
            kind = launches.kind_of(event)
            busy[kind].append((event["ts"], event["ts"] + event["dur"]))
            if kind not in exchanges and kind != _COMPUTE:
                sent[kind].append(0)
    steps = len({x["name"] for x in events if x["name"].startswith("ProfilerStep#")}) or 1
    compute = busy.pop(_COMPUTE, [])
    communication = [interval for intervals in busy.values() for interval in intervals]
    all_intervals = [*communication, *compute] or [(0.0, 0.0)]
    traced = max(stop for _, stop in all_intervals) - min(start for start, _ in all_intervals)
    yield f"{path}: milliseconds of a step, mean of {steps}"
    yield _row("", "calls", "MiB", "busy", "hidden", "exposed", "of step")

    def row(name: str, calls: str, mib: str, intervals: list[Interval]) -> str:
        exposed = _length([*intervals, *compute]) - _length(compute)
        parts = _length(intervals), _length(intervals) - exposed, exposed
        times = [f"{part / steps / 1e3:,.2f}" for part in parts]
        return _row(name, calls, mib, *times, f"{exposed / traced:.1%}" if traced else "")

    for kind, sizes in sorted(sent.items()):
        mib = f"{sum(sizes) / steps / 2**20:,.2f}" if sum(sizes) else ""
        yield row(kind, f"{len(sizes) / steps:,.1f}", mib, busy[kind])
    if not traced:
        yield "no GPU was traced: only calls and bytes are counted"
        return
    yield row("all communication", "", "", communication)
    idle = traced - _length(all_intervals)
    for name, length in ((_COMPUTE, _length(compute)), ("idle", idle), ("step", traced)):
        time = f"{length / steps / 1e3:,.2f}"
        yield _row(name, "", "", time, "", "", f"{length / traced:.1%}")


def _read(path: Path) -> list[Event]:
    """The complete events of a trace, one at least; ConfigError if it is none, or not whole."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as text:
            events = [x for x in json.load(text)["traceEvents"] if "ph" in x and x["ph"] == "X"]
        _ = events[0]
    except (OSError, EOFError, ValueError, zlib.error, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} is no whole file of torch.profiler's export_chrome_trace: {error!r}"
        ) from error
    return events


class _Launches:
    """The calls that launched GPU work, and the ranges of ds_usp's exchanges around them."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.sent: dict[str, list[int]] = defaultdict(list)  # by kind the bytes of each exchange
        self._calls: dict[int, Event] = {}
        self._ranges: dict[object, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            if match := _EXCHANGE.match(event["name"]):  # of a CPU thread, or of a GPU stream
                times = event["ts"], event["ts"] + event["dur"]
                self._ranges[event["pid"], event["tid"]].append((*times, match[1]))
                if event["cat"] == "user_annotation":
                    self.sent[match[1]].append(int(match[2]))
            elif event.get("cat") in ("cuda_runtime", "cuda_driver"):
                self._calls[event.get("args", {}).get("correlation", 0)] = event
        for ranges in self._ranges.values():
            ranges.sort()

    def kind_of(self, event: Event) -> str:
        """The ledger's kind of GPU work; else ``nccl ...``, ``Memcpy ...`` or ``kernels``."""
        name, args = event["name"], event.get("args", {})
        is_nccl = event["cat"] == "kernel" and "nccl" in name.lower()
        if not is_nccl and event["cat"] != "gpu_memcpy":
            return _COMPUTE
        kind = self._range_at(event) or self._range_at(self._calls.get(args.get("correlation")))
        if kind:
            return kind
        if is_nccl:
            return f"nccl {args.get('Collective name', 'point to point')}"
        return _COMPUTE if "DtoD" in name else name.partition(" (")[0]  # such as Memcpy HtoD

    def _range_at(self, event: Event | None) -> str:
        """The kind of the range in which an event begins, on its thread or stream."""
        if event is None:
            return ""
        ranges = self._ranges.get((event["pid"], event["tid"]), [])
        index = bisect_right(ranges, event["ts"], key=lambda x: x[0]) - 1
        return ranges[index][2] if index >= 0 and event["ts"] <= ranges[index][1] else ""


def _length(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total, end = total + max(0.0, stop - max(start, end)), max(end, stop)
    return total


def _row(name: str, *cells: str) -> str:
    return f"  {name:20}" + "".join(f"{cell:>10}" for cell in cells)
