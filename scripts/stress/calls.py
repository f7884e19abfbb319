"""What a rank of the stress test does: random attention calls, or their messages without ds_usp."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

import ds_usp

Pause = Callable[[], None]  # shifts the ranks against each other
MASKS = ("causal", "causal", "full", "window")
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
RECORD_BYTES = 2048  # of the consistency check


@dataclass(frozen=True)
class Call:
    """One attention call on one mesh, forward and mostly backward; few tokens, so that the ranks
    do little else than exchange messages."""

    ulysses: int
    order: str
    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: str
    mask: str
    dtype: torch.dtype
    drop_in: bool
    backward: bool
    calls: int  # before their backward passes, which are one


def random_of(seed: int, index: int) -> random.Random:
    """The source of a world's ``index``-th call, the same on all its ranks."""
    return random.Random(f"{seed} {index}")


def draw(rng: random.Random, world: int) -> Call:
    """A random call; some are refused."""
    kv_heads = rng.choice((1, 2, 3, 4))
    return Call(
        ulysses=rng.choice([degree for degree in range(1, world + 1) if world % degree == 0]),
        order=rng.choice(("ulysses-ring", "ring-ulysses")),
        batch=rng.choice((1, 1, 2, 3)),
        seq_len=rng.choice((3, 4, 7, 16, 24, 48, 67, 128)),
        heads=kv_heads * rng.choice((1, 2, 3)),
        kv_heads=kv_heads,
        head_dim=rng.choice((8, 16, 32)),
        layout=rng.choice(("contiguous", "zigzag", "striped")),
        mask=rng.choice(MASKS),
        dtype=rng.choice(DTYPES),
        drop_in=rng.random() < 0.5,
        backward=rng.random() < 0.85,
        calls=rng.choice((1, 1, 2)),
    )


class LocalAttention(torch.nn.Module):
    """The local attention of a drop-in with ring degree 1."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2)


@cache
def _mesh(ulysses: int, order: str) -> ds_usp.SequenceMesh:
    return ds_usp.SequenceMesh.from_group(None, ulysses, order)


def attend(call: Call, pause: Pause) -> None:
    """Make the call, with random local tensors."""
    mesh = _mesh(call.ulysses, call.order)
    layout = mesh.layout(call.layout, call.seq_len)
    tokens = layout.length(mesh.rank)
    q, k, v = (
        torch.randn(call.batch, tokens, heads, call.head_dim, dtype=call.dtype)
        for heads in (call.heads, call.kv_heads, call.kv_heads)
    )
    for x in (q, k, v):
        x.requires_grad_(call.backward)
    masks = {
        "causal": ds_usp.MaskSpec.causal(),
        "full": ds_usp.MaskSpec.full(),
        "window": ds_usp.MaskSpec.window(5),
    }
    mask = masks[call.mask]
    pause()
    if call.drop_in:
        module = ds_usp.USPAttention(
            LocalAttention(), mesh=mesh, layout=layout, mask=mask, dropout_p=0.0
        )
        outs = [module(q, k, v, 0) for _ in range(call.calls)]
    else:
        outs = [
            ds_usp.usp_attention(q, k, v, mesh=mesh, layout=layout, mask=mask)
            for _ in range(call.calls)
        ]
    pause()
    if call.backward:
        sum(out.float().sum() for out in outs).backward()


@cache
def _groups(world: int) -> tuple[dist.ProcessGroup, ...]:
    """Three groups of all ranks: for keys and values, their gradients, the head exchange."""
    return tuple(dist.new_group(list(range(world))) for _ in range(3))


def exchange(rng: random.Random, rank: int, world: int, pause: Pause) -> None:
    """The messages of an attention call, forward and backward, by torch alone. The records go
    over the default group, as ds_usp's do."""
    kv_group, grad_group, head_group = _groups(world)
    elements = rng.choice((1, 16, 96, 768, 6144))
    for backward in (False, True):
        pause()
        _gather_records(world)
        heads = torch.full((world * elements,), float(rank))
        received = torch.empty_like(heads)
        head_work = dist.all_to_all_single(received, heads, group=head_group, async_op=True)
        block, grads = torch.full((elements,), float(rank)), torch.full((elements,), float(rank))
        kv_works = _post(kv_group, block, rank, 1, world)
        grad_works: Sequence[dist.Work] = ()
        for step in range(1, world):
            pause()
            for work in kv_works:
                work.wait()
            kv_works = _post(kv_group, block, rank, step + 1, world) if step + 1 < world else []
            if backward:
                for work in grad_works:
                    work.wait()
                grad_works = _post(grad_group, grads, rank, step, world)
        for work in (*grad_works, head_work):
            work.wait()
        expected = torch.arange(world).repeat_interleave(elements).float()
        if not torch.equal(received, expected):
            raise RuntimeError(f"the all-to-all brought {received.tolist()[:8]}")


def _gather_records(world: int) -> None:
    buffers = [bytearray(RECORD_BYTES) for _ in range(world)]
    records = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
    local = torch.frombuffer(bytearray(RECORD_BYTES), dtype=torch.uint8)
    dist.group.WORLD.allgather([records], [local]).wait()


def _post(
    group: dist.ProcessGroup, block: torch.Tensor, rank: int, step: int, world: int
) -> list[dist.Work]:
    """Send the block ``step`` ranks on, receive the one from ``step`` ranks back."""
    received = torch.empty_like(block)
    return [
        group.send([block], (rank + step) % world, 0),
        group.recv([received], (rank - step) % world, 0),
    ]


def run(
    rank: int,
    world: int,
    seed: int,
    indices: Sequence[int],
    pause_s: float,
    torch_only: bool,
    on_call: Callable[[], None],
) -> int:
    """Make these calls of a world's; returns how many were refused.

    Args:
        pause_s: ranks wait for a random time up to this, three times a call.
        on_call: called after each.
    """
    refused = 0
    for index in indices:
        rng, delays = random_of(seed, index), random.Random(f"{seed} {index} {rank}")

        def pause(delays: random.Random = delays) -> None:
            if pause_s and delays.random() < 0.3:
                time.sleep(pause_s * delays.random())

        if torch_only:
            exchange(rng, rank, world, pause)
        else:
            try:
                attend(draw(rng, world), pause)
            except ds_usp.USPError:
                refused += 1
        on_call()
    return refused
