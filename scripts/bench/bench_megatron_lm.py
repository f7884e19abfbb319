"""Training steps in megatron-core's loop: ds_usp beside TransformerEngine's context parallelism.

    torchrun --nproc-per-node 2 scripts/bench/bench_megatron_lm.py --out megatron_lm.csv \\
        --workloads gpt-1.3b:16K:2 gpt-1.3b:32K:1 gpt-1.3b:64K:1 llama3-8b/8:32K:1
    torchrun --nproc-per-node 2 scripts/bench/bench_megatron_lm.py --device cpu \\
        --workloads tiny:64:2                       # shows that it runs

bf16, DistributedDataParallel, the distributed optimizer, gradient reduction and parameter gathering
overlapped; context parallelism over all ranks. In one run, on the same model and weights (the
learning rate is 0): in TransformerEngine's layers its own p2p and a2a and every mesh of ds_usp; in
the local layers every mesh of ds_usp; "stock": the layers as they are, every sequence on one rank,
where the sequences divide among the ranks (the local layers on CPUs only). --backend and --kernels
choose the attention kernels of both (fused: cuDNN; flash: FlashAttention, where TransformerEngine
finds it); ds_usp runs on each of its own.

A row is the median of --iterations steps after --warm-up, over --rounds, in which the baselines of
one model take turns.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from bench_harness import Session, Table, common_flags
from megatron_train import (
    LAYERS,
    Training,
    Workload,
    create_groups,
    destroy_groups,
    without_gpu,
)

from ds_usp.geometry.degrees import divisors

TIMES = ("tokens_per_s_per_gpu", "ms", "loss", "grad_norm", "peak_gib")


def baseline_names(layers: str, context: int, kernels: Sequence[str]) -> list[str]:
    """What one model's layers can attend by, at a context-parallel size."""
    if context == 1:
        return ["stock"]
    degrees = list(reversed(divisors(context)))
    meshes = [f"ds_usp {u}x{context // u} {kernel}" for kernel in kernels for u in degrees]
    return [*(["TE p2p", "TE a2a"] if layers == "te" else []), *meshes]


@contextmanager
def training(
    session: Session, args: argparse.Namespace, workload: Workload, layers: str, context: int
) -> Iterator[Training | str]:
    """A model, or why a rank cannot build it; its memory is freed at the end."""
    if context == 1 and workload.sequences % session.world:
        yield f"{workload.sequences} sequences do not divide among {session.world} ranks"
        return
    built = session.try_all_ranks(
        lambda: Training(
            session,
            workload,
            layers=layers,
            kernels=args.kernels,
            backend=args.backend,
            bf16=args.precision == "bf16",
        )
    )
    try:
        yield built
    finally:
        if isinstance(built, Training):
            built.release()
        del built
        gc.collect()
        if session.on_gpu:
            torch.cuda.empty_cache()


def prepared(session: Session, model: Training, name: str, steps: int) -> str | None:
    """Warm a baseline up; the reason if a rank cannot run it."""

    def warm_up() -> None:
        model.attend_by(name)
        for _ in range(steps):
            model.step()

    model.release()
    return session.try_all_ranks(warm_up)


def peak_gib(session: Session, model: Training) -> float:
    """Peak GiB since the last reset, with the staging buffers of the meshes, maximum over ranks."""
    if not session.on_gpu:
        return float("nan")
    peak = torch.cuda.max_memory_allocated() + model.reserved_bytes()
    return session.all_reduced([peak], torch.distributed.ReduceOp.MAX)[0] / 2**30


def time_model(
    session: Session, args: argparse.Namespace, table: Table, model: Training, layers: str
) -> None:
    """Time the baselines of one model in turns, and add their rows."""
    workload, times, label = model.workload, {}, LAYERS[layers]
    names = baseline_names(layers, model.config.context_parallel_size, args.kernels)
    rows: dict[str, list[str]] = {}
    for _ in range(args.rounds):
        for name in names:
            failed = prepared(session, model, name, args.warm_up)
            if failed:
                session.print0(f"{workload}  {name}, {label}: left out, {failed}")
                continue
            if session.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            seconds = [session.seconds(model.step) for _ in range(args.iterations)]
            times.setdefault(name, []).extend(seconds)
            rows[name] = [
                f"{model.loss():.4f}",
                f"{float(model.grad_norm):.4f}",
                f"{peak_gib(session, model):.2f}",
            ]
    for name, measured in times.items():
        median = statistics.median(measured)
        rate = workload.sequences * workload.seq_len / median / session.world
        row = [str(workload), f"{name}, {label}", f"{rate:.1f}", f"{median * 1e3:.2f}"]
        table.add([*row, *rows[name]])
        session.print0(
            f"{workload}  {name + ', ' + label:40} {rate:10,.0f} tokens/s per GPU "
            f"{median * 1e3:9.2f} ms  loss {rows[name][0]}  {rows[name][2]} GiB"
        )


def main() -> None:
    """Time every workload; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    if not session.on_gpu:
        without_gpu()
    note = f"{args.precision}, {args.backend} of TransformerEngine"
    table = Table(session, args.out, ("workload", "contender", *TIMES), note)
    for context in (session.world, 1):
        create_groups(context)
        for text, layers in itertools.product(args.workloads, args.layers):
            if session.on_gpu and (layers, context) == ("local", 1):
                continue  # materializes all scores of a sequence
            workload = Workload.parse(text)
            with training(session, args, workload, layers, context) as model:
                if isinstance(model, str):
                    session.print0(f"{workload}  {LAYERS[layers]}, {context}: left out, {model}")
                else:
                    time_model(session, args, table, model, layers)
        destroy_groups()
    session.close()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["gpt-1.3b:16K:2", "gpt-1.3b:32K:1"],
        metavar="MODEL[/LAYERS]:TOKENS[:SEQUENCES]",
        help="models of the planner, or tiny",
    )
    parser.add_argument("--layers", nargs="+", choices=LAYERS, help="default: all, local on CPUs")
    parser.add_argument("--kernels", nargs="+", help="of ds_usp (default: cudnn, auto on CPUs)")
    parser.add_argument("--backend", default="fused", choices=("fused", "flash", "auto"))
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16, fp32 on CPUs")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.layers = args.layers or (list(LAYERS) if on_gpu else ["local"])
    args.precision = args.precision or ("bf16" if on_gpu else "fp32")
    args.kernels = args.kernels or ["cudnn" if on_gpu else "auto"]
    return args


if __name__ == "__main__":
    main()
