"""What rank 0 reports of a run: its description, where the first step is, a line and a bar for each
step, metrics.jsonl, loss.png, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ds_usp import ConfigError
from ds_usp.planner import cluster_of, model_flop_per_token
from usp_trainer.auto_args import planned_run
from usp_trainer.run_files import not_written, replace_file
from usp_trainer.validate_args import model_parallel_size

METRICS = "metrics.jsonl"
EARLIER = "metrics.jsonl.old"
PLOT = "loss.png"
STEPS_OF_CURVE = 9  # last steps whose mean loss is a point of the smooth curve
STEPS_OF_MEAN = 20  # last steps whose mean time predicts that of the remaining ones
FIRST_STEP_S = 10.0  # before the first line about where the first step is, and between two


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
        f"{args.hidden_size}, {args.num_attention_heads} heads, {args.num_key_value_heads} for KV, "
        f"layers {args.transformer_impl}",
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


@contextmanager
def first_step_lines(
    layers: Sequence[tuple[int, nn.Module]],
    count: int,
    print_line: Callable[[str], None],
    seconds: float = FIRST_STEP_S,
) -> Iterator[None]:
    """Inside, a line every few seconds has the layer whose kernels this process has launched last.
    A step that is over before the first line prints nothing.

    Args:
        layers: of this rank, each with its number in the model, from 1.
        count: layers of the model.
        print_line: called from another thread.
    """
    place, ended, begin = ["before the first layer"], threading.Event(), time.monotonic()

    def enter(direction: str, number: int, *_: object) -> None:
        place[0] = f"{direction} pass of layer {number} of {count}"

    def watch_backward(number: int, _: nn.Module, __: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(partial(enter, "backward", number))

    def print_lines() -> None:
        note = "; a first step compiles kernels and may pin host memory"
        while not ended.wait(seconds):
            print_line(f"first step, {time.monotonic() - begin:.0f} s: {place[0]}{note}")
            note = ""

    hooks = []
    for number, layer in layers:
        hooks.append(layer.register_forward_pre_hook(partial(enter, "forward", number)))
        hooks.append(layer.register_forward_hook(partial(watch_backward, number)))
    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for hook in hooks:
            hook.remove()


class StepLine:
    """Loss, learning rate, gradient norm, speed, memory and remaining time of each step.

    Speed is in tokens/s of all ranks; on GPUs also in TFLOP/s per GPU, counting model FLOP by
    ``ds_usp.planner`` without recomputation, and in bf16 as a fraction of the peak (MFU) if the
    planner's table has the GPU. With documents no FLOP are shown: they depend on their lengths.
    """

    def __init__(self, args: Namespace) -> None:
        self._total = args.train_iters
        self._seconds: deque[float] = deque(maxlen=STEPS_OF_MEAN)
        self._steps = 0
        self._flop_per_token = 0.0
        self._peak: float | None = None  # dense, in bf16
        if args.device == "cuda" and not args.reset_attention_mask:
            ranks = model_parallel_size(args) * args.data_parallel_size
            shape = planned_run(args).model_shape()
            self._flop_per_token = model_flop_per_token(shape, args.seq_length) / ranks
            with suppress(ConfigError):  # the planner's table does not have this GPU
                if args.bf16:
                    self._peak = cluster_of(None, torch.cuda.get_device_name(), 1).peak_flop_per_s

    def speed(self, row: Mapping[str, Any]) -> dict[str, float]:
        if not self._flop_per_token:
            return {}
        flop_per_s = row["tokens_per_s"] * self._flop_per_token
        speed = {"tflops_per_gpu": flop_per_s / 1e12}
        return speed | ({"mfu": flop_per_s / self._peak} if self._peak else {})

    def text(self, row: Mapping[str, Any]) -> str:
        parts = [f"loss {row['loss']:.3f}"]
        if "valid_loss" in row:
            parts.append(f"validation loss {row['valid_loss']:.3f}")
        parts += [f"lr {row['lr']:.3g}", f"gradient norm {row['grad_norm']:.3g}"]
        parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
        speed = self.speed(row)
        if speed:
            parts.append(f"{speed['tflops_per_gpu']:.0f} TFLOP/s a GPU")
        if "mfu" in speed:
            parts.append(f"MFU {100 * speed['mfu']:.1f} %")
        parts.append(f"{row['memory_bytes'] / 2**20:,.0f} MiB")
        return ", ".join(parts)

    def time_left(self, row: Mapping[str, Any]) -> str:
        # The first step, which compiles, is dropped after the second.
        self._steps += 1
        if self._steps == 2:
            self._seconds.clear()
        self._seconds.append(row["seconds"])
        mean = sum(self._seconds) / len(self._seconds)
        return str(timedelta(seconds=round(mean * (self._total - row["step"]))))


class MetricsFile:
    """The metrics file of one run, open for appending. Only rank 0 creates one.

    Args:
        resumed_at: rows up to this step are kept; later steps were not saved and run again.
            None: the run starts anew, and an existing file is kept as ``metrics.jsonl.old``.

    Attributes:
        rows: the rows that were kept.
        notes: lines for the user about rows that were dropped and files that were renamed.
    """

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        if self._path.is_file():
            if resumed_at is None and not self._path.is_symlink():
                os.replace(self._path, folder / EARLIER)
                self.notes.append(f"the earlier {METRICS} is kept as {folder / EARLIER}")
            elif resumed_at is not None:
                self.rows = [row for row in self._read() if row["step"] <= resumed_at]
        replace_file(self._path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = self._path.open("ab", buffering=0)

    def _read(self) -> list[dict[str, Any]]:
        rows, dropped = [], []
        lines = self._path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                losses = [row["loss"], row.get("valid_loss", 0.0)]  # what is read of it: the plot
                whole = type(row["step"]) is int and {*map(type, losses)} == {float}
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                whole = False
            if whole:
                rows.append(row)
            else:
                dropped.append(str(number))
        if dropped:
            self.notes.append(
                f"{self._path}: dropped line {', '.join(dropped)} of {len(lines)}, which cannot be "
                "read (a run was killed while it wrote, or the disk was full)"
            )
        return rows

    def write(self, row: Mapping[str, Any]) -> None:
        """Append the row of one step; after an OSError the file ends with the step before."""
        line = (json.dumps(row) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
            if written != len(line):  # a partial write; the next call raises the reason
                self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(end)
            raise not_written(self._path, error, row["step"]) from error

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files in ``folder``, one scalar a number; steps after ``first_step`` are replaced."""

    def __init__(self, folder: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=first_step + 1 if first_step else None)
        self.close = self._writer.close

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()


class Wandb:
    """One run of a project of Weights & Biases, with the flags as its configuration."""

    def __init__(self, args: Namespace) -> None:
        import wandb

        self._run = wandb.init(
            project=args.wandb_project,
            name=args.wandb_exp_name,
            dir=args.wandb_save_dir,
            config=vars(args),
        )
        self.close = self._run.finish

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)


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
        self._trackers: list[TensorBoard | Wandb] = []
        if args.tensorboard_dir:
            self._trackers.append(TensorBoard(args.tensorboard_dir, first_step))
        if args.wandb_project:
            self._trackers.append(Wandb(args))
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
        if not self._args.quiet:
            tqdm.write(text, file=sys.stdout)

    def finish(self) -> None:
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
    label = f"mean of the last {STEPS_OF_CURVE}"
    axes.plot(steps, trailing_mean(losses), color="#1f4e8c", linewidth=2.2, label=label)
    validation = [(r["step"], r["valid_loss"]) for r in rows if "valid_loss" in r]
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="#d1495b", label="validation")
    axes.set_xlabel("optimizer step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("mean loss per token (nats)")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    axes.legend(frameon=False)
    replace_file(path, partial(figure.savefig, format="png"))
    pyplot.close(figure)


def trailing_mean(values: Sequence[float], count: int = STEPS_OF_CURVE) -> list[float]:
    """Of each value and those before it, ``count`` at most: a spike shows at its step and after."""
    windows = (values[max(0, end - count) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
