"""A layer of GLM-5, whose indexer picks the keys of each query, on one GPU and on several.

    torchrun --nproc-per-node 2 scripts/bench/bench_sparse.py --out sparse.csv

``layer``: a decoder layer (64 heads, latents of 512 + 64, 2,048 keys of each query, 32 index heads
of 128, dense MLP) with a small vocabulary, forward + backward in bf16. Every GPU computes all
tokens by itself, then all share them; ``exposed_ms`` is what a step is faster by where the gathers
of keys are left out. ``step``: a training step of --layers such layers with GLM-5's vocabulary,
FSDP2 with fp32 weights, AdamW, nothing recomputed but in chunks of queries, after one of 4,096
tokens; with --alone also on each GPU by itself, which may have no memory for it. ``errors``: a
layer in bf16 against fp64 on few tokens, attention as transformers computes it and in chunks, loss
and the gradient of all parameters.
Smallest run, on CPUs: --device cpu --tokens 96 --error-tokens 64 --step-tokens 96 --tiny --alone
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from bench_harness import Session, Table, common_flags
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ds_usp
from ds_usp.integrations.transformers import enable, sparse_layers
from ds_usp.testing import relative_error

_SETTINGS = ("what", "tokens", "layers", "gpus", "matmul_precision", "query_chunks")
_MEASURED = ("seconds", "rate_of_one_gpu", "exposed_ms", "peak_gib", "error", "remark")
COLUMNS = _SETTINGS + _MEASURED
TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16}
TINY |= {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
TINY |= {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 16, "intermediate_size": 64}


class Bench:
    """The ranks, their meshes of one and of all, and the table."""

    def __init__(self, session: Session, args: argparse.Namespace) -> None:
        self.session, self.args = session, args
        alone = [dist.new_group([rank]) for rank in range(session.world)]
        groups = {1: alone[session.rank], session.world: dist.group.WORLD}
        self.groups = groups
        self.meshes = {
            n: ds_usp.SequenceMesh.from_group(group, ulysses_degree=1)
            for n, group in groups.items()
        }
        note = f"transformers {transformers.__version__}, GLM-5's layer, batch 1, zigzag"
        self.table = Table(session, args.out, COLUMNS, note)

    def model(self, layers: int, vocabulary: int, dtype: torch.dtype) -> Any:
        """The same weights on every rank."""
        torch.manual_seed(0)
        config = transformers.GlmMoeDsaConfig(
            **{"num_hidden_layers": layers, "vocab_size": vocabulary, "use_cache": False}
            | {"mlp_layer_types": ["dense"] * layers, "indexer_types": ["full"] * layers}
            | {"eos_token_id": None, "max_position_embeddings": 2**20}
            | (TINY if self.args.tiny else {})
        )
        with self.session.device:
            model = transformers.GlmMoeDsaForCausalLM._from_config(
                config, attn_implementation="eager", dtype=dtype
            )
        return model.train()

    def batch(self, tokens: int, vocabulary: int) -> dict[str, Tensor]:
        """Random tokens, which are their own labels."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(vocabulary, (1, tokens), generator=generator).to(self.session.device)
        return {"input_ids": ids, "labels": ids}

    def add(self, what: str, tokens: int, layers: int, gpus: int, **values: Any) -> None:
        """Write and print a row."""
        precision = torch.get_float32_matmul_precision()
        known = {"what": what, "tokens": tokens, "layers": layers, "gpus": gpus}
        known |= {"matmul_precision": precision, "query_chunks": self.args.query_chunks, **values}
        row = [_text(known.get(column, "")) for column in COLUMNS]
        self.table.add(row)
        pairs = zip(COLUMNS, row, strict=True)
        self.session.print0("  ".join(f"{name} {text}" for name, text in pairs if text))

    def free(self) -> None:
        """Give memory of what ran before back."""
        gc.collect()
        if self.session.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        """The most that a rank has allocated since :meth:`free`."""
        if not self.session.on_gpu:
            return math.nan
        peak = torch.cuda.max_memory_allocated() / 2**30
        return self.session.all_reduced([peak], ReduceOp.MAX)[0]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def without_exchange() -> Iterator[None]:
    """Each rank repeats its own keys where it would be sent those of others."""

    def repeat(x: Tensor, dim: int, *, mesh: Any, layout: Any) -> Tensor:
        times = [1] * x.ndim
        times[dim] = -(-layout.seq_len // x.shape[dim])
        return x.repeat(times).narrow(dim, 0, layout.seq_len)

    with mock.patch.object(sparse_layers, "gather_tokens", repeat):
        yield


def bench_layer(bench: Bench, tokens: int) -> None:
    """Time a layer on one GPU and on all, with and without its exchanges."""
    session, args = bench.session, bench.args
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    model, batch = bench.model(1, 1024, dtype), bench.batch(tokens, 1024)
    options: dict[str, Any] = {"loss_chunks": 4, "query_chunks": args.query_chunks}
    losses: list[float] = []

    def step(tokens: int = tokens) -> None:
        model.zero_grad()
        loss = model(**{name: x[:, :tokens] for name, x in batch.items()}).loss
        loss.backward()
        losses.append(loss.item())

    one: dict[str, float] = {}
    for gpus, mesh in bench.meshes.items():
        bench.free()
        with enable(model, mesh, **options):
            step(min(tokens, 8192))
            seconds = session.try_all_ranks(lambda: session.seconds(step, args.repeats))
            if isinstance(seconds, str):
                bench.add("layer", tokens, 1, gpus, remark=seconds)
                continue
            peak, bare, loss = bench.peak_gib(), seconds, losses[-1]
            if gpus > 1:
                with without_exchange():
                    bare = session.seconds(step, args.repeats)
        one = one or {"seconds": seconds, "loss": loss}
        bench.add(
            "layer",
            tokens,
            1,
            gpus,
            seconds=seconds,
            rate_of_one_gpu=one["seconds"] / seconds / gpus,
            exposed_ms=1e3 * (seconds - bare),
            peak_gib=peak,
            error=abs(loss - one["loss"]) / one["loss"],
        )


def bench_step(bench: Bench, tokens: int) -> None:
    """Time a training step on one GPU, which may have no memory for it, and on all."""
    session, args = bench.session, bench.args
    vocabulary = 1024 if args.tiny else 154880
    batch = bench.batch(tokens, vocabulary)
    for gpus, mesh in reversed(bench.meshes.items()):
        if gpus < session.world and not args.alone:
            continue
        bench.free()
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        policy = precision if session.on_gpu else MixedPrecisionPolicy()
        devices = DeviceMesh.from_group(bench.groups[gpus], session.device.type)

        def train(
            mesh: Any = mesh, devices: Any = devices, policy: Any = policy
        ) -> tuple[Any, ...]:
            model = bench.model(args.layers, vocabulary, torch.float32)
            options: dict[str, Any] = {"mlp_chunks": args.mlp_chunks, "loss_chunks": 16}
            enable(model, mesh, query_chunks=args.query_chunks, **options)
            for layer in model.model.layers:
                fully_shard(layer, mesh=devices, mp_policy=policy)
            fully_shard(model, mesh=devices, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=session.on_gpu)

            def step(tokens: int) -> float:
                loss = model(**{name: x[:, :tokens] for name, x in batch.items()}).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.item()

            step(min(tokens, 4096))
            losses: list[float] = []
            return session.seconds(lambda: losses.append(step(tokens))), losses[0]

        found = session.try_all_ranks(train)
        if isinstance(found, str):
            bench.add("step", tokens, args.layers, gpus, remark=found)
            continue
        seconds, loss = found
        remark = f"loss {loss:.5f}"
        bench.add(
            "step",
            tokens,
            args.layers,
            gpus,
            seconds=seconds,
            peak_gib=bench.peak_gib(),
            remark=remark,
        )
        del found


def bench_errors(bench: Bench, tokens: int) -> None:
    """Errors of bf16 against fp64: transformers' own attention, and chunks on one GPU and all."""
    session = bench.session
    batch = bench.batch(tokens, 1024)
    low = torch.bfloat16 if session.on_gpu else torch.float32

    def gradients(model: Any) -> Tensor:
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat([loss.detach().view(1).double(), *(x.double() for x in parts)])

    model = bench.model(1, 1024, low)
    truth = gradients(bench.model(1, 1024, low).double())
    cases: dict[str, tuple[int, Any]] = {"transformers": (1, nullcontext)}
    for gpus, mesh in bench.meshes.items():
        options: dict[str, Any] = {"gradients": "sum", "query_chunks": 8}
        cases[f"chunks, {gpus}"] = gpus, partial(enable, model, mesh, **options)
    for name, (gpus, context) in cases.items():
        with context():
            have = gradients(model)
        if gpus > 1:
            have[1:] = _summed(have[1:])
        error = relative_error(have[1:], truth[1:])
        how, chunks = (name.split(",")[0], 1 if name == "transformers" else 8)
        bench.add("errors", tokens, 1, gpus, error=error, remark=how, query_chunks=chunks)


def _summed(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def main() -> None:
    """Measure; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device, timeout_s=300)
    torch.set_float32_matmul_precision(args.matmul_precision)
    bench = Bench(session, args)
    if "errors" in args.what:
        bench_errors(bench, args.error_tokens)
    if "layer" in args.what:
        for tokens in args.tokens:
            bench_layer(bench, tokens)
    if "step" in args.what:
        bench_step(bench, args.step_tokens)
    session.close()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    whats = ("errors", "layer", "step")
    parser.add_argument("--what", nargs="+", choices=whats, default=whats)
    parser.add_argument("--tokens", nargs="+", type=int, default=[32768, 131072])
    parser.add_argument("--step-tokens", type=int, default=131072)
    parser.add_argument("--error-tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4, help="of the training step")
    parser.add_argument("--mlp-chunks", type=int, default=0, help="of the training step")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--query-chunks", type=_chunks, default="auto")
    parser.add_argument(
        "--matmul-precision", default="highest", help="of fp32: the scores of the indexer"
    )
    parser.add_argument("--alone", action="store_true", help="the training step on one GPU too")
    parser.add_argument("--tiny", action="store_true", help="small dims, to show that it runs")
    return parser.parse_args()


def _chunks(text: str) -> int | str:
    return text if text == "auto" else int(text)


if __name__ == "__main__":
    main()
