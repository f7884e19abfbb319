"""What communication costs: a step's GPU time, by what ran, and what communication stuck out.

    torchrun --nproc-per-node 4 scripts/bench/overlap.py --shapes 32768:32:32:128 --out overlap.csv

Steps in a row are recorded with torch's profiler after warm-up (--settle seconds of it), so that
the host runs ahead of the GPU as it does in training. Communication is *exposed* while nothing
computes under it; the GPU is *idle* while nothing runs at all. A number is that of a mean step, on
a mean rank, and with --each-rank of every rank: the slowest decides, and others wait for it. NCCL's
kernels count as communicating while they wait for their peer.
On CPUs (--device cpu) the figures mean little: they show that the script runs.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from baselines import PEERS, Shape, all_contenders, parsed, shape_flags
from bench_harness import Session, Step, Table, flags, settle_flag, settling
from torch.profiler import ProfilerActivity, profile

Interval = tuple[int, int]
Event = tuple[str, int, int]
COMMUNICATION = re.compile(r"nccl|gloo|Memcpy PtoP|Memcpy DtoD|symm_|push_|pull_", re.IGNORECASE)
ATTENTION = re.compile(r"flash|cudnn|fmha|sdpa|attention", re.IGNORECASE)
FIGURES = ("span", "attention", "other_compute", "communication", "exposed", "idle")


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments without overlaps."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def length(intervals: Iterable[Interval]) -> int:
    """Moments in all, each once."""
    return sum(stop - start for start, stop in joined(intervals))


def figures(events: Sequence[Event]) -> dict[str, float]:
    """Milliseconds from (name, start, stop) of its GPU work, in nanoseconds."""
    communication = [(a, b) for name, a, b in events if COMMUNICATION.search(name)]
    compute = [(name, a, b) for name, a, b in events if not COMMUNICATION.search(name)]
    attention = [(a, b) for name, a, b in compute if ATTENTION.search(name)]
    everything = [(a, b) for _, a, b in events]
    working = [(a, b) for _, a, b in compute]
    span = max(b for _, b in everything) - min(a for a, _ in everything)
    found = {
        "span": span,
        "attention": length(attention),
        "other_compute": length(working) - length(attention),
        "communication": length(communication),
        "exposed": length(everything) - length(working),
        "idle": span - length(everything),
    }
    return {name: value / 1e6 for name, value in found.items()}


def recorded(session: Session, step: Step, steps: int) -> list[Event]:
    """What ran on this device in some steps: (name, start, stop) in nanoseconds."""
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


def kernel_table(events: Sequence[Event], rows: int) -> str:
    """The longest-running names of all steps."""
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, start, stop in events:
        short = re.sub(r"<.*|\(.*", "", name)[-90:] if "at::" not in name else name[:150]
        total[short] += stop - start
        calls[short] += 1
    return "\n".join(
        f"    {nanoseconds / 1e6:8.3f} ms {calls[name]:4d} x  {name}"
        for name, nanoseconds in total.most_common(rows)
    )


def main() -> None:
    """Record what the flags ask for; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    columns = ("shape", "contender", *FIGURES)
    table = Table(session, args.out, columns, "bf16, causal, batch 1; milliseconds")
    contenders = all_contenders(args.kernels, args.peers)
    for shape in map(Shape.parse, args.shapes):
        for contender in contenders:
            step = contender.prepared(session, shape, args.forward)
            if step is None:
                continue
            session.settle(step, settling(args))
            events = recorded(session, step, args.steps)
            ranks = figures_of_ranks(session, events, args.steps)
            named = [(contender.label, mean(ranks))]
            if args.each_rank:
                named += [(f"{contender.label}, rank {at}", each) for at, each in enumerate(ranks)]
            for label, found in named:
                hidden = 1 - found["exposed"] / max(found["communication"], 1e-9)
                table.add([str(shape), label, *(f"{found[name]:.3f}" for name in FIGURES)])
                session.say(
                    f"{shape}  {label:28}"
                    + "".join(f" {name} {found[name]:.2f}" for name in FIGURES)
                    + f" ms, {hidden:.0%} of communication hidden"
                )
            if args.detail:
                session.say(kernel_table(events, args.detail))
    session.close()


def figures_of_ranks(
    session: Session, events: Sequence[Event], steps: int
) -> list[dict[str, float]]:
    """Of one step, of every rank."""
    mine = figures(events)
    rows = [[0.0] * len(FIGURES) for _ in range(session.world)]
    rows[session.rank] = [mine[name] / steps for name in FIGURES]
    every = session.reduced([value for row in rows for value in row])
    count = len(FIGURES)
    cut = (every[at : at + count] for at in range(0, len(every), count))
    return [dict(zip(FIGURES, row, strict=True)) for row in cut]


def mean(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {name: statistics.mean(each[name] for each in ranks) for name in FIGURES}


def parse() -> argparse.Namespace:
    """The flags."""
    parser = flags(__doc__)
    shape_flags(parser, "32768:32:32:128")
    parser.add_argument("--peers", nargs="*", default=[], choices=PEERS)
    parser.add_argument("--steps", type=int, default=5)
    settle_flag(parser)
    parser.add_argument("--forward", action="store_true", help="forward only")
    parser.add_argument("--each-rank", action="store_true", help="their rows after the mean's")
    parser.add_argument("--detail", type=int, default=0, help="print so many kernels")
    return parsed(parser)


if __name__ == "__main__":
    main()
