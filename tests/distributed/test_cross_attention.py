"""Queries and keys of two sequences, and prefix language models, on every mesh."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cases import ALL_LAYOUTS, Case, inputs, layouts, mesh_of, reference, run_cases
from harness import RankContext, WorkerPool

import ds_usp
from ds_usp import MaskSpec
from ds_usp import testing as oracle
from ds_usp.attention.local_attention import FrameworkArguments, LocalAttention

MESHES = [(1, 1), (4, 1), (2, 2), (1, 4), (3, 2)]
BASE = Case(batch=2, seq_len=43, heads=6, kv_heads=3, head_dim=16)
GATHER = ds_usp.Tuning(gather=True)


def cross_cases() -> list[Case]:
    """Each kind of layout for either sequence, the keys fewer or more."""
    pairs = product(ALL_LAYOUTS, ALL_LAYOUTS)
    lengths = (17, 96, 43)
    cases = [
        replace(BASE, layout=q_kind, mask="full", keys=(lengths[position % 3], kv_kind))
        for position, (q_kind, kv_kind) in enumerate(pairs)
    ]
    one = replace(BASE, mask="full", keys=(29, "contiguous"))
    return [
        *cases,
        replace(one, tuning=GATHER),
        replace(one, keys=(96, "striped"), tuning=GATHER, dtype=torch.float64),
        replace(one, value_dim=8, sinks=True),
        replace(one, softcap=2.0, dropout_p=0.2, sinks=True),
    ]


def prefix_cases() -> list[Case]:
    """A prefix of one token, inside of a shard, over several and of all, under some windows."""
    prefixes = (1, 5, 22, 42, 43)
    cases = [
        replace(BASE, layout=layout, prefix=prefix, tuning=GATHER if position % 2 else BASE.tuning)
        for position, (layout, prefix) in enumerate(product(ALL_LAYOUTS, prefixes))
    ]
    return [
        *cases,
        replace(BASE, prefix=3, mask="window"),
        replace(BASE, prefix=17, mask="window both sides", kernel="eager", layout="striped"),
        replace(BASE, prefix=17, alibi=True, sinks=True, value_dim=8),
    ]


@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_equals_the_oracle(pool: WorkerPool, ulysses: int, ring: int) -> None:
    made = [*cross_cases(), *prefix_cases()]
    if ulysses == 4:  # a head chunk needs a key/value head on each rank
        made = [replace(case, heads=8, kv_heads=2) for case in made]
    results = pool.run(run_cases, ulysses * ring, cases=made, ulysses_degree=ulysses)
    for case, *by_rank in zip(made, *results, strict=True):
        limit = 1e-12 if case.dtype == torch.float64 else 1e-5
        worst = {name: max(errors[name] for errors in by_rank) for name in by_rank[0]}
        assert max(worst.values()) <= limit, f"{case}: {worst}"


def refused(ctx: RankContext, changes: dict[str, Any]) -> str:
    mesh = mesh_of(2)
    layout, kv_layout = mesh.layout("zigzag", 32), mesh.layout("zigzag", 16)
    q, k = torch.randn(1, 8, 2, 8), torch.randn(1, 4, 2, 8)
    options: dict[str, Any] = {"mask": MaskSpec.full(), "kv_layout": kv_layout, **changes}
    try:
        ds_usp.usp_attention(q, k, k, mesh=mesh, layout=layout, **options)
    except ds_usp.USPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


SLOPES = ds_usp.Scores(alibi_slopes=torch.ones(2))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "right": ({}, "nothing"),
    "causal": (
        {"mask": MaskSpec.causal()},
        "UnsupportedAttentionError: the keys are of another sequence (zigzag(16 tokens, ulysses "
        "2 x ring 2)) than the queries (zigzag(32 tokens, ulysses 2 x ring 2)), and a causal mask",
    ),
    "ALiBi": ({"scores": SLOPES}, "UnsupportedAttentionError: alibi_slopes weigh distances"),
    "no layout of keys": (
        {"kv_layout": None},
        "ConfigError: q has 8 tokens on this rank, k and v have 4: give the keys of another "
        "sequence a layout of their own (kv_layout=)",
    ),
    "prefix too long": (
        {"mask": MaskSpec.prefix_lm(33)},
        "ConfigError: a prefix of 33 tokens in a sequence of 32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused_everywhere(pool: WorkerPool, name: str) -> None:
    changes, text = REFUSED[name]
    for message in pool.run(refused, 4, changes=changes):
        assert message.startswith(text), message


def other_keys(ctx: RankContext) -> str:
    """One rank has a token more of the keys than the layout gives it."""
    mesh = mesh_of(2)
    k = torch.randn(1, 4 + (ctx.rank == 3), 2, 8)
    layout, kv_layout = mesh.layout("zigzag", 32), mesh.layout("zigzag", 16)
    try:
        ds_usp.usp_attention(
            torch.randn(1, 8, 2, 8),
            k,
            k,
            mesh=mesh,
            layout=layout,
            mask=MaskSpec.full(),
            kv_layout=kv_layout,
        )
    except ds_usp.USPError as error:
        return str(error)
    return "nothing"


def test_too_many_keys_on_one_rank_stop_all(pool: WorkerPool) -> None:
    for message in pool.run(other_keys, 4):
        assert "rank 3 holds 5 tokens of the keys" in message and "gives it 4" in message


def test_mask_text_has_the_prefix() -> None:
    mask = MaskSpec.prefix_lm(5)
    assert str(mask) == "causal with a prefix of 5" and not mask.is_causal
    assert [mask.allows(2, key) for key in range(8)] == [True] * 5 + [False] * 3
    assert [mask.allows(6, key) for key in range(8)] == [True] * 7 + [False]
    with pytest.raises(ds_usp.ConfigError, match="prefix=-1 must be"):
        MaskSpec.prefix_lm(-1)
    with pytest.raises(ds_usp.ConfigError, match=r"a prefix of 2 tokens .* documents"):
        MaskSpec(None, 0, [0, 4], 2)


def through_the_drop_in(ctx: RankContext, ulysses: int) -> float:
    """USPAttention around a local attention that attends to all of another sequence."""
    mesh = mesh_of(ulysses)
    case = replace(BASE, seq_len=48, heads=8, kv_heads=4, mask="full", keys=(24, "zigzag"))
    full, expected = inputs(case), reference(case)
    layout, kv_layout = layouts(mesh, case)
    places = {"q": layout, "k": kv_layout, "v": kv_layout}
    shards = [
        place.shard(full[name], 1, mesh.rank).requires_grad_() for name, place in places.items()
    ]
    attention = ds_usp.USPAttention(
        Dense(), gather_idx=1, mesh=mesh, layout="zigzag", mask=MaskSpec.full(), dropout_p=0.0
    )
    out = attention(*shards, 0)
    grads = torch.autograd.grad(out, shards, layout.shard(full["dout"], 1, mesh.rank))
    errors = [
        oracle.relative_error(actual, place.shard(expected[name], 1, mesh.rank))
        for name, place, actual in zip(
            ("out", "dq", "dk", "dv"), (layout, *places.values()), (out, *grads), strict=True
        )
    ]
    with pytest.raises(ds_usp.ConfigError, match="by one table"):
        attention(*shards, 0, (torch.ones(48, 1, 1, 16),) * 2)
    return max(errors)


class Dense(torch.nn.Module):
    """A local attention of no known class, without a mask."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        return oracle.dense_attention(q, k, v, allowed)[0].to(q.dtype)


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_the_drop_in_crosses_sequences(pool: WorkerPool, ulysses: int) -> None:
    assert max(pool.run(through_the_drop_in, 4, ulysses=ulysses)) <= 1e-5


def test_a_frameworks_mask_is_compared_with_the_prefix() -> None:
    framework = FrameworkArguments(LocalAttention(MaskSpec.prefix_lm(5), None, 0.0))
    shown = oracle.causal(range(8), range(8))
    shown[:, :5] = True
    accepted = framework.check(8, 16, (shown,), {"is_causal": False})
    assert str(accepted) == "1 extra arguments, is_causal"
    for wrong in ({"is_causal": True}, {"attn_mask": oracle.causal(range(8), range(8))}):
        with pytest.raises(ds_usp.UnsupportedAttentionError, match="causal with a prefix of 5"):
            framework.check(8, 16, (), wrong)
