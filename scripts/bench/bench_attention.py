r"""Attention on several GPUs: every ulysses x ring mesh, the single-GPU kernel and other libraries.

    torchrun --nproc-per-node 4 scripts/bench/bench_attention.py --out results.csv
    torchrun --nproc-per-node 4 scripts/bench/bench_attention.py --errors --out errors.csv
    torchrun --nproc-per-node 2 scripts/bench/bench_attention.py --shapes short inference \
        --kernels flash4 cudnn --peers deepspeed plain --rounds 5 --out short.csv

The baselines of one shape run interleaved, round after round, so that a drifting clock affects
all of them; a number is the median over rounds of the slowest rank. In each round a baseline first
runs for --settle seconds to warm up the clock, then --in-a-row steps, whose mean is recorded. FLOPs
count the visible pairs; forward + backward is 3.5 x the forward. The sets of shapes are in
shapes.py; `python scripts/bench/tables.py --compare short.csv` prints the rows as a table.

With --graphs every step is captured in a CUDA graph and the replay is timed: short passes are
launch-bound without a graph.

With --errors nothing is timed: the script reports the error of every mesh and library against fp64
as a multiple of the error of the same kernel on one GPU, or of the first of --kernels for a library
with a kernel that is not among them, and fails if a mesh of ds_usp is above 1.5 or NaN. Smallest
run, on CPUs: --device cpu --shapes 512:4:4:16.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import reference
from baselines import (
    COLUMNS,
    PEERS,
    Baseline,
    all_baselines,
    all_meshes,
    ds_usp_baseline,
    parse_baseline_args,
    shape_flags,
    time_baselines,
)
from bench_harness import Session, Table, common_flags, comparison_flags
from shapes import Shape, requested_shapes

import ds_usp

LONGEST_CHECKED = 8192
LARGEST_RATIO = 1.5


def main() -> None:
    """Measure or check what the flags ask for; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    shapes = requested_shapes(args)
    passed = check(session, args, shapes) if args.errors else compare(session, args, shapes)
    session.close()
    sys.exit(not passed)


def compare(session: Session, args: argparse.Namespace, shapes: Sequence[Shape]) -> bool:
    """Time all baselines on each shape."""
    note = "bf16; causal, batch 1, forward + backward unless the shape has a word for another" + (
        "; in CUDA graphs; extra_gib of the calls that they hold" if args.graphs else ""
    )
    table = Table(session, args.out, ("shape", *COLUMNS), note)
    baselines = all_baselines(args.kernels, args.peers)
    for shape in shapes:
        start = time.monotonic()
        time_baselines(session, args, table, shape, baselines, graphs=args.graphs)
        session.print0(f"{shape}  took {time.monotonic() - start:.0f} s")
    return True


def check(session: Session, args: argparse.Namespace, shapes: Sequence[Shape]) -> bool:
    """True if at least one mesh was checked and each errs at most 1.5 x its single-GPU kernel."""
    kernel_names = [f"kernel_{name}" for name in reference.NAMES]
    columns = ["shape", "contender", "worst_ratio", *reference.NAMES, *kernel_names]
    table = Table(session, args.out, columns, "bf16, causal, batch 1; relative errors against fp64")
    meshes = all_meshes()
    peers = [baseline for peer in args.peers for baseline in PEERS[peer](args.kernels)]
    short = [replace(shape, seq_len=min(shape.seq_len, LONGEST_CHECKED)) for shape in shapes]
    ratios = []
    for shape in dict.fromkeys(short):
        inputs = reference.fresh_inputs(session, shape)
        expected = reference.causal_reference(session, shape, inputs)
        for kernel in args.kernels:
            alone = ds_usp_baseline(ds_usp.SequenceMesh.single(), kernel)
            kernel_errors = errors_or_reason(session, alone, shape, inputs, expected)
            if isinstance(kernel_errors, str):
                session.print0(f"{shape}  one GPU, {kernel}: left out, {kernel_errors}")
                continue
            ours = [ds_usp_baseline(mesh, kernel) for mesh in meshes]
            libraries = [peer for peer in peers if kernel == kernel_beside(peer, args.kernels)]
            for baseline in [*ours, *libraries]:
                errors = errors_or_reason(session, baseline, shape, inputs, expected)
                if isinstance(errors, str):
                    session.print0(f"{shape}  {baseline.label}: fails, {errors}")
                    if baseline.mesh is None:
                        continue
                    errors = [float("nan")] * len(reference.NAMES)
                ratio = reference.worst_ratio(errors, kernel_errors)
                ratios += [ratio] if baseline.mesh is not None else []
                numbers = ratio, *errors, *kernel_errors
                table.add([str(shape), baseline.label, *(f"{x:.4g}" for x in numbers)])
                session.print0(f"{shape}  {baseline.label:30} {ratio:.3f} x the kernel's error")
    passed = bool(ratios) and all(ratio <= LARGEST_RATIO for ratio in ratios)
    session.print0(f"{len(ratios)} meshes checked: {'passed' if passed else 'FAILED'}")
    return passed


def kernel_beside(peer: Baseline, kernels: Sequence[str]) -> str:
    """The kernel whose errors a library's are a multiple of: its own, or the first."""
    return peer.kernel if peer.kernel in kernels else kernels[0]


def errors_or_reason(
    session: Session,
    baseline: Baseline,
    shape: Shape,
    inputs: reference.Tensors,
    expected: reference.Tensors,
) -> list[float] | str:
    """Relative L2 errors of out, dq, dk and dv, or the first rank's message if any rank fails.

    Collective over all ranks; the same result on each. ds_usp over ``SequenceMesh.single()`` gives
    the errors of the kernel alone, with which the others are compared.

    Args:
        inputs: q, k, v and dout of the full sequence.
        expected: out, dq, dk and dv in fp64.
    """
    return session.try_all_ranks(
        lambda: reference.errors(session, baseline, shape, inputs, expected)
    )


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    shape_flags(parser, "32768:32:32:128", "131072:32:32:128")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="default: all; none on CPUs")
    comparison_flags(parser)
    parser.add_argument("--forward", action="store_true", help="forward only")
    parser.add_argument("--graphs", action="store_true", help="launch CUDA graphs of the steps")
    parser.add_argument("--errors", action="store_true", help="check instead of measure")
    args = parse_baseline_args(parser)
    if args.graphs and (args.errors or args.device == "cpu"):
        parser.error("--graphs times CUDA graphs: not with --errors or --device cpu")
    if args.errors and any(s.forward or s.full or s.window for s in requested_shapes(args)):
        parser.error("--errors checks causal shapes without a window, forward and backward")
    if args.peers is None:
        args.peers = list(PEERS) if args.device == "cuda" else []
    return args


if __name__ == "__main__":
    main()
