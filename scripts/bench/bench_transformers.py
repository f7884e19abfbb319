"""Training steps of a transformers model: ds_usp beside ALST and Accelerate's context parallelism.

    python scripts/bench/bench_transformers.py --ranks 2 --out transformers.jsonl
    python scripts/bench/bench_transformers.py --ranks 1 --out one_gpu.jsonl   # hooks alone
    python scripts/bench/bench_transformers.py --ranks 2 --device cpu --smoke  # shows that it runs

The model is Llama-3-8B's shape cut to 8 layers, bf16, with random weights, gradient checkpointing
and AdamW. On every mesh ds_usp runs under ZeRO-3 and FSDP2, with its loss in chunks and attention's
results kept in the checkpoints; ALST (DeepSpeed's UlyssesSPAttentionHF with its tiled MLP and tiled
loss) under ZeRO-3; Accelerate's context parallelism (torch's) under FSDP2; on one rank the model of
transformers, as it is and enabled. Cases take turns: every round starts each in processes of its
own, because they replace functions of transformers, and each case trains all workloads. Losses of
the first step are compared with the first case's; a case that is not right for packed documents is
left out there. `tree:PROMPT+NxANSWER` is N answers to a prompt that is there once, `rows:` the same
as packed rows that repeat it, `each:` as rows of which each is a micro batch of a step; answers may
be prompts of further ones (+NxANSWER). Their losses are compared too. Rows are JSON lines, which
--out collects over several runs; the summary is the median over all steps of all rounds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_harness import Session, append_row, common_flags, read_rows, start_ranks
from torch.distributed import ReduceOp
from transformers_cases import Batch, Case, Settings, Training, cases, new_batches

PACKAGES = ("transformers", "accelerate", "deepspeed")
WORKLOADS = ["plain:32768", "packed:65536", "plain:131072"]
LIMIT = {"cuda": 2e-3, "cpu": 1e-5}  # relative difference of losses
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Start every case in turn, or be a rank of one; 1 if a loss differs or nothing ran."""
    args = parse()
    if args.case:
        run_case(args)
        return 0
    known = cases(args.ranks, args.attention)
    names = args.cases or [
        n for n, case in known.items() if (case.ranks or args.ranks) <= args.ranks
    ]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no case {unknown[0]!r}; there are: {', '.join(known)}")
    path = args.out or Path(f"{ROOT.name}_transformers.jsonl")
    for round_ in range(args.rounds):
        for name in names:
            start_case(args, name, known[name], round_, path)
    return summarize(path, args.device)


def start_case(args: argparse.Namespace, name: str, case: Case, round_: int, path: Path) -> None:
    """Run a case in processes of its own; its rows go to ``path``."""
    flags = [f"--case={name}", f"--round={round_}", f"--out={path}"]
    code = start_ranks(flags, case.ranks or args.ranks, args.case_timeout)
    if code:
        print(f"{name}: ended with exit code {code}", flush=True)


def run_case(args: argparse.Namespace) -> None:
    """On every rank: train all workloads by one case, and write their rows."""
    session = Session.start(args.device)
    options: dict[str, Any] = {"recompute": args.recompute, "kernel": args.kernel}
    options |= {"mlp_chunks": args.mlp_chunks, "loss_chunks": args.loss_chunks}
    options |= {"offload_ratio": args.offload_ratio}
    documents = tuple(map(int, args.documents.split(":")))
    settings = Settings(
        session.device, args.model, documents, options, args.attention, args.bf16_weights
    )
    case = (
        cases(session.world, args.attention).get(args.case) or cases(1, args.attention)[args.case]
    )
    training = session.try_all_ranks(lambda: case.build(settings))
    for workload in args.workloads:
        row = {"workload": workload, "case": args.case, "round": args.round}
        row |= {"recompute": args.recompute, "bf16_weights": args.bf16_weights}
        if isinstance(training, str):
            row["refused"] = training
        elif not workload.startswith("plain") and not case.packed:
            row["refused"] = "not right for packed documents"
        elif workload.startswith("tree") and not args.case.startswith("ds_usp"):
            row["refused"] = "has no trees"
        elif workload.startswith("each") and args.case.endswith("ZeRO-3"):
            row["refused"] = "its engine counts micro batches itself"
        else:
            row |= measured(session, args, training, new_batches(settings, workload))
        write(session, args, row)
    session.close()


def measured(
    session: Session, args: argparse.Namespace, training: Training, batches: Sequence[Batch]
) -> dict[str, Any]:
    """Loss, seconds of each step and peak memory of a workload, or why a rank cannot train it."""
    gc.collect()
    if session.on_gpu:
        torch.cuda.empty_cache()

    def warm_up() -> None:
        training.step(batches if args.warm_up else batches[:1], report=True)
        for _ in range(args.warm_up - 1):
            training.step(batches)

    failed = session.try_all_ranks(warm_up)
    if isinstance(failed, str):
        return {"refused": failed}
    if session.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    # Reporting waits for the end of a step, as its clock does.
    seconds = [
        session.seconds(lambda: training.step(batches, report=True)) for _ in range(args.iterations)
    ]
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    row = {
        "loss": training.loss,
        "seconds": [round(s, 5) for s in seconds],
        "tokens_per_s_per_gpu": round(tokens / statistics.median(seconds) / session.world, 2),
    }
    if session.on_gpu:
        peak = torch.cuda.max_memory_allocated() + training.reserved_bytes()
        row["peak_gib"] = round(session.all_reduced([peak], ReduceOp.MAX)[0] / 2**30, 3)
    return row


def write(session: Session, args: argparse.Namespace, row: dict[str, Any]) -> None:
    """Append a row to the file."""
    append_row(session, args.out, row, PACKAGES, f"{args.model}, {args.attention}")
    text = row.get("refused") or f"{row['tokens_per_s_per_gpu']:,} tokens/s, loss {row['loss']:.6f}"
    session.print0(f"{row['workload']:14} {row['case']:36} {text}")


def summarize(path: Path, device: str) -> int:
    """Print medians; 1 if a loss differs from the first case's, or there is none."""
    rows = read_rows(path)
    wrong = 0
    for workload in dict.fromkeys(row["workload"] for row in rows):
        of_workload = [row for row in rows if row["workload"] == workload]
        # A tree has the loss of its rows.
        same = {workload, *(workload.replace("tree:", x) for x in ("rows:", "each:"))}
        losses = [row["loss"] for row in rows if row["workload"] in same and "loss" in row]
        for name in dict.fromkeys(row["case"] for row in of_workload):
            case_rows = [row for row in of_workload if row["case"] == name]
            ran = [row for row in case_rows if "loss" in row]
            if not ran:
                print(f"{workload:14} {name:36} left out: {case_rows[-1]['refused']}")
                continue
            difference = max(abs(row["loss"] - losses[0]) / losses[0] for row in ran)
            ok = difference <= LIMIT[device]
            wrong += not ok
            print(f"{workload:14} {name:36} {medians(ran)}, loss {difference:.1e} off"
                  f"{'' if ok else ': DIFFERS'}")  # fmt: skip
    if not any("loss" in row for row in rows):
        print("nothing ran")
        return 1
    return int(wrong > 0)


def medians(rows: Iterable[dict[str, Any]]) -> str:
    """Speed, time and memory of the rows of a case."""
    rows = list(rows)
    seconds = statistics.median(s for row in rows for s in row["seconds"])
    rate = statistics.median(row["tokens_per_s_per_gpu"] for row in rows)
    peak = max(row.get("peak_gib", 0.0) for row in rows)
    memory = f" {peak:7.2f} GiB" if peak else ""
    return f"{rate:12,.1f} tokens/s per rank {seconds * 1e3:10,.1f} ms{memory}"


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--model", help="NAME/LAYERS (default: llama3-8b/8)")
    parser.add_argument(
        "--workloads",
        nargs="+",
        metavar="KIND:TOKENS",
        help="plain or packed; tree, rows or each, as 16384+8x2048 or 8192+2x4096+4x2048",
    )
    parser.add_argument("--documents", help="SHORTEST:LONGEST tokens (default: 256:16384)")
    parser.add_argument("--cases", nargs="+", help="names of cases (default: all)")
    parser.add_argument("--kernel", default="auto", help="of ds_usp")
    parser.add_argument("--recompute", default="attention", help="of ds_usp")
    parser.add_argument("--loss-chunks", type=int, default=8, help="of ds_usp")
    parser.add_argument("--mlp-chunks", type=int, default=0, help="of ds_usp")
    parser.add_argument("--offload-ratio", type=float, default=0.0, help="of ds_usp")
    parser.add_argument("--bf16-weights", action="store_true", help="under FSDP2 all is bf16")
    parser.add_argument("--attention", default="sdpa", help="transformers' own, of the others")
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--warm-up", type=int, help="steps; 0: one micro batch")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--case-timeout", type=float, default=600.0, help="seconds of a case")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    full = ("llama3-8b/8", WORKLOADS, "256:16384", 3, 2, 2)
    smoke = ("tiny/2", ["plain:64", "packed:96"], "5:40", 1, 1, 1)
    names = ("model", "workloads", "documents", "iterations", "warm_up", "rounds")
    for name, value in zip(names, smoke if args.smoke else full, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
