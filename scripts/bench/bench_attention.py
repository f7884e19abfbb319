"""Attention on several GPUs: every ulysses x ring split, beside the single-GPU kernel and peers.

    torchrun --nproc-per-node 4 scripts/bench/bench_attention.py --out results.csv

Contenders of one shape run interleaved, round after round, so that a drifting clock meets all of
them; a number is the median over rounds of the slowest rank. FLOPs count the causal half,
forward + backward 3.5 x the forward.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from contenders import Contender, Shape, Step, all_contenders


def measured(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of each step, the slowest rank of each round counting."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            torch.cuda.synchronize()
            events[0].record()
            step()
            events[1].record()
            torch.cuda.synchronize()
            slowest = torch.tensor(events[0].elapsed_time(events[1]) / 1e3, device="cuda")
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds[name].append(slowest.item())
    return {name: statistics.median(each) for name, each in seconds.items()}


def extra_bytes(step: Step) -> int:
    """Peak allocation of one step above what stands before it, on the worst rank."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.tensor(torch.cuda.max_memory_allocated() - before, device="cuda")
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)


def prepared(contender: Contender, shape: Shape, forward_only: bool) -> tuple[Step, int] | str:
    """The warmed-up step with its extra memory, or why there is none; the same on all ranks."""
    reason = ""
    try:
        step = contender.make(shape, forward_only)
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    except (ImportError, RuntimeError, ValueError, AssertionError, TypeError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    if any(reasons):
        return next(filter(None, reasons))
    return step, extra_bytes(step)


def main() -> None:
    """Measure what the flags ask for; rank 0 prints and writes."""
    args = parse()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    contenders = all_contenders(args.kernels, args.peers)
    rows = []
    for text in args.shapes:
        shape = Shape.parse(text)
        ready, begin = {}, time.monotonic()
        for contender in contenders:
            result = prepared(contender, shape, args.forward)
            if isinstance(result, str):
                if rank == 0:
                    print(f"{shape}  {contender.label}: left out, {result}", flush=True)
                continue
            ready[contender.label] = result
        medians = measured({name: step for name, (step, _) in ready.items()}, args.rounds)
        flop = shape.tflop * (1 / 3.5 if args.forward else 1.0)
        for name, seconds in medians.items():
            rate = flop / world / seconds
            gib = ready[name][1] / 2**30
            limit = medians.get(f"one GPU, {name.split(', ')[1]}")
            share = limit / seconds if limit else float("nan")
            rows.append(
                [
                    str(shape),
                    name,
                    f"{seconds * 1e3:.3f}",
                    f"{rate:.1f}",
                    f"{share:.3f}",
                    f"{gib:.2f}",
                ]
            )
            if rank == 0:
                print(
                    f"{shape}  {name:28} {seconds * 1e3:9.2f} ms {rate:6.1f} TFLOP/s per GPU "
                    f"{share:7.1%} of the kernel {gib:6.2f} GiB",
                    flush=True,
                )
        if rank == 0:
            print(f"{shape}  took {time.monotonic() - begin:.0f} s", flush=True)
        del ready
    if rank == 0 and args.out:
        write(args.out, rows, world)
    dist.destroy_process_group()


def write(path: Path, rows: list[list[str]], world: int) -> None:
    """The table, with what is needed to read it."""
    with path.open("w", newline="") as file:
        file.write(f"# torchrun --nproc-per-node {world} {' '.join(sys.argv)}\n")
        file.write(
            f"# {datetime.date.today()}, {world} x {torch.cuda.get_device_name()}, torch "
            f"{torch.__version__}, cuDNN {torch.backends.cudnn.version()}, NCCL "
            f"{'.'.join(map(str, torch.cuda.nccl.version()))}; bf16, causal, batch 1\n"
        )
        table = csv.writer(file)
        table.writerow(
            ["shape", "contender", "ms", "tflop_per_s_per_gpu", "share_of_kernel", "extra_gib"]
        )
        table.writerows(rows)


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["32768:32:32:128", "131072:32:32:128"],
        help="seq_len:heads:kv_heads:head_dim",
    )
    parser.add_argument("--kernels", nargs="+", default=["flash4", "cudnn", "flash2"])
    parser.add_argument("--peers", nargs="*", default=["deepspeed", "torch", "yunchang", "te"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--forward", action="store_true", help="forward only")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
