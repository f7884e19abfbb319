"""Gradient reduction at the end of a step and under its backward pass: ZeRO-1 beside ZeRO-2.

    python scripts/bench/bench_zero.py --gpus 2 --out zero.jsonl
    python scripts/bench/bench_zero.py --gpus 2 --device cpu --smoke   # shows that it runs

Trains the trainer's GPT, 8 layers of hidden 4096 on 32K tokens, once for each case and round:
ZeRO-1 reduces at the end, ZeRO-2 under the backward pass, where NCCL's kernels take multiprocessors
from others; ``NCCL_MAX_CTAS`` limits how many. Cases are interleaved. A row has the time of a step
(median of those after the warm-up and before the traced one), losses and gradient norms, and of the
traced step how long communication and kernels ran and how much of it was exposed, means over ranks.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "examples_deepspeed" / "sequence_parallel" / "pretrain_gpt_usp.py"
# Of a case: the ZeRO stage, and NCCL's limit of multiprocessors.
CASES = {
    "ZeRO-1": (1, None),
    "ZeRO-2": (2, None),
    **{f"ZeRO-2, {ctas} CTAs": (2, ctas) for ctas in (16, 8, 4, 2)},
}
MODEL = {"num-layers": 8, "hidden-size": 4096, "num-attention-heads": 32, "seq-length": 32768}
SMOKE = {"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 64}
FLAGS = (
    *("--use-rotary-position-embeddings", "--normalization", "rmsnorm", "--swiglu"),
    *("--untie-embeddings-and-output-weights", "--disable-bias-linear"),
)
WARM_UP = 3


def command(args: argparse.Namespace, stage: int, folder: str) -> list[str]:
    """The command line of one training."""
    model = SMOKE if args.smoke else MODEL
    sizes = [text for name, value in model.items() for text in (f"--{name}", str(value))]
    dtype = ["--bf16"] if args.device == "cuda" else []
    kernel = ["--usp-kernel", args.kernel] if args.kernel else []
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
    return [
        *(sys.executable, *torchrun, str(TRAINER), "--device", args.device),
        *(*dtype, *kernel, *sizes, *FLAGS),
        *("--ds-sequence-parallel-size", str(args.gpus), "--ulysses-degree", str(args.gpus)),
        *("--zero-stage", str(stage), "--train-iters", str(args.steps), "--output-dir", folder),
        *("--usp-report-communication", str(args.steps - 1)),
    ]


def run(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """One training of a case: its row, or why it failed."""
    stage, ctas = CASES[name]
    environment = dict(os.environ)
    if ctas is not None:
        environment["NCCL_MAX_CTAS"] = str(ctas)
    folder = tempfile.mkdtemp()
    try:
        line = command(args, stage, folder)
        done = subprocess.run(line, env=environment, text=True, capture_output=True, check=False)
        if done.returncode:
            return {"case": name, "failed": (done.stderr or done.stdout)[-800:]}
        return {"case": name, **measured(args, Path(folder))}
    finally:
        shutil.rmtree(folder)


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What a training wrote: the metrics of its steps, and the report of the traced one."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = rows[WARM_UP : args.steps - 2]  # the traced step, and the one after, are left out
    row = {
        "ms": round(1e3 * statistics.median(x["seconds"] for x in timed), 3),
        "losses": [x["loss"] for x in rows],
        "grad_norms": [x["grad_norm"] for x in rows],
    }
    report = (folder / "communication.csv").read_text().splitlines()
    kinds = list(csv.DictReader(line for line in report if not line.startswith("#")))
    for column in ("busy_ms", "exposed_ms"):
        row[column] = {
            kind: statistics.mean(float(x[column] or 0) for x in kinds if x["kind"] == kind)
            for kind in ("gradient reduction", "parameter gather", "kernels")
            if any(x["kind"] == kind for x in kinds)
        }
    return row


def main() -> int:
    """Run all cases in interleaved rounds; 1 if one failed or has other losses than ZeRO-1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kernel", help="the attention kernel (default: the trainer's)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--out", type=Path, help="a file of JSON lines to append to")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        for name in args.cases:
            rows.append(run(args, name))
            print(name, rows[-1], flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    failed = [row for row in rows if "failed" in row]
    trained = [row for row in rows if "failed" not in row]
    apart = {row["case"] for row in trained if differs(row, trained[0])}
    for name in apart:
        print(f"WRONG: {name} has other losses or gradient norms than {trained[0]['case']}")
    return int(bool(failed or apart))


def differs(row: dict[str, Any], first: dict[str, Any]) -> bool:
    """Whether losses or gradient norms of the first two steps are further apart than rounding."""
    return any(
        abs(have - want) > 2e-3 * abs(want)
        for key in ("losses", "grad_norms")
        for have, want in zip(row[key][:2], first[key][:2], strict=True)
    )


if __name__ == "__main__":
    raise SystemExit(main())
