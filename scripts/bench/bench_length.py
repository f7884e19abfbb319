"""Long sequences in the trainer of examples_deepspeed: how far, what it costs, stock DeepSpeed's.

    R="torchrun --nproc-per-node 2"
    $R scripts/bench/bench_length.py train --out DIR                       # 32 layers, 2M tokens
    $R scripts/bench/bench_length.py train --layers 4 --steps 1 --out DIR
    $R scripts/bench/bench_length.py layer --out DIR                       # one causal layer, 2M
    $R scripts/bench/bench_length.py flags --out DIR                       # each setting, 128K
    $R scripts/bench/bench_length.py longest --case ds_usp --out DIR
    $R scripts/bench/bench_length.py longest --case ALST --out DIR
    python scripts/bench/plot_memory.py DIR/moments.csv --out memory.svg

Every run is the trainer's own ``pretrain`` with ZeRO-3 on Llama-3-8B's shape, in this process; only
its weights are drawn on the GPU.

train    all memory settings, a window of 4096 tokens, two steps; the planner's memory is printed
         before, the peak after.
layer    one layer, forward and backward, attention to all tokens; its rate beside that of the
         kernel alone on one GPU.
flags    losses of 12 steps with all settings, with none, and with none on another mesh, whose
         difference is bf16's; then settings one on top of the other, and each alone. --only NAME...
         measures some of these runs, by the names of their rows; the table has those of DIR.
         --always NAME... switches settings on in every run, "none" too, where it fits no GPU else.
longest  the longest sequence that trains a step other than the first, which has no moments of Adam:
         of the trainer or of ALST (UlyssesSPAttentionHF, tiled MLP, tiled loss, activation
         checkpoints on the CPU, ZeRO-3), both with the window and with the optimizer's states on
         the GPU. --first TOKENS begins near the expected length.

Rows are JSON lines in DIR/length.jsonl, each written at once. ``--smoke --device cpu`` shows that
it runs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_harness import Session, Table, append_row, common_flags, read_rows
from length_longest import ALSTTrial, Trial, longest
from length_runs import MODELS, MOMENTS, PACKAGES, Run, Trained
from length_table import runs_of, table
from local_kernels import usp_attend
from shapes import Shape
from usp_trainer.launch import select_device

import ds_usp
from ds_usp.training import prepare_deepspeed

BEGIN = time.monotonic()
HEADS = "heads in chunks"  # of exchanges: of several ranks alone
# In the order of docs/usage/million-tokens.md, after the recomputation that three of them need.
SETTINGS = {
    "recompute full": "--usp-recompute full",
    "loss in chunks": "--usp-loss-chunks {loss}",
    "MLP in chunks": "--usp-mlp-chunks {mlp}",
    HEADS: "--usp-projection-overlap recompute",
    "offload": "--usp-offload-ratio {ratio}",
    "4 layers a checkpoint": "--usp-checkpoint-layers 4",
    "states on the host": "--usp-states-on-host",
}
_NEEDS_CHECKPOINTS = (HEADS, "offload", "4 layers a checkpoint")


def all_settings(world: int, *but: str) -> list[str]:
    """The names of the settings that so many ranks can have."""
    return [name for name in SETTINGS if name not in but and (world > 1 or name != HEADS)]


def settings_text(args: argparse.Namespace, *names: str) -> str:
    """The trainer's flags of settings."""
    text = " ".join(SETTINGS[name] for name in names)
    return text.format(loss=args.loss_chunks, mlp=args.mlp_chunks, ratio=args.offload_ratio)


def new_run(args: argparse.Namespace, name: str, **changes: object) -> Run:
    """A run as the flags have it, without memory settings."""
    run = Run(name, args.model, args.layers, args.tokens, args.steps, args.ulysses, args.window)
    return replace(run, seed=args.seed, **changes)  # type: ignore[arg-type]


def train(session: Session, args: argparse.Namespace) -> None:
    """All settings at full length, the memory of every step recorded."""
    settings = args.settings or settings_text(args, *all_settings(session.world))
    run = new_run(args, "train", settings=f"{settings} {args.more}")
    moments = Table(session, args.out / "moments.csv", MOMENTS, str(run))
    Trained(session, run, args.out, BEGIN, "train", moments).train()


def layer(session: Session, args: argparse.Namespace) -> None:
    """One layer's forward and backward, after a warm-up at a small length and the kernel's rate."""
    settings = args.settings or settings_text(args, "loss in chunks", "MLP in chunks")
    run = new_run(args, "layer", settings=f"{settings} {args.more}")
    warm_up = replace(run, name="warm-up", tokens=args.warm_up_tokens)
    Trained(session, warm_up, args.out, BEGIN, "layer").train()
    kernel_rate = _kernel_rate(session, args)
    row = Trained(session, run, args.out, BEGIN, "layer").train()[-1]
    model, seconds = MODELS[run.model], row["of_layers_s"]
    # Products of queries and keys, weights and values: two forward, five backward, causal half.
    one = 2 * run.tokens**2 / 2 * model.q_width / session.world / 1e12
    result: dict[str, Any] = {"part": "layer", "name": "rate", "kernel_alone": kernel_rate}
    for direction, products in (("forward", 2), ("backward", 5)):
        result[f"layer_{direction}_s"] = seconds[f"layer {direction}"]
        attention = seconds[f"attention {direction}"]
        result[f"attention_{direction}_s"] = attention
        result[f"attention_{direction}_tflop_per_s"] = round(products * one / attention, 1)
    both = seconds["attention forward"] + seconds["attention backward"]
    result["tflop_per_s"] = round(7 * one / both, 1)
    result["share_of_kernel"] = round(7 * one / both / kernel_rate, 4)
    result["layer_s"] = seconds["layer forward"] + seconds["layer backward"]
    _written(session, args, result, str(run))
    shape = Shape(run.tokens, model.heads, model.kv_heads, model.hidden // model.heads)
    errors = {"part": "layer", "name": "errors", **tail_errors(session, shape)}
    _written(session, args, errors, str(shape))


def _written(session: Session, args: argparse.Namespace, row: dict[str, Any], note: str) -> None:
    append_row(session, args.out / "length.jsonl", row, PACKAGES, note)
    session.print0(" ".join(f"{name} {value}" for name, value in row.items()))


def tail_errors(session: Session, shape: Shape) -> dict[str, float]:
    """Attention with a window over all tokens, whose tensors have offsets above 2**31: relative
    errors of each rank's last tokens, against a call on these alone. Maximum over ranks; gradients
    of keys and values on the last rank, where no later query sees them."""
    mesh = ds_usp.SequenceMesh.from_group(None, 1)
    window = max(shape.seq_len // 512, 8)
    mask, tokens = ds_usp.MaskSpec.window(window), shape.seq_len // session.world
    layout = mesh.layout("contiguous", shape.seq_len)
    tensors = [x.requires_grad_() for x in shape.random(session.device, tokens)]
    if not session.on_gpu:
        tensors = [x.detach().float().requires_grad_() for x in tensors]

    def results(mesh: Any, layout: Any, q: Any, k: Any, v: Any, dout: Any) -> list[torch.Tensor]:
        """Out and its gradients, of the last ``2 * window`` tokens."""
        out = ds_usp.usp_attention(q, k, v, mesh=mesh, layout=layout, mask=mask)
        grads = torch.autograd.grad(out, (q, k, v), dout)
        return [x[:, -2 * window :].detach().float() for x in (out, *grads)]

    single, short = ds_usp.SequenceMesh.single(), 4 * window
    tail = [x[:, -short:].detach().contiguous().requires_grad_() for x in tensors]
    alone = results(single, single.layout("contiguous", short), *tail)
    pairs = zip(results(mesh, layout, *tensors), alone, strict=True)
    errors = [float((x - y).norm() / y.norm()) for x, y in pairs]
    if session.rank < session.world - 1:
        errors[2:] = 0.0, 0.0
    largest = session.all_reduced(errors, torch.distributed.ReduceOp.MAX)
    mesh.release()
    return {f"tail_{name}": x for name, x in zip(("out", "dq", "dk", "dv"), largest, strict=True)}


def _kernel_rate(session: Session, args: argparse.Namespace) -> float:
    """TFLOP/s of the kernel alone on one GPU, forward and backward, with as many heads as a rank
    has in the layer."""
    model = MODELS[args.model]
    heads = (max(count // args.ulysses, 1) for count in (model.heads, model.kv_heads))
    shape = Shape(args.kernel_tokens, *heads, model.hidden // model.heads)
    single = ds_usp.SequenceMesh.single()
    attend = usp_attend(single, single.layout("contiguous", shape.seq_len), "auto", shape.mask)
    *qkv, dout = shape.random(session.device, shape.seq_len)
    if not session.on_gpu:
        *qkv, dout = (x.float() for x in (*qkv, dout))
    for x in qkv:
        x.requires_grad_()

    def step() -> None:
        torch.autograd.grad(attend(*qkv), qkv, dout)

    step()
    rate = shape.tflop / session.seconds(step, 3)
    session.print0(f"the kernel alone, {shape}: {rate:.1f} TFLOP/s")
    return rate


def flags(session: Session, args: argparse.Namespace) -> None:
    """Losses with all settings, with none and on another mesh; then time and peak of each."""
    runs = {run.name: run for run in compared_runs(args, session.world)}
    unknown = [name for name in args.only if name not in runs]
    if unknown:
        raise SystemExit(f"--only {unknown[0]!r}: there is no such run, but {'; '.join(runs)}")
    for name, run in runs.items():
        if not args.only or name in args.only:
            _tried(session, args, run)
    if session.rank == 0:
        session.print0("\n".join(table(runs_of(read_rows(args.out / "length.jsonl")))))


def compared_runs(args: argparse.Namespace, world: int) -> list[Run]:
    """The runs of ``flags``: those whose losses are compared, settings one on top of the other, and
    each alone; all with the settings that are always on."""
    everything = all_settings(world, *args.always)
    always = settings_text(args, *args.always)

    def settings(*names: str) -> str:
        return f"{always} {settings_text(args, *names)}".strip()

    text = f"{settings(*everything)} {args.more}"
    none = new_run(args, "none", steps=args.compare_steps, samples=4, settings=always)
    runs = [none, replace(none, name="all", settings=text)]
    if world > 1:
        other = world if args.ulysses < world else 1
        runs.append(replace(none, name="none, other mesh", ulysses=other))
    for count in range(1, len(everything)):
        names = everything[:count]
        runs.append(new_run(args, f"+ {names[-1]}", settings=settings(*names)))
    for name in everything[1:]:
        names = [name]
        if name in _NEEDS_CHECKPOINTS and "recompute full" in everything:
            names.insert(0, "recompute full")
        runs.append(new_run(args, f"only {' and '.join(names)}", settings=settings(*names)))
    return runs


def _tried(session: Session, args: argparse.Namespace, run: Run) -> None:
    """Train a run, or say why not; none begins after ``--seconds``."""
    spent = session.all_reduced([time.monotonic() - BEGIN], torch.distributed.ReduceOp.MAX)[0]
    if spent > args.seconds:
        session.print0(f"left out, after {spent:.0f} s: {run.name}")
        return
    trained = Trained(session, run, args.out, BEGIN, "flags")
    outcome = session.try_all_ranks(trained.train)
    if isinstance(outcome, str):
        _written(session, args, {"part": "flags", "name": run.name, "refused": outcome}, str(run))


def search(session: Session, args: argparse.Namespace) -> None:
    """The longest sequence of one case."""
    if args.case == "ALST":
        trial: Trial = ALSTTrial(session, f"{args.model}/{args.layers}", args.window, args.unit)
    else:
        names = all_settings(session.world, "states on the host")
        settings = args.settings or settings_text(args, *names)
        run = new_run(args, args.case, settings=f"{settings} {args.more}")
        trial = partial(_trained, session, args, run)
    longest(session, args, trial, BEGIN)


def _trained(session: Session, args: argparse.Namespace, run: Run, tokens: int) -> dict[str, Any]:
    run = replace(run, name=f"{run.name} {tokens}", tokens=tokens)
    return Trained(session, run, args.out, BEGIN, "longest").train()[-1]


PARTS: dict[str, Callable[[Session, argparse.Namespace], None]] = {
    "train": train,
    "layer": layer,
    "flags": flags,
    "longest": search,
}
FULL = {
    "train": {"layers": 32, "tokens": 2**21, "steps": 2, "window": 4096, "ulysses": 1},
    "layer": {"layers": 1, "tokens": 2**21, "steps": 1, "window": 0, "ulysses": 1},
    "flags": {"layers": 4, "tokens": 2**17, "steps": 2, "window": 0, "ulysses": 2},
    "longest": {"layers": 8, "tokens": 2**17, "steps": 2, "window": 4096, "ulysses": 1},
}
FULL["flags"] |= {"loss_chunks": 16, "mlp_chunks": 4}
SMOKE = {"tokens": 512, "layers": 5, "model": "tiny", "loss_chunks": 4, "mlp_chunks": 4}
SMOKE |= {"warm_up_tokens": 128, "kernel_tokens": 128, "compare_steps": 3, "unit": 64}
OTHERS = {"model": "llama3-8b", "loss_chunks": 256, "mlp_chunks": 32, "warm_up_tokens": 2**17}
OTHERS |= {"kernel_tokens": 65536, "compare_steps": 12, "unit": 16384}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    add = parser.add_argument
    add("part", choices=PARTS)
    add("--smoke", action="store_true", help="tiny sizes")
    add("--model", choices=MODELS)
    names = ("layers", "tokens", "steps", "window", "ulysses", "loss_chunks", "mlp_chunks")
    for name in (*names, "warm_up_tokens", "kernel_tokens", "compare_steps", "unit"):
        add(f"--{name.replace('_', '-')}", type=int)
    add("--offload-ratio", default="0.95")
    add("--settings", default="", help="memory flags of the trainer, instead of the part's")
    add("--more", default="", help="further flags of the trainer")
    add("--seed", type=int, default=1234)
    add("--seconds", type=float, default=480.0, help="after which no further run begins")
    add("--case", choices=("ds_usp", "ALST"), default="ds_usp", help="of longest")
    add("--trials", type=int, default=6, help="of longest")
    add("--first", type=int, help="tokens of the first trial of longest (default: --tokens)")
    add("--only", nargs="+", default=[], metavar="NAME", help="the runs of flags to measure")
    add("--always", nargs="+", default=[], metavar="NAME", choices=SETTINGS, help="of flags")
    args = parser.parse_args()
    defaults = OTHERS | FULL[args.part] | (SMOKE if args.smoke else {})
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.part == "layer":
        args.layers = 1
    if args.smoke and args.window:
        args.window = 64
    args.first = args.first or args.tokens
    args.out = args.out or Path("bench_length")
    return args


def main() -> None:
    """Run the part that the command line names."""
    args = parse()
    if select_device(args.device) == "cuda":  # for every case and row alike
        os.environ.update(ds_usp.allocator_variables(os.environ, expandable_segments=True))
    prepare_deepspeed()
    args.out.mkdir(parents=True, exist_ok=True)
    session = Session.start(args.device, 600)
    session.print0(f"[{time.monotonic() - BEGIN:6.1f} s] the ranks have met")
    if not session.on_gpu:
        torch.set_num_threads(1)
    PARTS[args.part](session, args)
    session.close()


if __name__ == "__main__":
    main()
