"""Bytes that a rank sends, counted: uneven splits, tunings and windows.

What even splits send is the planner's formula, to the byte: test_planner_comm. What a layer saves:
tests/megatron/test_planner_layer_bytes.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext
from torch.profiler import ProfilerActivity, profile

import ds_usp
from ds_usp import Tuning
from ds_usp.cli.report_communication import _Launches, _read

B, D = 2, 16
PLAIN = Tuning(chunks=1, gather=False)


def count(
    ctx: RankContext, ulysses: int, heads: int, kv_heads: int, seq_len: int, tuning: Tuning
) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes of one forward and backward pass on this rank."""
    mesh = mesh_of(ulysses)
    mesh.ledger.reset()
    layout = mesh.layout("zigzag", seq_len)
    tokens = layout.length(mesh.rank)
    q, k, v = (
        torch.randn(B, tokens, h, D, requires_grad=True) for h in (heads, kv_heads, kv_heads)
    )
    out = ds_usp.usp_attention(
        q, k, v, mesh=mesh, layout=layout, mask=ds_usp.MaskSpec.causal(), tuning=tuning
    )
    out.sum().backward()
    return dict(mesh.ledger.calls), dict(mesh.ledger.bytes)


# On four ranks: the Ulysses degree, the tuning, all-to-alls, KV exchanges and those of gradients.
TUNINGS = [
    (4, PLAIN, (4, 0, 0)),
    (4, Tuning(2, False), (8, 0, 0)),
    (2, PLAIN, (4, 2, 1)),
    (2, Tuning(2, True), (8, 4, 2)),
    (1, PLAIN, (0, 6, 3)),
    (1, Tuning(1, True), (0, 4, 2)),
    (1, Tuning(4, True), (0, 8, 4)),
    (1, Tuning(4, False), (0, 24, 12)),
]


def test_a_tuning_changes_how_often_a_rank_sends_and_not_what(pool):
    sent = {}
    for ulysses, tuning, expected in TUNINGS:
        sizes = {"ulysses": ulysses, "heads": 8, "kv_heads": 8, "seq_len": 64}
        for rank, (calls, sizes_of) in enumerate(pool.run(count, 4, tuning=tuning, **sizes)):
            kinds = ("all_to_all", "ring_kv", "ring_dkv")
            assert tuple(calls.get(kind, 0) for kind in kinds) == expected, tuning
            assert sent.setdefault((ulysses, rank), sizes_of) == sizes_of


def traced(ctx: RankContext, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calls and bytes of a pass by kind: of the ledger, and of the ranges in a profiler's trace."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        calls, sent = count(ctx, 2, 8, 8, 64, Tuning(2, True))
    path = folder / f"rank{ctx.rank}.json.gz"
    profiler.export_chrome_trace(str(path))
    ranges = {kind: (len(sizes), sum(sizes)) for kind, sizes in _Launches(_read(path)).sent.items()}
    return {kind: (calls[kind], sent[kind]) for kind in calls}, ranges


def test_ranges_in_a_trace_are_what_the_ledger_counts(pool, tmp_path):
    for counted, ranges in pool.run(traced, 4, folder=tmp_path):
        assert ranges == counted and len(counted) == 3


def exchange_uneven(ctx: RankContext, case: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes counted, and bytes that the tensors of the other ranks' heads and tokens have."""
    heads, kv_heads, seq_len, q_heads, kv, chunks = case
    mesh = mesh_of(ctx.world)
    mesh.ledger.reset()
    layout = mesh.layout("contiguous", seq_len)
    lengths = [layout.length(rank) for rank in range(ctx.world)]
    me = ctx.rank
    others = [rank for rank in range(ctx.world) if rank != me]
    qkv_there = sum(lengths[me] * (q_heads[r] + 2 * kv[r]) for r in others)
    out_there = sum(lengths[r] * q_heads[me] for r in others)
    dqkv_back = sum(lengths[r] * (q_heads[me] + 2 * kv[me]) for r in others)
    dout_back = sum(lengths[me] * q_heads[r] for r in others)
    expected = 4 * B * D * (qkv_there + out_there + dqkv_back + dout_back)
    _, counted = count(ctx, ctx.world, heads, kv_heads, seq_len, Tuning(chunks))
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


@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_uneven_heads_and_lengths_send_no_byte_too_many(pool, case):
    results = pool.run(exchange_uneven, 4, case=case)
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
def test_a_window_sends_the_border_and_causal_no_block_in_vain(pool, gather):
    token = 2 * 2 * D * 4
    for rank, (window, causal) in enumerate(pool.run(two_windows, 4, gather=gather)):
        later = 3 - rank  # contiguous: only the ranks behind this one see its keys
        assert window == ((1, 7 * token) if later else (0, 0))
        assert causal == (min(later, 2) if gather else later, later * 16 * token)


SEQ_LEN, SAVED_B = 64, 2
