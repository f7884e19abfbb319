"""What rank 0 reports: the run, its steps as a bar or lines, metrics.jsonl, TensorBoard, a plot."""

from __future__ import annotations

import json
import os
import resource
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ds_usp import ConfigError
from ds_usp.planner import cluster_of, model_flop_per_token
from ds_usp.training import attention_kernel
from usp_trainer.data import Tokens
from usp_trainer.step import planned_run

METRICS, EARLIER, PLOT = "metrics.jsonl", "metrics.jsonl.old", "loss.png"
STEPS_OF_CURVE = 9  # last steps whose mean loss is a point of the smooth curve


def describe_degrees(args: Namespace) -> str:
    """The parallel degrees as text."""
    return (
        f"Ulysses {args.ulysses_degree} x ring {args.ring_degree} ({args.usp_layout}), "
        f"data {args.data_parallel_size}, ZeRO-{args.zero_stage}"
    )


def describe_run(args: Namespace, tokens: Tokens, num_parameters: int) -> str:
    """Machine, degrees, kernel, model and data of a run.

    Raises:
        UnsupportedAttentionError: no attention kernel serves the model here.
    """
    on_gpu, head_dim = args.device == "cuda", args.hidden_size // args.num_attention_heads
    kernel = attention_kernel(
        args.usp_kernel,
        device=torch.device(args.device),
        dtype=torch.bfloat16 if args.bf16 else torch.float32,
        head_dim=head_dim,
        documents=args.reset_attention_mask,
    )
    machine = torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()} CPU cores"
    sizes = f"{args.num_layers} layers, hidden {args.hidden_size}, {args.num_attention_heads} heads"
    batch = f"{args.global_batch_size} x {args.seq_length}"
    rows = {
        "machine": f"{machine}, torch {torch.__version__}",
        "degrees": describe_degrees(args),
        "attention": f"kernel {kernel}, {'bf16' if args.bf16 else 'fp32'}, head dim {head_dim}",
        "model": f"{num_parameters / 1e6:.2f} M parameters, {sizes}, "
        f"{args.num_key_value_heads} for KV",
        "step": f"{batch} = {args.global_batch_size * args.seq_length} tokens, {args.optimizer}, "
        f"learning rate {args.lr:g}, {args.train_iters} steps",
        "data": f"{tokens.name}, {len(tokens.ids):,} tokens of {tokens.vocab_size} kinds",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:>{width}}  {value}" for name, value in rows.items())


def flop_per_token(args: Namespace) -> tuple[float, float]:
    """Model FLOP of a token on one GPU, and the GPU's peak in bf16; 0 where not known: on CPUs, and
    with packed documents, whose lengths decide. Those of recomputation do not count."""
    if args.device == "cpu" or args.reset_attention_mask:
        return 0.0, 0.0
    run, peak = planned_run(args), 0.0
    with suppress(ConfigError):  # the planner's table does not have this GPU
        peak = cluster_of(None, torch.cuda.get_device_name(), 1).peak_flop_per_s
    flop = model_flop_per_token(run.model_shape(), args.seq_length)
    return flop / run.world_size, peak if args.bf16 else 0.0


class Reporter:
    """Writes a row a step to ``metrics.jsonl`` and shows a bar, or lines where the output is no
    terminal. Rank 0 alone has one.

    Args:
        first_step: steps that are done; rows of later ones, which were not saved, are dropped.
    """

    def __init__(self, args: Namespace, first_step: int) -> None:
        self._args, (self._flop, self._peak) = args, flop_per_token(args)
        self._folder = Path(args.output_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        path, rows = self._folder / METRICS, []
        if path.is_file() and args.load:
            rows = [row for row in read_rows(path) if row["step"] <= first_step]
        elif path.is_file():
            os.replace(path, self._folder / EARLIER)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._rows = rows
        self._file = path.open("a", buffering=1)
        self._board: Any = None
        if args.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            purge = first_step + 1 if first_step else None
            self._board = SummaryWriter(args.tensorboard_dir, purge_step=purge)
        self._bar = tqdm(
            total=args.train_iters,
            initial=first_step,
            unit="step",
            disable=True if args.quiet else None,  # None: off where the output is no terminal
            dynamic_ncols=True,
        )

    def step(self, row: dict[str, Any]) -> None:
        """Write and show one step's numbers, and what follows from its ``seconds``."""
        args = self._args
        row["tokens_per_s"] = args.global_batch_size * args.seq_length / row["seconds"]
        if self._flop:
            row["tflops_per_gpu"] = row["tokens_per_s"] * self._flop / 1e12
        if self._peak:
            row["mfu"] = row["tflops_per_gpu"] * 1e12 / self._peak
        row["memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if args.device == "cuda":  # else what is resident
            row["memory_bytes"] = torch.cuda.max_memory_allocated()
        self._rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        if self._board:
            for name in row.keys() - {"step"}:
                self._board.add_scalar(name, row[name], row["step"])
            self._board.flush()
        text = step_text(row)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        step, total = row["step"], args.train_iters
        due = step in (1, total) or step % args.log_interval == 0 or "valid_loss" in row
        if self._bar.disable and due:
            self.say(f"step {step}/{total}: {text}")

    def say(self, text: str) -> None:
        """Print a line above the bar, unless ``--quiet``."""
        if not self._args.quiet:
            tqdm.write(text)

    def finish(self) -> None:
        """Close the files and, unless ``--quiet``, draw the plot."""
        self._bar.close()
        self._file.close()
        if self._board:
            self._board.close()
        if self._args.quiet or not self._rows:
            return
        plot_loss(self._rows, describe_degrees(self._args), self._folder / PLOT)
        self.say(f"metrics  {self._folder / METRICS}\nplot     {self._folder / PLOT}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a line that a killed run left in part is none."""
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def step_text(row: Mapping[str, Any]) -> str:
    """The numbers of a step as one line."""
    parts = [f"loss {row['loss']:.3f}"]
    if "valid_loss" in row:
        parts.append(f"validation loss {row['valid_loss']:.3f}")
    parts += [f"lr {row['lr']:.3g}", f"gradient norm {row['grad_norm']:.3g}"]
    parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    if "tflops_per_gpu" in row:
        parts.append(f"{row['tflops_per_gpu']:.0f} TFLOP/s a GPU")
    if "mfu" in row:
        parts.append(f"MFU {100 * row['mfu']:.1f} %")
    parts.append(f"{row['memory_bytes'] / 2**20:,.0f} MiB")
    return ", ".join(parts)


def plot_loss(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Plot the loss over steps, raw and smoothed, and the validation losses if there are any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    windows = (losses[max(0, end - STEPS_OF_CURVE) : end] for end in range(1, len(losses) + 1))
    smooth = [sum(window) / len(window) for window in windows]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes.plot(steps, losses, color="#9db8d9", linewidth=1.0, label="each step")
    axes.plot(steps, smooth, color="#1f4e8c", label=f"mean of the last {STEPS_OF_CURVE}")
    validation = [(row["step"], row["valid_loss"]) for row in rows if "valid_loss" in row]
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="#d1495b", label="validation")
    axes.set(xlabel="optimizer step", ylabel="mean loss per token (nats)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)
