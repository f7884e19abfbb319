"""Writes the tables of README.md and pages under docs/ from the files under results/.

    python scripts/bench/tables.py            # rewrite the tables in place
    python scripts/bench/tables.py --check    # exit 1 if one of them differs from its file
    python scripts/bench/tables.py --compare FILE...   # print files of bench_attention.py

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; NAME is a key of
:data:`TABLES`.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import long_context_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
DOCUMENTS = (
    "README.md",
    "docs/benchmarks.md",
    "docs/one-real-run.md",
    "docs/usage/diffusers.md",
    "docs/usage/million-tokens.md",
)
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

ALL_METHODS = (
    "one GPU",
    "ds_usp 4x1",
    "ds_usp 2x2",
    "ds_usp 1x4",
    "DeepSpeed ulysses",
    "TransformerEngine a2a",
    "TransformerEngine a2a+p2p",
    "TransformerEngine p2p",
    "torch allgather",
    "torch alltoall",
    "yunchang 4x1",
    "yunchang 2x2",
    "yunchang 1x4",
)
NAMES = {
    "one GPU": "the kernel alone, one GPU",
    "DeepSpeed ulysses": "DeepSpeed `DistributedAttention`, 4 x 1",
    "TransformerEngine a2a": "TransformerEngine `a2a`, 4 x 1",
    "TransformerEngine a2a+p2p": "TransformerEngine `a2a+p2p`, 2 x 2",
    "TransformerEngine p2p": "TransformerEngine `p2p`, 1 x 4",
    "torch allgather": "torch context parallel, all-gather",
    "torch alltoall": "torch context parallel, all-to-all",
}
ALONE = "one GPU"
UNSHARDED = "stock"  # every sequence whole, on one rank
SHORT_NAMES = {
    "DeepSpeed ulysses": "DeepSpeed",
    "plain all-to-all": "plain all-to-alls",
    "TE p2p": "TransformerEngine `p2p`",
    "TE a2a": "TransformerEngine `a2a`",
    "diffusers ulysses 2": "diffusers' Ulysses",
    "diffusers ring 2": "diffusers' ring",
    **{f"TransformerEngine {kind}": f"TransformerEngine `{kind}`" for kind in ("p2p", "a2a")},
}
TE_LAYERS = "TransformerEngine's layers"
# What README's table of benchmarks compares.
HEADLINES = (
    ("8K, 32/8 heads, FlashAttention-4, 2 H200", "attention_h200.csv", "8K 32/8 d128", "flash4"),
    ("32K, 32/32, FlashAttention-4, 2 H200", "attention_h200.csv", "32K 32/32 d128", "flash4"),
    *(
        (f"{tokens}, 32/32, {label}", "attention_2gpus.csv", f"{tokens} 32/32 d128", kernel)
        for tokens, kernel, label in (
            ("32K", "flash4", "FlashAttention-4"),
            ("128K", "flash4", "FlashAttention-4"),
            ("128K", "cudnn", "cuDNN"),
        )
    ),
    *(
        (
            f"{tokens}, 32/8, packed, cuDNN",
            "attention_packed.csv",
            f"{tokens} 32/8 d128 documents 256-8192/8",
            "cudnn",
        )
        for tokens in ("32K", "128K")
    ),
    *(
        (
            f"GPT 1.3B, {tokens}, {kernel_label}",
            "megatron_lm_h100.csv",
            f"gpt-1.3b 24 layers {tokens} x {batch}",
            f"{kernel}, {TE_LAYERS}",
        )
        for tokens, batch, kernel, kernel_label in (
            ("16K", 2, "flash4", "default kernels"),
            ("32K", 1, "flash4", "default kernels"),
            ("32K", 1, "cudnn", "cuDNN"),
        )
    ),
    ("Llama 3, 8 layers, 32K, 2 H200", "transformers_32k.jsonl", "plain:32768", "FSDP2"),
    *(
        (
            f"Qwen3-8B whole, {tokens >> 10}K, {kernel_label}, 2 H200",
            "long_context.jsonl",
            f"{tokens} on 2 H200",
            f"{kernel}, 36 layers",
        )
        for tokens, kernel, kernel_label in (
            (131072, "flash4", "default kernels"),
            (131072, "cudnn", "cuDNN"),
            (262144, "cudnn", "cuDNN"),
        )
    ),
    ("Wan 2.1, 10 blocks, guided step, 480p", "diffusers_guided.jsonl", "wan-480p:guided", "cudnn"),
    *(
        (f"{label}, a step of its loop, 2 H200", "diffusers_loops.jsonl", f"{x}:loop", "cudnn")
        for label, x in (
            ("FLUX.2-dev whole, 1024 px", "flux2-1024"),
            ("Wan 2.1 14B whole, guided, 480p", "wan14b-480p"),
        )
    ),
)
# Those of README; docs/benchmarks.md has all that compare with others, wins and losses. The
# last two fields are of what stands beside: the shape or workload, and how its method begins.
_HISTORY = "57344+2x4096+2x4096+4x2048"
_ANSWERS = "GRPO 65536 + 8 x 2048"
README_HEADLINES = (
    *(x for x in HEADLINES if x[0] == "Qwen3-8B whole, 128K, default kernels, 2 H200"),
    (
        "64K of shared history, 16 branches of 2K, 8 layers of Qwen3-8B, 2 H200",
        *("prefix_trees_64k.jsonl", f"tree:{_HISTORY}", "FSDP2", f"each:{_HISTORY}", "ds_usp"),
    ),
    (
        "TRL's GRPO step, 8 answers of 2K to 64K, 8 layers, 2 H200",
        *("grpo_trees.jsonl", f"{_ANSWERS}, tree", "flash4, 8 layers"),
        *(f"{_ANSWERS}, rows", "ds_usp"),
    ),
    (
        "Wan 2.1 14B whole, guided step, 480p, 2 H200",
        *("diffusers_loops.jsonl", "wan14b-480p:loop", "cudnn", "wan14b-480p:loop", ALONE),
    ),
    (
        "32K, 32/32, both on cuDNN, 2 H200",
        *("attention_h200.csv", "32K 32/32 d128", "cudnn"),
        *("32K 32/32 d128", "TransformerEngine p2p"),
    ),
)
MODELS = {
    ("gpt-1.3b", "24"): "GPT 1.3B",
    ("llama3-8b", "8"): "Llama 3 8B, 8 layers",
}
KERNELS = {
    "flash4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "flash2": "FlashAttention-2 (torch)",
    "ffa": "its own",
}


def read(name: str | Path) -> list[dict[str, str]]:
    """The rows of a results file, or of the file at a path, without the comments at its head."""
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def attention_table(results: str, kernel: str, methods: Sequence[str] = ALL_METHODS) -> str:
    """Time, percent of the kernel's speed and memory of each method on one kernel, 32K and 128K."""
    runs: Mapping[tuple[str, str], dict[str, str]] = {
        (row["shape"].split()[0], row["contender"]): row for row in read(results)
    }
    rows = []
    for method in methods:
        cells = [runs.get((length, f"{method}, {kernel}")) for length in ("32K", "128K")]
        if any(cells):
            texts = [text for cell in cells for text in _measured(cell)]
            rows.append([NAMES.get(method, method.replace("x", " x ")), *texts])
    units = ("ms", "of the kernel", "memory")
    head = [KERNELS[kernel], *(f"{length}, {unit}" for length in ("32K", "128K") for unit in units)]
    return markdown(head, rows)


def _measured(row: Mapping[str, str] | None) -> list[str]:
    """Cells of one baseline: milliseconds, share of the kernel, memory; empty without a row."""
    if row is None:
        return ["", "", ""]
    share = f"{100 * float(row['share_of_kernel']):.0f} %"
    return [f"{float(row['ms']):.1f}", share, f"{float(row['extra_gib']):.2f} GiB"]


def comparison_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Milliseconds of each baseline, a line for each shape and kernel.

    The last column is the time of the fastest other library over that of the fastest ds_usp mesh:
    above 1, ds_usp is faster.
    """
    runs = _times(rows)
    methods = list(dict.fromkeys(method for times in runs.values() for method in times))
    meshes = sorted(method for method in methods if method.startswith("ds_usp"))[::-1]
    libraries = [method for method in methods if method not in (*meshes, ALONE)]
    columns = [*meshes, *libraries, *(method for method in methods if method == ALONE)]
    lines = []
    for (shape, kernel), times in runs.items():
        ratio = f"{fastest:.3f}" if (fastest := _ratio(times)) else ""
        cells = [f"{times[name]:.3f}" if name in times else "" for name in columns]
        lines.append([shape, KERNELS.get(kernel, kernel), *cells, ratio])
    names = ["kernel alone" if name == ALONE else name for name in columns]
    return markdown(["shape", "kernel", *names, "best peer / best ds_usp"], lines)


def _times(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, str], dict[str, float]]:
    """Milliseconds by shape and kernel, then by method."""
    runs: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        method, _, kernel = row["contender"].rpartition(", ")
        runs.setdefault((row["shape"], kernel), {})[method] = float(row["ms"])
    return runs


def _ratio(times: Mapping[str, float]) -> float:
    """Time of the fastest other library over that of the fastest ds_usp mesh; 0 without one."""
    ours = [x for name, x in times.items() if name.startswith("ds_usp")]
    others = [x for name, x in times.items() if not name.startswith("ds_usp") and name != ALONE]
    return min(others) / min(ours) if ours and others else 0.0


def ratio_table(files: Mapping[str, str]) -> str:
    """Lowest, median and highest ratio of each file of :func:`comparison_table`.

    Args:
        files: what each file of bench_attention.py measured.
    """
    lines = []
    for name, what in files.items():
        ratios = sorted(filter(None, map(_ratio, _times(read(name)).values())))
        slower = sum(ratio < 1 for ratio in ratios)
        middle = (ratios[0], statistics.median(ratios), ratios[-1])
        lines.append(
            [what, f"`{name}`", str(len(ratios)), *(f"{x:.2f}" for x in middle), str(slower)]
        )
    head = ["what", "file", "shapes x kernels", "lowest", "median", "highest", "below 1"]
    return markdown(head, lines)


def packed_table(results: str) -> str:
    """Milliseconds of packed documents, a line for each shape: the fastest mesh of ds_usp on each
    kernel beside each kind of TransformerEngine's context parallelism, which is on cuDNN.

    The last columns are the time of its fastest kind over that of ds_usp: above 1, ds_usp is
    faster.
    """
    shapes: dict[str, dict[str, dict[str, float]]] = {}
    for (shape, kernel), times in _times(read(results)).items():
        shapes.setdefault(shape, {})[kernel] = times
    lines, kernels, kinds = [], ("flash4", "cudnn", "flash2"), ("a2a", "p2p")
    for shape, by_kernel in shapes.items():
        meshes = [
            min((ms, name) for name, ms in by_kernel[kernel].items() if name.startswith("ds_usp"))
            for kernel in kernels
        ]
        peers = [by_kernel["cudnn"][f"TransformerEngine {kind}"] for kind in kinds]
        ours = [f"{ms:.2f}, {name[7:].replace('x', ' x ')}" for ms, name in meshes]
        ratios = [f"{min(peers) / ms:.3f}" for ms, _ in (meshes[1], meshes[0])]
        lines.append([shape, *ours, *(f"{ms:.2f}" for ms in peers), *ratios])
    head = [f"ds_usp, {KERNELS[kernel]}" for kernel in kernels]
    others = [f"TransformerEngine `{kind}`, cuDNN" for kind in kinds]
    ratio_heads = ["ratio, cuDNN", "ratio, FlashAttention-4 to cuDNN"]
    return markdown(["shape", *head, *others, *ratio_heads], lines)


def passes_table(results: str, packed: bool) -> str:
    """TFLOP/s a GPU of forward, of backward, which is the rest, and of both: the mean of all
    shapes with documents, or without, and in the last column its ratio to the fastest other
    library's."""
    seconds, work = dict[tuple[str, str], float](), dict[str, float]()
    for row in (row for row in read(results) if ("documents" in row["shape"]) == packed):
        seconds[row["contender"], row["shape"]] = float(row["ms"]) / 1e3
        work[row["shape"]] = float(row["tflop_per_s_per_gpu"]) * float(row["ms"]) / 1e3
    rates = {}
    for contender in dict.fromkeys(contender for contender, _ in seconds):
        of_shapes = []
        for shape in (x for x in work if not x.endswith(" forward")):
            both, forward = (seconds[contender, x] for x in (shape, f"{shape} forward"))
            first, all_work = work[f"{shape} forward"], work[shape]
            parts = (first / forward, (all_work - first) / (both - forward), all_work / both)
            of_shapes.append(parts)
        rates[contender] = [statistics.mean(x) for x in zip(*of_shapes, strict=True)]
    others = [x for name, (*_, x) in rates.items() if not name.startswith((ALONE, "ds_usp"))]
    lines = []
    for contender, of_passes in rates.items():
        name, _, kernel = contender.partition(", ")
        ratio = f"{of_passes[-1] / max(others):.2f}" if name.startswith("ds_usp") else ""
        name = SHORT_NAMES.get(name, name.replace("x", " x "))
        lines.append([name, KERNELS[kernel], *(f"{x:.0f}" for x in of_passes), ratio])
    return markdown(["TFLOP/s a GPU", "kernel", "forward", "backward", "both", "ratio"], lines)


def factor_table(results: str) -> str:
    """Step times from the unpatched framework to megatron_patches; speed relative to the first."""
    runs = read(results)
    first = float(runs[0]["ms_per_iteration"])
    rows = []
    for row in runs:
        milliseconds = float(row["ms_per_iteration"])
        rows.append(
            [
                {"stock": "stock", "ours": "under `megatron_patches`"}[row["program"]],
                KERNELS[row["kernel"]],
                "yes" if row["activation_checkpointing"] == "True" else "no",
                row["loss_chunks"],
                f"{milliseconds:.0f}",
                f"{int(row['tokens_per_s_per_gpu']):,}",
                f"{first / milliseconds:.2f} x",
            ]
        )
    head = ["program", "kernel", "activation checkpointing", "loss chunks"]
    return markdown([*head, "ms a step", "tokens/s per GPU", "speed"], rows)


def training_table(results: Sequence[tuple[str, str]], layers: str) -> str:
    """Tokens/s per GPU in megatron-core's loop, a line for each workload and kernel of ds_usp.

    The last column is the rate of the fastest ds_usp mesh over that of TransformerEngine's faster
    context parallelism in the same run: above 1, ds_usp is faster.

    Args:
        results: a machine and its results file, whose meshes of ds_usp end in their kernel.
        layers: whose layers, as they end the name of a method there.
    """
    columns = {
        "ds_usp 2x1": "ds_usp 2 x 1",
        "ds_usp 1x2": "ds_usp 1 x 2",
        "TE p2p": "TransformerEngine `p2p`",
        "TE a2a": "TransformerEngine `a2a`",
    }
    lines = []
    for machine, file in results:
        rates: dict[str, dict[str, float]] = {}
        for row in read(file):
            name, _, kind = row["contender"].partition(", ")
            if kind == layers:
                rates.setdefault(row["workload"], {})[name] = float(row["tokens_per_s_per_gpu"])
        for workload, of in rates.items():
            model, layer_count, _, length, _, sequences = workload.split()
            label = f"{MODELS[model, layer_count]}, {length}, {sequences}"
            peers = {name: rate for name, rate in of.items() if name.startswith("TE ")}
            meshes = [name.rpartition(" ") for name in of if name.startswith("ds_usp")]
            for kernel in dict.fromkeys(kernel for *_, kernel in meshes):
                ours = {name: of[f"{name} {kernel}"] for name, _, k in meshes if k == kernel}
                cells = [f"{x:,.0f}" if (x := (ours | peers).get(m)) else "" for m in columns]
                ratio = f"{max(ours.values()) / max(peers.values()):.3f}"
                lines.append([label, machine, KERNELS[kernel], *cells, ratio])
    head = ["model, tokens, batch", "machine", "kernel of ds_usp"]
    return markdown([*head, *columns.values(), "best / best"], lines)


def transformers_table(columns: Sequence[tuple[str, str, str]]) -> str:
    """Tokens/s per GPU and peak memory of models of transformers, a line for each method.

    A rate is the median over rounds. The last lines are the rate of the fastest ds_usp mesh over
    that of the other method on as many GPUs, under the same engine.

    Args:
        columns: name of the column, results file, workload there.
    """
    runs: list[dict[str, list[dict[str, Any]]]] = []
    for _, results, workload in columns:
        runs.append({})
        for row in json_lines(results):
            if row["workload"] == workload:
                runs[-1].setdefault(row["case"], []).append(row)
    lines = []
    for method in dict.fromkeys(method for run in runs for method in run):
        cells = [_rate_and_memory(run[method]) if method in run else "" for run in runs]
        lines.append([method.replace("1x", "1 x ").replace("2x", "2 x "), *cells])
    for other in ("ALST, ZeRO-3", "Accelerate context parallel, FSDP2"):
        engine = other.rpartition(", ")[2]
        ratios = []
        for run in runs:
            rates = {m: _rate(rows) for m, rows in run.items() if m.endswith(engine)}
            best = max((x for m, x in rates.items() if m.startswith("ds_usp")), default=0.0)
            ratios.append(f"{best / rates[other]:.3f}" if rates.get(other) else "")
        lines.append([f"best ds_usp / {other}", *ratios])
    return markdown(["tokens/s per GPU; peak memory", *(name for name, *_ in columns)], lines)


def _rate(rows: Sequence[Mapping[str, Any]]) -> float:
    """Median over rounds of tokens/s per GPU; 0 if the method could not train."""
    return statistics.median(row.get("tokens_per_s_per_gpu", 0.0) for row in rows)


def _rate_and_memory(rows: Sequence[Mapping[str, Any]]) -> str:
    """A cell of one method: rate and peak memory, or why there is none."""
    if reason := rows[0].get("refused", ""):
        return "out of memory" if reason.startswith("OutOfMemoryError") else reason
    return f"{_rate(rows):,.0f}; {max(row['peak_gib'] for row in rows):.1f} GiB"


def diffusion_table(results: str) -> str:
    """Milliseconds a step of diffusion transformers, a line for each workload, kernel and mode.

    The last columns are the time of the fastest other method, and of one GPU, over that of the
    fastest ds_usp mesh: above 1, ds_usp is faster.
    """
    runs: dict[tuple[str, str, str, str], dict[str, str | float]] = {}
    last = {(row["workload"], row["case"]): row for row in json_lines(results)}
    for row in last.values():
        name, _, kernel = row["case"].rpartition(", ")
        mode = "compiled" if name.endswith(" compiled") else "eager"
        mode += ", cached" if " cached" in name else ""
        workload, _, kind = row["workload"].partition(":")
        key = (f"{workload}, {row['tokens']:,} tokens", kind, kernel, mode)
        refused = "WRONG" if row.get("wrong") else "refused"
        time = _milliseconds(row) if "ms" in row and not row.get("wrong") else refused
        runs.setdefault(key, {})[name.removesuffix(" compiled").removesuffix(" cached")] = time
    methods = list(dict.fromkeys(method for times in runs.values() for method in times))
    lines = []
    for (workload, kind, kernel, mode), times in runs.items():
        cells = [f"{x:,.1f}" if isinstance(x := times.get(m, ""), float) else x for m in methods]
        best = [
            min((x for m, x in times.items() if m.startswith(start) and isinstance(x, float)),
                default=0.0)
            for start in ("ds_usp", ("diffusers", "xdit", "cache-dit"), ALONE)
        ]  # fmt: skip
        ratios = [f"{x / best[0]:.3f}" if x and best[0] else "" for x in best[1:]]
        lines.append([workload, kind, KERNELS.get(kernel, kernel), mode, *cells, *ratios])
    head = ["workload", "step", "kernel", "", *methods]
    return markdown([*head, "fastest other / best ds_usp", "one GPU / best ds_usp"], lines)


def json_lines(name: str) -> list[dict[str, Any]]:
    """The rows of a results file of JSON lines; of those that a run has written anew after each
    round, which have a ``run_id``, the last."""
    last: dict[object, dict[str, Any]] = {}
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    for index, row in enumerate(map(json.loads, lines)):
        key = (row["run_id"], row["workload"], row["case"]) if "run_id" in row else index
        last[key] = row
    long = long_context_rows.timed_case
    return [long(row) if "checkpointing" in row else row for row in last.values()]


def gpu_tests_table() -> str:
    """The last run of the tests under tests/gpu that was recorded."""
    run = json.loads((RESULTS / "gpu_tests.json").read_text(encoding="utf-8"))
    skipped = "; ".join(f"{count} {reason}" for reason, count in run["skipped"].items())
    counts = str(run["passed"]), str(len(run["failed"])), skipped
    line = [run["machine"], run["date"], run["commit"], run["software"], *counts]
    return markdown(["machine", "date", "commit", "", "passed", "failed", "skipped"], [line])


def headline_table(
    cases: Sequence[tuple[str, ...]],
    beside: str = "fastest other",
    machine: str = "2 H100 unless named",
) -> str:
    """Times of the fastest ds_usp mesh and of the fastest other method.

    The last column is the time of the other over that of ds_usp: above 1, ds_usp is faster.

    Args:
        cases: what the table says, the results file, the shape or workload, and the kernel,
            engine or layers, as they end the name of a method there; ``kernel, layers`` where
            meshes of ds_usp are on several kernels beside the same methods. Where the other is no
            other library: its shape or workload, and the beginning of its method.
        beside: head of the column of the other.
        machine: head of the first column; a label that ends with it is printed without it.
    """
    lines = []
    for label, results, case, last, *of_other in cases:
        kernel, _, group = last.rpartition(", ")
        times = _times_of(results, case, group)
        ours = {n: ms for n, ms in times.items() if n.startswith("ds_usp") and n.endswith(kernel)}
        if of_other:
            found = _times_of(results, of_other[0], group)
            others = {n: ms for n, ms in found.items() if n.startswith(of_other[1])}
        else:
            others = {n: ms for n, ms in times.items() if n.split()[0] not in ("ds_usp", UNSHARDED)}
            others.pop(ALONE, None)
        best, other = min(ours, key=ours.__getitem__), min(others, key=others.__getitem__)
        mesh = best.removeprefix("ds_usp ").removesuffix(kernel).strip()
        mesh = mesh.replace("x", " x ").replace("graphs", "CUDA graphs,")
        method = SHORT_NAMES.get(other, other)
        if of_other and of_other[0] != case:  # the same answers in another form
            mesh, method = f"{mesh}, as a tree", "as rows"
        cells = [f"{_time(ours[best])}, {mesh}", f"{_time(others[other])}, {method}"]
        lines.append(
            [label.removesuffix(f", {machine}"), *cells, f"{others[other] / ours[best]:.3f}"]
        )
    ratio_means = "ratio; above 1: ds_usp is faster"
    return markdown([machine, "ds_usp, Ulysses x ring", beside, ratio_means], lines)


def _times_of(results: str, case: str, group: str) -> dict[str, float]:
    """Median milliseconds by method of a shape or workload, of methods that end in a group."""
    rounds: dict[str, list[float]] = {}
    for row in json_lines(results) if results.endswith(".jsonl") else read(results):
        name, _, kind = (row.get("contender") or row["case"]).partition(", ")
        timed = not (row.get("refused") or row.get("wrong"))
        if timed and case == (row.get("shape") or row.get("workload")) and kind == group:
            if "run_id" in row:  # of several runs the last one, as in `diffusion_table`
                rounds.pop(name, None)
            rounds.setdefault(name, []).append(_milliseconds(row))
    return {name: statistics.median(of) for name, of in rounds.items()}


def _milliseconds(row: Mapping[str, Any]) -> float:
    """The time of a row, or the median of its steps; that of one step of a denoising loop."""
    if "seconds" in row:
        return 1e3 * statistics.median(row["seconds"])
    if not isinstance(row["ms"], list):
        return float(row["ms"])
    return statistics.median(row["ms"]) / row.get("steps", 1)


def _time(milliseconds: float) -> str:
    """Whole steps of large models take seconds, and are told in them."""
    long = milliseconds >= 1_000
    return f"{_rounded(milliseconds / 1e3)} s" if long else f"{_rounded(milliseconds)} ms"


def _rounded(time: float) -> str:
    """Three digits at least, one of them behind the point."""
    return f"{time:.{1 if time >= 10 else 2}f}"


COMPARED = "attention.csv"


BASE = "trainer-1x1"  # the curve that the others are compared with
EPOCH, EARLY = 1000, 20  # steps that read the text once; before differences of rounding have grown


def long_run_table() -> str:
    """Each curve of the long run beside one rank of the trainer. The head of its files has a line
    for each: its name, a colon, what it is."""
    name = "long_run_training_by_step.csv"
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    labels = dict(line[2:].split(";")[0].split(": ") for line in lines if line.startswith("# "))
    training, validation = _curves(name), _curves(name.replace("training", "validation"))
    rows = []
    for name, label in labels.items():
        steps = len(training[name])
        last = f"{validation[name][steps]:.3f}" if steps % EPOCH == 0 else "not reached"
        cells = [label, f"{steps:,}", "", last, "", ""]
        if name != BASE:
            cells[2] = f"{max(_differences(training, name)[:EARLY]):.5f}"
        if name != BASE and steps <= EPOCH:  # of the same learning rates
            valid = _differences(validation, name)
            cells[4:] = f"{max(valid):.3f}", f"{statistics.mean(valid):.3f}"
        rows.append(cells)
    early = f"training loss, steps 1 to {EARLY}: at most"
    head = ["curve", "steps", early, "validation loss at the end"]
    return markdown([*head, f"each {EPOCH // 10} steps: at most", "mean"], rows)


def _curves(name: str) -> dict[str, dict[int, float]]:
    """Losses by curve and step of a file with a column for each curve."""
    curves: dict[str, dict[int, float]] = {}
    for row in read(name):
        step = int(row.pop("step"))
        for curve, loss in row.items():
            if loss:
                curves.setdefault(curve, {})[step] = float(loss)
    return curves


def _differences(curves: Mapping[str, Mapping[int, float]], name: str) -> list[float]:
    """Absolute differences of a curve from :data:`BASE` where both have a value, in order."""
    return [abs(x - curves[BASE][n]) for n, x in curves[name].items() if n in curves[BASE]]


TABLES: Mapping[str, Callable[[], str]] = {
    "headline": partial(headline_table, HEADLINES),
    "headline-readme": partial(headline_table, README_HEADLINES, "beside it", "2 H200"),
    "long-run": long_run_table,
    "gpu-tests": gpu_tests_table,
    "long-context": lambda: long_context_rows.table(
        long_context_rows.read(RESULTS / "long_context.jsonl")
    ),
    "long-context-rl": lambda: long_context_rows.table(
        chain.from_iterable(
            long_context_rows.read(RESULTS / name)
            for name in ("long_context.jsonl", "grpo_trees.jsonl")
        ),
        rl=True,
    ),
    "attention-flash4": partial(attention_table, COMPARED, "flash4"),
    "attention-cudnn": partial(attention_table, COMPARED, "cudnn"),
    "attention-flash2": partial(attention_table, "attention_peers.csv", "flash2"),
    "attention-packed": partial(packed_table, "attention_packed.csv"),
    "attention-magi": partial(passes_table, "attention_magi.csv", True),
    "attention-magi-causal": partial(passes_table, "attention_magi.csv", False),
    "attention-magi-ffa": partial(passes_table, "attention_magi_ffa.csv", True),
    "attention-magi-ffa-causal": partial(passes_table, "attention_magi_ffa.csv", False),
    "attention-ratios": partial(
        ratio_table,
        {
            "attention_short.csv": "causal, forward + backward, 8K to 128K tokens",
            "attention_inference.csv": "full mask, forward: image and video models",
            "attention_held_out.csv": "odd lengths, few KV heads, head dims 64 to 192, windows",
        },
    ),
    "diffusers": partial(diffusion_table, "diffusers.jsonl"),
    "diffusers-h100": partial(diffusion_table, "diffusers_h100.jsonl"),
    "diffusers-guided": partial(diffusion_table, "diffusers_guided.jsonl"),
    "diffusers-loops": partial(diffusion_table, "diffusers_loops.jsonl"),
    "factors": partial(factor_table, "step_factors.csv"),
    "megatron-lm": partial(
        training_table,
        (
            ("2 H100", "megatron_lm_h100.csv"),
            ("2 H200", "megatron_lm.csv"),
            ("2 H200", "megatron_lm_flash4.csv"),
        ),
        TE_LAYERS,
    ),
    "transformers": partial(
        transformers_table,
        (
            ("32K", "transformers.jsonl", "plain:32768"),
            ("32K, second run", "transformers_32k.jsonl", "plain:32768"),
            ("128K", "transformers.jsonl", "plain:131072"),
            ("64K packed", "transformers.jsonl", "packed:65536"),
        ),
    ),
}


def rewritten(text: str) -> str:
    """The document with every table regenerated."""
    return BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check the documents; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    parser.add_argument("--compare", nargs="+", type=Path, default=[], help="print, write nothing")
    args = parser.parse_args(argv)
    for path in args.compare:
        print(comparison_table(read(path.resolve())))
    if args.compare:
        return 0
    check: bool = args.check
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = rewritten(before)
        if before != after:
            stale.append(name)
            if not check:
                path.write_text(after, encoding="utf-8")
    if stale and check:
        print(f"tables differ from results/: {', '.join(stale)}; run {sys.argv[0]}")
    return int(bool(stale and check))


if __name__ == "__main__":
    sys.exit(main())
