"""What a rank sends, counted by the ledger, equals the formulas to the byte."""

from __future__ import annotations

import pytest
import torch
from harness import RankContext, WorkerPool

import ds_usp

B, D = 2, 16


def count(
    ctx: RankContext, ulysses: int, heads: int, kv_heads: int, seq_len: int, dtype: torch.dtype
) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes of one forward and backward pass on this rank."""
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, ulysses)
    layout = mesh.layout("zigzag", seq_len)
    tokens = layout.length(mesh.rank)
    q, k, v = (
        torch.randn(B, tokens, h, D, dtype=dtype, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    out = ds_usp.usp_attention(q, k, v, mesh=mesh, layout=layout, mask=ds_usp.MaskSpec.causal())
    out.sum().backward()
    return dict(mesh.ledger.calls), dict(mesh.ledger.bytes)


CASES = [
    (4, ulysses, kv_heads, dtype)
    for ulysses in (1, 2, 4)
    for kv_heads in (8, 2, 1)
    for dtype in (torch.float32, torch.bfloat16)
] + [(8, 2, 4, torch.bfloat16), (8, 4, 2, torch.float32)]


@pytest.mark.parametrize(("world", "ulysses", "kv_heads", "dtype"), CASES)
def test_bytes_equal_the_formulas(
    pool: WorkerPool, world: int, ulysses: int, kv_heads: int, dtype: torch.dtype
) -> None:
    heads, seq_len, ring = 8, 64, world // ulysses
    local, block = seq_len // world, seq_len // ring
    my_heads = heads // ulysses
    my_kv = max(kv_heads // ulysses, 1)  # fewer KV heads than ranks: each rank still needs one
    size = dtype.itemsize
    # Each way: q, k and v (or their gradients) for the other ranks' heads, out for their tokens.
    qkv = (ulysses - 1) * B * local * (my_heads + 2 * my_kv) * D * size
    out = (ulysses - 1) * B * local * my_heads * D * size
    kv_block = 2 * B * block * my_kv * D
    expected_calls: dict[str, int] = {}
    expected_bytes: dict[str, int] = {}
    if ulysses > 1:
        expected_calls["all_to_all"], expected_bytes["all_to_all"] = 4, 2 * (qkv + out)
    if ring > 1:
        # Keys and values go round forward and backward; fp32 gradients make as many hops, the
        # last one home, because a rank's share of its own block stays where it is.
        expected_calls["ring_kv"] = 2 * (ring - 1)
        expected_bytes["ring_kv"] = 2 * (ring - 1) * kv_block * size
        expected_calls["ring_dkv"] = ring - 1
        expected_bytes["ring_dkv"] = (ring - 1) * kv_block * 4
    results = pool.run(
        count,
        world,
        ulysses=ulysses,
        heads=heads,
        kv_heads=kv_heads,
        seq_len=seq_len,
        dtype=dtype,
    )
    assert results == [(expected_calls, expected_bytes)] * world


def exchange_uneven(ctx: RankContext, heads: int, kv_heads: int, seq_len: int) -> tuple[int, int]:
    """Bytes counted, and bytes that the tensors of the other ranks' heads and tokens have."""
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, ctx.world)
    layout = mesh.layout("contiguous", seq_len)
    lengths = [layout.length(rank) for rank in range(ctx.world)]
    q_heads = [heads * (r + 1) // ctx.world - heads * r // ctx.world for r in range(ctx.world)]
    firsts = [heads * r // ctx.world for r in range(ctx.world)]
    group = heads // kv_heads
    kv = [
        len({head // group for head in range(first, first + count)})
        for first, count in zip(firsts, q_heads, strict=True)
    ]
    me = ctx.rank
    others = [rank for rank in range(ctx.world) if rank != me]
    qkv_there = sum(lengths[me] * (q_heads[r] + 2 * kv[r]) for r in others)
    out_there = sum(lengths[r] * q_heads[me] for r in others)
    dqkv_back = sum(lengths[r] * (q_heads[me] + 2 * kv[me]) for r in others)
    dout_back = sum(lengths[me] * q_heads[r] for r in others)
    expected = 4 * B * D * (qkv_there + out_there + dqkv_back + dout_back)
    _, counted = count(ctx, ctx.world, heads, kv_heads, seq_len, torch.float32)
    return counted["all_to_all"], expected


@pytest.mark.parametrize(("heads", "kv_heads", "seq_len"), [(7, 7, 61), (6, 2, 63), (10, 5, 66)])
def test_uneven_heads_and_lengths_send_no_byte_too_many(
    pool: WorkerPool, heads: int, kv_heads: int, seq_len: int
) -> None:
    results = pool.run(exchange_uneven, 4, heads=heads, kv_heads=kv_heads, seq_len=seq_len)
    assert all(counted == expected for counted, expected in results), results


def two_windows(ctx: RankContext) -> list[tuple[int, int]]:
    """Ring hops forward of a short window and of the causal mask."""
    hops = []
    for mask in (ds_usp.MaskSpec.window(7, 0), ds_usp.MaskSpec.causal()):
        mesh = ds_usp.SequenceMesh.from_group(ctx.group, 1)
        layout = mesh.layout("contiguous", 64)
        x = torch.randn(1, layout.length(mesh.rank), 2, D)
        ds_usp.usp_attention(x, x, x, mesh=mesh, layout=layout, mask=mask)
        hops.append((mesh.ledger.calls["ring_kv"], mesh.ledger.bytes["ring_kv"]))
    return hops


def test_a_window_sends_only_the_neighbours_block(pool: WorkerPool) -> None:
    block = 2 * 16 * 2 * D * 4
    assert pool.run(two_windows, 4) == [[(1, block), (3, 3 * block)]] * 4
