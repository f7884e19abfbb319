r"""Samples dealt to groups of ranks, beside one degree for all: by the planner's clock, and timed.

    python scripts/bench/bench_dealt.py --plan --mixes chat "chat and 1 long" long documents \
        --out dealt_plan.csv
    torchrun --nproc-per-node 2 scripts/bench/bench_dealt.py --out dealt.csv
    torchrun --nproc-per-node 2 scripts/bench/bench_dealt.py --device cpu --model tiny \
        --max-tokens 64 --samples 5  # shows that it runs

Contenders, on the same samples:

* ``dealt``: ``DealtBatches``.
* ``ulysses N``, ``ring N``: groups of N ranks alone, packed and balanced by the same dealer: what
  the best loader could make of one degree. Only where N ranks hold the longest sample of the mix.
* ``packed N``: groups of N whose rows are filled with samples as they come, and which take rows in
  turn, as loaders of packed documents have them.

Lengths are drawn from measured ones (:data:`MIXES`), the same for all. ``--plan`` prices steps by
``ds_usp.planner.sample_cost`` and needs no ranks; ``cpu_s`` is what the dealing itself takes. The
timed model is a Llama of 8 layers (hidden size 2048, 32/8 heads of 64, MLP 8192, vocabulary 128256)
in bf16 under DDP, its layers recomputed, its loss in chunks; contenders take turns, each on the
same steps. ``loss`` is the first step's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from math import exp, log
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_harness import Session, Table, common_flags
from shapes import MAGI
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_usp
from ds_usp import training
from ds_usp.experimental.dealt_batches import DealtBatches
from ds_usp.geometry.dealing import Dealer, DealtGroup, DealtStep, groups_of_size
from ds_usp.kernels.rotary import apply_rotary
from ds_usp.planner import load_cluster, load_model, sample_cost
from ds_usp.planner.models import ModelShape

# Tokens at these percentiles of all samples; between them lengths are drawn log-uniformly.
PERCENT = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 99.9, 100)
# Requests and answers together. github.com/Azure/AzurePublicDataset at b469a11,
# data/AzureLLMInferenceTrace_conv.csv: 19,366 requests to a conversation service in November 2023
# (Splitwise, arXiv 2311.18677).
CHAT = (
    *(64, 132, 296, 368, 473, 506, 800, 1412, 1469, 1522, 1628, 2820, 4136, 4186, 4259, 4917),
    *(6345, 14089),
)
# github.com/kvcache-ai/Mooncake at 3b5a594, FAST25-release/traces/conversation_trace.jsonl: 12,031
# requests to the assistant Kimi (Mooncake, arXiv 2407.00079).
LONG = (
    *(895, 927, 1120, 1343, 2038, 3635, 5291, 7255, 9886, 13574, 18246, 27723, 40056, 66769),
    *(85858, 101102, 121912, 126527),
)
COUNTS = [count for *_, count in MAGI]
DOCUMENTS = [1, *(last for _, last, _ in MAGI)]
TABLES = {
    "chat": (PERCENT, CHAT),
    "long": (PERCENT, LONG),
    "documents": ([100 * x / sum(COUNTS) for x in (0, *accumulate(COUNTS))], DOCUMENTS),
}
# Most samples are of the first table; of 64, so many are of ``long``.
MIXES = {
    "chat": ("chat", 0),
    "chat and 1 long": ("chat", 1),
    "chat and 8 long": ("chat", 8),
    "long": ("long", 0),
    "documents": ("documents", 0),
}
# Of --plan: a cluster, and how many of its GPUs.
MACHINES = (("h100", 8), ("h100", 64), ("l20", 8))
COLUMNS = ("cluster", "gpus", "mix", "contender", "s_per_step", "slower_than_dealt", "cpu_s")
TIMED = ("mix", "contender", "tokens_per_step", "micro_batches", "s_per_step", "slower", "loss")


def draw_lengths(mix: str, count: int, seed: int, most: int) -> list[int]:
    """The lengths of one step; longer ones than ``most`` are drawn again."""
    draw, lengths = random.Random(f"{mix} {seed}"), []
    table, long = MIXES[mix]
    while len(lengths) < count:
        percent, tokens = TABLES["long" if len(lengths) < long * count / 64 else table]
        at = draw.uniform(0, 100)
        index = next(i for i, (_, b) in enumerate(pairwise(percent)) if at <= b)
        a, b = percent[index : index + 2]
        low, high = tokens[index : index + 2]
        length = round(exp(log(low) + (log(high) - log(low)) * (at - a) / (b - a)))
        if length <= most:
            lengths.append(length)
    draw.shuffle(lengths)
    return lengths


def longest(mix: str, most: int) -> int:
    """Tokens that a sample of the mix may have, of at most so many."""
    table, long = MIXES[mix]
    return min(most, TABLES["long" if long else table][1][-1])


@dataclass(frozen=True)
class Packed(Dealer):
    """Groups of one size that take full rows in turn, filled with samples as they come."""

    def deal(self, lengths: Sequence[int]) -> DealtStep:
        """The rows, as many at once as there are groups."""
        (size,) = self.sizes
        rows: list[list[int]] = [[]]
        for i, length in enumerate(lengths):
            if sum(lengths[j] for j in rows[-1]) + length > size * self.max_tokens:
                rows.append([])
            rows[-1].append(i)
        start, groups = self.cost(0, size), groups_of_size(self.world, size)
        micro_batches = []
        for first in range(0, len(rows), len(groups)):
            pairs = list(zip_longest(groups, rows[first : first + len(groups)]))
            micro_batch = [
                DealtGroup(
                    ranks, tuple(row), start + sum(self.cost(lengths[i], size) - start for i in row)
                )
                for ranks, row in pairs
                if row
            ]
            idle = (DealtGroup(range(r, r + 1)) for ranks, row in pairs if not row for r in ranks)
            micro_batches.append((*micro_batch, *idle))
        return DealtStep(tuple(micro_batches))


def contenders(dealer: Dealer, longest_sample: int) -> Iterator[tuple[str, Dealer]]:
    """Those that can hold such a sample; rings are made of the same."""
    yield "dealt", dealer
    for size in (x for x in dealer.sizes if x & (x - 1) == 0):
        if longest_sample <= size * dealer.max_tokens:
            alone = replace(dealer, sizes=(size,))
            yield f"ulysses {size}", alone
            if size < dealer.world:  # of one group the two are the same
                yield f"packed {size}", Packed(**vars(alone))


def plan(args: argparse.Namespace) -> None:
    """Steps by the planner's clock."""
    session = Session(torch.device("cpu"), 0, 1)
    note = f"steps priced by ds_usp.planner.sample_cost, llama3-8b; max_tokens {args.max_tokens}, "
    note += f"{args.samples} samples a step for each 8 GPUs, mean of {args.steps} steps"
    table = Table(session, args.out, COLUMNS, note)
    for name, world in MACHINES:
        cost = sample_cost(load_cluster(name), load_model("llama3-8b"), args.max_tokens)
        dealer = Dealer(world, args.max_tokens, cost)
        for mix in args.mixes:
            most, count = longest(mix, dealer.longest), args.samples * world // 8
            steps = [draw_lengths(mix, count, i, most) for i in range(args.steps)]
            dealer.deal(steps[0])  # prices what it needs
            fastest = 0.0
            for contender, own in contenders(dealer, most):
                begin = time.process_time()
                seconds = statistics.mean(own.deal(x).seconds for x in steps)
                cpu = (time.process_time() - begin) / len(steps)
                fastest = fastest or seconds
                row = (name, str(world), mix, contender, f"{seconds:.4f}")
                row = (*row, f"{seconds / fastest:.3f}", f"{cpu:.3f}")
                table.add(row)
                print(*row, sep=", ")


@dataclass(frozen=True)
class Sizes:
    """Of the timed model."""

    hidden: int = 2048
    ffn: int = 8192
    heads: int = 32
    kv_heads: int = 8
    layers: int = 8
    vocab: int = 128256

    @property
    def shape(self) -> ModelShape:
        """As the planner has it."""
        widths = self.hidden, self.ffn, self.heads, self.kv_heads, self.vocab
        return ModelShape("timed", self.layers, *widths, self.hidden // self.heads, gated=True)


MODELS = {"llama": Sizes(), "tiny": Sizes(64, 128, 8, 4, 2, 211)}


class Layer(nn.Module):
    """Attention on the batch's mesh, and a gated MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        linear, h = partial(nn.Linear, bias=False), sizes.hidden
        self.head_dim = h // sizes.heads
        self.split = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
        self.norms = nn.ModuleList(nn.RMSNorm(h) for _ in range(2))
        self.qkv, self.out = linear(h, self.head_dim * sum(self.split)), linear(h, h)
        self.up, self.down = linear(h, 2 * sizes.ffn), linear(sizes.ffn, h)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], batch: Any, kernel: str) -> Tensor:
        """``[1, s_local, hidden]`` to the same."""
        qkv = self.qkv(self.norms[0](x)).unflatten(2, (-1, self.head_dim))
        q, k, v = qkv.split(self.split, 2)
        q, k = apply_rotary((q, k), *rotary, 1)
        mask = ds_usp.MaskSpec.causal(batch.documents)
        out = ds_usp.usp_attention(
            q, k, v, mesh=batch.mesh, layout=batch.layout, mask=mask, kernel=kernel
        )
        x = x + self.out(out.flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, 2)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Computes losses itself, so that DDP sees one forward pass."""

    def __init__(self, sizes: Sizes, kernel: str) -> None:
        super().__init__()
        self.kernel, self.dim = kernel, sizes.hidden // sizes.heads
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, batch: Any, weight: float, chunks: int) -> Tensor:
        """The weighted loss of a rank's tokens."""
        x = self.embedding(batch.tokens)
        angles = training.rotary_frequencies(batch.positions[0], self.dim)[:, 0, 0]
        rotary = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, rotary, batch, self.kernel, use_reentrant=False)
        weights = torch.where(batch.labels == training.IGNORE_INDEX, 0.0, weight)
        # Without chunks of it the logits of 16K tokens are 8 GiB.
        return training.chunked_weighted_loss(
            self.norm(x), self.head.weight, batch.labels, weights, chunks=chunks
        )


def timed(args: argparse.Namespace) -> None:
    """Steps of the model on the ranks of torchrun."""
    session = Session.start(args.device)
    sizes = MODELS[args.model]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    with session.device:
        model = Llama(sizes, args.kernel).to(dtype)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=True)
    note = f"{args.model}, {args.samples} samples a step, max_tokens {args.max_tokens}, "
    note += f"{args.steps} steps a round, {args.rounds} rounds; kernel {args.kernel}"
    table = Table(session, args.out, TIMED, note)
    cost = sample_cost(load_cluster(args.cluster), sizes.shape, args.max_tokens, recompute="full")
    for mix in args.mixes:
        compare(session, table, args, mix, ddp, optimizer, cost)
    session.close()


def compare(
    session: Session, table: Table, args: Any, mix: str, ddp: Any, optimizer: Any, cost: Any
) -> None:
    """Time all contenders on the same steps of a mix."""
    sizes = MODELS[args.model]
    most = longest(mix, session.world * args.max_tokens)
    # On CPUs the model and its samples are small; what is dealt is the same.
    scale = 1 if args.model == "llama" else args.max_tokens / 16384
    draw, steps = torch.Generator().manual_seed(0), []
    for number in range(args.steps):
        lengths = draw_lengths(
            mix, args.samples, number, round(most / scale) if scale < 1 else most
        )
        lengths = [max(2, min(most, round(x * scale))) for x in lengths]
        tokens = [torch.randint(sizes.vocab, (x,), generator=draw) for x in lengths]
        steps.append([{"input_ids": x} for x in tokens])
    dealers = list(contenders(Dealer(session.world, args.max_tokens, cost), longest(mix, most)))
    loaders = {}
    for name, dealer in dealers:
        heads = sizes.heads, sizes.kv_heads
        make = partial(DealtBatches, steps, None, args.max_tokens, cost=cost)
        loaders[name] = make(heads=heads, sizes=dealer.sizes, device=session.device)
        loaders[name].dealer = dealer
        if name == f"ulysses {session.world}":
            loaders[f"ring {session.world}"] = make(sizes=dealer.sizes, device=session.device)
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    losses, micro_batches = {}, {}
    for round_ in range(args.rounds + 1):  # the first one compiles and allocates
        for name, loader in loaders.items():
            session.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            losses[name], micro_batches[name] = run(session, loader, ddp, optimizer)
            session.synchronize()
            took = session.all_reduced([time.perf_counter() - begin], dist.ReduceOp.MAX)[0]
            if round_:
                seconds[name].append(float(took) / args.steps)
    tokens = sum(len(x["input_ids"]) for step in steps for x in step) // args.steps
    fastest = statistics.median(seconds["dealt"])
    for name, of_rounds in seconds.items():
        s = statistics.median(of_rounds)
        row = (mix, name, str(tokens), str(micro_batches[name]), f"{s:.4f}")
        row = (*row, f"{s / fastest:.3f}", f"{losses[name]:.6f}")
        table.add(row)
        session.print0(", ".join(row))


def run(session: Session, loader: Any, ddp: Any, optimizer: Any) -> tuple[float, int]:
    """The loss of the first step, and the micro batches of all."""
    first, count = None, 0
    for step in loader:
        losses = []
        for batch in step:
            ddp.require_backward_grad_sync = batch.is_last
            weight = training.loss_token_weight(batch.loss_tokens, session.world)
            chunks = max(1, batch.tokens.shape[1] // 2048)
            loss = ddp(batch, weight, chunks)
            loss.backward()
            losses.append(loss.detach())
            count += 1
        optimizer.step()
        optimizer.zero_grad()
        if first is None:
            first = training.mean_loss(losses, session.world, dist.group.WORLD)
    return float(first), count


def main() -> int:
    """Plan, or time on the ranks."""
    parser = common_flags(__doc__)
    parser.add_argument("--plan", action="store_true", help="price steps, without ranks")
    parser.add_argument("--samples", type=int, default=64, help="of a step")
    parser.add_argument("--steps", type=int, default=0, help="0: 16 that are priced, 2 timed ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES)[:3])
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a rank")
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--cluster", default="h100", help="whose costs are dealt by")
    args = parser.parse_args()
    args.steps = args.steps or (16 if args.plan else 2)
    (plan if args.plan else timed)(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
