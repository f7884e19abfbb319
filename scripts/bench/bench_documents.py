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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from baselines import (
    COLUMNS,
    PEERS,
    Baseline,
    all_meshes,
    baseline_flags,
    ds_usp_baseline,
    parse_baseline_args,
    single_gpu_baseline,
    time_baselines,
)
from bench_harness import Session, Table, common_flags, comparison_flags
from shapes import Shape, packed

import ds_usp

SHORT = 1024  # tokens of the probe for packed documents in another library


def main() -> None:
    """Measure both workloads; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    shape = Shape.parse(args.shape)
    shortest, longest = map(int, args.documents.split(":"))
    borders = packed(shape.seq_len, shortest, longest, args.seed)
    note = f"bf16, causal, batch 1; documents {borders}"
    table = Table(session, args.out, ("workload", *COLUMNS), note)
    session.print0(f"{len(borders) - 1} documents: {borders}")
    compare_documents(session, args, table, shape, borders)
    for name, reason in refusals(session, args.peers, shape):
        table.add(["documents", name, "refused", reason])
        session.print0(f"documents  {name:32} takes no documents: {reason}")
    compare_windows(session, args, table, shape)
    session.close()


def tflop(shape: Shape, pairs: int) -> float:
    """TFLOP of forward and backward for ``pairs`` visible (query, key) pairs."""
    return 3.5 * 4 * pairs * shape.heads * shape.head_dim / 1e12


def meshes_by_layout(
    kernels: Sequence[str], mask: ds_usp.MaskSpec, kind: str, documents: Sequence[int] = ()
) -> list[Baseline]:
    """The single-GPU kernel, and ds_usp on every mesh: in ``kind`` with a ring, and in zigzag."""
    baselines = [single_gpu_baseline(kernel, mask) for kernel in kernels]
    for kernel in kernels:
        for mesh in all_meshes():
            for layout in (kind, "zigzag") if mesh.ring_degree > 1 else ("zigzag",):
                borders = documents if layout == "balanced" else ()
                baseline = ds_usp_baseline(mesh, kernel, mask, layout, borders)
                baselines.append(replace(baseline, name=f"{baseline.name} {layout}"))
    return baselines


def compare_documents(
    session: Session, args: argparse.Namespace, table: Table, shape: Shape, borders: list[int]
) -> None:
    """ds_usp and the single-GPU kernel on documents; other libraries on the full sequence."""
    pairs = sum((end - start) * (end - start + 1) // 2 for start, end in pairwise(borders))
    baselines = meshes_by_layout(args.kernels, ds_usp.MaskSpec.causal(borders), "balanced", borders)
    baselines += [
        replace(baseline, name=f"{baseline.name} (all pairs)")
        for peer in args.peers
        for baseline in PEERS[peer](args.kernels)
    ]
    work = tflop(shape, pairs)
    time_baselines(session, args, table, shape, baselines, workload="documents", tflop=work)


def compare_windows(session: Session, args: argparse.Namespace, table: Table, shape: Shape) -> None:
    """Time ds_usp with a sliding window and with a full causal mask."""
    left = args.window
    full = shape.seq_len * (shape.seq_len + 1) // 2
    masked = max(shape.seq_len - 1 - left, 0)
    visible_pairs = full - masked * (masked + 1) // 2
    for name, mask, pairs in (
        (f"window {left}", ds_usp.MaskSpec.window(left), visible_pairs),
        ("causal", ds_usp.MaskSpec.causal(), full),
    ):
        baselines = meshes_by_layout(args.kernels, mask, "contiguous")
        work = tflop(shape, pairs)
        time_baselines(session, args, table, shape, baselines, workload=name, tflop=work)


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
    """Parse the command line."""
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
