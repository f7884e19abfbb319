"""Packed documents and windows on several GPUs, beside the single-GPU kernel and peers.

    torchrun --nproc-per-node 4 scripts/bench/bench_documents.py --out documents.csv

One sequence holds packed documents of log-uniform lengths, the same in every run. Every mesh runs
in the layouts balanced and zigzag, compared with the same kernel on the same documents on one GPU
with 1/world of the heads. Libraries without packed documents get a row "refused"; their dense
attention over the full sequence is timed instead. Then every mesh runs with and without a sliding
window. FLOPs count the visible pairs; forward + backward is 3.5 x the forward. Baselines run
interleaved, as in bench_attention.py. Smallest run, on CPUs: --device cpu --shape 256:4:4:16
--documents 8:64 --window 32 --rounds 1.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from baselines import (
    PEERS,
    Attend,
    Baseline,
    Shape,
    all_meshes,
    baseline_flags,
    parse_baseline_args,
)
from bench_harness import Session, Table, common_flags, comparison_flags, warm_up_seconds

import ds_usp

COLUMNS = ("workload", "contender", "ms", "tflop_per_s_per_gpu", "share_of_kernel", "extra_gib")
SHORT = 1024  # tokens of the probe for packed documents in another library


def main() -> None:
    """Measure both workloads; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    shape = Shape.parse(args.shape)
    shortest, longest = map(int, args.documents.split(":"))
    borders = packed(shape.seq_len, shortest, longest, args.seed)
    note = f"bf16, causal, batch 1; documents {borders}"
    table = Table(session, args.out, COLUMNS, note)
    session.print0(f"{len(borders) - 1} documents: {borders}")
    compare_documents(session, args, table, shape, borders)
    for name, reason in refusals(session, args.peers, shape):
        table.add(["documents", name, "refused", reason])
        session.print0(f"documents  {name:32} takes no documents: {reason}")
    compare_windows(session, args, table, shape)
    session.close()


def packed(tokens: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Cumulative log-uniform document lengths (``cu_seqlens``), the last cut at ``tokens``."""
    draw, borders = random.Random(seed), [0]
    while borders[-1] < tokens:
        length = int(shortest * (longest / shortest) ** draw.random())
        borders.append(min(tokens, borders[-1] + length))
    return borders


def tflop(shape: Shape, pairs: int) -> float:
    """TFLOP of forward and backward for ``pairs`` visible (query, key) pairs."""
    return 3.5 * 4 * pairs * shape.heads * shape.head_dim / 1e12


def compare_documents(
    session: Session, args: argparse.Namespace, table: Table, shape: Shape, borders: list[int]
) -> None:
    """ds_usp and the single-GPU kernel on documents; other libraries on the full sequence."""
    mask = ds_usp.MaskSpec.causal(borders)
    pairs = sum((end - start) * (end - start + 1) // 2 for start, end in pairwise(borders))
    baselines = [single_gpu_baseline(kernel, mask) for kernel in args.kernels]
    baselines += [
        ds_usp_baseline(mesh, kernel, mask, layout, borders)
        for kernel in args.kernels
        for mesh in all_meshes()
        for layout in (("balanced", "zigzag") if mesh.ring_degree > 1 else ("zigzag",))
    ]
    dense_baselines = [
        replace(baseline, name=f"{baseline.name} (all pairs)")
        for peer in args.peers
        for baseline in PEERS[peer](args.kernels)
    ]
    compare(
        session,
        args,
        table,
        "documents",
        shape,
        [*baselines, *dense_baselines],
        tflop(shape, pairs),
    )


def compare_windows(session: Session, args: argparse.Namespace, table: Table, shape: Shape) -> None:
    """ds_usp with a sliding window and with a full causal mask."""
    left = args.window
    full = shape.seq_len * (shape.seq_len + 1) // 2
    masked = shape.seq_len - 1 - left
    visible_pairs = full - max(masked, 0) * (max(masked, 0) + 1) // 2
    for name, mask, pairs in (
        (f"window {left}", ds_usp.MaskSpec.window(left), visible_pairs),
        ("causal", ds_usp.MaskSpec.causal(), full),
    ):
        baselines = [single_gpu_baseline(kernel, mask) for kernel in args.kernels]
        baselines += [
            ds_usp_baseline(mesh, kernel, mask, layout, [])
            for kernel in args.kernels
            for mesh in all_meshes()
            for layout in (("contiguous", "zigzag") if mesh.ring_degree > 1 else ("zigzag",))
        ]
        compare(session, args, table, name, shape, baselines, tflop(shape, pairs))


def compare(
    session: Session,
    args: argparse.Namespace,
    table: Table,
    workload: str,
    shape: Shape,
    baselines: Sequence[Baseline],
    work: float,
) -> None:
    """Time baselines on one workload of ``work`` TFLOP."""
    steps, extra = {}, {}
    for baseline in baselines:
        step = baseline.prepared(session, shape, forward_only=False)
        if step is not None:
            steps[baseline.label] = step
            extra[baseline.label] = baseline.extra_gib(session, step)
    medians = session.medians(steps, args.rounds, args.in_a_row, warm_up_seconds(args))
    for name, seconds in medians.items():
        rate = work / session.world / seconds
        share = medians.get(f"one GPU, {name.split(', ')[-1]}", float("nan")) / seconds
        figures = (f"{seconds * 1e3:.3f}", f"{rate:.1f}", f"{share:.3f}", f"{extra[name]:.2f}")
        table.add([workload, name, *figures])
        session.print0(
            f"{workload}  {name:44} {seconds * 1e3:9.2f} ms {rate:6.1f} TFLOP/s per GPU "
            f"{share:7.1%} of the kernel {extra[name]:6.2f} GiB"
        )


def ds_usp_baseline(
    mesh: ds_usp.SequenceMesh,
    kernel: str,
    mask: ds_usp.MaskSpec,
    kind: str,
    borders: Sequence[int],
) -> Baseline:
    """ds_usp over one mesh, in one layout."""

    def attend(shape: Shape) -> tuple[Attend, Shape, int]:
        documents = borders if kind == "balanced" else ()
        layout = mesh.layout(kind, shape.seq_len, documents)
        return attention(mesh, layout, mask, kernel), shape, layout.length(mesh.rank)

    name = f"ds_usp {mesh.ulysses_degree}x{mesh.ring_degree} {kind}"
    return Baseline(name, kernel, attend, mesh)


def single_gpu_baseline(kernel: str, mask: ds_usp.MaskSpec) -> Baseline:
    """The kernel without communication: full sequence, 1/world of the heads. The upper limit."""

    def attend(shape: Shape) -> tuple[Attend, Shape, int]:
        world, mesh = dist.get_world_size(), ds_usp.SequenceMesh.single()
        share = replace(shape, heads=shape.heads // world, kv_heads=max(shape.kv_heads // world, 1))
        layout = mesh.layout("contiguous", shape.seq_len)
        return attention(mesh, layout, mask, kernel), share, shape.seq_len

    return Baseline("one GPU", kernel, attend)


def attention(
    mesh: ds_usp.SequenceMesh, layout: ds_usp.TokenLayout, mask: ds_usp.MaskSpec, kernel: str
) -> Attend:
    """usp_attention as a function of q, k and v."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ds_usp.usp_attention(q, k, v, mesh=mesh, layout=layout, mask=mask, kernel=kernel)

    return attend


# ------------------------------------------------------------------ peers


def refusals(session: Session, peers: Sequence[str], shape: Shape) -> Iterator[tuple[str, str]]:
    """Libraries that do not support packed documents, each with its error message."""
    for peer in (name for name in PROBES if name in peers):
        answer = session.try_all_ranks(lambda probe=PROBES[peer]: probe(session, shape))
        yield peer, answer if isinstance(answer, str) else "it ran: check its result before use"


def probe_yunchang(session: Session, shape: Shape) -> None:
    """LongContextAttention, zigzag, with cumulative lengths."""
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    set_seq_parallel_pg(1, session.world, session.rank, session.world)
    attention = LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.TORCH_FLASH)
    q, k, v, _ = shape.random(session.device, SHORT // session.world)
    borders = torch.tensor([0, SHORT // 3, SHORT], device=session.device, dtype=torch.int32)
    attention(q, k, v, causal=True, cu_seqlens=borders)


def probe_torch(session: Session, shape: Shape) -> None:
    """scaled_dot_product_attention under context_parallel, with the documents as its mask."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (session.world,))
    tokens = SHORT // session.world
    q, k, v, _ = (x.transpose(1, 2) for x in shape.random(session.device, tokens))
    visible = torch.ones(tokens, SHORT, device=session.device, dtype=torch.bool)
    with context_parallel(mesh):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)


PROBES: dict[str, Callable[[Session, Shape], None]] = {
    "yunchang": probe_yunchang,
    "torch": probe_torch,
}


def parse() -> argparse.Namespace:
    """The flags."""
    parser = common_flags(__doc__)
    parser.add_argument("--shape", default="131072:32:32:128", help="seq_len:heads:kv_heads:dim")
    parser.add_argument("--documents", default="2048:32768", help="shortest:longest, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=4096, help="tokens to the left")
    baseline_flags(parser)
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="default: yunchang, torch")
    comparison_flags(parser)
    args = parse_baseline_args(parser)
    if args.peers is None:
        args.peers = ["yunchang", "torch"] if args.device == "cuda" else []
    return args


if __name__ == "__main__":
    main()
