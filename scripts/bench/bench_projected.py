r"""Self-attention that projects chunk by chunk of heads, twice, beside the plain path.

    torchrun --nproc-per-node 2 scripts/bench/bench_projected.py --out projected.csv
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 scripts/bench/bench_projected.py \
        --shapes 32768:4096:32:32 --out projected_slow_link.csv

On a mesh of Ulysses ranks and one of ring ranks, for each shape TOKENS:HIDDEN:HEADS:KV_HEADS, two
paths run interleaved, forward and backward in bf16: linear layers around usp_attention, and
projected_attention (keep="input"). A time is the median over rounds of the slowest rank:
block_ms of the attention block, layer_ms with two norms and an MLP of 4 x HIDDEN. exposed_ms is the
block's communication under no kernel (ds_usp.profiling.exposed), the mean of the ranks; peak_mib
what a step of the layer allocates; error that of the output and all gradients at --checked tokens
beside fp32, as a multiple of the plain path's: above 1.5 the run fails.
Smallest run, on CPUs: --device cpu --shapes 64:32:4:2.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from typing import Any, NamedTuple

import torch
from bench_harness import Session, Step, Table, common_flags
from torch import nn

import ds_usp
from ds_usp.profiling import exposed

COLUMNS = "mesh tokens hidden heads kv_heads path block_ms layer_ms exposed_ms communication_ms"
SIZES = ("2048:16:16", "4096:32:32", "4096:32:8")
PATHS: dict[str, dict[str, Any]] = {
    "plain": {"overlap": False},
    "projected keep=input": {"overlap": True},
}


class Shape(NamedTuple):
    """Sizes of one layer."""

    tokens: int
    hidden: int
    heads: int
    kv_heads: int


class Layer(nn.Module):
    """A transformer layer around an attention block."""

    def __init__(self, hidden: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        wide = 4 * hidden
        self.mlp = nn.Sequential(nn.Linear(hidden, wide), nn.GELU(), nn.Linear(wide, hidden))

    def forward(self, x: torch.Tensor, rotary: Any) -> torch.Tensor:
        x = x + self.attention(self.norm(x), rotary)
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


def make_steps(
    mesh: ds_usp.SequenceMesh, shape: Shape, device: torch.device, dtype: torch.dtype, layer: bool,
    tuning: ds_usp.Tuning,
) -> dict[str, Any]:  # fmt: skip
    """Forward and backward of each path, with the same weights and tokens, of the block or of the
    layer."""
    torch.manual_seed(0)
    tokens, hidden, heads, kv_heads = shape
    dim, layout = hidden // heads, mesh.layout("zigzag", tokens)
    with torch.device(device):
        qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * dim)
        out = nn.Linear(hidden, hidden)
        x, dy = (layout.shard(z, 1, mesh.rank).to(dtype) for z in torch.randn(2, 1, tokens, hidden))
        inverse = 1e4 ** -torch.linspace(0, 1, dim // 2)
        angles = torch.outer(torch.arange(float(tokens)), inverse).repeat(1, 2)
        angles = layout.shard(angles, 0, mesh.rank)
        steps = {}
        for path, options in PATHS.items():
            module: nn.Module = ds_usp.USPSelfAttention(
                qkv, out, heads, kv_heads, mesh=mesh, layout=layout,
                mask=ds_usp.MaskSpec.causal(), tuning=tuning, **options,
            )  # fmt: skip
            module = Layer(hidden, module) if layer else module
            steps[path] = partial(_step, module.to(dtype), x, (angles.cos(), angles.sin()), dy)
    return steps


def _step(module: nn.Module, x: torch.Tensor, rotary: Any, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = module(x, rotary)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


def errors(session: Session, mesh: ds_usp.SequenceMesh, shape: Shape, dtype: torch.dtype) -> Any:
    """Each path's error beside fp32, as a multiple of the plain path's: the worst tensor's, in one
    chunk of heads and in two."""
    worst = [0.0 for _ in PATHS]
    for chunks in range(1, 1 + min(2, shape.kv_heads // mesh.ulysses_degree)):
        where = mesh, shape, session.device
        tuning = ds_usp.Tuning(chunks=chunks)
        exact = make_steps(*where, torch.float32, False, tuning)["plain"]()
        errors_of_paths = [
            [float((a - b).norm() / b.norm()) for a, b in zip(step(), exact, strict=True)]
            for step in make_steps(*where, dtype, False, tuning).values()
        ]
        for i, values in enumerate(errors_of_paths):
            ratios = (a / max(b, 1e-6) for a, b in zip(values, errors_of_paths[0], strict=True))
            worst[i] = max(worst[i], *ratios)
    return dict(zip(PATHS, session.all_reduced(worst, torch.distributed.ReduceOp.MAX), strict=True))


def traced_ms(step: Step) -> list[float]:
    """Milliseconds of communication under no kernel, and of all; the mean of the ranks."""
    with exposed.report(print_line=lambda _: None) as report:
        step()
    sums = [(rank.exposed_ns, rank.communication_ns) for rank in report.ranks]
    return [sum(column) / max(len(sums), 1) / 1e6 for column in zip(*sums, strict=True)] or [0, 0]


def measure(session: Session, mesh: Any, shape: Shape, args: Namespace, table: Table) -> bool:
    """Measure one shape on one mesh; whether all errors are small."""
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    small = shape._replace(tokens=min(shape.tokens, args.checked))
    ratios = errors(session, mesh, small, dtype)
    where = mesh, shape, session.device, dtype
    block, layer = (make_steps(*where, whole, ds_usp.Tuning()) for whole in (False, True))
    seconds = [session.medians(steps, args.rounds, 2, args.warm_up) for steps in (block, layer)]
    for path in PATHS:
        numbers = [1e3 * of_kind[path] for of_kind in seconds]
        numbers += traced_ms(block[path])
        numbers += [session.extra_bytes(layer[path]) / 2**20, ratios[path]]
        name = f"{mesh.ulysses_degree}x{mesh.ring_degree}"
        row = [name, *map(str, shape), path, *(f"{x:.3f}" for x in numbers)]
        table.add(row)
        session.print0("  ".join(row))
    return all(ratio <= 1.5 for ratio in ratios.values())


def main() -> None:
    """Measure what the flags ask for."""
    parser = common_flags(__doc__)
    shapes = [f"{tokens}:{size}" for size in SIZES for tokens in (16384, 32768)]
    parser.add_argument("--shapes", nargs="+", default=shapes, help="TOKENS:HIDDEN:HEADS:KV_HEADS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=float, default=0.0, help="seconds before a measurement")
    parser.add_argument("--checked", type=int, default=2048, help="tokens of the errors")
    args = parser.parse_args()
    session = Session.start(args.device)
    columns = [*COLUMNS.split(), "peak_mib", "error"]
    table = Table(session, args.out, columns, "forward and backward, causal, zigzag, RoPE")
    session.print0("  ".join(columns))
    meshes = [ds_usp.SequenceMesh.from_group(None, degree) for degree in {session.world: 0, 1: 0}]
    made = [Shape(*map(int, text.split(":"))) for text in args.shapes]
    passed = [measure(session, mesh, x, args, table) for mesh in meshes for x in made]
    session.close()
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
