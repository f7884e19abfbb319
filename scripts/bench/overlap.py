"""What communication costs: a step's GPU time, by what ran, and what communication stuck out.

    torchrun --nproc-per-node 4 scripts/bench/overlap.py --shapes 32768:32:32:128 --out overlap.csv

A step is recorded with torch's profiler after warm-up. Communication is *exposed* while nothing
computes under it; the GPU is *idle* while nothing runs at all. A number is the median over steps
of the mean over ranks. NCCL's kernels count as communicating while they wait for their peer.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from contenders import Shape, Step, all_contenders

Interval = tuple[int, int]
COMMUNICATION = re.compile(r"nccl|Memcpy PtoP|Memcpy DtoD|symm_|push_|pull_", re.IGNORECASE)
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


def figures(events: Sequence[tuple[str, int, int]]) -> dict[str, float]:
    """Milliseconds of one step from (name, start, stop) of its GPU work, in nanoseconds."""
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


def recorded(step: Step) -> list[tuple[str, int, int]]:
    """What ran on this GPU in one step: (name, start, stop) in nanoseconds."""
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    results = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]


def kernel_table(events: Sequence[tuple[str, int, int]], rows: int) -> str:
    """The longest-running names of a step."""
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
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = []
    for text in args.shapes:
        shape = Shape.parse(text)
        for contender in all_contenders(args.kernels, args.peers):
            step = contender.make(shape, args.forward)
            for _ in range(3):
                step()
            steps = [recorded(step) for _ in range(args.steps)]
            mine = [figures(events) for events in steps]
            medians = [statistics.median(each[name] for each in mine) for name in FIGURES]
            mean = torch.tensor(medians, device="cuda")
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            found = dict(zip(FIGURES, mean.tolist(), strict=True))
            hidden = 1 - found["exposed"] / max(found["communication"], 1e-9)
            rows.append([str(shape), contender.label, *(f"{found[name]:.3f}" for name in FIGURES)])
            if rank == 0:
                print(
                    f"{shape}  {contender.label:28}"
                    + "".join(f" {name} {found[name]:.2f}" for name in FIGURES)
                    + f" ms, {hidden:.0%} of communication hidden",
                    flush=True,
                )
                if args.detail:
                    print(kernel_table(steps[-1], args.detail), flush=True)
    if rank == 0 and args.out:
        with args.out.open("w", newline="") as file:
            file.write(f"# torchrun --nproc-per-node {world} {' '.join(sys.argv)}\n")
            file.write(
                f"# {datetime.date.today()}, {world} x {torch.cuda.get_device_name()}, torch "
                f"{torch.__version__}; bf16, causal, batch 1; milliseconds\n"
            )
            csv.writer(file).writerows([["shape", "contender", *FIGURES], *rows])
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shapes", nargs="+", default=["32768:32:32:128"], help="seq_len:heads:kv_heads:head_dim"
    )
    parser.add_argument("--kernels", nargs="+", default=["flash4", "cudnn"])
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--forward", action="store_true", help="forward only")
    parser.add_argument("--detail", type=int, default=0, help="print so many kernels of a step")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
