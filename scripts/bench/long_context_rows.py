"""Compares rows of ``bench_long_context.py``: their table, their losses, their picture.

    python scripts/bench/long_context_rows.py rows.jsonl --plot rows.svg

Exit code 1 where first losses of one length, number of layers and machine differ by more than 2e-3.
A time of the whole model is extrapolated, and marked, where two numbers of layers were timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT = 2e-3
LAYERS = 36
NAMES = {"Accelerate": "Accelerate `cp_size`", "ALST": "ALST, ZeRO-3", "GRPO": "GRPO, ds_usp"}
KERNELS = {"flash4": "FlashAttention-4", "cudnn": "cuDNN"}
Row = Mapping[str, Any]


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def label(row: Row) -> str:
    """The program of a row with what it was told, short."""
    name = NAMES.get(row["case"], row["case"])
    if row["case"] in ("ds_usp", "GRPO"):
        name += f" {row['ulysses']} x {row['world'] // row['ulysses']}, `{row['recompute']}`"
        name += f", {KERNELS.get(row['attention'], row['attention'])}"
        name += f", offload {row['offload_ratio']}" if row["offload_ratio"] else ""
        if row.get("completions", 2) != 2:
            name += f", {row['completions']} of {row['prompt']} + {row['tokens']}"
        name += ", a tree" if row.get("share_prefixes") else ""
    return name + (", offload" if row["checkpointing"].get("offload") else "")


def timed_case(row: Row) -> dict[str, Any]:
    """The row as ``tables.py`` reads those of other benchmarks of steps."""
    name = "Accelerate context parallel" if row["case"] == "Accelerate" else row["case"]
    workload = f"{row['tokens']} on {machine(row)}"
    if row["case"] == "GRPO":
        form = "tree" if row.get("share_prefixes") else "rows"
        name, answers = "ds_usp", f"{row.get('completions')} x {row['tokens']}"
        workload = f"GRPO {row.get('prompt')} + {answers}, {form}"
    if name == "ds_usp":
        name += f" {row['ulysses']}x{row['world'] // row['ulysses']} {row['attention']}"
    timed = {"seconds": [row["seconds"]]} if "seconds" in row else {}
    return {**row, "case": f"{name}, {row['layers']} layers", "workload": workload, **timed}


def machine(row: Row) -> str:
    """Number and kind of the GPUs."""
    return str(row["run"].split(", ")[1]).replace("NVIDIA ", "").replace(" x ", " ")


def cells(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows of equal settings as one with their medians; what was extrapolated comes last."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (machine(row), row["case"] == "GRPO", row["tokens"], label(row), row["layers"])
        groups.setdefault(key, []).append(row)
    found = []
    for (where, is_rl, tokens, name, layers), same in sorted(groups.items(), key=str):
        ran = [row for row in same if "seconds" in row]
        cell = {"machine": where, "rl": is_rl, "tokens": tokens, "name": name, "layers": layers}
        cell |= {"rows": len(ran), "refused": "" if ran else same[-1]["refused"], "marked": False}
        for field in ("loss", "seconds", "tokens_per_s_per_gpu", "tflops_per_gpu"):
            cell[field] = statistics.median(row[field] for row in ran) if ran else 0.0
        for field in ("peak_gib", "host_gib"):
            cell[field] = max((row[field] for row in ran), default=0.0)
        if same[-1].get("share_prefixes"):  # what its rows would take, and a tree does not compute
            cell["tflops_per_gpu"] = 0.0
        found.append(cell)
    return found + list(extrapolated(found))


def extrapolated(found: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The whole model's time from two numbers of layers: what a layer adds does not change."""
    ran = [cell for cell in found if cell["rows"] and not cell["rl"]]
    for key in dict.fromkeys((c["machine"], c["tokens"], c["name"]) for c in ran):
        same = [c for c in ran if (c["machine"], c["tokens"], c["name"]) == key]
        if len(same) < 2 or same[-1]["layers"] == LAYERS:
            continue
        first, last = sorted(same, key=lambda c: c["layers"])[-2:]
        a_layer = (last["seconds"] - first["seconds"]) / (last["layers"] - first["layers"])
        seconds = last["seconds"] + a_layer * (LAYERS - last["layers"])
        rate = last["tokens_per_s_per_gpu"] * last["seconds"] / seconds
        yield {**last, "layers": LAYERS, "seconds": seconds, "tokens_per_s_per_gpu": rate,
               "marked": True, "tflops_per_gpu": 0.0, "peak_gib": 0.0}  # fmt: skip


def table(rows: Iterable[Row], *, rl: bool = False) -> str:
    """A Markdown table."""
    head = ("tokens", "machine", "program", "layers", "s a step", "tokens/s a GPU", "TFLOP/s a GPU",
            "GPU GiB", "host GiB", "first loss")  # fmt: skip
    lines = [head, ("---",) * len(head)]
    for c in sorted(cells(rows), key=lambda c: (c["machine"], c["tokens"], c["layers"], c["name"])):
        if c["rl"] is not rl:
            continue
        measured = (c["refused"], "", "", "", "", "")
        if c["rows"]:
            measured = (
                f"{c['seconds']:.1f}{' (extrapolated)' if c['marked'] else ''}",
                f"{c['tokens_per_s_per_gpu']:,.0f}",
                f"{c['tflops_per_gpu']:.0f}" if c["tflops_per_gpu"] else "",
                f"{c['peak_gib']:.1f}" if c["peak_gib"] else "",
                f"{c['host_gib']:.0f}",
                "" if rl else f"{c['loss']:.5f}",
            )
        lines.append((f"{c['tokens']:,}", c["machine"], c["name"], str(c["layers"]), *measured))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def differences(rows: Iterable[Row]) -> list[str]:
    """First losses that are not those of the first program of their length and layers."""
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    found = []
    for cell in cells(rows):
        if cell["rows"] and not cell["rl"] and not cell["marked"]:
            same = first.setdefault((cell["machine"], cell["tokens"], cell["layers"]), cell)
            if abs(cell["loss"] - same["loss"]) > LIMIT * abs(same["loss"]):
                found.append(f"{cell['tokens']:,} {cell['name']}: {cell['loss']} {same['loss']}")
    return found


def plot(rows: Iterable[Row], path: Path) -> None:
    """Draw tokens/s a GPU of each program at its fastest: where several ran, and the longest."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ds_usp"  # the same names in every run
    from matplotlib import pyplot

    best: dict[str, dict[str, float]] = {}  # by program, then by length and machine
    whole = [c for c in cells(rows) if c["rows"] and c["layers"] == LAYERS and not c["rl"]]
    longest = max((c["tokens"] for c in whole), default=0) // 1024
    for c in sorted(whole, key=lambda c: (c["machine"], c["tokens"])):
        rates = best.setdefault(c["name"].split(" ")[0].strip(","), {})
        place = f"{c['tokens'] // 1024}K tokens\n{c['machine']}"
        rates[place] = max(rates.get(place, 0.0), c["tokens_per_s_per_gpu"])
    reached = Counter(place for rates in best.values() for place in rates)
    places = [
        place
        for place, programs in reached.items()
        if programs > 1 or place.startswith(f"{longest}K")
    ]
    figure, axes = pyplot.subplots(figsize=(4.8, 0.8 + 0.9 * len(places)), layout="constrained")
    programs = sorted(best, key=lambda name: name != "ds_usp")
    height = 0.8 / len(programs)
    for index, name in enumerate(programs):
        rates = {place: rate for place, rate in best[name].items() if place in places}
        above = [sum(place in best[other] for other in programs[:index]) for place in rates]
        middles = [
            places.index(place) + height * (bars_above - (reached[place] - 1) / 2)
            for place, bars_above in zip(rates, above, strict=True)
        ]
        color = "#1f6feb" if name == "ds_usp" else f"{0.7 + 0.1 * (index - 1):.1f}"
        bars = axes.barh(middles, rates.values(), 0.92 * height, label=name, color=color)
        axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.set_yticks(range(len(places)), places)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    # Narrow: its labels are read on a phone too.
    axes.set_title("tokens/s a GPU: Qwen3-8B whole,\nattention to all tokens, a training step")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Print the tables, draw the picture, compare the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="JSON lines of bench_long_context.py")
    parser.add_argument("--plot", type=Path, help="the picture to write")
    args = parser.parse_args()
    rows = read(args.rows)
    print(table(rows), table(rows, rl=True), *differences(rows), sep="\n")
    if args.plot:
        plot(rows, args.plot)
    return int(not rows or bool(differences(rows)))


if __name__ == "__main__":
    sys.exit(main())
