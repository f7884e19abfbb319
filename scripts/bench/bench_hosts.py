r"""What attention sends between two hosts, and how long it takes.

    python scripts/hosts/hosts.py run -- torchrun scripts/bench/bench_hosts.py bytes --out bytes.csv
    python scripts/bench/bench_hosts.py grid --out times.jsonl --links 1:0.1 2.5:0.1 10:2
    torchrun --nnodes 2 ... scripts/bench/bench_hosts.py times --device cuda --out times.jsonl

``bytes`` compares the ledger's bytes between nodes with the counters of the network interface, and
fails where they differ by more than 5 %. ``times`` has contenders interleaved, round after round; a
number is the median over rounds of the slowest rank. ``grid`` makes hosts with each link, profiles
them for the planner and runs ``times`` there; ``plot`` draws its file. A shape that the file has is
not run again.

On CPUs the kernel computes nothing: it sleeps as long as a GPU of ``--tflops`` would compute. With
``--scale 32`` heads are 1/32 as wide, links 1/32 as fast and GPUs too: times are those of the full
sizes, which the file has, but two cores send only so many bytes a second.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from baselines import PEERS, Baseline, ds_usp_baseline
from bench_harness import Session, Table, append_row, read_rows
from shapes import Shape

import ds_usp
from ds_usp.geometry.degrees import divisors
from ds_usp.geometry.tiles import Tile
from ds_usp.kernels.api import QKV, BackwardInputs, KernelCaps, OutLse, SingleTileKernel
from ds_usp.kernels.head_dims import HeadDims
from ds_usp.planner.attention_time import attention_s
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.recurrence.scan import PieceMap, Recurrence, affine_scan

HOSTS = Path(__file__).resolve().parents[1] / "hosts" / "hosts.py"
LARGEST_OVERHEAD = 0.05
STATE = (8, 128, 128)
Step = Callable[[], None]


class SleepingKernel(SingleTileKernel):
    """Results without values, after the time of a GPU: two cores compute attention so slowly that
    no link matters beside them, and sleep at any speed."""

    name = "bench_hosts:SleepingKernel"
    caps = KernelCaps(devices=frozenset(), dtypes=frozenset({torch.bfloat16}), head_dims=HeadDims())
    flop_per_s = 400e12

    def tile_forward(self, qkv: QKV, tile: Tile, scale: float) -> OutLse:
        q, _, v = qkv
        self._sleep(q, tile, 4)
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
        return out, torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def tile_backward(self, saved: BackwardInputs, tile: Tile, scale: float) -> QKV:
        self._sleep(saved.q, tile, 10)
        dq, dk, dv = (torch.zeros_like(x) for x in (saved.q, saved.k, saved.v))
        return dq, dk, dv

    def _sleep(self, q: torch.Tensor, tile: Tile, flop_per_pair: int) -> None:
        pairs = tile.rows * tile.columns * (1.0 if tile.is_full else 0.5)
        time.sleep(flop_per_pair * pairs * q.shape[0] * q.shape[2] * q.shape[3] / self.flop_per_s)


def meshes() -> Iterator[tuple[str, ds_usp.SequenceMesh, ds_usp.Tuning]]:
    """Every ulysses x ring, either axis inside the hosts, and double rings where a host has several
    ranks of a ring."""
    world = dist.get_world_size()
    for ulysses in reversed(divisors(world)):
        both = ("ulysses-ring", "ring-ulysses") if 1 < ulysses < world else ("ulysses-ring",)
        for order in both:
            mesh = ds_usp.SequenceMesh.from_group(None, ulysses, order)
            inside = ", ring inside" if order == "ring-ulysses" else ""
            name = f"{ulysses} x {world // ulysses}{inside}"
            yield name, mesh, ds_usp.Tuning()
            if 1 < (inner := mesh.ring_ranks_per_node) < mesh.ring_degree:
                yield f"{name}, double ring", mesh, ds_usp.Tuning(inner_ring=inner)


# ------------------------------------------------------------------ bytes


def count_bytes(args: argparse.Namespace, session: Session) -> bool:
    """Print and write what was counted of every case; whether all of it is the ledger's."""
    columns = ["ranks", "mesh", "case", "pass", "host", "ledger_bytes", "counted_bytes", "overhead"]
    table = Table(session, args.out, columns, "bytes that a host sends to the other")
    overheads: list[float] = []
    for name, mesh, case, label, step in byte_cases(args):
        mesh.ledger.reset()
        dist.barrier()
        before = _sent_bytes(args.interface)
        step()
        dist.barrier()
        counted = _sent_bytes(args.interface) - before
        ledger = mesh.ledger
        sums = sum(ledger.between_nodes.values()), sum(ledger.bytes.values())
        ranks = [(0, 0, 0, 0)] * session.world
        dist.all_gather_object(ranks, (int(os.environ["GROUP_RANK"]), counted, *sums))
        for host in sorted({host for host, *_ in ranks}):
            counts, crossing, inside = zip(*(x[1:] for x in ranks if x[0] == host), strict=True)
            seen, sent = max(counts), sum(crossing)
            # Where nothing is to cross, the comparisons of calls do: as a share of what is sent
            # inside the host, since they are none of nothing.
            base = sent or sum(inside)
            overheads.append((seen - sent) / base if base else 0.0)
            numbers = host, sent, seen, f"{overheads[-1]:.4f}"
            table.add([str(session.world), name, case, label, *map(str, numbers)])
            session.print0(
                f"{name:24} {case:22} {label:9} host {host}: ledger {sent / 1e6:8.3f} MB, "
                f"counted {seen / 1e6:8.3f} MB, {overheads[-1]:+.2%}"
            )
    wrong = sum(abs(x) > LARGEST_OVERHEAD for x in overheads)
    session.print0(f"{len(overheads)} rows, {wrong} differ by more than {LARGEST_OVERHEAD:.0%}")
    return bool(overheads) and not wrong


def byte_cases(
    args: argparse.Namespace,
) -> Iterator[tuple[str, ds_usp.SequenceMesh, str, str, Step]]:
    """Name of the mesh, the mesh, what is computed on it, and one pass of it after the other."""
    for name, mesh, tuning in meshes():
        layout = mesh.layout("zigzag", args.seq_len)
        tokens = layout.length(mesh.rank)
        calls: dict[str, Callable[[], torch.Tensor]] = {}
        for kv_heads in args.kv_heads:
            heads = args.heads, kv_heads, kv_heads
            q, k, v = (torch.randn(1, tokens, n, args.head_dim, requires_grad=True) for n in heads)
            calls[f"{args.heads}/{kv_heads} heads"] = partial(
                ds_usp.usp_attention, q, k, v, mesh=mesh, layout=layout,
                mask=ds_usp.MaskSpec.causal(), tuning=tuning,
            )  # fmt: skip
        if "double" not in name:
            x = torch.rand(1, tokens, 8, requires_grad=True)
            scan = Recurrence(_with_states, STATE, STATE, True, piecewise=True), [x]
            where = {"mesh": mesh, "layout": layout, "dims": (1,), "out_dim": 1}
            calls["recurrent states"] = partial(affine_scan, *scan, **where)
            if args.diffusion and "inside" not in name:
                calls["diffusers' Wan"] = _diffusion(mesh)
        for case, call in calls.items():
            out = call()  # the first one opens connections
            if out.requires_grad:
                out.sum().backward()
            outs: list[torch.Tensor] = []
            yield name, mesh, case, "forward", partial(_append, outs, call)
            if outs[0].requires_grad:
                yield name, mesh, case, "backward", outs[0].sum().backward


def _append(outs: list[torch.Tensor], call: Callable[[], torch.Tensor]) -> None:
    outs.append(call())


def _with_states(inputs: list[torch.Tensor], piece: object) -> PieceMap:
    """A scan with the states of a layer of 8 heads whose states and transitions are matrices of 128
    x 128. It is no layer of any model, but sends what one of these sizes sends."""
    (x,) = inputs
    whole = x.mean().expand(1, *STATE)
    exported, across = whole if piece.exports else None, piece.exports and piece.imports
    respond = (lambda state: x * state.mean()) if piece.imports else None
    return PieceMap(x, exported, whole if across else None, respond)


def _diffusion(mesh: ds_usp.SequenceMesh) -> Callable[[], torch.Tensor]:
    """Two blocks of Wan's transformer over 4,096 tokens of video, whose output is small."""
    import diffusers

    from ds_usp.integrations.diffusers import enable

    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        in_channels=4, out_channels=4, attention_head_dim=32, num_attention_heads=8, num_layers=2,
        text_dim=32, freq_dim=32, ffn_dim=32,
    ).eval()  # fmt: skip
    enable(model, mesh)
    video, text = torch.randn(1, 4, 4, 64, 64), torch.randn(1, 16, 32)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(video, torch.tensor([1]), text).sample

    return forward


def _sent_bytes(interface: str) -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            return int(fields.split()[8])
    raise SystemExit(f"bench_hosts.py: no interface {interface}: give --interface (`ip addr`)")


# ------------------------------------------------------------------ times


def measure_times(args: argparse.Namespace, session: Session) -> bool:
    """Time every contender on every shape that the file does not have."""
    SleepingKernel.flop_per_s = args.tflops / args.scale * 1e12
    kernel = SleepingKernel.name if args.device == "cpu" else args.kernel
    made = ((f"ds_usp {name}", *mesh_and_tuning) for name, *mesh_and_tuning in meshes())
    contenders = {name: ds_usp_baseline(mesh, kernel, tuning) for name, mesh, tuning in made}
    for peer in args.peers:
        contenders |= {baseline.name: baseline for baseline in PEERS[peer]([kernel])}
    for shape in map(Shape.parse, args.shapes):
        cell = {"gbit": args.gbit, "delay_ms": args.delay_ms, "shape": str(shape)}
        key = {**cell, "world": session.world}.items()
        if session.all_reduced([any(key <= row.items() for row in read_rows(args.out))])[0]:
            continue
        small = replace(shape, head_dim=shape.head_dim // args.scale)
        steps: dict[str, Step] = {}
        for name, contender in contenders.items():
            step = session.try_all_ranks(partial(_warm, contender, small, session.device))
            if isinstance(step, str):
                session.print0(f"{shape}  {name}: left out, {step}")
            else:
                steps[name] = step
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(args.rounds):
            for name, times in seconds.items():
                times.append(session.seconds(steps[name]))
        for name, times in seconds.items():
            ms = [round(1e3 * x, 2) for x in (statistics.median(times), min(times), max(times))]
            mesh = contenders[name].mesh
            row = {**cell, "contender": name, **dict(zip(("ms", "least", "most"), ms, strict=True))}
            planned = mesh is not None and "double" not in name and args.cluster is not None
            row["predicted_ms"] = predicted_ms(args, mesh, small) if planned else None
            row |= {"rounds": args.rounds, "load": os.getloadavg()[0]}
            append_row(session, args.out, row, ("deepspeed",), f"gloo, scale 1:{args.scale}")
            session.print0(
                f"{args.gbit:5g} Gbit/s {args.delay_ms:4g} ms  {shape}  {name:34} {ms[0]:9.1f} ms "
                f"({ms[1]} to {ms[2]}), planner {row['predicted_ms']}; load {row['load']:.1f}"
            )
    return True


def _warm(contender: Baseline, shape: Shape, device: torch.device) -> Step:
    step = contender.make(shape, device)
    step()  # opens connections
    return step


def predicted_ms(args: argparse.Namespace, mesh: ds_usp.SequenceMesh, shape: Shape) -> float:
    """The planner's time of a call, forward and backward, on the profiled links and this kernel."""
    # A profile of CPUs has their attention: its links are these hosts', its kernels are not.
    cluster = replace(
        load_cluster(str(args.cluster)),
        peak_flop_per_s=args.tflops / args.scale * 1e12,
        attention_efficiency=((1.0, 1.0),),
        calls=(),
    )
    width = shape.heads * shape.head_dim
    model = ModelShape("call", 1, width, width, shape.heads, shape.kv_heads, 1, shape.head_dim)
    degrees = {"ulysses": mesh.ulysses_degree, "ring": mesh.ring_degree, "order": mesh.order}
    work, config = Workload(model, shape.seq_len), ParallelConfig(**degrees)
    both = (attention_s(cluster, work, config, backward=backward) for backward in (False, True))
    return round(1e3 * sum(time.total for time in both), 2)


# ------------------------------------------------------------------ the grid of links


def grid(args: argparse.Namespace) -> int:
    """``times`` on hosts with each link, one after the other; the exit code."""
    hosts, code = [sys.executable, HOSTS, "--name", "grid"], 0
    run = [*hosts, "run", "--timeout", args.timeout, "--", "torchrun"]
    ours = ["--tflops", args.tflops, "--scale", args.scale, "--rounds", args.rounds]
    ours += ["--shapes", *args.shapes, "--peers", *args.peers, "--out", args.out]

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # hosts go down too

    def call(*command: object, **options: Any) -> int:
        return subprocess.run(list(map(str, command)), **options).returncode

    for link in args.links:
        gbit, _, delay = link.partition(":")
        delay = delay or "0"
        up = [*hosts, "up", "--gbit", float(gbit) / args.scale, "--delay-ms", delay]
        call(*up, "--ranks", args.ranks, check=True)
        try:
            cluster = args.out.with_name(f"{args.out.stem}_{gbit}_{delay}.json")
            if not cluster.exists():
                profile = ["-m", "ds_usp", "profile", "--device", "cpu", "--seconds", 5]
                call(*run, *profile, "--out", cluster, stdout=subprocess.DEVNULL)
            times = [*run, __file__, "times", "--gbit", gbit, "--delay-ms", delay, *ours]
            times += ["--cluster", cluster] if cluster.exists() else []
            code = call(*times) or code
        finally:
            call(*hosts, "down")
    return code


def plot(path: Path) -> int:
    """Milliseconds against the link's speed, a line for each contender, beside the rows' file."""
    from ds_usp.planner.plot import new_figure, save_svg

    panels: dict[tuple[str, float], dict[str, list[tuple[float, float]]]] = {}
    for row in read_rows(path):
        lines = panels.setdefault((row["shape"], row["delay_ms"]), {})
        lines.setdefault(row["contender"], []).append((row["gbit"], row["ms"]))
    rows = -(-len(panels) // 2)
    figure = new_figure(11, 3.2 * rows)
    all_axes = figure.subplots(rows, 2, squeeze=False).flat
    for ((shape, delay), lines), axes in zip(sorted(panels.items()), all_axes, strict=False):
        for name, points in lines.items():
            axes.loglog(*zip(*sorted(points), strict=True), marker=".", label=name)
        axes.set_title(f"{shape}, {delay:g} ms one way", loc="left")
        axes.set_xlabel("Gbit/s between the hosts")
        axes.set_ylabel("ms, forward + backward")
        axes.grid(color="#e4e4e4", which="both")
        axes.legend(frameon=False, fontsize="small")
    save_svg(figure, path.with_suffix(".svg"))
    return 0


def main() -> int:
    """Do what the command line says; the exit code."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("command", choices=("bytes", "times", "grid", "plot"))
    add("--out", type=Path, help="the file to write")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--interface", default="eth0", help="bytes: the network interface (default: eth0)")
    add("--heads", type=int, default=8, help="bytes: query heads")
    add("--kv-heads", type=int, nargs="+", default=[8, 2], help="bytes: of each case")
    add("--seq-len", type=int, default=2048, help="bytes: tokens")
    add("--head-dim", type=int, default=64, help="bytes")
    add("--diffusion", action="store_true", help="bytes: also of a diffusion transformer")
    shapes = ["32768:16:16:128", "32768:16:4:128"]
    add("--shapes", nargs="+", default=shapes, help="times: tokens:heads:KV heads:head dim")
    add("--peers", nargs="*", default=["deepspeed"], choices=PEERS, help="times")
    add("--kernel", default="auto", help="times, on GPUs")
    add("--tflops", type=float, default=400, help="times: of the GPU that the kernel stands for")
    add("--scale", type=int, default=1, help="times: see above")
    add("--rounds", type=int, default=3, help="times")
    add("--gbit", type=float, default=0, help="times: of the link, for the file")
    add("--delay-ms", type=float, default=0, help="times: of the link, for the file")
    add("--cluster", type=Path, help="times: what `ds-usp profile` wrote on these hosts")
    add("--links", nargs="+", default=["1:0"], help="grid: Gbit/s:delay in ms, of each link")
    add("--ranks", type=int, default=2, help="grid: of each of the two hosts")
    add("--timeout", type=float, default=300, help="grid: seconds of each program")
    args = parser.parse_args()
    if args.command != "bytes" and args.out is None:
        parser.error("--out: the file to write")
    if args.command in ("grid", "plot"):
        return grid(args) if args.command == "grid" else plot(args.out)
    session = Session.start(args.device)
    work = count_bytes if args.command == "bytes" else measure_times
    passed = work(args, session)
    session.close()
    return int(not passed)


if __name__ == "__main__":
    sys.modules["bench_hosts"] = sys.modules["__main__"]  # the kernel is loaded by its name
    sys.exit(main())
