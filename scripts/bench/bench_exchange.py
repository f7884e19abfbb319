r"""What each way to exchange heads and keys gains: calls with one part of it left out.

    for n in 1 2 3; do
        torchrun --nproc-per-node 2 scripts/bench/bench_exchange.py --process $n --out arms_$n.csv
    done
    python scripts/bench/bench_exchange.py --decide arms_*.csv

``all`` is what ds_usp does by itself. ``nccl`` leaves out the copy engines, ``no triton`` the
kernel that packs for them, ``slices`` copy engines and the dense buffer, so that torch copies each
slice of heads and NCCL sends them. ``fused`` asks for FlashInfer's fused exchange
(``Tuning(copies="flashinfer")``: eager calls of up to 8,192 tokens). ``plain`` is Ulysses by hand,
``flashinfer`` Ulysses by FlashInfer's exchange, by hand and without a comparison of ranks. The
kernel ``none`` times the exchanges of a forward call alone.

A cell is a shape, a split, a kernel, and eager calls or the replay of a CUDA graph; its arms run
interleaved. ``ms`` is the time of a step, ``host_ms`` of starting it, both of the slowest rank; a
replay's ``ms`` is what the GPU alone takes. The Llama step is a forward and backward pass of 8
layers of Llama 3 8B's shape. ``--profile`` prints where the host's time of an eager call goes:

    torchrun --nproc-per-node 2 scripts/bench/bench_exchange.py --llama 0 --kernels cudnn \
        --arms all plain --profile 25 --shapes 8192:32:8:128:forward 8192:32:8:128

``--decide`` prints what a part gains in each cell, by the medians over the files. A gain counts
where it is above the spread of the files and 2 %, or 5 % below 32K tokens.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import itertools
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from baselines import (
    Attend,
    Baseline,
    check_heads_divide,
    ds_usp_baseline,
    even_piece,
    local_kernel,
    plain_all_to_alls,
)
from bench_harness import Session, Step, Table, common_flags
from shapes import Shape

import ds_usp
from ds_usp.attention.tuning import Tuning
from ds_usp.comm.all_to_all import HeadAllToAll
from ds_usp.comm.fused_exchange import fused_unavailable_reason
from ds_usp.comm.packing import PackPlan
from ds_usp.geometry.degrees import divisors

SHAPES = (
    "4608:24:24:128:full:forward",  # Flux, 1024 px
    "8192:32:8:128:forward",
    "8192:32:8:128",
    "32768:32:8:128:forward",
    "32768:32:8:128",
    "32768:32:32:128",
    "32760:40:40:128:full:forward",  # Wan 14B, 480p
    "131072:32:8:128",
)
CELL = ("shape", "split", "kernel", "way")
COLUMNS = ("process", *CELL, "arm", "ms", "host_ms", "extra_gib")
NO_KERNEL = "none"
Split = tuple[int, int]  # Ulysses x ring


@dataclass(frozen=True)
class Parts:
    """The parts of the exchange that an arm has."""

    copy_engines: bool = True
    triton_packing: bool = True
    dense_buffer: bool = True
    fused: bool = False

    @property
    def tuning(self) -> Tuning:
        """What a call asks for."""
        return Tuning(copies="flashinfer") if self.fused else Tuning()


ARMS = {
    "all": Parts(),
    "fused": Parts(fused=True),
    "nccl": Parts(copy_engines=False),
    "no triton": Parts(triton_packing=False),
    "slices": Parts(copy_engines=False, dense_buffer=False),
}
# The arm without a part, and the arm that has it and is otherwise the same.
JUDGED_BY = {
    "copy engines": ("nccl", "all"),
    "Triton packing": ("no triton", "all"),
    "dense buffer": ("slices", "nccl"),
    "FlashInfer": ("all", "fused"),
}


class Switch:
    """Patches ds_usp so that calls leave out the parts that :attr:`parts` has not."""

    def __init__(self) -> None:
        self.parts = Parts()
        resolve_copy_engines = Tuning._resolve_copy_engines
        uniform: Callable[[HeadAllToAll], Any] = HeadAllToAll._uniform.func
        fused: Callable[[PackPlan], Any] = PackPlan._fused.func
        kernels: dict[PackPlan, Any] = {}  # plans are shared by the meshes of all arms

        def copy_engines(tuning: Tuning, *args: Any) -> bool:
            return self.parts.copy_engines and resolve_copy_engines(tuning, *args)

        def dense_buffer(exchange: HeadAllToAll) -> Any:
            return uniform(exchange) if self.parts.dense_buffer else None

        def triton_packing(plan: PackPlan) -> Any:
            if plan not in kernels:
                kernels[plan] = fused(plan)
            return kernels[plan] if self.parts.triton_packing else None

        cached = cached_property(dense_buffer)  # an exchange belongs to the mesh of its arm
        cached.__set_name__(HeadAllToAll, "_uniform")
        patches = (
            (Tuning, "_resolve_copy_engines", copy_engines),
            (HeadAllToAll, "_uniform", cached),
            (PackPlan, "_fused", property(triton_packing)),
        )
        for owner, name, patched in patches:
            setattr(owner, name, patched)

    def step(self, arm: str, step: Step) -> Step:
        """A step with the parts of an arm."""

        def run() -> None:
            self.parts = ARMS.get(arm, Parts())
            step()

        return run


@dataclass
class Arm:
    """One arm of a cell, with its times in milliseconds."""

    step: Step
    extra_gib: float = float("nan")
    ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)


class Run:
    """One process group that measures all cells."""

    def __init__(self, session: Session, args: argparse.Namespace, table: Table) -> None:
        self.session, self.args, self.table, self.switch = session, args, table, Switch()
        ranks = list(range(session.world))
        self.splits = [(u, session.world // u) for u in reversed(divisors(session.world))]
        # Equal groups share a mesh, and a mesh its plans: so each arm has a group of its own.
        self.meshes = {
            (split, arm): ds_usp.SequenceMesh.from_group(dist.new_group(ranks), split[0])
            for split in self.splits
            for arm in self.arms_of(split)
        }

    def arms_of(self, split: Split) -> list[str]:
        """The arms of a split; a ring alone packs no heads."""
        arms = [arm for arm, parts in ARMS.items() if not parts.fused]
        if split[0] == 1:
            arms = ["all", "nccl"]
        elif split[1] == 1 and fused_unavailable_reason() is None:
            arms = list(ARMS)
        return [arm for arm in arms if arm in self.args.arms]

    def baselines(self, shape: Shape, split: Split, kernel: str) -> dict[str, Baseline]:
        """What is compared in the cells of a shape, split and kernel."""
        arms = self.arms_of(split)
        if kernel != NO_KERNEL:
            of_arms = {
                arm: ds_usp_baseline(self.meshes[split, arm], kernel, ARMS[arm].tuning)
                for arm in arms
            }
        elif split[1] > 1 or not shape.forward:
            return {}
        else:
            of_arms = {arm: exchanges_alone(self.meshes[split, arm], ARMS[arm]) for arm in arms}
        if "plain" in self.args.arms:  # over all ranks, whatever the split
            plain = next(iter(plain_all_to_alls([kernel])))
            of_arms["plain"] = plain_exchanges() if kernel == NO_KERNEL else plain
        if "fused" in arms:
            of_arms["flashinfer"] = flashinfer(kernel)
        return of_arms

    def cells(self, shape: Shape, split: Split, kernel: str) -> None:
        """Time the arms, eager and in CUDA graphs."""
        session = self.session
        eager, graphs = dict[str, Arm](), dict[str, Arm]()
        for name, baseline in self.baselines(shape, split, kernel).items():
            self.switch.parts = ARMS.get(name, Parts())
            step = baseline.prepared(session, shape)
            if step is None:
                continue
            step = self.switch.step(name, step)
            eager[name] = Arm(step, baseline.extra_gib(session, step))
            # The library has no fused exchange in a graph: streams would wait for those outside.
            captures = kernel != NO_KERNEL or not ARMS.get(name, Parts()).fused
            if session.on_gpu and not self.args.eager and captures:
                replay = session.try_all_ranks(partial(session.capture_graph, step))
                if isinstance(replay, str):
                    session.print0(f"{shape}  {name}: no CUDA graph, {replay}")
                else:
                    graphs[name] = Arm(replay, eager[name].extra_gib)
        ms_at_500_tflops = 2 * shape.tflop / session.world
        repeats = min(max(int(10 / ms_at_500_tflops), 3), 30) if session.on_gpu else 2
        self.time([*eager.values(), *graphs.values()], self.args.rounds, repeats)
        self.report(str(shape), split, kernel, "eager", eager)
        self.report(str(shape), split, kernel, "graph", graphs)
        if self.args.profile and "all" in eager and split[0] == 1:
            self.profile(eager["all"].step)

    def profile(self, step: Step) -> None:
        """Print the functions in which rank 0's host spends most time of its own in a call."""
        calls, profiler = 50, cProfile.Profile()
        with torch.autograd.set_multithreading_enabled(False):  # a profile is of one thread
            step()  # cuDNN makes a plan of its backward in each thread that calls it
            for _ in range(calls):
                self.session.synchronize()  # a full queue would be profiled as well
                profiler.runcall(step)
        if self.session.rank:
            return
        stats = pstats.Stats(profiler)
        table = stats.stats  # type: ignore[attr-defined]
        rows = sorted(table.items(), key=lambda row: -row[1][2])
        for (path, line, name), (_, count, own_s, total_s, _) in rows[: self.args.profile]:
            where = f"{Path(path).name}:{line} {name}" if line else name
            times = f"{own_s / calls * 1e6:7.1f} us of its own, {total_s / calls * 1e6:7.1f} in all"
            print(f"  {times}, {count / calls:5.1f} x {where}", flush=True)

    def llama(self, tokens: int, split: Split) -> None:
        """Time a step of a model under each arm."""
        from transformers import LlamaConfig, LlamaForCausalLM

        from ds_usp.integrations.transformers import enable

        session, sizes = self.session, (4096, 14336, 32, 8)
        if not session.on_gpu:
            sizes = (64, 128, 4, 4)
        config = LlamaConfig(
            hidden_size=sizes[0],
            intermediate_size=sizes[1],
            num_attention_heads=sizes[2],
            num_key_value_heads=sizes[3],
            num_hidden_layers=8,
            max_position_embeddings=tokens,
        )
        torch.manual_seed(0)
        with session.device:
            model = LlamaForCausalLM(config).to(torch.bfloat16)
            ids = torch.randint(0, config.vocab_size, (1, tokens))

        def step() -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()

        arms = {name: Arm(self.switch.step(name, step)) for name in self.arms_of(split)}
        for _ in range(3):
            for name, arm in arms.items():
                enable(model, self.meshes[split, name], loss_chunks=8)
                arm.step()  # the plans of this mesh
                self.time([arm], rounds=1, repeats=3)
        self.report(f"Llama step {tokens // 1024}K", split, "auto", "eager", arms)

    def time(self, arms: Iterable[Arm], rounds: int, repeats: int) -> None:
        """Time each arm once a round."""
        session = self.session
        for _, arm in itertools.product(range(rounds), arms):
            host_s = 0.0

            def steps(arm: Arm = arm) -> None:
                nonlocal host_s
                begin = time.perf_counter()
                for _ in range(repeats):
                    arm.step()
                host_s = time.perf_counter() - begin

            arm.step()
            step_ms = session.seconds(steps) * 1e3 / repeats
            arm.ms.append(step_ms)
            (host_ms,) = session.all_reduced([host_s * 1e3 / repeats], dist.ReduceOp.MAX)
            arm.host_ms.append(host_ms)

    def report(
        self, shape: str, split: Split, kernel: str, way: str, arms: Mapping[str, Arm]
    ) -> None:
        """Write and print the rows of a cell."""
        for name, arm in arms.items():
            ms, host_ms = statistics.median(arm.ms), statistics.median(arm.host_ms)
            cell = shape, f"{split[0]}x{split[1]}", kernel, way, name
            numbers = f"{ms:.4f}", f"{host_ms:.4f}", f"{arm.extra_gib:.3f}"
            self.table.add([str(self.args.process), *cell, *numbers])
            self.session.print0(f"{'  '.join(cell):60} {ms:9.3f} ms, host {host_ms:8.3f} ms")


def head_ranges(heads: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Equally many heads for each rank."""
    return tuple((rank * heads // ranks, (rank + 1) * heads // ranks) for rank in range(ranks))


def exchanges_alone(mesh: ds_usp.SequenceMesh, parts: Parts) -> Baseline:
    """The exchanges of a forward call: q, k and v to heads, and as much as the output back."""

    def attend(shape: Shape) -> tuple[Attend, Shape, list[int]]:
        layout = mesh.layout("contiguous", shape.seq_len)
        q_ranges = head_ranges(shape.heads, mesh.sp_degree)
        kv_ranges = head_ranges(shape.kv_heads, mesh.sp_degree)
        copies = parts.copy_engines and torch.cuda.is_available()
        by = copies, parts.fused
        qkv = HeadAllToAll(mesh, (layout,) * 3, (q_ranges, kv_ranges, kv_ranges), *by)
        back = HeadAllToAll(mesh, (layout,), (q_ranges,), *by)
        if parts.fused:
            largest = back.fused_bytes(shape.batch, [shape.head_dim], itemsize=2)
            mesh.reserve({"fused": largest}, torch.device("cuda", torch.cuda.current_device()))
        elif copies:
            most = qkv.staging_bytes(shape.batch, [shape.head_dim] * 3, itemsize=2)
            mesh.reserve({"all_to_all": most}, torch.device("cuda", torch.cuda.current_device()))

        def run(*tensors: torch.Tensor) -> torch.Tensor:
            heads = qkv.to_heads(tensors)[:1]
            outs = back.alloc_outputs(heads)
            back.to_sequence(heads, outs)
            return outs[0]

        return run, shape, layout.positions(mesh.rank)

    return Baseline("exchanges", NO_KERNEL, attend, mesh)


def plain_exchanges() -> Baseline:
    """The same as four all-to-alls, each packed by torch."""
    from baselines import AllToAll

    def attend(shape: Shape) -> tuple[Attend, Shape, list[int]]:
        check_heads_divide(shape)
        positions = even_piece(shape)
        lengths = [len(positions)] * dist.get_world_size()

        def run(*tensors: torch.Tensor) -> torch.Tensor:
            heads = [AllToAll.apply(x, lengths, True) for x in tensors]
            out: torch.Tensor = AllToAll.apply(heads[0], lengths, False)
            return out

        return run, shape, positions

    return Baseline("plain exchanges", NO_KERNEL, attend)


class FlashInferExchange(torch.autograd.Function):
    """One of FlashInfer's exchanges of a tensor; its gradient goes by the other."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, there: Callable[..., Any], back: Callable[..., Any]
    ) -> torch.Tensor:
        ctx.back = back
        out: torch.Tensor = there(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grads[0].contiguous()), None, None


def flashinfer(kernel: str) -> Baseline:
    """Ulysses by FlashInfer's fused exchange."""

    def attend(shape: Shape) -> tuple[Attend, Shape, list[int]]:
        from flashinfer.comm.ulysses import UlyssesCommunicator

        check_heads_divide(shape)
        positions = even_piece(shape)
        most = 2 * shape.batch * len(positions) * shape.heads * shape.head_dim
        exchange = UlyssesCommunicator(max_bytes=most, dtype=torch.bfloat16, backend="nvlink")
        attend_local = None if kernel == NO_KERNEL else local_kernel(shape, kernel)
        ways = exchange.scatter_heads, exchange.gather_heads

        def forward(*tensors: torch.Tensor) -> torch.Tensor:
            heads = [ways[0](x) for x in tensors]
            attended = heads[0] if attend_local is None else attend_local(*heads).contiguous()
            out: torch.Tensor = ways[1](attended)
            return out

        def with_gradient(*tensors: torch.Tensor) -> torch.Tensor:
            q, k, v = (FlashInferExchange.apply(x, *ways) for x in tensors)
            attended = attend_local(q, k, v).contiguous()
            out: torch.Tensor = FlashInferExchange.apply(attended, *reversed(ways))
            return out

        return forward if shape.forward else with_gradient, shape, positions

    return Baseline("flashinfer", kernel, attend)


def decide(paths: Sequence[Path]) -> None:
    """Print what each part gains in each cell, and in how many cells that counts."""
    ms: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(line for line in file if not line.startswith("#")):
                ms[tuple(row[name] for name in CELL)][row["arm"]].append(float(row["ms"]))
    for part, pair in JUDGED_BY.items():
        num_counting = 0
        for cell, arms in ms.items():
            if not all(arms[name] for name in pair):
                continue
            without, with_part = (statistics.median(arms[name]) for name in pair)
            spread = max((max(x) - min(x)) / min(x) for x in (arms[name] for name in pair))
            least = 0.05 if cell[0].startswith(("4608", "8K")) else 0.02
            counts = without / with_part - 1 > max(spread, least)
            num_counting += counts
            gain = f"{without / with_part - 1:+7.1%}, spread {spread:.1%}"
            print(f"{part:15} {'  '.join(cell):56} {gain} {'counts' if counts else ''}")
        print(f"{part}: {'stays' if num_counting else 'leaves'}, {num_counting} cells count\n")


def main() -> int:
    """Measure, or decide from the files of several processes."""
    parser = common_flags(__doc__)
    parser.add_argument("--process", type=int, default=1, help="a number for the column")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--kernels", nargs="+", default=(NO_KERNEL, "flash4", "cudnn"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", default=(*ARMS, "plain"))
    parser.add_argument("--profile", type=int, default=0, help="functions to show, on rings alone")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--ulysses", type=int, nargs="+", help="degrees; none: all")
    parser.add_argument("--llama", type=int, default=32768, help="tokens of its step; 0: none")
    parser.add_argument("--decide", nargs="+", type=Path, help="files to decide from")
    args = parser.parse_args()
    if args.decide:
        decide(args.decide)
        return 0
    session = Session.start(args.device)
    note = "bf16, batch 1; causal, forward + backward unless the shape has a word for another"
    run = Run(session, args, Table(session, args.out, COLUMNS, note))
    if args.llama:
        for split in run.splits:
            run.llama(args.llama, split)
    shapes = map(Shape.parse, args.shapes)
    splits = [split for split in run.splits if args.ulysses is None or split[0] in args.ulysses]
    for shape, split, kernel in itertools.product(shapes, splits, args.kernels):
        run.cells(shape, split, kernel)
    session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
