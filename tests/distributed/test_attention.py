"""USP attention against the fp64 oracle, forward and backward, on every mesh up to 8 ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, product
from unittest import mock

import pytest
import torch
from cases import ALL_LAYOUTS, ALL_ORDERS, HEADS, RESULTS, Case, dense_errors, mesh_of, run_cases
from harness import RankContext, WorkerPool

import ds_usp
from ds_usp.attention import tuning
from ds_usp.attention.plan import AttentionOptions, plan_call
from ds_usp.geometry.chunking import chunk_positions
from ds_usp.geometry.heads import HeadSplit
from ds_usp.geometry.pipeline_schedule import render
from ds_usp.planner.attention_time import AttentionCall
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.parallel_config import ParallelConfig

MESHES = [(u, r) for u in (1, 2, 4) for r in (1, 2, 4) if u * r <= 8]
PRODUCT_HEADS = ("MHA", "GQA", "MQA")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def heads_of(name: str) -> dict[str, int]:
    return dict(zip(("heads", "kv_heads"), HEADS[name], strict=True))


def cases_on(ulysses: int, ring: int, layout: str) -> list[Case]:
    """Masks x heads x lengths, then one case for each other size, in fp32 and fp64.

    Each of the first is on two of the four layouts: as it is on one, in chunks on the other. A
    layout has every mask with every number of heads, half of each length, half of each in chunks.
    """
    base, turn = Case(batch=1), ALL_LAYOUTS.index(layout)
    masks, lengths = ("causal", "full", "window", "window both sides"), (64, 67)
    product_cases, nth = [], count(turn)
    for m, h in product(range(len(masks)), range(len(PRODUCT_HEADS))):
        name, seq_len = PRODUCT_HEADS[h], lengths[(m + h + turn) % 2]
        case = replace(base, mask=masks[m], seq_len=seq_len, **heads_of(name))
        in_chunks = (m // 2 + h + turn // 2) % 2
        product_cases.append(tuned(case, ulysses, next(nth)) if in_chunks else case)
    names = [name for name, (heads, _) in HEADS.items() if heads >= ulysses]
    single_cases = [
        *(replace(base, **heads_of(name)) for name in names if name not in PRODUCT_HEADS),
        *(replace(base, **heads_of(name), seq_len=61, mask="window ahead") for name in names[::2]),
        replace(base, batch=3, head_dim=80, seq_len=70),
        replace(base, batch=3, head_dim=128, **heads_of("GQA")),
        replace(base, softmax_scale=0.3, mask="window back", **heads_of("MQA")),
        replace(base, kernel="eager", seq_len=67, mask="window", **heads_of("GQA")),
        replace(base, dtype=torch.float64, seq_len=67, **heads_of("GQA")),
        replace(base, dtype=torch.float64, mask="window both sides", **heads_of("6 heads of 2")),
        replace(base, dtype=torch.float64, mask="full", kernel="eager"),
        # A kernel of rectangular causal tiles computes later chunks in one step.
        *(
            tuned(replace(base, kernel="eager", seq_len=n, kv_heads=4), ulysses, 1)
            for n in (64, 67)
        ),
    ]
    return [replace(case, layout=layout) for case in product_cases + single_cases]


def tuned(case: Case, ulysses: int, index: int) -> Case:
    """The case in several chunks and with all-gathered KV, or one of the two."""
    most = HeadSplit(case.heads, case.kv_heads, ulysses).max_chunks
    tunings = (
        ds_usp.Tuning(chunks=1, gather=True),
        ds_usp.Tuning(chunks=most, gather=True),
        ds_usp.Tuning(chunks=most, gather=False),
        ds_usp.Tuning(chunks=max(most - 1, 1), gather=True),
    )
    return replace(case, tuning=tunings[index % len(tunings)])


def check(
    pool: WorkerPool, cases: list[Case], ulysses: int, ring: int, order: str = ALL_ORDERS[0]
) -> None:
    world = ulysses * ring
    results = pool.run(run_cases, world, cases=cases, ulysses_degree=ulysses, order=order)
    for case, *by_rank in zip(cases, *results, strict=True):
        worst = {name: max(errors[name] for errors in by_rank) for name in RESULTS}
        assert max(worst.values()) <= TOLERANCE[case.dtype], f"{case}: {worst}"


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_equals_the_oracle(pool: WorkerPool, ulysses: int, ring: int, layout: str) -> None:
    check(pool, cases_on(ulysses, ring, layout), ulysses, ring)


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 2), (4, 2), (2, 4)])
def test_ranks_may_lie_ring_first(pool: WorkerPool, ulysses: int, ring: int) -> None:
    cases = [
        Case(layout=layout, mask=mask, seq_len=67, heads=6, kv_heads=2, tuning=tuning)
        for layout, mask, tuning in product(
            ALL_LAYOUTS,
            ("causal", "window both sides"),
            (ds_usp.Tuning(), ds_usp.Tuning(gather=True)),
        )
    ]
    check(pool, cases, ulysses, ring, order="ring-ulysses")


@pytest.mark.parametrize("ulysses", [2, 3, 4])
def test_chunks_may_be_smaller_than_a_kv_group(pool: WorkerPool, ulysses: int) -> None:
    """K and V are exchanged with the group's first chunk, and so are their gradients."""
    heads = {2: [(8, 2), (12, 4), (7, 1)], 3: [(12, 3), (9, 1)], 4: [(8, 2), (16, 4), (14, 2)]}
    cases = []
    for (query_heads, kv_heads), layout in product(heads[ulysses], ("zigzag", "contiguous")):
        split = HeadSplit(query_heads, kv_heads, ulysses)
        base = Case(layout=layout, seq_len=67, heads=query_heads, kv_heads=kv_heads)
        for chunks in range(split.max_chunks + 1, split.max_chunks_in_groups + 1):
            cases.append(replace(base, tuning=ds_usp.Tuning(chunks=chunks)))
        cases.append(
            replace(cases[-1], mask="window", sinks=True, kernel="eager", documents=((40, 27),))
        )
        cases.append(replace(cases[-1], alibi=True, softcap=5.0, documents=()))
        cases.append(replace(cases[0], dtype=torch.float64, value_dim=8))
    check(pool, cases, ulysses, 1)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("ulysses", "ring"), [(3, 2), (1, 7), (7, 1)])
def test_degrees_need_not_be_powers_of_two(
    pool: WorkerPool, ulysses: int, ring: int, layout: str
) -> None:
    cases = [
        Case(layout=layout, seq_len=seq_len, mask=mask, heads=14, kv_heads=7)
        for seq_len, mask in product((43, 84), ("causal", "window", "full"))
    ]
    check(pool, cases, ulysses, ring)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("ring", [3, 4, 7])
def test_ranks_may_hold_a_token_or_two(pool: WorkerPool, ring: int, layout: str) -> None:
    # Not causal: the first token's dq would be 0, which leaves nothing to be relative to.
    shortest = 2 * ring if layout == "context_parallel" else ring
    tunings = (ds_usp.Tuning(), ds_usp.Tuning(chunks=3, gather=True))
    cases = [
        Case(layout=layout, seq_len=seq_len, mask=mask, kernel=kernel, tuning=tunings[turn % 2])
        for seq_len in range(shortest, shortest + 4)
        for turn, (mask, kernel) in enumerate(
            product(("full", "window ahead"), ("auto", "eager")), start=seq_len
        )
    ]
    check(pool, cases, 1, ring)


def run_launch_bound(
    ctx: RankContext, cases: list[Case], ulysses_degree: int
) -> list[dict[str, float]]:
    """:func:`cases.run_cases` as on GPUs where launches would take longer than kernels."""
    mesh = mesh_of(ulysses_degree)
    mesh.plans.clear()
    with mock.patch.object(
        tuning,
        "chunk_positions",
        lambda sizes, launch_bound: chunk_positions(sizes, launch_bound=True),
    ):
        results = run_cases(ctx, cases, ulysses_degree)
    mesh.plans.clear()
    return results


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), (1, 4), (2, 2)])
def test_a_launch_bound_call_computes_local_and_remote_kv_together(
    pool: WorkerPool, ulysses: int, ring: int, layout: str
) -> None:
    cases = [
        Case(layout=layout, seq_len=seq_len, mask=mask, kernel=kernel, tuning=tuned)
        for seq_len, mask, kernel, tuned in product(
            (64, 67),
            ("causal", "window both sides"),
            ("sdpa", "eager"),
            (ds_usp.Tuning(1, True), ds_usp.Tuning(1, False)),
        )
    ]
    results = pool.run(run_launch_bound, ulysses * ring, cases=cases, ulysses_degree=ulysses)
    for case, *by_rank in zip(cases, *results, strict=True):
        worst = max(max(errors.values()) for errors in by_rank)
        assert worst <= TOLERANCE[case.dtype], f"{case}: {worst}"


def mean_errors(
    pool: WorkerPool, case: Case, ulysses: int, ring: int, seeds: int
) -> dict[str, float]:
    """Error of each result over all ranks and several inputs, root mean square."""
    cases = [replace(case, seed=seed) for seed in range(seeds)]
    results = pool.run(run_cases, ulysses * ring, cases=cases, ulysses_degree=ulysses)
    flat = [errors for by_case in results for errors in by_case]
    return {name: (sum(e[name] ** 2 for e in flat) / len(flat)) ** 0.5 for name in RESULTS}


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_bf16_loses_no_more_than_the_dense_kernel(pool: WorkerPool, layout: str) -> None:
    seeds = 3
    case = Case(
        layout=layout, dtype=torch.bfloat16, seq_len=256, heads=8, kv_heads=2, head_dim=64, batch=1
    )
    dense = [dense_errors(replace(case, seed=seed)) for seed in range(seeds)]
    limit = {name: max(errors[name] for errors in dense) for name in RESULTS}
    by_ring = {
        (ulysses, ring): mean_errors(pool, case, ulysses, ring, seeds)
        for ulysses, ring in [(1, 2), (1, 8), (2, 2), (8, 1)]
    }
    for degrees, errors in by_ring.items():
        for name in ("out", "dq", "dk", "dv"):
            assert errors[name] <= 1.5 * limit[name], (degrees, name, errors, limit)
        assert errors["lse"] <= 1e-5  # fp32, whatever the inputs are
    for name in ("out", "dq", "dk", "dv"):  # sums are fp32: no growth with the number of blocks
        assert by_ring[1, 8][name] <= 1.1 * by_ring[1, 2][name], (name, by_ring)


def first_steps(ctx: RankContext) -> tuple[list[bool], list[bool]]:
    """Whether each chunk's first step is of the local block alone, forward and backward."""
    mesh = mesh_of(2)
    layout = mesh.layout("zigzag", 64)
    x = torch.randn(1, 16, 8, 8)
    options = AttentionOptions(
        mesh, layout, ds_usp.MaskSpec.causal(), kernel="eager", tuning=ds_usp.Tuning(3, True)
    )
    _, call = plan_call(x, x, x, options)
    plans = [ring.schedule for ring in call.ring_calls]
    return (
        [plan.steps[0].is_local for plan in plans],
        [plan.backward_steps[0].is_local for plan in plans],
    )


def test_the_first_chunk_computed_has_its_local_block_alone(pool: WorkerPool) -> None:
    modes = pool.run(
        first_steps, 4
    )  # of 1, 2 and 1 heads: too little is computed before the second chunk
    assert any(forward == [True, True, False] for forward, _ in modes)
    for forward, backward in modes:  # backward begins with the last chunk
        assert forward[:2] == [True, True] and backward == [False, True, True]


def schedules(ctx: RankContext, ulysses: int, chunks: int, gather: bool) -> list[tuple[str, str]]:
    """Of both passes, the schedule that a call executes and the one that is explained."""
    mesh = mesh_of(ulysses)
    layout = mesh.layout("zigzag", 64)
    q, kv = torch.randn(1, 16, 8, 8, requires_grad=True), torch.randn(1, 16, 4, 8)
    tuning = ds_usp.Tuning(chunks, gather)
    mask = ds_usp.MaskSpec.causal()
    kernel = "sdpa" if ulysses == 4 else "eager"  # it does not write gradients into send buffers
    options = AttentionOptions(mesh, layout, mask, kernel=kernel, tuning=tuning)
    _, plan = plan_call(q, kv, kv, options)
    explained = AttentionCall(
        load_cluster("cpu"),
        layout,
        mask,
        *(8, 4, 8),
        ParallelConfig(ulysses=ulysses, ring=4 // ulysses),
        rank=mesh.rank,
        chunks=chunks,
        gather=gather,
    )
    return [
        (render(executed), render(explained.schedule(backward=backward).schedule))
        for executed, backward in ((plan.forward, False), (plan.backward, True))
    ]


@pytest.mark.parametrize(
    ("ulysses", "chunks", "gather"), [(2, 2, True), (1, 3, False), (4, 2, False), (2, 2, False)]
)
def test_the_explained_schedule_is_the_executed_one(
    pool: WorkerPool, ulysses: int, chunks: int, gather: bool
) -> None:
    for passes in pool.run(schedules, 4, ulysses=ulysses, chunks=chunks, gather=gather):
        assert all(executed == explained for executed, explained in passes)
