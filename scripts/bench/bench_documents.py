"""Packed documents and windows on several GPUs, beside the single-GPU kernel and peers.

    torchrun --nproc-per-node 4 scripts/bench/bench_documents.py --out documents.csv

One sequence is packed of documents whose lengths are log-uniform, the same on every run. Every
split runs on them in the layout that is made for them and in zigzag, against the same kernel on the
same documents on one GPU with its share of the heads. Peers that take no documents say so in a
row; what they can do instead, attention to the whole sequence, is timed beside it. Then every split
runs with a window and without. FLOPs count the pairs that are seen, forward + backward 3.5 x the
forward; contenders run interleaved, as in bench_attention.py. Tiny, on CPUs: --device cpu --shape
256:4:4:16 --documents 8:64 --window 32 --rounds 1.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from baselines import PEERS, Attend, Contender, Shape, all_meshes, contender_flags, parsed
from bench_harness import Session, Table, flags, race_flags, settling

import ds_usp

COLUMNS = ("workload", "contender", "ms", "tflop_per_s_per_gpu", "share_of_kernel", "extra_gib")
SHORT = 1024  # tokens on which a peer is asked whether it takes documents


def main() -> None:
    """Measure both workloads; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    shape = Shape.parse(args.shape)
    shortest, longest = map(int, args.documents.split(":"))
    borders = packed(shape.seq_len, shortest, longest, args.seed)
    note = f"bf16, causal, batch 1; documents {borders}"
    table = Table(session, args.out, COLUMNS, note)
    session.say(f"{len(borders) - 1} documents: {borders}")
    race_documents(session, args, table, shape, borders)
    for name, reason in refusals(session, args.peers, shape):
        table.add(["documents", name, "refused", reason])
        session.say(f"documents  {name:32} takes no documents: {reason}")
    race_windows(session, args, table, shape)
    session.close()


def packed(tokens: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Borders of documents whose lengths are log-uniform; the last one ends with the sequence."""
    draw, borders = random.Random(seed), [0]
    while borders[-1] < tokens:
        length = int(shortest * (longest / shortest) ** draw.random())
        borders.append(min(tokens, borders[-1] + length))
    return borders


def tflop(shape: Shape, pairs: int) -> float:
    """Forward and backward of so many (query, key) pairs."""
    return 3.5 * 4 * pairs * shape.heads * shape.head_dim / 1e12


def race_documents(
    session: Session, args: argparse.Namespace, table: Table, shape: Shape, borders: list[int]
) -> None:
    """Ours and the kernel alone on the documents; peers on the whole sequence."""
    mask = ds_usp.MaskSpec.causal(borders)
    pairs = sum((end - start) * (end - start + 1) // 2 for start, end in pairwise(borders))
    contenders = [one_gpu(kernel, mask) for kernel in args.kernels]
    contenders += [
        ours(mesh, kernel, mask, layout, borders)
        for kernel in args.kernels
        for mesh in all_meshes()
        for layout in (("balanced", "zigzag") if mesh.ring_degree > 1 else ("zigzag",))
    ]
    whole = [
        replace(each, name=f"{each.name} (all pairs)")
        for peer in args.peers
        for each in PEERS[peer](args.kernels)
    ]
    race(session, args, table, "documents", shape, [*contenders, *whole], tflop(shape, pairs))


def race_windows(session: Session, args: argparse.Namespace, table: Table, shape: Shape) -> None:
    """Ours with a window and with none."""
    left = args.window
    full = shape.seq_len * (shape.seq_len + 1) // 2
    hidden = shape.seq_len - 1 - left
    seen = full - max(hidden, 0) * (max(hidden, 0) + 1) // 2
    for name, mask, pairs in (
        (f"window {left}", ds_usp.MaskSpec.window(left), seen),
        ("causal", ds_usp.MaskSpec.causal(), full),
    ):
        contenders = [one_gpu(kernel, mask) for kernel in args.kernels]
        contenders += [
            ours(mesh, kernel, mask, layout, [])
            for kernel in args.kernels
            for mesh in all_meshes()
            for layout in (("contiguous", "zigzag") if mesh.ring_degree > 1 else ("zigzag",))
        ]
        race(session, args, table, name, shape, contenders, tflop(shape, pairs))


def race(
    session: Session,
    args: argparse.Namespace,
    table: Table,
    workload: str,
    shape: Shape,
    contenders: Sequence[Contender],
    work: float,
) -> None:
    """Time contenders on one workload of ``work`` TFLOP."""
    steps, extra = {}, {}
    for contender in contenders:
        step = contender.prepared(session, shape, forward_only=False)
        if step is not None:
            steps[contender.label] = step
            extra[contender.label] = contender.extra_gib(session, step)
    medians = session.medians(steps, args.rounds, args.in_a_row, settling(args))
    for name, seconds in medians.items():
        rate = work / session.world / seconds
        share = medians.get(f"one GPU, {name.split(', ')[-1]}", float("nan")) / seconds
        figures = (f"{seconds * 1e3:.3f}", f"{rate:.1f}", f"{share:.3f}", f"{extra[name]:.2f}")
        table.add([workload, name, *figures])
        session.say(
            f"{workload}  {name:44} {seconds * 1e3:9.2f} ms {rate:6.1f} TFLOP/s per GPU "
            f"{share:7.1%} of the kernel {extra[name]:6.2f} GiB"
        )


def ours(
    mesh: ds_usp.SequenceMesh,
    kernel: str,
    mask: ds_usp.MaskSpec,
    kind: str,
    borders: Sequence[int],
) -> Contender:
    """This package over one mesh, in one layout."""

    def attend(shape: Shape) -> tuple[Attend, Shape, int]:
        documents = borders if kind == "balanced" else ()
        layout = mesh.layout(kind, shape.seq_len, documents)
        return attention(mesh, layout, mask, kernel), shape, layout.length(mesh.rank)

    name = f"ds_usp {mesh.ulysses_degree}x{mesh.ring_degree} {kind}"
    return Contender(name, kernel, attend, mesh)


def one_gpu(kernel: str, mask: ds_usp.MaskSpec) -> Contender:
    """The kernel alone on the whole sequence and a GPU's share of the heads: the limit."""

    def attend(shape: Shape) -> tuple[Attend, Shape, int]:
        world, mesh = dist.get_world_size(), ds_usp.SequenceMesh.single()
        share = replace(shape, heads=shape.heads // world, kv_heads=max(shape.kv_heads // world, 1))
        layout = mesh.layout("contiguous", shape.seq_len)
        return attention(mesh, layout, mask, kernel), share, shape.seq_len

    return Contender("one GPU", kernel, attend)


def attention(
    mesh: ds_usp.SequenceMesh, layout: ds_usp.TokenLayout, mask: ds_usp.MaskSpec, kernel: str
) -> Attend:
    """usp_attention as a function of q, k and v."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ds_usp.usp_attention(q, k, v, mesh=mesh, layout=layout, mask=mask, kernel=kernel)

    return attend


# ------------------------------------------------------------------ peers


def refusals(session: Session, peers: Sequence[str], shape: Shape) -> Iterator[tuple[str, str]]:
    """Each peer that cannot be told documents, and what it says when it is."""
    for peer in (each for each in ASKED if each in peers):
        answer = session.attempt(lambda ask=ASKED[peer]: ask(session, shape))
        yield peer, answer if isinstance(answer, str) else "it ran: read its result before use"


def ask_yunchang(session: Session, shape: Shape) -> None:
    """LongContextAttention, zigzag, with cumulative lengths."""
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    set_seq_parallel_pg(1, session.world, session.rank, session.world)
    attention = LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.TORCH_FLASH)
    q, k, v, _ = shape.random(session.device, SHORT // session.world)
    borders = torch.tensor([0, SHORT // 3, SHORT], device=session.device, dtype=torch.int32)
    attention(q, k, v, causal=True, cu_seqlens=borders)


def ask_torch(session: Session, shape: Shape) -> None:
    """scaled_dot_product_attention under context_parallel, with the documents as its mask."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (session.world,))
    tokens = SHORT // session.world
    q, k, v, _ = (x.transpose(1, 2) for x in shape.random(session.device, tokens))
    seen = torch.ones(tokens, SHORT, device=session.device, dtype=torch.bool)
    with context_parallel(mesh):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


ASKED: dict[str, Callable[[Session, Shape], None]] = {
    "yunchang": ask_yunchang,
    "torch": ask_torch,
}


def parse() -> argparse.Namespace:
    """The flags."""
    parser = flags(__doc__)
    parser.add_argument("--shape", default="131072:32:32:128", help="seq_len:heads:kv_heads:dim")
    parser.add_argument("--documents", default="2048:32768", help="shortest:longest, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=4096, help="tokens to the left")
    contender_flags(parser)
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="default: yunchang, torch")
    race_flags(parser)
    args = parsed(parser)
    if args.peers is None:
        args.peers = ["yunchang", "torch"] if args.device == "cuda" else []
    return args


if __name__ == "__main__":
    main()
