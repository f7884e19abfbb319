"""Tensor parallelism with all-reduces, with sharded tokens, and with their communication hidden.

    torchrun --nproc-per-node 2 scripts/bench/bench_tp_overlap.py --out tp_overlap.csv

The trainer's layers (bf16, SwiGLU, RoPE, local linear layers) on all ranks as one tensor-parallel
group. *layer*: forward and backward of one. *step*: four of them with embedding and loss, forward,
backward and AdamW. *all-reduce* is without sharded tokens, *plain* shards them with whole
collectives (--usp-tp-shard-tokens), *fused* with torch's fused operators (USP_TP_FUSED=1). Times
are medians of the slowest rank. The differences are of the first step's loss and gradients, the
largest over weights, from those of *all-reduce*; above 3 times those of *plain* they are WRONG, and
the exit code is 1. Smallest run, on CPUs: --device cpu --hidden 32 --tokens 64 --rounds 1.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench_harness import Session, Step, Table, common_flags
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples_deepspeed" / "sequence_parallel"))

from usp_trainer.arguments import parse  # noqa: E402
from usp_trainer.validate_args import validate_and_derive  # noqa: E402

from ds_usp.training import TensorParallelComm  # noqa: E402
from megatron_patches.megatron_core import cpu_fallbacks_patch_set  # noqa: E402
from megatron_patches.megatron_core.groups import initialize_groups  # noqa: E402

COLUMNS = ("hidden", "tokens", "what", "method", "ms", "speedup", "loss_diff", "gradient_diff")
LAYERS, VOCABULARY, HEAD_DIM = 4, 32000, 128
NEVER_WRONG = 1e-4  # a relative difference of gradients
Rows = list[list[str]]
METHODS: dict[str, Any] = {
    "all-reduce": lambda group, device: None,
    "plain": lambda group, device: TensorParallelComm(group, "asked for"),
    "fused": TensorParallelComm.build,
}


class Model:
    """The trainer's model of one size by one method."""

    def __init__(self, session: Session, args: Namespace, parts: Any, method: str) -> None:
        from usp_trainer import model as trainer_model

        mesh, groups = parts
        self.comm = METHODS[method](groups.tp, session.device)
        config = replace(trainer_model.transformer_config(args), perform_initialization=False)
        layout = mesh.layout(args.usp_layout, args.seq_length)
        patched = mock.patch.object(trainer_model, "transformer_config", lambda _: config)
        parts = args, mesh, layout, groups, session.device, self.comm
        with patched, session.device:
            self.gpt = trainer_model.build_model(*parts)
        dtype = torch.bfloat16 if session.on_gpu else torch.float32
        self.gpt.to(dtype)
        torch.manual_seed(1234)  # weights are drawn alike by all methods, norms are 1 on all ranks
        with torch.no_grad():
            for p in self.gpt.parameters():
                p.normal_(0.0, 0.02) if p.ndim > 1 else p.fill_(1.0)
        self.optimizer = torch.optim.AdamW(self.gpt.parameters(), 1e-4, fused=session.on_gpu)
        self.ids = torch.arange(args.seq_length, device=session.device)[None] * 7919 % VOCABULARY
        shards = self.comm.size if self.comm else 1
        shape = args.seq_length // shards, 1, args.hidden_size
        self.x, self.grad = (torch.randn(shape, dtype=dtype, device=session.device) for _ in "xg")
        self.x.requires_grad_()

    def layer(self) -> None:
        """Forward and backward of the second layer."""
        self.gpt.calls[2](self.x).backward(self.grad)
        self.x.grad = None
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Forward, backward and optimizer of all layers."""
        self.backward()
        self.optimizer.step()

    def backward(self) -> tuple[Tensor, list[Tensor]]:
        """Loss and gradients."""
        self.optimizer.zero_grad()
        weights = torch.full(self.ids.shape, 1 / self.ids.numel(), device=self.ids.device)
        loss = self.gpt(self.ids, self.ids.roll(-1, 1), weights)
        loss.backward()
        return loss.detach(), [p.grad for p in self.gpt.parameters()]


def arguments(session: Session, hidden: int, tokens: int) -> Namespace:
    """Checked, as the trainer has them."""
    flags = f"""--tensor-model-parallel-size {session.world} --num-layers {LAYERS} --swiglu
        --hidden-size {hidden} --num-attention-heads {max(session.world, hidden // HEAD_DIM)}
        --seq-length {tokens} --use-rotary-position-embeddings --normalization rmsnorm
        --disable-bias-linear --untie-embeddings-and-output-weights --transformer-impl local
        --device {session.device.type} {"--bf16" if session.on_gpu else ""}"""
    args = validate_and_derive(parse(flags.split()), session.world)
    args.padded_vocab_size = VOCABULARY
    return args


def differences(model: Model, reference: Model) -> tuple[float, float]:
    """Relative differences of two methods' losses, and of their gradients, the largest."""
    (loss, gradients), (expected, references) = model.backward(), reference.backward()
    pairs = [(a.float(), b.float()) for a, b in zip(gradients, references, strict=True)]
    return float(abs(loss / expected - 1)), max(float((a - b).norm() / b.norm()) for a, b in pairs)


def measure(
    session: Session, hidden: int, tokens: int, parts: Any, args: Namespace
) -> list[list[str]]:
    """The rows of one size."""
    checked = arguments(session, hidden, tokens)
    models = {method: Model(session, checked, parts, method) for method in METHODS}
    comm = models["fused"].comm
    if session.on_gpu and comm and comm.plain_reason:
        session.print0(f"fused: left out, {comm.plain_reason}")
        del models["fused"]
    rows, apart = [], {}
    for name, model in models.items():
        local = differences(model, models["all-reduce"])
        apart[name] = session.all_reduced(local, dist.ReduceOp.MAX)
    for what, repeats in (("layer", args.repeats), ("step", max(1, args.repeats // 4))):
        steps: dict[str, Step] = {name: getattr(model, what) for name, model in models.items()}
        for step in (*steps.values(), *steps.values()):
            step()
        seconds = session.medians(steps, args.rounds, repeats)
        for method, time in seconds.items():
            figures = time * 1e3, seconds["all-reduce"] / time, *apart[method]
            names = f"{hidden}", f"{tokens}", what, method
            rows.append([*names, *(f"{x:.4g}" for x in figures)])
    return rows


def main() -> None:
    """Measure every size; rank 0 prints and writes."""
    parser = common_flags(__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 2048])
    parser.add_argument("--tokens", type=int, nargs="+", default=[12288, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=12, help="layers in a row; steps: a quarter")
    args = parser.parse_args()
    os.environ["USP_TP_FUSED"] = "1"
    session = Session.start(args.device)
    cpu_fallbacks_patch_set().apply()
    parts = initialize_groups(tensor=session.world, sequence=1, pipeline=1, ulysses=1)
    table = Table(session, args.out, COLUMNS, f"{LAYERS} layers in a step")
    session.print0(" ".join(f"{column:>13}" for column in COLUMNS))
    wrong = False
    for hidden, tokens in product(args.hidden, args.tokens):
        rows = measure(session, hidden, tokens, parts, args)
        plain = next(float(row[-1]) for row in rows if row[3] == "plain")
        for row in rows:
            table.add(row)
            is_wrong = not float(row[-1]) <= max(3 * plain, NEVER_WRONG)
            wrong |= is_wrong
            session.print0(" ".join(f"{x:>13}" for x in row) + is_wrong * "  WRONG")
    session.close()
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
