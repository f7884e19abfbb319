"""Attention on several GPUs: every ulysses x ring split, beside the single-GPU kernel and peers.

    torchrun --nproc-per-node 4 scripts/bench/bench_attention.py --out results.csv
    torchrun --nproc-per-node 4 scripts/bench/bench_attention.py --errors --out errors.csv

Contenders of one shape run interleaved, round after round, so that a drifting clock meets all of
them; a number is the median over rounds of the slowest rank. In a round each first runs for
--settle seconds, so that the GPU has the clock of this one and not of the one before, then a few
steps in a row, as the layers of a model do, and their mean counts. FLOPs count the causal half,
forward + backward 3.5 x the forward.

With --graphs every step is captured in a CUDA graph and its launch is timed: where passes are
short, it is the host that is measured without.

With --errors nothing is timed: the error of every split against fp64, in units of the error that
the same kernel makes on one GPU. Above 1.5, or where it is no number, the script fails. Tiny, on
CPUs: --device cpu --shapes 512:4:4:16.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import reference
from baselines import PEERS, Shape, all_contenders, all_meshes, parsed, shape_flags
from bench_harness import Session, Table, flags, race_flags, settling

import ds_usp

COLUMNS = ("shape", "contender", "ms", "tflop_per_s_per_gpu", "share_of_kernel", "extra_gib")
LONGEST_CHECKED = 8192
LARGEST_RATIO = 1.5


def main() -> None:
    """Measure or check what the flags ask for; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    shapes = [Shape.parse(text) for text in args.shapes]
    passed = check(session, args, shapes) if args.errors else race(session, args, shapes)
    session.close()
    sys.exit(not passed)


def race(session: Session, args: argparse.Namespace, shapes: Sequence[Shape]) -> bool:
    """Time all contenders on each shape."""
    note = "bf16, causal, batch 1" + (
        ", in CUDA graphs; extra_gib of the calls that they hold" if args.graphs else ""
    )
    table = Table(session, args.out, COLUMNS, note)
    contenders = all_contenders(args.kernels, args.peers)
    for shape in shapes:
        begin = time.monotonic()
        steps, extra = {}, {}
        for contender in contenders:
            step = contender.prepared(session, shape, args.forward)
            if step is None:
                continue
            extra[contender.label] = contender.extra_gib(session, step)
            made = session.attempt(partial(session.captured, step)) if args.graphs else step
            if isinstance(made, str):
                session.say(f"{shape}  {contender.label}: left out, no CUDA graph of it: {made}")
            else:
                steps[contender.label] = made
        medians = session.medians(steps, args.rounds, args.in_a_row, settling(args))
        tflop = shape.tflop * (1 / 3.5 if args.forward else 1.0)
        for name, seconds in medians.items():
            rate = tflop / session.world / seconds
            share = medians.get(f"one GPU, {name.split(', ')[1]}", float("nan")) / seconds
            figures = (f"{seconds * 1e3:.3f}", f"{rate:.1f}", f"{share:.3f}", f"{extra[name]:.2f}")
            table.add([str(shape), name, *figures])
            session.say(
                f"{shape}  {name:30} {seconds * 1e3:9.2f} ms {rate:6.1f} TFLOP/s per GPU "
                f"{share:7.1%} of the kernel {extra[name]:6.2f} GiB"
            )
        session.say(f"{shape}  took {time.monotonic() - begin:.0f} s")
    return True


def check(session: Session, args: argparse.Namespace, shapes: Sequence[Shape]) -> bool:
    """Whether every split errs about as much as its kernel does on one GPU, and there was one."""
    kernel_names = [f"kernel_{name}" for name in reference.NAMES]
    columns = ["shape", "contender", "worst_ratio", *reference.NAMES, *kernel_names]
    table = Table(session, args.out, columns, "bf16, causal, batch 1; relative errors against fp64")
    meshes = all_meshes()
    short = [replace(shape, seq_len=min(shape.seq_len, LONGEST_CHECKED)) for shape in shapes]
    ratios = []
    for shape in dict.fromkeys(short):
        inputs = reference.fresh_inputs(session, shape)
        true = reference.causal_truth(*inputs)
        for kernel in args.kernels:
            alone = tried(session, ds_usp.SequenceMesh.single(), kernel, inputs, true)
            if isinstance(alone, str):
                session.say(f"{shape}  one GPU, {kernel}: left out, {alone}")
                continue
            for mesh in meshes:
                name = f"ds_usp {mesh.ulysses_degree}x{mesh.ring_degree}, {kernel}"
                ours = tried(session, mesh, kernel, inputs, true)
                if isinstance(ours, str):
                    session.say(f"{shape}  {name}: fails, {ours}")
                    ours = [float("nan")] * len(reference.NAMES)
                ratios.append(reference.worst_ratio(ours, alone))
                table.add([str(shape), name, *(f"{x:.4g}" for x in (ratios[-1], *ours, *alone))])
                session.say(f"{shape}  {name:30} {ratios[-1]:.3f} x the kernel's error")
    passed = bool(ratios) and all(ratio <= LARGEST_RATIO for ratio in ratios)
    session.say(f"{len(ratios)} checked: {'passed' if passed else 'FAILED'}")
    return passed


def tried(
    session: Session,
    mesh: ds_usp.SequenceMesh,
    kernel: str,
    inputs: reference.Tensors,
    true: reference.Tensors,
) -> list[float] | str:
    """The errors of one attention, or why it cannot run."""
    return session.attempt(lambda: reference.errors(session, mesh, kernel, inputs, true))


def parse() -> argparse.Namespace:
    """The flags."""
    parser = flags(__doc__)
    shape_flags(parser, "32768:32:32:128", "131072:32:32:128")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="default: all; none on CPUs")
    race_flags(parser)
    parser.add_argument("--forward", action="store_true", help="forward only")
    parser.add_argument("--graphs", action="store_true", help="launch CUDA graphs of the steps")
    parser.add_argument("--errors", action="store_true", help="check instead of measure")
    args = parsed(parser)
    if args.graphs and (args.errors or args.device == "cpu"):
        parser.error("--graphs times CUDA graphs: not with --errors or --device cpu")
    if args.peers is None:
        args.peers = list(PEERS) if args.device == "cuda" else []
    return args


if __name__ == "__main__":
    main()
