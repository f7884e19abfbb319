"""A double ring against the fp64 oracle, and what of it crosses the borders of its nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import ALL_LAYOUTS, RESULTS, Case, run_cases
from harness import WorkerPool

from ds_usp import Tuning

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def check(pool: WorkerPool, cases: list[Case], ulysses: int, world: int) -> None:
    results = pool.run(run_cases, world, cases=cases, ulysses_degree=ulysses)
    for case, *by_rank in zip(cases, *results, strict=True):
        worst = {name: max(errors[name] for errors in by_rank) for name in RESULTS}
        assert max(worst.values()) <= TOLERANCE[case.dtype], f"{case}: {worst}"


def cases_of(inner: int) -> list[Case]:
    """Layouts x masks x how a window comes, then sizes that do not divide and documents."""
    base = Case(batch=1, heads=8, kv_heads=4)
    tunings = [
        Tuning(chunks, gather, inner_ring=inner)
        for chunks, gather in product((1, 2), (False, True))
    ]
    masks = ("causal", "full", "window", "window ahead", "neighbours")
    return [
        *(
            replace(base, layout=layout, mask=mask, tuning=tunings[at % 4], seq_len=64 + at % 5)
            for at, (layout, mask) in enumerate(product(ALL_LAYOUTS, masks))
        ),
        *(
            replace(base, layout=layout, documents=((9, 30, 1, 24),), tuning=tuning)
            for layout, tuning in zip(
                (*ALL_LAYOUTS, "balanced"), (*tunings, tunings[0]), strict=True
            )
        ),
        *(replace(base, kernel="eager", tuning=tuning) for tuning in tunings),
        replace(base, dtype=torch.float64, seq_len=67, batch=2, tuning=tunings[0]),
        replace(base, documents=((64,), (20, 44)), batch=2, tuning=tunings[0]),
        replace(base, kernel="eager", alibi=True, sinks=True, dropout_p=0.1, tuning=tunings[1]),
        replace(base, mask="full", keys=(51, "contiguous"), tuning=tunings[0]),
    ]


@pytest.mark.parametrize(
    ("world", "ulysses", "inner"), [(4, 1, 2), (8, 2, 2), (6, 1, 2), (6, 1, 3)]
)
def test_equals_the_oracle(pool: WorkerPool, world: int, ulysses: int, inner: int) -> None:
    check(pool, cases_of(inner), ulysses, world)
