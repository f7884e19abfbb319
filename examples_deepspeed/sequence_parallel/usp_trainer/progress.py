"""Progress reports of rank 0: the run's description, the bar, metrics.jsonl and loss.png."""

from __future__ import annotations

import os
import platform
import resource
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from usp_trainer.metrics import METRICS, MetricsFile
from usp_trainer.step_line import StepLine
from usp_trainer.trackers import trackers

PLOT = "loss.png"


def describe_degrees(args: Namespace) -> str:
    """The parallel degrees as text."""
    return (
        f"Ulysses {args.ulysses_degree} x Ring {args.ring_degree} ({args.usp_layout}), "
        f"tensor {args.tensor_model_parallel_size}, data {args.data_parallel_size}, "
        f"pipeline {args.pipeline_model_parallel_size}, ZeRO-{args.zero_stage}"
    )


def describe_run(args: Namespace, groups: Mapping[str, Sequence[int]], parameters: int) -> str:
    """Machine, degrees, model and data of a run, printed once."""
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    if args.device == "cuda":
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    rows = {
        "machine": f"{machine}, torch {torch.__version__}, Python {platform.python_version()}",
        "degrees": describe_degrees(args),
        "rank 0's groups": ", ".join(f"{name} {list(ranks)}" for name, ranks in groups.items()),
        "attention": f"kernel {args.attention_kernel}"
        f"{' (chosen by auto)' if args.usp_kernel == 'auto' else ''}, "
        f"{'bf16' if args.bf16 else 'fp32'}, head dim "
        f"{args.hidden_size // args.num_attention_heads}",
        "model": f"{parameters / 1e6:.2f} M parameters, {args.num_layers} layers, hidden "
        f"{args.hidden_size}, {args.num_attention_heads} heads, {args.num_key_value_heads} for KV",
        "step": f"{args.global_batch_size} x {args.seq_length} = "
        f"{args.global_batch_size * args.seq_length} tokens, {args.optimizer}, learning rate "
        f"{args.lr:g}, {args.train_iters} steps",
        "data": ", ".join(args.data_path or ["CPython's documentation (pydoc_data.topics)"]),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:>{width}}  {value}" for name, value in rows.items())


def memory_bytes(device: str) -> int:
    """Peak memory of this process: allocated on the GPU, resident without one."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class ProgressReporter:
    """Writes one line per step to ``metrics.jsonl`` and shows a bar. Only rank 0 creates one.

    On resume, rows of steps after the checkpoint are removed from the file first.
    """

    def __init__(self, args: Namespace, first_step: int) -> None:
        self._args = args
        self._folder = Path(args.output_dir)
        self._file = MetricsFile(self._folder, first_step if args.load else None)
        self._new: list[dict[str, Any]] = []
        self._line = StepLine(args)
        self._trackers = trackers(args, first_step)
        for note in self._file.notes:
            self.print_above(note)
        self._bar = tqdm(
            total=args.train_iters,
            initial=first_step,
            unit="step",
            disable=True if args.quiet else None,  # None: off where the output is no terminal
            file=sys.stdout,
            dynamic_ncols=True,
        )

    def step(self, row: dict[str, Any]) -> None:
        """Record one step, counted from 1."""
        row = row | self._line.speed(row)
        self._new.append(row)
        self._file.write(row)
        for tracker in self._trackers:
            tracker.log(row["step"], {name: row[name] for name in row if name != "step"})
        shown, time_left = self._line.text(row), self._line.time_left(row)
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()
        step, total = row["step"], self._args.train_iters
        due = step in (1, total) or step % self._args.log_interval == 0 or "valid_loss" in row
        if self._bar.disable and due and not self._args.quiet:
            print(f"step {step}/{total}: {shown}, {time_left} left", flush=True)

    def print_above(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._args.quiet:
            tqdm.write(text, file=sys.stdout)

    def finish(self) -> None:
        """Draw the plot and print the paths of the outputs."""
        self._bar.close()
        for tracker in self._trackers:
            tracker.close()
        self._file.close()
        if self._args.quiet:
            return
        plot_loss(self._file.rows + self._new, describe_degrees(self._args), self._folder / PLOT)
        if self._new:
            first, last = self._new[0], self._new[-1]
            print(
                f"trained  {len(self._new)} steps in {sum(r['seconds'] for r in self._new):.0f} s, "
                f"loss {first['loss']:.3f} -> {last['loss']:.3f}"
            )
        print(f"metrics  {self._folder / METRICS}\nplot     {self._folder / PLOT}", flush=True)


def plot_loss(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Plot the loss over steps, raw and smoothed, and the validation losses if there are any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, losses = [r["step"] for r in rows], [r["loss"] for r in rows]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes.plot(steps, losses, color="#9db8d9", linewidth=1.0, label="each step")
    axes.plot(steps, moving_average(losses), color="#1f4e8c", linewidth=2.2, label="smoothed")
    validation = [(r["step"], r["valid_loss"]) for r in rows if "valid_loss" in r]
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="#d1495b", label="validation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean loss per token (nats)")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    axes.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def moving_average(values: Sequence[float], max_half_width: int = 4) -> list[float]:
    """Centred moving average, of up to ``max_half_width`` neighbours on each side."""
    means = []
    for i in range(len(values)):
        half_width = min(max_half_width, i, len(values) - 1 - i)
        window = values[i - half_width : i + half_width + 1]
        means.append(sum(window) / len(window))
    return means
