"""Packed documents through real groups against the fp64 oracle, forward and backward."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import (
    ALL_LAYOUTS,
    ALL_ORDERS,
    MASKS,
    RESULTS,
    Case,
    errors_of,
    inputs,
    mesh_of,
    run_cases,
)
from harness import RankContext, WorkerPool

import ds_usp

LAYOUTS = (*ALL_LAYOUTS, "balanced")
GATHERED = ds_usp.Tuning(1, True)
TUNINGS = (ds_usp.Tuning(1, False), GATHERED, ds_usp.Tuning(2, False), ds_usp.Tuning(2, True))


def lengths_of(draw: random.Random, tokens: int) -> tuple[int, ...]:
    """Random lengths of documents that fill a sequence: many short ones, few, or one."""
    longest = draw.choice([1, 4, 12, tokens // 2, tokens])
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(draw.randint(1, longest), tokens - sum(lengths)))
    return tuple(lengths)


def random_cases(ulysses: int, ring: int) -> list[Case]:
    """Each mask in each layout, with documents that samples share or have of their own."""
    draw, cases, ranks = random.Random(ulysses * 10 + ring), [], ulysses * ring
    for index, (layout, mask) in enumerate(product(LAYOUTS, MASKS)):
        tokens, batch = draw.randint(2 * ranks, 2 * ranks + 70), draw.randint(1, 3)
        samples = batch if draw.random() < 0.5 else 1
        heads, kv_heads = draw.choice([(8, 8), (8, 4), (8, 2)])
        cases.append(
            Case(
                seq_len=tokens,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=8,
                batch=batch,
                layout=layout,
                mask=mask,
                kernel=draw.choice(["auto", "eager"]),
                tuning=draw.choice(TUNINGS if kv_heads >= 2 * ulysses else TUNINGS[:2]),
                documents=tuple(lengths_of(draw, tokens) for _ in range(samples)),
                seed=index,
            )
        )
    return cases


def check(
    pool: WorkerPool, cases: list[Case], ulysses: int, ring: int, order: str = ALL_ORDERS[0]
) -> None:
    """Every result of every rank."""
    results = pool.run(
        run_cases, ulysses * ring, cases=cases, ulysses_degree=ulysses, order=order, timeout=180.0
    )
    for rank, by_case in enumerate(results):
        for case, errors in zip(cases, by_case, strict=True):
            assert set(errors) == set(RESULTS)
            assert max(errors.values()) <= 1e-5, f"rank {rank} {case}: {errors}"


@pytest.mark.parametrize(
    ("ulysses", "ring", "order"),
    [
        (1, 2, "ulysses-ring"),
        (2, 2, "ring-ulysses"),
        (1, 4, "ulysses-ring"),
        (4, 1, "ulysses-ring"),
        (2, 3, "ulysses-ring"),
        (2, 4, "ulysses-ring"),
    ],
)
def test_random_documents_are_the_oracles(
    pool: WorkerPool, ulysses: int, ring: int, order: str
) -> None:
    check(pool, random_cases(ulysses, ring), ulysses, ring, order)


# The long one is on both ranks; the last one is padding.
ODD_LENGTHS = (1, 7, 4093, 1, 1, 511)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_documents_of_1_7_and_4093_tokens(pool: WorkerPool, layout: str) -> None:
    check(pool, [Case(sum(ODD_LENGTHS), 1, 1, 8, 1, layout, documents=(ODD_LENGTHS,))], 1, 2)


@pytest.mark.parametrize("mask", ["causal", "full", "window both sides"])
def test_a_rank_may_hold_padding_alone_and_a_block_may_be_masked_for_all(
    pool: WorkerPool, mask: str
) -> None:
    base = Case(64, mask=mask, layout="contiguous")
    cases = [
        replace(base, documents=((48, 16),)),  # the last rank has nothing but padding
        replace(base, documents=((16,) * 4,)),  # no rank sees another's block
        replace(base, documents=((16,) * 4,), tuning=GATHERED),
        replace(base, documents=((64,),)),  # one document over all shards
        replace(base, documents=((1,) * 64,)),
        replace(base, documents=((1,) * 64, (64,))),  # every block is masked for one sample
        replace(base, documents=((1,) * 64, (64,)), tuning=GATHERED),
    ]
    check(pool, cases, 1, 4)


class Causal(torch.nn.Module):
    """A local attention of no known class; documents must not reach it."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the local attention was called")


def drop_in(ctx: RankContext, *, case: Case, ulysses: int, batch_dim: int) -> list[float]:
    """Relative errors of out and gradients of ``USPAttention(...)(q, k, v, documents=borders)``."""
    mesh = mesh_of(ulysses)
    layout, full = case.layout_on(mesh), inputs(case)
    attention = ds_usp.USPAttention(
        Causal(), mesh=mesh, layout=layout, mask=ds_usp.MaskSpec.causal(), dropout_p=0.0
    )
    local_qkv = [layout.shard(full[name], 1, mesh.rank).requires_grad_() for name in "qkv"]
    qkv = (x.transpose(0, 1) if batch_dim else x for x in local_qkv)
    out = attention(*qkv, batch_dim, documents=case.mask_spec.documents)
    out = out.transpose(0, 1) if batch_dim else out
    grads = torch.autograd.grad(out, local_qkv, layout.shard(full["dout"], 1, mesh.rank))
    actual = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    return list(errors_of(mesh, case, actual).values())


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_the_drop_in_takes_documents_with_each_call(pool: WorkerPool, ulysses: int) -> None:
    for layout, batch_dim in (("zigzag", 0), ("balanced", 1)):
        case = Case(layout=layout, documents=((20, 4, 40), (64,)))
        errors_of_ranks = pool.run(drop_in, 4, case=case, ulysses=ulysses, batch_dim=batch_dim)
        assert max(max(errors) for errors in errors_of_ranks) <= 1e-5


def refused_by_the_drop_in(ctx: RankContext, *, how: str, ulysses: int) -> None:
    mesh = mesh_of(ulysses)
    x = torch.randn(1, 16, 4, 8)
    known = {"mask": ds_usp.MaskSpec.causal(), "dropout_p": 0.0}
    if how == "at construction":
        ds_usp.USPAttention(Causal(), mesh=mesh, mask=ds_usp.MaskSpec.causal([0, 64]), dropout_p=0)
    elif how == "unknown":
        ds_usp.USPAttention(Causal(), mesh=mesh)(x, x, x, 0, documents=[0, 64])
    elif how == "a mask, too":
        mask = torch.ones(64, 64).tril().bool()
        ds_usp.USPAttention(Causal(), mesh=mesh, **known)(x, x, x, 0, None, mask, documents=[0, 64])
    else:
        documents = [0, 63] if how == "short" else [[0, 64]] * 2
        ds_usp.USPAttention(Causal(), mesh=mesh, **known)(x, x, x, 0, documents=documents)


REFUSED = {
    "at construction": "give documents=borders to each call",
    "unknown": "Give what it computes",
    "a mask, too": "Leave it out",
    "short": "end at 63, the sequence has 64 tokens",
    "two samples": "given for 2 samples, the batch has 1",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_the_drop_in_cannot_serve_is_refused_on_every_rank(pool: WorkerPool, how: str) -> None:
    for error in pool.errors(refused_by_the_drop_in, 4, how=how, ulysses=4):
        assert isinstance(error, ds_usp.USPError) and REFUSED[how] in str(error), error
