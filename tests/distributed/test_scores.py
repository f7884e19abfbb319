"""Soft cap, ALiBi, sinks, dropout and values of their own head dim, on every mesh."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import ALL_LAYOUTS, Case, run_cases
from harness import WorkerPool

import ds_usp

BASE = Case(batch=2, seq_len=43, heads=8, kv_heads=4, head_dim=16)
CHANGES = {
    "softcap": {"softcap": 1.5},
    "ALiBi": {"alibi": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.3},
    "values of 8": {"value_dim": 8},
    "values of 24": {"value_dim": 24, "kernel": "sdpa"},
    "values of 24, eager": {"value_dim": 24, "kernel": "eager"},
    "sinks and values of 8": {"sinks": True, "value_dim": 8, "dtype": torch.float64},
    "all": {"softcap": 2.0, "alibi": True, "sinks": True, "dropout_p": 0.1, "value_dim": 24},
}
TUNINGS = (
    ds_usp.Tuning(),
    ds_usp.Tuning(chunks=1, gather=True),
    ds_usp.Tuning(chunks=2, gather=True),
    ds_usp.Tuning(chunks=2, gather=False),
)
MESHES = [(1, 1), (4, 1), (2, 2), (1, 4), (4, 2)]


def cases(ulysses: int, ring: int) -> list[Case]:
    """Each change under each layout, or on eight ranks under two of them, with other masks, heads
    and tunings in turn."""
    masks = ("causal", "full", "window", "window both sides")
    kv_heads = (4, 8, 1)
    all_cases = []
    for position, (layout, change) in enumerate(product(ALL_LAYOUTS, CHANGES)):
        case = replace(
            BASE, layout=layout, mask=masks[position % 4], kv_heads=kv_heads[position % 3]
        )
        parts = ds_usp.geometry.heads.HeadSplit(8, case.kv_heads, ulysses).max_chunks
        tuning = TUNINGS[position % (4 if parts > 1 else 2)]
        all_cases.append(replace(case, tuning=tuning, **CHANGES[change]))
    documents = ((1, 17, 25), (30, 13))  # each sample its own
    changes = ("sinks and values of 8", "all")
    if ulysses * ring == 8:
        all_cases = all_cases[::2]
    return all_cases + [replace(BASE, documents=documents, **CHANGES[each]) for each in changes]


@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_changed_scores_are_the_oracles(pool: WorkerPool, ulysses: int, ring: int) -> None:
    made = cases(ulysses, ring)
    results = pool.run(run_cases, ulysses * ring, cases=made, ulysses_degree=ulysses)
    for case, *by_rank in zip(made, *results, strict=True):
        limit = 1e-12 if case.dtype == torch.float64 else 1e-5
        worst = {name: max(errors[name] for errors in by_rank) for name in by_rank[0]}
        assert ("dsinks" in worst) == case.sinks
        assert max(worst.values()) <= limit, f"{case}: {worst}"
