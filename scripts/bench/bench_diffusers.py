"""Steps of a diffusion transformer: ds_usp beside diffusers' context parallelism and xDiT.

    python scripts/bench/bench_diffusers.py --ranks 2 --out diffusers.jsonl
    python scripts/bench/bench_diffusers.py --ranks 2 --device cpu --smoke   # shows that it runs

Flux.1-dev's transformer at 1024 and 2048 pixels (4,608 and 16,896 tokens), and Wan 2.1 14B's cut
to 10 blocks at 480p and 720p (32,760 and 75,600 tokens), one sample, bf16, random weights.
``forward`` is a forward pass as in sampling, ``train`` a forward and backward pass with gradient
checkpointing; gradients stay on their rank, as averaging them costs all methods the same;
``guided`` is a step with guidance, which calls the transformer once for each branch, and
``cached`` two of them with the same latents, where FirstBlockCache skips the second one. ``loop``
are four steps of the denoising loop of FLUX.2-dev at 1024 pixels, or two of Wan 2.1 14B with all 40
layers and guidance; rows have the milliseconds of a loop, the summary those of a step. Cases:
diffusers on one GPU (rank 0, the others wait), ds_usp on every ulysses x ring of the ranks, without
and with CUDA graphs (sampling only), with both branches at once on half of the ranks each (cfg),
diffusers' Ulysses and its ring, and xDiT's transformers on every ulysses x ring (sampling only, if
xfuser is installed), on the same attention kernel, eager and with compiled blocks. diffusers has no
context parallelism on FlashAttention-4, and xDiT no ring. cache-dit's own parallelism only by name
(``--rounds 1 --cases "one GPU, cudnn" "cache-dit ulysses 2, cudnn"``): it patches diffusers for all
cases after it.

One process for each rank runs all cases, those of a transformer on the same weights. A case is
timed after its first step; further rounds interleave the cases of a workload. Outputs and a few
gradients are compared with the first case's: WRONG is what differs by more than 3 times what
another kernel does to one GPU's. A case that raises is left out with its reason; so is one that
does not end in --case-timeout, and then new processes do the rest.
Rows are JSON lines, which --out collects over several runs: one for each round, with the times of
all rounds so far, so that a run that is cut off keeps them. The last of a run and case counts.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from bench_harness import Session, append_row, common_flags, read_rows, start_ranks
from diffusers_cases import KINDS, Case, Step, Workload, alone, cases, inputs, new_transformer
from torch import Tensor, nn
from torch.distributed import ReduceOp

ResultT = TypeVar("ResultT")
PACKAGES = ("diffusers", "flash-attn-4", "xfuser", "cache-dit")
WORKLOADS = [
    f"{shape}:{kind}"
    for shape in ("flux-1024", "wan-480p", "wan-720p", "flux-2048")
    for kind in KINDS
    if kind != "loop"
]
WORKLOADS += ["flux2-1024:loop", "wan14b-480p:loop"]
SMOKE = [
    *("tiny-flux-small:forward", "tiny-flux-small:train", "tiny-wan-small:train"),
    *("tiny-flux2-small:loop", "tiny-wan-small:loop"),
]
NEVER_WRONG = {torch.bfloat16: 5e-3, torch.float32: 1e-5}  # relative differences
OTHER_KERNEL = {"cudnn": "flash2", "sdpa": "eager"}  # for the spread; of the others "cudnn"
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Start the ranks for each transformer, or be one; 1 if a result is WRONG or nothing ran."""
    args = parse()
    workloads = [Workload.checked(name) for name in args.workloads]
    known = cases(args.ranks, args.kernels, compiled_of(args))
    unknown = [name for name in args.cases or () if name not in known]
    if unknown:
        raise SystemExit(f"no case {unknown[0]!r}; there are: {', '.join(known)}")
    args.cases = args.cases or [name for name in known if not name.startswith("cache-dit")]
    if args.run_id:
        run(args, workloads)
        return 0
    path = args.out or Path(f"{ROOT.name}_diffusers.jsonl")
    run_id = f"{time.time():.0f}"
    wanted = len(args.cases) * len(workloads)
    flags = [f"--run-id={run_id}", f"--out={path}"]
    have = -1
    while have < (now := len(done(path, run_id, args.workloads))) < wanted:
        have = now  # a case that ends its processes has a row: new ones do the rest
        start_ranks(flags, args.ranks, 300 + 2 * args.case_timeout * wanted)
    order = list(known).index
    rows = sorted(rows_of(path, run_id), key=lambda row: order(row["case"]))
    return summarize(rows, args.workloads)


def rows_of(path: Path, run_id: str) -> list[dict[str, Any]]:
    """The rows of a run, of each workload and case the last."""
    rows = [row for row in read_rows(path) if row["run_id"] == run_id]
    return list({(row["workload"], row["case"]): row for row in rows}.values())


def done(path: Path, run_id: str, names: Sequence[str]) -> set[tuple[str, str]]:
    """Workload and case of the rows of a run, of the workloads of these names."""
    rows = rows_of(path, run_id)
    return {(row["workload"], row["case"]) for row in rows if row["workload"] in names}


# ------------------------------------------------------------------ on every rank


def run(args: argparse.Namespace, workloads: Sequence[Workload]) -> None:
    """All cases that have no row yet, of all workloads, which share a model's weights."""
    session = Session.start(args.device, args.case_timeout + 60)
    torch._dynamo.config.recompile_limit = 256  # all cases compile the same code
    for model in dict.fromkeys(workload.model for workload in workloads):
        transformer = new_transformer(model, session.device, DTYPE[args.device])
        for workload in (w for w in workloads if w.model == model):
            finished = done(args.out, args.run_id, [workload.name])
            dist.barrier()  # nobody writes before all have read
            torch._dynamo.reset()
            Run(session, args, workload, transformer).cases(finished)
    session.close()


class Run:
    """A workload on every rank."""

    def __init__(
        self, session: Session, args: argparse.Namespace, workload: Workload, transformer: nn.Module
    ) -> None:
        self._session, self._args, self._workload = session, args, workload
        self._transformer = transformer
        self._given = inputs(workload, transformer, session.device)
        self._weights = sum(p.numel() * p.element_size() for p in transformer.parameters())
        self._reference: list[Tensor] = []
        self._spread: list[float] = []

    def cases(self, finished: set[tuple[str, str]]) -> None:
        """Run, compare and time all cases but those that have a row."""
        args = self._args
        known = cases(args.ranks, args.kernels, compiled_of(args))
        names = [n for n in args.cases if (self._workload.name, n) not in finished]
        if not names:
            return
        first = next(iter(known))
        if first not in names:
            self._compare_with(known[first])
        steps: dict[str, Step] = {}
        rows: dict[str, dict[str, Any]] = {}
        for name in names:
            first_step = partial(self._first_step, known[name], name == first)
            result = self._bounded(name, first_step)
            if isinstance(result, str):
                self._refuse(name, result)
            else:
                steps[name], rows[name] = result
                self._say(name, rows[name])
                self._time(name, steps, rows)
        # Not before all are compiled: cases share code, whose compilation another may have dropped.
        for name in [x for x in steps if known[x].compiled and not known[x].graphs]:
            result = self._bounded(name, partial(self._with_peak, steps[name], steps[name]))
            if isinstance(result, str):
                self._refuse(name, result)
                del steps[name]
            else:
                rows[name] |= result[1]
        self._rounds(steps, rows)

    def _refuse(self, name: str, reason: str) -> None:
        self._write(name, {"refused": reason})
        if any(text in reason for text in ("CUDA error", "AcceleratorError", "NCCL")):
            self._end_process()  # it can't use its GPU any more

    def _end_process(self) -> None:
        if self._session.rank:
            time.sleep(10)  # the first rank that ends ends all, and rank 0 has a row to write
        os._exit(1)

    def _first_step(self, case: Case, is_reference: bool) -> tuple[Step, dict[str, Any]]:
        """A case's step, its memory and how far its results are off."""
        begin = time.perf_counter()
        step = case.step(self._transformer, self._given, self._workload.train)
        results, peak = self._with_peak(step, step.results)
        row = {"first_s": round(time.perf_counter() - begin, 2)} | peak
        if is_reference:
            self._reference = results
            self._measure_spread()
        return step, row | self._compared(results)

    def _with_peak(self, step: Step, run: Callable[[], ResultT]) -> tuple[ResultT, dict[str, Any]]:
        """What ``run`` of a step returns, and the peak memory of weights and step."""
        gc.collect()
        if not self._session.on_gpu:
            return run(), {}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before + step.reserved_bytes()
        return result, {"peak_gib": round((self._weights + extra) / 2**30, 3)}

    def _compare_with(self, case: Case) -> None:
        """Take the reference, which has a row of an ended process or was not asked for."""
        step = case.step(self._transformer, self._given, self._workload.train)
        result = self._bounded("the reference", step.results)
        self._reference = [] if isinstance(result, str) else result
        self._bounded("the spread", self._measure_spread)

    def _measure_spread(self) -> None:
        kernel = OTHER_KERNEL.get(self._args.kernels[0], "cudnn")
        case = Case(partial(alone, kernel), sharded=False)
        try:
            step = case.step(self._transformer, self._given, self._workload.train)
            others = step.results()
        except Exception as error:  # without a spread NEVER_WRONG holds
            self._session.print0(f"no spread of {kernel}: {error}")
            others = self._reference
        self._spread = differences(others, self._reference)

    def _compared(self, results: Sequence[Tensor]) -> dict[str, Any]:
        """The difference from the reference and its limit, of rank 0, whose row it is."""
        errors = differences(results, self._reference)
        if not errors or self._session.rank:
            return {}
        least = NEVER_WRONG[DTYPE[self._args.device]]
        limits = [max(3 * spread, least) for spread in self._spread]
        pairs = list(zip(errors, limits, strict=True))
        row = {"difference": errors[0], "difference_limit": limits[0]}
        if len(errors) > 1:
            worst = max(pairs[1:], key=lambda pair: pair[0] / pair[1])
            row |= dict(zip(("gradient_difference", "gradient_limit"), worst, strict=True))
        return row | {"wrong": not all(value <= limit for value, limit in pairs)}

    def _time(self, name: str, steps: dict[str, Step], rows: dict[str, dict[str, Any]]) -> None:
        """Time a step once more, and write its row; a step that fails is dropped."""
        seconds = self._bounded(name, partial(self._timed, steps[name]))
        if isinstance(seconds, str):
            self._refuse(name, seconds)
            del steps[name]
            return
        rows[name].setdefault("ms", []).append(round(seconds * 1e3, 4))
        self._write(name, rows[name])
        self._say(name, {"ms": rows[name]["ms"]})

    def _rounds(self, steps: dict[str, Step], rows: dict[str, dict[str, Any]]) -> None:
        """Time every step again in interleaved rounds, as many as --rounds and --budget allow."""
        begin = time.perf_counter()
        for _ in range(self._args.rounds - 1):
            for name in list(steps):
                self._time(name, steps, rows)
            spent = self._session.all_reduced([time.perf_counter() - begin], ReduceOp.MAX)[0]
            if spent > self._args.budget:
                break

    def _timed(self, step: Step) -> float:
        """Seconds of a step; a short one is repeated until the clock is that of its own load."""
        seconds = self._session.seconds(step)
        repeats = min(math.ceil(self._args.repeat_s / seconds), 50)
        if repeats <= 1:
            return seconds
        self._session.seconds(step, math.ceil(repeats / 2))
        return self._session.seconds(step, repeats)

    def _bounded(self, name: str, run: Callable[[], Any]) -> Any:
        """``run`` on all ranks: its result, or why a rank failed; it ends in --case-timeout.

        Else the process ends, as what hangs on a GPU cannot be taken back.
        """
        limit = self._args.case_timeout

        def end() -> None:
            self._write(name, {"refused": f"no end in {limit:.0f} s"})
            self._end_process()

        timer = threading.Timer(limit, end)
        timer.daemon = True
        timer.start()
        try:
            return self._session.try_all_ranks(run)
        finally:
            timer.cancel()

    def _write(self, name: str, row: dict[str, Any]) -> None:
        labels = {"workload": self._workload.name, "case": name, "run_id": self._args.run_id}
        sizes = {"tokens": self._workload.tokens}
        sizes |= {"steps": self._workload.loop} if self._workload.loop else {}
        append_row(self._session, self._args.out, {**labels, **sizes, **row}, PACKAGES, "")
        if "refused" in row:
            self._say(name, row)

    def _say(self, name: str, row: Mapping[str, Any]) -> None:
        since = time.time() - float(self._args.run_id)  # which is when the run was started
        self._session.print0(f"{since:6.1f} s {self._workload.name:18} {name:36} {row}")


def differences(results: Sequence[Tensor], reference: Sequence[Tensor]) -> list[float]:
    """Relative norms of the differences; none on ranks that have no results."""
    pairs = zip(results, reference, strict=False)
    return [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs]


# ------------------------------------------------------------------ the summary


def summarize(rows: Sequence[Mapping[str, Any]], workloads: Sequence[str]) -> int:
    """Print medians; 1 if a result is WRONG, or there is none."""
    wrong = 0
    for workload in workloads:
        of_workload = [row for row in rows if row["workload"] == workload]
        first = next((row for row in of_workload if "ms" in row), None)
        print(f"{workload}, {Workload(workload).tokens:,} tokens")
        for row in of_workload:
            if "refused" in row:
                print(f"  {row['case']:36} left out: {row['refused']}")
                continue
            ms = statistics.median(row["ms"]) / (Workload(workload).loop or 1)
            speed = math.nan
            if first:
                speed = statistics.median(first["ms"]) / statistics.median(row["ms"])
            memory = f" {row['peak_gib']:7.2f} GiB" if "peak_gib" in row else ""
            off = row.get("difference", math.nan)
            text = f"{ms:10,.2f} ms {speed:6.3f} x{memory}, {off:.1e} off"
            if "gradient_difference" in row:
                text += f", gradients {row['gradient_difference']:.1e}"
            wrong += row.get("wrong", False)
            print(f"  {row['case']:36} {text}{' WRONG' if row.get('wrong') else ''}")
    if not any("ms" in row for row in rows):
        print("nothing ran")
        return 1
    return int(wrong > 0)


def compiled_of(args: argparse.Namespace) -> list[bool]:
    """Whether blocks are compiled, of the cases in their order."""
    return {"no": [False], "yes": [True], "both": [False, True]}[args.compile]


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--workloads", nargs="+", metavar="MODEL-SIZE:KIND")
    parser.add_argument("--cases", nargs="+", help="names of cases (default: all)")
    parser.add_argument("--kernels", nargs="+", help="default: cudnn, on CPUs sdpa")
    parser.add_argument("--compile", choices=("no", "yes", "both"), help="default: both")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--repeat-s", type=float, help="shorter steps are repeated (default: 0.5)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of a workload's rounds")
    parser.add_argument("--case-timeout", type=float, default=180.0, help="seconds of a case")
    parser.add_argument("--run-id", help=argparse.SUPPRESS)
    args = parser.parse_args()
    full = (WORKLOADS, "both", 5, 0.5)
    smoke = (SMOKE, "no", 1, 0.0)
    names = ("workloads", "compile", "rounds", "repeat_s")
    for name, value in zip(names, smoke if args.smoke else full, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.kernels = args.kernels or {"cuda": ["cudnn"], "cpu": ["sdpa"]}[args.device]
    return args


if __name__ == "__main__":
    raise SystemExit(main())
