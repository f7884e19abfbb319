"""GPU time of a step: attention, other kernels, communication, and exposed communication.

    torchrun --nproc-per-node 4 scripts/bench/overlap.py --shapes 32768:32:32:128 --out overlap.csv

Consecutive steps are recorded with torch's profiler after --settle seconds of warm-up, so that the
CPU runs ahead of the GPU as it does in training. Communication is *exposed* while no compute kernel
runs; the GPU is *idle* while nothing runs. A number is the mean over steps and ranks; --each-rank
adds every rank's mean. NCCL kernels count as communication while they wait for their peer.
On CPUs (--device cpu) the numbers mean little: they show that the script runs.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from baselines import PEERS, all_baselines, parse_baseline_args, shape_flags
from bench_harness import Session, Step, Table, common_flags, warm_up_flag, warm_up_seconds
from shapes import requested_shapes
from torch.profiler import ProfilerActivity, profile

Interval = tuple[int, int]
Event = tuple[str, int, int]
COMMUNICATION = re.compile(r"nccl|gloo|Memcpy PtoP|Memcpy DtoD|symm_|push_|pull_", re.IGNORECASE)
ATTENTION = re.compile(r"flash|cudnn|fmha|sdpa|attention", re.IGNORECASE)
PARTS = ("span", "attention", "other_compute", "communication", "exposed", "idle")


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals: sorted and disjoint."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def total_length(intervals: Iterable[Interval]) -> int:
    """Length of the union of intervals."""
    return sum(stop - start for start, stop in merge_intervals(intervals))


def breakdown_ms(events: Sequence[Event]) -> dict[str, float]:
    """Milliseconds by kind of GPU work, from events (name, start, stop) in nanoseconds."""
    communication = [(a, b) for name, a, b in events if COMMUNICATION.search(name)]
    compute = [(name, a, b) for name, a, b in events if not COMMUNICATION.search(name)]
    attention = [(a, b) for name, a, b in compute if ATTENTION.search(name)]
    all_intervals = [(a, b) for _, a, b in events]
    working = [(a, b) for _, a, b in compute]
    span = max(b for _, b in all_intervals) - min(a for a, _ in all_intervals)
    nanoseconds = {
        "span": span,
        "attention": total_length(attention),
        "other_compute": total_length(working) - total_length(attention),
        "communication": total_length(communication),
        "exposed": total_length(all_intervals) - total_length(working),
        "idle": span - total_length(all_intervals),
    }
    return {name: value / 1e6 for name, value in nanoseconds.items()}


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


def kernel_table(events: Sequence[Event], max_rows: int) -> str:
    """The kernels with the largest total time, as lines of a table."""
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, start, stop in events:
        short = re.sub(r"<.*|\(.*", "", name)[-90:] if "at::" not in name else name[:150]
        total[short] += stop - start
        calls[short] += 1
    return "\n".join(
        f"    {nanoseconds / 1e6:8.3f} ms {calls[name]:4d} x  {name}"
        for name, nanoseconds in total.most_common(max_rows)
    )


def main() -> None:
    """Record the requested baselines; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    columns = ("shape", "contender", *PARTS)
    table = Table(session, args.out, columns, "bf16; milliseconds")
    baselines = all_baselines(args.kernels, args.peers)
    for shape in requested_shapes(args):
        for baseline in baselines:
            step = baseline.prepared(session, shape)
            if step is None:
                continue
            session.warm_up_clock(step, warm_up_seconds(args))
            events = record_events(session, step, args.steps)
            ranks = breakdown_of_ranks(session, events, args.steps)
            labelled = [(baseline.label, mean(ranks))]
            if args.each_rank:
                labelled += [
                    (f"{baseline.label}, rank {rank}", row) for rank, row in enumerate(ranks)
                ]
            for label, parts in labelled:
                hidden = 1 - parts["exposed"] / max(parts["communication"], 1e-9)
                table.add([str(shape), label, *(f"{parts[name]:.3f}" for name in PARTS)])
                session.print0(
                    f"{shape}  {label:28}"
                    + "".join(f" {name} {parts[name]:.2f}" for name in PARTS)
                    + f" ms, {hidden:.0%} of communication hidden"
                )
            if args.detail:
                session.print0(kernel_table(events, args.detail))
    session.close()


def breakdown_of_ranks(
    session: Session, events: Sequence[Event], steps: int
) -> list[dict[str, float]]:
    """For each rank the milliseconds of one mean step, by kind of work; collective."""
    local = breakdown_ms(events)
    rows = [[0.0] * len(PARTS) for _ in range(session.world)]
    rows[session.rank] = [local[name] / steps for name in PARTS]
    values_of_all = session.all_reduced([value for row in rows for value in row])
    count = len(PARTS)
    rank_rows = (
        values_of_all[offset : offset + count] for offset in range(0, len(values_of_all), count)
    )
    return [dict(zip(PARTS, row, strict=True)) for row in rank_rows]


def mean(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over ranks of each part."""
    return {name: statistics.mean(parts[name] for parts in ranks) for name in PARTS}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    shape_flags(parser, "32768:32:32:128")
    parser.add_argument("--peers", nargs="*", default=[], choices=PEERS)
    parser.add_argument("--steps", type=int, default=5)
    warm_up_flag(parser)
    parser.add_argument("--forward", action="store_true", help="forward only")
    parser.add_argument("--each-rank", action="store_true", help="add a row for every rank")
    parser.add_argument("--detail", type=int, default=0, help="print so many kernels")
    return parse_baseline_args(parser)


if __name__ == "__main__":
    main()
