"""A layer that carries a state from token to token, and blocks with it, on several GPUs.

    python scripts/bench/bench_recurrence.py --configs 2 --precompile
    torchrun --nproc-per-node 2 scripts/bench/bench_recurrence.py --configs 2 --out recurrence.csv

The layer is the gated delta net of Qwen3-Next (16 key heads, 32 value heads of 128, hidden size
2048, convolution of 4), forward + backward in bf16, with the kernels of flash-linear-attention in
all contenders: one GPU with all tokens; ds_usp; the context parallelism of fla; heads exchanged by
all-to-all, as Megatron-LM and verl do. The stack has three such layers to one of attention, each
with an MLP, recomputed layer by layer. Contenders run interleaved. ``error`` is the relative
difference of output and gradient of the input from those of one GPU.

Triton tries every configuration of a kernel, minutes for each contender: ``--configs`` keeps a few
of each, alike for all, and ``--precompile`` compiles them in many processes before the ranks start.
Smallest run, on CPUs: --device cpu --tokens 64 --shape 32:2:4:8 --rounds 1, with torch's forms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_harness import (
    Session,
    Step,
    Table,
    common_flags,
    comparison_flags,
    start_ranks,
    steps_in_a_row,
    warm_up_seconds,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_usp
from ds_usp.recurrence.recurrences import delta_rule
from ds_usp.testing import relative_error

TAPS = 4
CONTENDERS = {
    "one": "one GPU",
    "contiguous": "ds_usp contiguous",
    "zigzag": "ds_usp zigzag",
    "fla-contiguous": "fla cp contiguous",
    "heads": "heads exchanged",
}
COLUMNS = ("what", "tokens", "contender", "ms", "times_one_gpu", "error", "extra_gib")


@dataclass(frozen=True)
class Shape:
    """A layer: hidden size, key heads, value heads, their dim."""

    hidden: int
    key_heads: int
    value_heads: int
    dim: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        return self.key_heads * self.dim, self.key_heads * self.dim, self.value_heads * self.dim


# ------------------------------------------------------------------ kernels


def limit_autotuning(count: int, only: int | None = None) -> None:
    """Let Triton try at most ``count`` configurations of a kernel, or ``only`` one of these: four
    warps, three stages and large blocks; four warps, two stages and small blocks; and so on."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def preferred(tuner: Any, *args: Any, **kwargs: Any) -> list[Any]:
        left, kept = list(prune(tuner, *args, **kwargs)), []
        while left and len(kept) < count:
            stages, sign = ((3, -1), (2, 1))[len(kept) % 2]

            def distance(config: Any, stages: int = stages, sign: int = sign) -> Any:
                blocks = sum(v for v in config.kwargs.values() if isinstance(v, int))
                warps = max(config.num_warps / 4, 4 / config.num_warps)
                return warps, abs(config.num_stages - stages), sign * blocks

            kept.append(min(left, key=distance))
            left.remove(kept[-1])
        return kept if only is None else [kept[min(only, len(kept) - 1)]]

    Autotuner.prune_configs = preferred


def precompile(args: argparse.Namespace) -> None:
    """Fill Triton's cache: each configuration of each contender in ranks of its own, few tokens."""
    jobs = [(name, str(k)) for name in args.contenders for k in range(args.configs)]

    def compile_one(job: tuple[str, str]) -> int:
        name, config = job
        flags = ["--contenders", name, "--config", config, "--tokens", "4096", "--what", "layer"]
        return start_ranks(flags, 2, args.patience)

    with ThreadPoolExecutor(len(jobs)) as pool:
        codes = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    print({f"{name} {config}": code for (name, config), code in codes.items()}, flush=True)


def torch_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x ``[b, t, c]``."""
    y = F.conv1d(x.mT, weight[:, None], padding=TAPS - 1, groups=len(weight))
    return F.silu(y[..., : x.shape[1]]).mT


def fla_conv(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    """The same, by fla."""
    from fla.modules.causal_conv1d import causal_conv1d

    out: torch.Tensor = causal_conv1d(x=x, weight=weight, activation="silu", **options)[0]
    return out


def kernels(session: Session) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The convolution, and the delta rule."""
    if session.on_gpu:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return fla_conv, chunk_gated_delta_rule
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    return torch_conv, qwen.torch_chunk_gated_delta_rule


# ------------------------------------------------------------------ layers

Conv = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Delta = Callable[..., torch.Tensor]


class DeltaLayer(nn.Module):
    """A gated delta net, with its convolution and its delta rule as arguments."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, v = shape, shape.widths[2]
        self.into = nn.Linear(shape.hidden, sum(shape.widths) + v, bias=False)
        self.gates = nn.Linear(shape.hidden, 2 * shape.value_heads, bias=False)
        self.taps = nn.Parameter(torch.randn(sum(shape.widths), TAPS) / TAPS)
        self.log_decay = nn.Parameter(torch.linspace(-6, 1, shape.value_heads))
        self.norm = nn.Parameter(torch.ones(shape.dim))
        self.out = nn.Linear(v, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, mixer: Mixer) -> torch.Tensor:
        """The layer, its convolution and delta rule by ``mixer``."""
        q, k, v = self.shape.widths
        mixed, z = self.into(x).split((q + k + v, v), -1)
        out = mixer(self, mixed, self.gates(x))
        out = F.rms_norm(out, (self.shape.dim,), self.norm)
        return self.out(out.flatten(-2) * F.silu(z))


Mixer = Callable[[DeltaLayer, torch.Tensor, torch.Tensor], torch.Tensor]


def mix(
    layer: DeltaLayer,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    *,
    conv: Conv,
    delta: Delta,
    part: tuple[int, int] = (0, 1),
) -> torch.Tensor:
    """Convolution and delta rule of one share of the heads: ``[b, t, heads, dim]``."""
    shape, (index, count) = layer.shape, part
    widths = [width // count for width in shape.widths]
    taps, log_decay = layer.taps, layer.log_decay
    if count > 1:
        by_kind = taps.split(shape.widths)
        taps = torch.cat([x.chunk(count)[index] for x in by_kind])
        log_decay = log_decay.chunk(count)[index]
    q, k, v = conv(mixed, taps).split(widths, -1)
    b, a = gates.chunk(2, -1)
    g = -log_decay.float().exp() * F.softplus(a.float())
    q, k, v = (x.unflatten(-1, (-1, shape.dim)) for x in (q, k, v))
    return delta(q, k, v, g=g, beta=b.sigmoid())


class Attention(nn.Module):
    """Grouped-query attention with a gate, heads twice as wide as those of the delta rule."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dim, self.heads = 2 * shape.dim, shape.key_heads
        self.kv_heads = max(self.heads // 8, 1)
        widths = (2 * self.heads + 2 * self.kv_heads) * self.dim
        self.into = nn.Linear(shape.hidden, widths, bias=False)
        self.out = nn.Linear(self.heads * self.dim, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The layer."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        q, k, v, gate = self.into(x).unflatten(-1, (-1, self.dim)).split(heads, -2)
        return self.out((attend(q, k, v) * gate.sigmoid()).flatten(-2))


class Block(nn.Module):
    """Delta rule or attention, then an MLP."""

    def __init__(self, shape: Shape, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.mixer = Attention(shape) if attends else DeltaLayer(shape)
        wide = 11 * shape.hidden // 4
        self.up = nn.Linear(shape.hidden, 2 * wide, bias=False)
        self.down = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, how: Contender) -> torch.Tensor:
        """The block."""
        given = how.attend if self.attends else how.mixer
        x = x + self.mixer(F.rms_norm(x, x.shape[-1:]), given)
        up, gate = self.up(F.rms_norm(x, x.shape[-1:])).chunk(2, -1)
        return x + self.down(up * F.silu(gate))


# ------------------------------------------------------------------ contenders


@dataclass(frozen=True)
class Contender:
    """A way to compute the layers.

    Attributes:
        layout: of the tokens; None: this rank computes all of them.
    """

    name: str
    layout: ds_usp.TokenLayout | None
    mixer: Mixer
    attend: Callable[..., torch.Tensor] | None = None

    def shard(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """This rank's tokens of ``[b, t, c]``."""
        if self.layout is None:
            return whole
        parts = [whole[:, s.start : s.start + s.length] for s in self.layout.segments(rank)]
        return torch.cat(parts, 1)


def contenders(session: Session, args: argparse.Namespace, tokens: int) -> Iterator[Contender]:
    """One GPU first, and all others."""
    conv, kernel = kernels(session)
    options = {"use_qk_l2norm_in_kernel": True}

    def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **gates: Any) -> torch.Tensor:
        return kernel(q, k, v, **gates, **options)[0]

    single = ds_usp.SequenceMesh.single()
    attend = partial(
        ds_usp.usp_attention,
        mesh=single,
        layout=single.layout("contiguous", tokens),
        mask=ds_usp.MaskSpec.causal(),
    )
    yield Contender("one GPU", None, partial(mix, conv=conv, delta=alone), attend)
    mesh = ds_usp.SequenceMesh.from_group(dist.group.WORLD, ulysses_degree=args.ulysses)
    for kind in ("contiguous", "zigzag"):
        layout = mesh.layout(kind, tokens)
        where: dict[str, Any] = {"mesh": mesh, "layout": layout}

        def halo(x: torch.Tensor, taps: torch.Tensor, where: Any = where) -> torch.Tensor:
            y = ds_usp.causal_conv(lambda t: conv(t.mT, taps).mT, x.mT, TAPS, **where)
            return y.mT

        def chained(*qkv: torch.Tensor, where: Any = where, **gates: Any) -> torch.Tensor:
            return delta_rule(kernel, *qkv, **gates, **where, **options)

        attend = partial(ds_usp.usp_attention, mask=ds_usp.MaskSpec.causal(), **where)
        yield Contender(f"ds_usp {kind}", layout, partial(mix, conv=halo, delta=chained), attend)
    if session.on_gpu:
        yield fla_contender(session, kernel, mesh, tokens)
    yield heads_contender(session, mesh, conv, alone, tokens)


def fla_contender(
    session: Session, kernel: Callable[..., Any], mesh: ds_usp.SequenceMesh, tokens: int
) -> Contender:
    """fla's own context parallelism."""
    from fla.ops.cp import build_cp_context

    borders, kind = torch.tensor([0, tokens], device=session.device), "contiguous"
    context = build_cp_context(borders, dist.group.WORLD, conv1d_kernel_size=TAPS, layout=kind)
    conv = partial(fla_conv, cp_context=context)

    def delta(*qkv: torch.Tensor, **gates: Any) -> torch.Tensor:
        return kernel(*qkv, **gates, use_qk_l2norm_in_kernel=True, cp_context=context)[0]

    return Contender(
        f"fla cp {kind}", mesh.layout(kind, tokens), partial(mix, conv=conv, delta=delta)
    )


def heads_contender(
    session: Session, mesh: ds_usp.SequenceMesh, conv: Conv, delta: Delta, tokens: int
) -> Contender:
    """All tokens of a share of the heads, by two all-to-alls."""
    world = session.world

    def mixer(layer: DeltaLayer, mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        shape = layer.shape
        kinds = [*mixed.split(shape.widths, -1), *gates.chunk(2, -1)]
        split = [x.chunk(world, -1) for x in kinds]
        shares = [torch.cat(share, -1) for share in zip(*split, strict=True)]
        into = AllToAll.apply(torch.cat(shares))  # [world, t, c]: own heads of each rank's tokens
        own = into.flatten(0, 1)[None]
        channels = sum(shape.widths) // world
        part = (session.rank, world)
        mixed, gates = own.split((channels, own.shape[-1] - channels), -1)
        out = mix(layer, mixed, gates, conv=conv, delta=delta, part=part)
        back = AllToAll.apply(out[0].unflatten(0, (world, -1)))
        return torch.cat(back.unbind(), -2)[None]

    return Contender("heads exchanged", mesh.layout("contiguous", tokens), mixer)


class AllToAll(torch.autograd.Function):
    """x ``[world, ...]``: one part to each rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return AllToAll.apply(grad)


# ------------------------------------------------------------------ measurements


def layer_step(
    session: Session, shape: Shape, how: Contender, x: torch.Tensor, dout: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """One layer, forward + backward: its output and the gradient of its input."""
    layer = _seeded(lambda: DeltaLayer(shape), session, x.dtype)
    return _pass_of(
        lambda y: layer(y, how.mixer),
        layer,
        how.shard(x, session.rank),
        how.shard(dout, session.rank),
    )


def stack_step(
    session: Session,
    args: argparse.Namespace,
    shape: Shape,
    how: Contender,
    x: torch.Tensor,
    dout: torch.Tensor,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Blocks, each recomputed in backward."""
    blocks = _seeded(
        lambda: nn.ModuleList(Block(shape, n % 4 == 3) for n in range(args.blocks)),
        session,
        x.dtype,
    )

    def run(y: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            y = checkpoint(block, y, how, use_reentrant=False)
        return y

    return _pass_of(run, blocks, how.shard(x, session.rank), how.shard(dout, session.rank))


def _seeded(make: Callable[[], nn.Module], session: Session, dtype: torch.dtype) -> nn.Module:
    """The same weights in every contender and on every rank."""
    torch.manual_seed(0)
    with session.device:
        return make().to(dtype)


def _pass_of(
    run: Callable[[torch.Tensor], torch.Tensor],
    module: nn.Module,
    x: torch.Tensor,
    dout: torch.Tensor,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    x = x.clone().requires_grad_()
    parameters = [p for p in module.parameters() if p.requires_grad]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out = run(x)
        return out.detach(), torch.autograd.grad(out, (x, *parameters), dout)[0]

    return step


def compare(
    session: Session,
    args: argparse.Namespace,
    table: Table,
    what: str,
    tokens: int,
    make: Callable[..., Callable[[], tuple[torch.Tensor, torch.Tensor]]],
) -> None:
    """Check all contenders against one GPU, then time them interleaved."""
    shape = Shape(*map(int, args.shape.split(":")))
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    torch.manual_seed(1)
    x, dout = (torch.randn(1, tokens, shape.hidden, device=session.device).to(dtype) for _ in "xd")
    steps: dict[str, Step] = {}
    errors: dict[str, float] = {}
    truth: tuple[torch.Tensor, ...] = ()
    asked = [CONTENDERS[name] for name in args.contenders]
    for how in contenders(session, args, tokens):
        if how.name not in asked or (what == "stack" and how.attend is None):
            continue
        step = session.try_all_ranks(lambda how=how: make(shape, how, x, dout))
        got = step if isinstance(step, str) else session.try_all_ranks(step)
        if isinstance(step, str) or isinstance(got, str):
            session.print0(f"{what} {tokens}  {how.name}: left out, {got}")
            continue
        if args.config is not None:
            continue  # only compiled, each contender alone: nothing to compare with
        truth = truth or got
        wanted = [how.shard(t, session.rank) for t in truth]
        error = max(relative_error(a, b) for a, b in zip(got, wanted, strict=True))
        errors[how.name] = session.all_reduced([error], dist.ReduceOp.MAX)[0]
        steps[how.name] = step
        del got
        session.print0(f"{what} {tokens}  {how.name}: ready, error {errors[how.name]:.1e}")
    if not steps:
        return
    seconds = session.medians(steps, args.rounds, steps_in_a_row(args), warm_up_seconds(args))
    for name, step in steps.items():
        gib, ms = session.extra_bytes(step) / 2**30, 1e3 * seconds[name]
        ratio = seconds.get("one GPU", float("nan")) / seconds[name]
        table.add(
            [
                what,
                str(tokens),
                name,
                f"{ms:.2f}",
                f"{ratio:.3f}",
                f"{errors[name]:.1e}",
                f"{gib:.2f}",
            ]
        )
        session.print0(
            f"{what:6} {tokens:7}  {name:24} {ms:9.2f} ms  {ratio:6.3f} x one GPU"
            f"  error {errors[name]:.1e}  {gib:6.2f} GiB"
        )


def main() -> None:
    """Measure layer and stack; rank 0 prints and writes."""
    args = parse()
    if args.configs and args.device == "cuda":
        limit_autotuning(args.configs, args.config)
    if args.precompile and args.config is None:
        precompile(args)
        return
    session = Session.start(args.device)
    note = f"hidden:key heads:value heads:dim {args.shape}, {args.blocks} blocks, batch 1"
    if args.configs:
        note += f"; Triton tries {args.configs} configurations of a kernel"
    table = Table(session, None if args.config is not None else args.out, COLUMNS, note)
    for tokens in args.tokens:
        if "layer" in args.what:
            compare(session, args, table, "layer", tokens, partial(layer_step, session))
        if "stack" in args.what:
            compare(session, args, table, "stack", tokens, partial(stack_step, session, args))
    session.close()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    parser.add_argument("--what", nargs="+", choices=("layer", "stack"), default=["layer", "stack"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[131072, 32768])
    parser.add_argument(
        "--shape", default="2048:16:32:128", help="hidden:key heads:value heads:dim"
    )
    parser.add_argument("--blocks", type=int, default=4, help="of the stack, every fourth attends")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--configs", type=int, default=0, help="of a Triton kernel; 0: all")
    parser.add_argument("--config", type=int, help="only this one, and only compile")
    parser.add_argument("--precompile", action="store_true", help="fill Triton's cache and end")
    parser.add_argument("--patience", type=float, default=200, help="seconds for that")
    parser.add_argument("--ulysses", type=int, default=1, help="Ulysses degree of attention")
    comparison_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
