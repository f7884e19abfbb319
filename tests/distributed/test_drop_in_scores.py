"""USPAttention with a ring does to its scores what the local attention would."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from harness import RankContext, WorkerPool
from sample_attentions import TOKENS, Setting, flash_attn, full_tensors, megatron_core

from ds_usp import MaskSpec

SINKS, SLOPES = (-1.0, 0.0, 2.5, 4.0), (0.5, 0.25, 0.125, 0.0625)
SETTINGS = {
    "megatron-core's softmax offset": (megatron_core, {"sinks": SINKS}, {"sinks": SINKS}),
    "flash-attn's ALiBi": (flash_attn, {"alibi": torch.tensor(SLOPES)}, {"slopes": SLOPES}),
}


def compare(ctx: RankContext, name: str, ulysses: int) -> list[float]:
    """Relative errors of this rank's out, dq, dk, dv and of the sinks' gradient of all."""
    make, arguments, changes = SETTINGS[name]
    attention = Setting(make, arguments, {"mask": MaskSpec.causal()}, ulysses=ulysses).module()
    layout = attention.mesh.layout("zigzag", TOKENS)
    q, k, v, dout = (layout.shard(x, 1, ctx.rank) for x in full_tensors())
    wanted = [x.requires_grad_() for x in (q, k, v)]
    learned = list(attention.local_attn.parameters())
    out = attention(q, k, v, 0)
    actual = [out.view(dout.shape)]
    actual += torch.autograd.grad(out, [*wanted, *learned], dout.view(out.shape))
    for grad in actual[4:]:
        dist.all_reduce(grad)
    expected = reference(**changes)
    shards = [layout.shard(x, 1, ctx.rank) for x in expected[:4]]
    return [
        oracle.relative_error(a, b) for a, b in zip(actual, [*shards, *expected[4:]], strict=True)
    ]


def reference(sinks: Any = None, slopes: Any = None) -> list[torch.Tensor]:
    q, k, v, dout = (x.double().requires_grad_() for x in full_tensors())
    learned = [] if sinks is None else [torch.tensor(sinks, dtype=torch.float64).requires_grad_()]
    out, _ = oracle.dense_attention(
        q,
        k,
        v,
        oracle.causal(range(TOKENS), range(TOKENS)),
        bias=None if slopes is None else oracle.alibi(torch.tensor(slopes), range(TOKENS)),
        sinks=learned[0] if learned else None,
    )
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, *learned], dout)]


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_the_oracle(pool: WorkerPool, name: str, ulysses: int) -> None:
    for errors in pool.run(compare, 4, name=name, ulysses=ulysses):
        assert max(errors) <= 1e-5, errors
