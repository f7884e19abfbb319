"""What a rank sends, counted by the ledger, equals the formulas to the byte."""

from __future__ import annotations

import pytest
import torch
from cases import mesh_of
from harness import RankContext, WorkerPool

import ds_usp
from ds_usp import Tuning

B, D = 2, 16
PLAIN = Tuning(chunks=1, gather=False)


def count(
    ctx: RankContext,
    ulysses: int,
    heads: int,
    kv_heads: int,
    seq_len: int,
    dtype: torch.dtype,
    tuning: Tuning,
) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes of one forward and backward pass on this rank."""
    mesh = mesh_of(ulysses)
    mesh.ledger.reset()
    layout = mesh.layout("zigzag", seq_len)
    tokens = layout.length(mesh.rank)
    q, k, v = (
        torch.randn(B, tokens, h, D, dtype=dtype, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    out = ds_usp.usp_attention(
        q, k, v, mesh=mesh, layout=layout, mask=ds_usp.MaskSpec.causal(), tuning=tuning
    )
    out.sum().backward()
    return dict(mesh.ledger.calls), dict(mesh.ledger.bytes)


CASES = [
    *(
        (4, ulysses, kv_heads, dtype, PLAIN)
        for ulysses in (1, 2, 4)
        for kv_heads in (8, 2, 1)
        for dtype in (torch.float32, torch.bfloat16)
    ),
    (8, 2, 4, torch.bfloat16, PLAIN),
    (8, 4, 2, torch.float32, PLAIN),
    *(
        (4, ulysses, kv_heads, dtype, Tuning(chunks, gather))
        for ulysses, kv_heads, dtype in (
            (1, 8, torch.float32),
            (1, 2, torch.bfloat16),
            (2, 8, torch.bfloat16),
            (2, 2, torch.float32),
            (4, 8, torch.float32),
        )
        for chunks in (1, 2, 4)
        for gather in (False, True)
        if (chunks > 1 or gather) and chunks <= kv_heads // ulysses
    ),
    (8, 2, 4, torch.bfloat16, Tuning(2, True)),
    (8, 1, 4, torch.float32, Tuning(3, True)),
]


@pytest.mark.parametrize(("world", "ulysses", "kv_heads", "dtype", "tuning"), CASES, ids=str)
def test_bytes_equal_the_formulas(
    pool: WorkerPool, world: int, ulysses: int, kv_heads: int, dtype: torch.dtype, tuning: Tuning
) -> None:
    heads, seq_len, ring = 8, 64, world // ulysses
    local, chunk = seq_len // world, seq_len // ring // 2
    my_heads = heads // ulysses
    my_kv = max(kv_heads // ulysses, 1)  # fewer KV heads than ranks: each rank still needs one
    size = dtype.itemsize
    # Each way: q, k and v (or their gradients) for the other ranks' heads, out for their tokens.
    qkv = (ulysses - 1) * B * local * (my_heads + 2 * my_kv) * D * size
    out = (ulysses - 1) * B * local * my_heads * D * size
    results = pool.run(
        count,
        world,
        ulysses=ulysses,
        heads=heads,
        kv_heads=kv_heads,
        seq_len=seq_len,
        dtype=dtype,
        tuning=tuning,
    )
    # Parts of the heads and blocks that come together change how often a rank sends, not what.
    at_most = (2 if tuning.chunks == 1 else 1) if tuning.gather else ring
    steps = min(ring - 1, at_most)
    for rank, result in enumerate(results):
        calls: dict[str, int] = {}
        sent: dict[str, int] = {}
        if ulysses > 1:
            calls["all_to_all"], sent["all_to_all"] = 4 * tuning.chunks, 2 * (qkv + out)
        if ring > 1:
            # Zigzag: a rank's queries see the front chunk of every rank before it and both chunks
            # of every rank after it. Keys and values go there forward and backward; gradients
            # come back once, in the same dtype. A rank's own block never leaves it.
            me = rank // ulysses
            chunks_to_others = (ring - 1 - me) + 2 * me
            chunks_from_others = me + 2 * (ring - 1 - me)
            token = 2 * B * my_kv * D * size
            calls["ring_kv"] = 2 * steps * tuning.chunks
            calls["ring_dkv"] = steps * tuning.chunks
            sent["ring_kv"] = 2 * chunks_to_others * chunk * token
            sent["ring_dkv"] = chunks_from_others * chunk * token
        assert result == (calls, sent)


def exchange_uneven(
    ctx: RankContext,
    seq_len: int,
    q_heads_of_each_rank: list[int],
    kv_heads_of_each_rank: list[int],
    heads: int,
    kv_heads: int,
    chunks: int,
) -> tuple[int, int]:
    """Bytes counted, and bytes that the tensors of the other ranks' heads and tokens have."""
    mesh = mesh_of(ctx.world)
    mesh.ledger.reset()
    layout = mesh.layout("contiguous", seq_len)
    lengths = [layout.length(rank) for rank in range(ctx.world)]
    q_heads, kv = q_heads_of_each_rank, kv_heads_of_each_rank
    me = ctx.rank
    others = [rank for rank in range(ctx.world) if rank != me]
    qkv_there = sum(lengths[me] * (q_heads[r] + 2 * kv[r]) for r in others)
    out_there = sum(lengths[r] * q_heads[me] for r in others)
    dqkv_back = sum(lengths[r] * (q_heads[me] + 2 * kv[me]) for r in others)
    dout_back = sum(lengths[me] * q_heads[r] for r in others)
    expected = 4 * B * D * (qkv_there + out_there + dqkv_back + dout_back)
    tuning = Tuning(chunks)
    _, counted = count(ctx, ctx.world, heads, kv_heads, seq_len, torch.float32, tuning)
    return counted["all_to_all"], expected


# On four ranks: heads, KV heads, tokens, what each rank computes of the two, in how many parts.
UNEVEN = [
    (8, 4, 61, [2, 2, 2, 2], [1, 1, 1, 1], 1),
    (7, 7, 61, [2, 2, 2, 1], [2, 2, 2, 1], 1),
    (6, 2, 63, [2, 1, 2, 1], [1, 1, 1, 1], 1),
    (10, 5, 66, [4, 2, 2, 2], [2, 1, 1, 1], 1),
    (14, 14, 61, [4, 4, 3, 3], [4, 4, 3, 3], 2),
    (14, 14, 61, [4, 4, 3, 3], [4, 4, 3, 3], 3),
    (20, 10, 66, [6, 6, 4, 4], [3, 3, 2, 2], 2),
]


@pytest.mark.parametrize(("heads", "kv_heads", "seq_len", "q_each", "kv_each", "chunks"), UNEVEN)
def test_uneven_heads_and_lengths_send_no_byte_too_many(
    pool: WorkerPool,
    heads: int,
    kv_heads: int,
    seq_len: int,
    q_each: list[int],
    kv_each: list[int],
    chunks: int,
) -> None:
    results = pool.run(
        exchange_uneven,
        4,
        seq_len=seq_len,
        q_heads_of_each_rank=q_each,
        kv_heads_of_each_rank=kv_each,
        heads=heads,
        kv_heads=kv_heads,
        chunks=chunks,
    )
    assert all(counted == expected for counted, expected in results), results


def two_windows(ctx: RankContext, gather: bool) -> list[tuple[int, int]]:
    """Ring messages and bytes forward of a short window and of the causal mask."""
    sent = []
    for mask in (ds_usp.MaskSpec.window(7, 0), ds_usp.MaskSpec.causal()):
        mesh = mesh_of(1)
        mesh.ledger.reset()
        layout = mesh.layout("contiguous", 64)
        x = torch.randn(1, layout.length(mesh.rank), 2, D)
        tuning = Tuning(gather=gather)
        ds_usp.usp_attention(x, x, x, mesh=mesh, layout=layout, mask=mask, tuning=tuning)
        sent.append((mesh.ledger.calls["ring_kv"], mesh.ledger.bytes["ring_kv"]))
    return sent


@pytest.mark.parametrize("gather", [False, True])
def test_a_window_sends_the_border_and_causal_no_block_in_vain(
    pool: WorkerPool, gather: bool
) -> None:
    token = 2 * 2 * D * 4
    for rank, (window, causal) in enumerate(pool.run(two_windows, 4, gather=gather)):
        later = 3 - rank  # contiguous: only the ranks behind this one see its keys
        assert window == ((1, 7 * token) if later else (0, 0))
        assert causal == (min(later, 2) if gather else later, later * 16 * token)
