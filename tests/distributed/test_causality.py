"""No token's result depends on a later token, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import RankContext, WorkerPool

import ds_usp

SEQ_LEN = 48
KINDS = ("contiguous", "zigzag", "striped", "context_parallel")


def changed_positions(ctx: RankContext, kind: str, ulysses: int, changed: int) -> tuple[int, int]:
    """First and last position whose output changes with the token at ``changed``."""
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, ulysses)
    layout = mesh.layout(kind, SEQ_LEN)
    before = [torch.randn(1, SEQ_LEN, 4, 16) for _ in range(3)]
    after = [x.clone() for x in before]
    for x in after:
        x[:, changed] += 1.0
    outs = []
    for qkv in (before, after):
        q, k, v = (layout.shard(x, 1, mesh.rank) for x in qkv)
        mask = ds_usp.MaskSpec.causal()
        out = ds_usp.usp_attention(q, k, v, mesh=mesh, layout=layout, mask=mask)
        shards = [torch.empty_like(out) for _ in range(mesh.sp_degree)]
        dist.all_gather(shards, out)
        outs.append(layout.gather(shards, 1))
    differs = (outs[0] != outs[1]).flatten(2).any(-1)[0].nonzero()
    return int(differs.min()), int(differs.max())


@pytest.mark.parametrize("ulysses", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_earlier_positions_stay_bit_identical(pool: WorkerPool, kind: str, ulysses: int) -> None:
    for changed in (0, 13, 30, SEQ_LEN - 1):
        for first, last in pool.run(
            changed_positions, 4, kind=kind, ulysses=ulysses, changed=changed
        ):
            assert (first, last) == (changed, SEQ_LEN - 1)
