"""A double ring against the fp64 oracle, and what of it crosses the borders of its nodes."""

from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import ALL_LAYOUTS, RESULTS, Case, mesh_of, run_cases
from harness import RankContext, WorkerPool
from test_attention import mean_errors
from test_planner_comm import LEDGER, expected_ledgers, model, over

from ds_usp import ConfigError, MaskSpec, MeshError, SequenceMesh, Tuning
from ds_usp.attention.plan import AttentionOptions, plan_call
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.traffic import attention_bytes

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
        replace(base, kernel="eager", softcap=2.0, sinks=True, tuning=tunings[1]),
        replace(base, mask="full", keys=(51, "contiguous"), tuning=tunings[0]),
    ]


# World, Ulysses, inner ring, and of how many cases one: other ones on each mesh.
MESHES = [(4, 1, 2, 2), (8, 2, 2, 4), (6, 1, 2, 4), (6, 1, 3, 4)]


@pytest.mark.parametrize("at", range(len(MESHES)))
def test_equals_the_oracle(pool, at):
    world, ulysses, inner, every = MESHES[at]
    check(pool, cases_of(inner)[at % every :: every], ulysses, world)


def test_bf16_gradients_summed_on_the_way_lose_no_more_than_straight(pool):
    case = Case(dtype=torch.bfloat16, seq_len=256, heads=4, kv_heads=2, head_dim=32, batch=1)
    straight, double = (
        mean_errors(pool, replace(case, tuning=tuning), 1, 8, seeds=3)
        for tuning in (Tuning(), Tuning(inner_ring=4))
    )
    assert all(double[name] <= 1.05 * straight[name] for name in RESULTS), (straight, double)


SENT = [*((layout, seq_len) for layout in ALL_LAYOUTS for seq_len in (64, 61)), ("zigzag", 96)]


def ledgers(
    ctx: RankContext, ulysses: int, inner: int, tunings: list[Tuning]
) -> list[list[tuple[LEDGER, LEDGER]]]:
    """What this rank counts after forward and after backward, by layout and tuning."""
    mesh = mesh_of(ulysses)
    return [
        [over(mesh, 1, model(8, 4), seq_len, layout, tuning) for tuning in tunings]
        for layout, seq_len in SENT
    ]


@pytest.mark.parametrize(("world", "ulysses", "inner"), [(4, 1, 2), (8, 2, 2)])
def test_the_ledger_is_what_the_planner_says(pool, world, ulysses, inner):
    tunings = [
        Tuning(chunks, gather, inner_ring=inner) for chunks, gather in ((1, False), (2, True))
    ]
    split = ParallelConfig(ulysses=ulysses, ring=world // ulysses, micro_batch=2)
    results = pool.run(ledgers, world, ulysses=ulysses, inner=inner, tunings=tunings)
    for rank, sent in enumerate(results):
        for (layout, seq_len), each in zip(SENT, sent, strict=True):
            work = Workload(model(8, 4), seq_len)
            want = expected_ledgers(attention_bytes(work, split, rank, layout, inner_ring=inner))
            assert each == [want] * len(tunings), (layout, seq_len, rank)


def nodes(ctx: RankContext) -> tuple[int, int, int, str]:
    """What meshes find of 8 ranks on hosts of 4, and how a call with large blocks is cut."""
    hosts = [bytes([rank // 4]) for rank in range(ctx.world)]
    with mock.patch("ds_usp.comm.mesh.node_ids", lambda group: hosts):
        group = dist.new_group()  # no other test's meshes
        ring, both = (SequenceMesh.from_group(group, ulysses) for ulysses in (1, 2))
        turned = SequenceMesh.from_group(group, 2, "ring-ulysses")
    mesh = both
    layout = mesh.layout("zigzag", 4 * 2048)
    q = torch.empty(1, layout.length(mesh.rank), 2, 64)
    options = AttentionOptions(mesh, layout, MaskSpec.causal())
    signature, plain = plan_call(q, q, q, options)
    assert "inner ring" not in str(signature) and not plain.ring_calls[0].schedule.outer_steps
    signature, call = plan_call(q, q, q, options._replace(tuning=Tuning(inner_ring=2)))
    assert len(call.ring_calls[0].schedule.outer_steps) == 1
    per_node = (x.ring_ranks_per_node for x in (ring, both, turned))
    return *per_node, str(signature)


def test_a_ring_across_hosts_is_a_double_one_where_it_is_asked_for(pool):
    for ring, both, turned, text in pool.run(nodes, 8):
        # Ring first, a ring of 4 is a host; 8 ranks on 2 hosts, 4 rings-of-ulysses ranks on 2.
        assert (ring, both, turned) == (4, 2, 4)
        assert "inner ring 2" in text


def refusals(ctx: RankContext) -> list[str]:
    """What a ring of 4 says to tunings that it cannot serve, the last of which ranks differ in."""
    texts = []
    for inner in (3, 8, 4 - 2 * (ctx.rank % 2)):
        try:
            over(mesh_of(1), 1, model(8, 4), 64, "zigzag", Tuning(inner_ring=inner))
        except (ConfigError, MeshError) as error:
            texts.append(str(error))
    return texts


def test_an_inner_ring_that_does_not_fit_is_refused_on_every_rank(pool):
    for three, eight, differ in pool.run(refusals, 4):
        assert "inner_ring=3 does not divide the 4 ranks of the ring. Use one of 1, 2, 4" in three
        assert "inner_ring=8" in eight
        assert "ranks 1, 3: inner ring 2" in differ
