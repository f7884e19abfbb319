"""A trace of training steps: GPU time by kind of kernel, idle GPU time, and the CPU's own time.

Two recordings of the same steps: one of the GPU alone, which disturbs least, for the times of
kernels; one with CPU events too, for the file that a trace viewer shows and for the CPU's time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from bench_harness import Session, Step
from torch.profiler import ProfilerActivity, profile

from ds_usp.profiling.exposed import total_length

Event = tuple[str, int, int]  # name, start, stop in nanoseconds
COMMUNICATION = re.compile(r"nccl|gloo|Memcpy PtoP|Memcpy DtoD|symm_|push_|pull_", re.IGNORECASE)
ATTENTION = re.compile(r"flash|cudnn|fmha|sdpa|attention", re.IGNORECASE)
GEMM = re.compile(r"gemm|cutlass|cublas|nvjet|xmma|addmm|splitkreduce|aten::mm", re.IGNORECASE)
OPTIMIZER = re.compile(r"adam|multi_tensor|foreach", re.IGNORECASE)
COPY = re.compile(r"memcpy|memset|copy_kernel|CatArray", re.IGNORECASE)
# The first that matches.
KINDS: Mapping[str, re.Pattern[str]] = {
    "communication": COMMUNICATION,
    "attention": ATTENTION,
    "gemm": GEMM,
    "optimizer": OPTIMIZER,
    "copy": COPY,
    "other": re.compile(""),
}
COLUMNS = ("span", *KINDS, "exposed", "idle", "cpu", "cpu_waits")
# Calls in which the CPU waits for the GPU.
WAITS = re.compile(r"(Device|Stream|Event)Synchronize|cudaMemcpy$", re.IGNORECASE)


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    return next(kind for kind, pattern in KINDS.items() if pattern.search(name))


def kinds_ms(events: Sequence[Event]) -> dict[str, float]:
    """Milliseconds of each kind, from events (name, start, stop) in nanoseconds.

    Those of a kind are the time in which at least one kernel of it runs; ``exposed``: communication
    under no other kernel; ``idle``: nothing runs."""
    intervals: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
    for name, start, stop in events:
        intervals[kind_of(name)].append((start, stop))
    everything = [pair for pairs in intervals.values() for pair in pairs]
    computing = [pair for kind in KINDS if kind != "communication" for pair in intervals[kind]]
    span = max(stop for _, stop in everything) - min(start for start, _ in everything)
    busy = total_length(everything)
    times = {kind: total_length(pairs) for kind, pairs in intervals.items()}
    times |= {"span": span, "exposed": busy - total_length(computing), "idle": span - busy}
    return {name: nanoseconds / 1e6 for name, nanoseconds in times.items()}


def record_events(session: Session, step: Step, steps: int) -> list[Event]:
    """Profiler events of ``steps`` steps on this device: (name, start, stop) in nanoseconds."""
    kind = "CUDA" if session.on_gpu else "CPU"
    dist.barrier()
    session.synchronize()
    with profile(activities=[getattr(ProfilerActivity, kind)]) as profiler:
        for _ in range(steps):
            step()
        session.synchronize()
    results = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results
        if event.device_type() == getattr(torch.autograd.DeviceType, kind)
        and event.duration_ns() > 0
    ]


def traced(session: Session, step: Step, steps: int, path: Path | None) -> dict[str, float]:
    """Milliseconds of one step by :data:`COLUMNS`, mean over steps and ranks. Collective.

    ``cpu`` is the time until the CPU has issued a step, without the calls in which it waits for the
    GPU, which are ``cpu_waits``.

    Args:
        path: the file of rank 0 for a trace viewer (chrome://tracing, Perfetto).
    """
    times = kinds_ms(record_events(session, step, steps))
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if session.on_gpu else [])]
    session.synchronize()
    with profile(activities=kinds) as profiler:
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        issued_ms = (time.perf_counter() - begin) * 1e3
        session.synchronize()
    results = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    waits = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results
        if event.device_type() == torch.autograd.DeviceType.CPU and WAITS.search(event.name())
    ]
    times["cpu_waits"] = total_length(waits) / 1e6
    times["cpu"] = issued_ms - times["cpu_waits"]
    if path and session.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
    sums = session.all_reduced([times[name] for name in COLUMNS])
    per_step = steps * session.world
    return {name: value / per_step for name, value in zip(COLUMNS, sums, strict=True)}
