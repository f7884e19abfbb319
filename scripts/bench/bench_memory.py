"""Time and peak memory of each activation-memory policy on LLaMA layers, forward + backward.

    torchrun --nproc-per-node 4 scripts/bench/bench_memory.py --out memory.csv --moments moments.csv
    torchrun --nproc-per-node 4 scripts/bench/bench_memory.py --shapes 16384:8:4096:32:11008

Layers are torch modules around ds_usp's attention, without optimizer; ``full`` is activation
checkpointing of whole layers. The peak is above weights and gradients, maximum over ranks.
``--moments`` writes the device and host bytes at each layer boundary of a step.

Smallest run, on CPUs, where memory is not counted: --device cpu --shapes 64:3:32:4:64.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_harness import Session, Table, common_flags
from torch import Tensor, nn

import ds_usp
from ds_usp.memory import GemmLast, LayerMemory, Offload, recompute_before

COLUMNS = ("shape", "policy", "ms", "tokens_per_s_per_gpu", "peak_gib", "host_gib")
MOMENTS = ("shape", "policy", "moment", "device_gib", "host_gib")
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """Tokens of the sequence, layers, width, heads, width of the MLP."""

    seq_len: int
    layers: int
    hidden: int
    heads: int
    ffn: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(*map(int, text.split(":")))

    def __str__(self) -> str:
        return f"{self.seq_len} tokens, {self.layers} x h{self.hidden} f{self.ffn}"


@dataclass(frozen=True)
class Policy:
    """``recompute`` of ds_usp.memory and the offloaded fraction."""

    recompute: str
    ratio: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Policy:
        """A policy from the text of ``--policies``."""
        recompute, _, ratio = text.partition("+")
        return cls(recompute, float(ratio or 0))

    def __str__(self) -> str:
        return f"{self.recompute} + offload {self.ratio:g}" if self.ratio else self.recompute


class Layer(nn.Module):
    """Norm, projection, attention, projection; norm, product, SwiGLU, product."""

    def __init__(self, shape: Shape, mesh: ds_usp.SequenceMesh, gemm_last: bool) -> None:
        super().__init__()
        h, self.heads, self.mesh = shape.hidden, shape.heads, mesh
        self.layout = mesh.layout("zigzag", shape.seq_len)
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        self.fc1 = nn.Linear(h, 2 * shape.ffn, bias=False)
        self.fc2 = nn.Linear(shape.ffn, h, bias=False)
        self.gemm_last = gemm_last
        if gemm_last:
            GemmLast.between(self.norm1, self.qkv)
            GemmLast.between(self.norm2, self.fc1)

    def forward(self, x: Tensor) -> Tensor:
        """A transformer layer with sequence-parallel attention; x: [batch, local tokens, h]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = ds_usp.usp_attention(
            q, k, v, mesh=self.mesh, layout=self.layout, mask=ds_usp.MaskSpec.causal()
        )
        x = x + self.out(mixed.flatten(2))
        y = self.fc1(self.norm2(x))
        if self.gemm_last:
            return x + recompute_before(gated, self.fc2, y)
        return x + self.fc2(gated(y))


def gated(y: Tensor) -> Tensor:
    """SwiGLU, unfused."""
    gate, value = y.chunk(2, -1)
    return F.silu(gate) * value


@dataclass
class Stack:
    """Layers under one policy; runs one step."""

    session: Session
    shape: Shape
    policy: Policy
    mesh: ds_usp.SequenceMesh
    layers: nn.ModuleList = field(init=False)
    moments: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        device, gemm_last = self.session.device, self.policy.recompute == "gemm-last"
        dtype = torch.bfloat16 if self.session.on_gpu else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            layers = [Layer(self.shape, self.mesh, gemm_last) for _ in range(self.shape.layers)]
        self.layers = nn.ModuleList(layers).to(dtype)
        self.offload = Offload(self.policy.ratio, device)
        self.memory = LayerMemory(self.policy.recompute, self.offload)
        tokens = layers[0].layout.length(self.mesh.rank)
        self.x = torch.randn(1, tokens, self.shape.hidden, device=device, dtype=dtype)
        self.x.requires_grad_()

    def step(self, record_memory: bool = False) -> None:
        """Forward and backward; gradients are kept allocated, so the peak does not count them.

        Args:
            record_memory: record the allocated bytes at each layer boundary, forward and backward.
        """
        self.moments.clear()
        x = self.x
        for number, layer in enumerate(self.layers):
            if record_memory:
                self._record_memory()
            x = self.memory.run(number, layer, x)
            if record_memory:
                x.register_hook(self._record_memory)
        x.backward(torch.ones_like(x))
        if record_memory:
            self._record_memory()

    def _record_memory(self, *_: object) -> None:
        device = torch.cuda.memory_allocated() if self.session.on_gpu else 0
        self.moments.append((device, self.offload.bytes_away))


def measure(session: Session, stack: Stack, args: argparse.Namespace) -> list[str]:
    """One row: ms, tokens/s, peak GiB, offloaded GiB."""
    stack.step()
    peak = session.extra_bytes(stack.step) / GIB
    sent = stack.offload.counts.offloaded
    stack.step()
    sent = stack.offload.counts.offloaded - sent
    seconds = session.medians({"": stack.step}, args.rounds, args.in_a_row)[""]
    rate = stack.shape.seq_len / session.world / seconds
    return [f"{seconds * 1e3:.2f}", f"{rate:.0f}", f"{peak:.3f}", f"{sent / GIB:.3f}"]


def moments(session: Session, stack: Stack) -> list[tuple[float, float]]:
    """GiB on the device, above weights and gradients, and on the host, over one step."""
    session.synchronize()
    base = torch.cuda.memory_allocated() if session.on_gpu else 0
    stack.step(record_memory=True)
    return [((device - base) / GIB, host / GIB) for device, host in stack.moments]


def main() -> None:
    """Measure what the flags ask for; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    mesh = ds_usp.SequenceMesh.from_group(None, args.ulysses)
    note = f"bf16, causal, batch 1, ulysses {mesh.ulysses_degree} x ring {mesh.ring_degree}"
    table = Table(session, args.out, COLUMNS, note)
    times = Table(session, args.moments, MOMENTS, note)
    for shape in map(Shape.parse, args.shapes):
        for policy in map(Policy.parse, args.policies):
            run(session, Stack(session, shape, policy, mesh), args, (table, times))
            if session.on_gpu:
                torch.cuda.empty_cache()
    session.close()


def run(session: Session, stack: Stack, args: argparse.Namespace, tables: Sequence[Table]) -> None:
    """Measure one policy on one shape; skipped, with a printed reason, if it does not fit."""
    names = [str(stack.shape), str(stack.policy)]
    row = session.try_all_ranks(lambda: measure(session, stack, args))
    if isinstance(row, str):
        session.print0(f"{names[0]}  {names[1]:24} left out, {row}")
        return
    tables[0].add([*names, *row])
    values = zip(COLUMNS[2:], row, strict=True)
    text = "  ".join(f"{name} {value}" for name, value in values)
    session.print0(f"{names[0]}  {names[1]:24} {text}")
    for index, (device, host) in enumerate(moments(session, stack)):
        tables[1].add([*names, str(index), f"{device:.4f}", f"{host:.4f}"])


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["65536:8:2048:16:5504", "65536:8:4096:32:11008"],  # 1.3B and 6.7B, 8 layers
        help="seq_len:layers:hidden:heads:ffn",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["none", "gemm-last", "attention", "full", "gemm-last+0.5", "attention+1"],
        help="recompute, or recompute+ratio",
    )
    parser.add_argument("--ulysses", type=int, help="default: all ranks")
    parser.add_argument("--moments", type=Path, help="the CSV file of memory over a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-a-row", type=int, default=2, help="steps of a round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
