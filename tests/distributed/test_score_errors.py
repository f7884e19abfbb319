"""Scores that cannot be served raise at once on every rank, and the group stays usable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankContext, WorkerPool
from test_errors import EVERYONE, TIMEOUT_S, WORLD, Call, attempt, check, outcome

import ds_usp
from ds_usp import Scores

WRONG: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "dropout of all": (
        {"dropout": 1.0, "scores": Scores(dropout_seed=1)},
        "ConfigError",
        ["dropout_p=1.0", "below 1"],
    ),
    "dropout in words": ({"dropout": "some"}, "ConfigError", ["dropout_p='some'", "below 1"]),
    "dropout on a kernel without": (
        {"dropout": 0.1, "scores": Scores(dropout_seed=1), "kernel": "sdpa"},
        "UnsupportedAttentionError",
        ["sdpa: has no dropout"],
    ),
    "no scores": ({"scores": 50.0}, "ConfigError", ["scores=50.0", "softcap=50.0"]),
    "sinks of too few heads": (
        {"scores": Scores(sinks=torch.zeros(4))},
        "ConfigError",
        ["sinks [4]", "8 query heads"],
    ),
    "whole sinks": (
        {"scores": Scores(sinks=torch.zeros(8, dtype=torch.int64))},
        "ConfigError",
        ["sinks of torch.int64", "floating"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_mesh_can_serve_raises_everywhere(pool: WorkerPool, name: str) -> None:
    changes, kind, fragments = WRONG[name]
    results = pool.run(
        attempt, WORLD, timeout=TIMEOUT_S, mode="usp_attention", changes=changes, odd=EVERYONE
    )
    check(results, [kind] * WORLD, fragments)


DIFFERENT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "soft cap": (
        {"scores": Scores(softcap=2.0)},
        ["plain scores on ranks 0-2, softcap 2.0 on rank 3"],
    ),
    "sinks": ({"scores": Scores(sinks=torch.ones(8))}, ["sinks: no on ranks 0-2, fixed on rank 3"]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_hear_of_it_everywhere(pool: WorkerPool, name: str) -> None:
    changes, fragments = DIFFERENT[name]
    results = pool.run(
        attempt, WORLD, timeout=TIMEOUT_S, mode="usp_attention", changes=changes, odd=(3,)
    )
    check(results, ["MeshError"] * WORLD, fragments)


def drop(ctx: RankContext) -> Any:
    scores = Scores(dropout_seed=5 + (ctx.rank == 3))
    return outcome(ctx, lambda: Call(dropout=0.1, scores=scores).make("usp_attention"))


def test_ranks_that_drop_by_other_seeds_hear_of_it(pool: WorkerPool) -> None:
    fragments = ["dropout seed: 5 on ranks 0-2, 6 on rank 3"]
    check(pool.run(drop, WORLD, timeout=TIMEOUT_S), ["MeshError"] * WORLD, fragments)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan"), "50", True])
def test_a_soft_cap_is_a_number_above_0(cap: Any) -> None:
    with pytest.raises(ds_usp.ConfigError, match=f"softcap={cap!r} must be"):
        Scores(softcap=cap)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(ds_usp.ConfigError, match=r"dropout_seed=.* must be a whole number"):
        Scores(dropout_seed=seed)


def test_slopes_and_sinks_are_tensors() -> None:
    with pytest.raises(ds_usp.ConfigError, match=r"alibi_slopes=\[0.5\] must be a tensor"):
        Scores(alibi_slopes=[0.5])  # type: ignore[arg-type]


def test_learned_slopes_are_refused() -> None:
    mesh = ds_usp.SequenceMesh.single()
    q, slopes = torch.ones(1, 4, 2, 8), torch.ones(2, requires_grad=True)
    with pytest.raises(ds_usp.UnsupportedAttentionError, match=r"alibi_slopes .* detach\(\) them"):
        ds_usp.usp_attention(
            q,
            q,
            q,
            mesh=mesh,
            layout=mesh.layout("zigzag", 4),
            mask=ds_usp.MaskSpec.causal(),
            scores=Scores(alibi_slopes=slopes),
        )
