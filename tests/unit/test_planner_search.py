"""The search: everything it lists is possible and fits, and practice comes out of the numbers."""

import functools
import math
import re
import time
from dataclasses import replace
from itertools import product

import pytest

from ds_usp.errors import ConfigError
from ds_usp.planner.answer import infeasibility
from ds_usp.planner.choose_degree import choose_ulysses
from ds_usp.planner.degree_rule import rule_degrees
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.memory import memory
from ds_usp.planner.models import ModelShape, load_model
from ds_usp.planner.parallel_config import (
    FRAMEWORKS,
    ParallelConfig,
    Workload,
    framework_caps,
    infeasible_reason,
)
from ds_usp.planner.search import GIB, STATED_ERROR, SearchResult, _Collector, search
from ds_usp.planner.step_time import step_mfu, step_time


@functools.cache
def find(
    name: str,
    seq_len: int,
    batch: int,
    gpus: int,
    cluster: str = "a800",
    how: str = "megatron-lm",
    **fixed: object,
) -> SearchResult:
    budget = fixed.pop("budget_gib", None)
    work, machine = Workload(load_model(name), seq_len, batch), load_cluster(cluster)
    if budget is not None:  # 96 % of a GPU
        machine = replace(machine, memory_bytes=float(str(budget)) * GIB / 0.96)
    return search(machine, work, gpus, framework_caps(how), fixed)


RUNS = [
    ("llama3-8b", 131072, 1, 16),
    ("llama3-8b", 8192, 64, 16),
    ("llama-65b", 8192, 128, 64),
    ("gpt-6.7b", 65536, 4, 8),
    ("llama-70b", 32768, 12, 24),
]


# Every run by transformers; each engine with one of the runs, and the one that some cannot.
SEARCHES = [("transformers", run) for run in RUNS]
SEARCHES += [(e.name, run) for n, e in enumerate(FRAMEWORKS[1:]) for run in (RUNS[n % 4], RUNS[4])]


@pytest.mark.parametrize(("how", "run"), SEARCHES, ids=str)
def test_every_plan_is_possible_and_fits(how, run):
    result = find(*run, how=how)
    assert result.plans or (
        result.closest_to_fitting and run[0] == "llama-70b" and how == "megatron-lm"
    )
    for plan in result.plans:
        assert infeasible_reason(result.work, plan.config, result.gpus) is None
        needs = memory(result.work, plan.config, result.cluster.workspace_bytes)
        assert needs.total == pytest.approx(plan.memory.total)
        assert needs.total <= result.budget_bytes * (1 + 1e-9)
        again = step_time(result.cluster, result.work, plan.config)
        assert again.total == pytest.approx(plan.time.total)
        assert 0 < plan.mfu < 1
        assert plan.mfu == pytest.approx(
            step_mfu(result.cluster, result.work, plan.config, again.total)
        )
    speeds = [round(plan.mfu, 4) for plan in result.plans[1:]]
    assert speeds == sorted(speeds, reverse=True)
    least = (1 - STATED_ERROR) * max(plan.mfu for plan in result.plans or result.over_memory)
    assert all(plan.mfu >= least for plan in result.plans)
    for plan in result.over_memory:
        assert plan.over_budget_bytes > 0


def test_what_is_left_out_is_slower():
    """The best plan of each degree is found by asking for it alone, without any short cut."""
    result = find("llama3-8b", 65536, 2, 4)
    for axis in ("tp", "split", "pp", "recompute"):
        for (name, value), best in result.best_with.items():
            if name == axis:
                fixed = {axis: value}
                if axis == "split":
                    fixed = dict(zip(("ulysses", "ring"), value, strict=True))
                alone = find("llama3-8b", 65536, 2, 4, **fixed)
                # Plans whose MFU is the same in four digits are sorted by their settings.
                fastest = max(plan.mfu for plan in alone.plans)
                assert fastest == pytest.approx(best.mfu, abs=5e-5), (axis, value)
                assert fastest <= max(plan.mfu for plan in result.plans) + 1e-12


def test_dp_before_sp():
    """With enough sequences and short ones, nothing is cut but the batch."""
    for name, cluster in (("gpt-1.3b", "a100"), ("llama-7b", "h100"), ("gpt-1.3b", "l20")):
        best = find(name, 4096, 64, 16, cluster, "transformers").plans[0].config
        assert (best.dp, best.sp, best.tp) == (16, 1, 1)


def test_ulysses_inside_the_node_and_the_ring_across():
    for gpus in (16, 32):
        best = find("llama3-8b", 131072, 1, gpus, how="transformers").plans[0].config
        assert best.split == rule_degrees(gpus, 8, 8)
        assert best.tp * best.ulysses <= 8


def test_a_large_ring_where_heads_are_few():
    shape = ModelShape("few heads", 32, 4096, 14336, 2, 2, 32000)
    result = search(load_cluster("a800"), Workload(shape, 131072), 16)
    assert result.plans[0].config.ring >= 8
    assert "ulysses beyond the heads of a tensor-parallel rank" in result.outcomes


def test_less_room_more_tricks():
    little = find("llama3-8b", 131072, 1, 16, how="trainer", budget_gib=30).plans[0]
    saving = little.config.recompute != "none" or little.config.offload_ratio > 0
    assert saving and little.memory.total <= 30 * GIB


def test_engines_are_kept():
    for plan in find("llama-65b", 8192, 32, 32, how="megatron-deepspeed").plans:
        config = plan.config
        assert config.virtual_stages(load_model("65b")) == 1 and config.zero >= 1
        assert not config.offload_ratio or config.offload_unit == "layer"
        assert config.recompute != "attention-only" and not config.tp_sequence
        assert config.schedule == ("deepspeed" if config.pp > 1 else "1f1b")
    for plan in find("llama-65b", 8192, 32, 32, how="megatron-lm").plans:
        assert plan.config.zero <= 1 and not plan.config.offload_ratio
    with pytest.raises(ConfigError, match="no engine 'fsdp'; there are transformers"):
        framework_caps("fsdp")


def test_fixed_axes():
    result = find("llama3-8b", 65536, 4, 16, tp=2, ring=4, recompute="full")
    assert result.plans
    for plan in result.plans:
        assert (plan.config.tp, plan.config.ring, plan.config.recompute) == (2, 4, "full")


def test_impossible_requests():
    """Of a call; what a command refuses is in test_planner_commands.py."""
    with pytest.raises(ConfigError, match="must be 1 or more"):
        find("llama3-8b", 8192, 4, 0)
    with pytest.raises(ConfigError, match="memory_bytes=0"):
        find("llama3-8b", 8192, 4, 8, budget_gib=0)


def test_what_is_given_is_counted_where_others_can_have_it():
    result = find("llama3-8b", 131072, 1, 16, how="megatron-deepspeed", zero=3)
    assert result.plans and result.outcomes["ZeRO-3 does not go with a pipeline"] > 0


def test_every_cut_is_refused_or_looked_at():
    result = find("llama3-8b", 8192, 1, 8, "h200", "megatron-deepspeed", micro_batch=1)
    cuts = [cut for cut in product((1, 2, 4, 8), repeat=5) if math.prod(cut) == 8]
    alone = "the global batch does not divide among dp"
    assert result.outcomes[alone] == sum(dp > 1 for *_, dp in cuts)
    stages = [
        3 if ulysses * ring > 1 and pp == 1 else 1  # of ZeRO
        for _, ulysses, ring, pp, dp in cuts
        if dp == 1
    ]
    # Kinds of recomputation.
    assert result.considered == 4 * sum(stages) + result.outcomes[alone]


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint_layers": 4},
        {"states_on_host": True},
        {"mlp_chunks": 1500},
        {"fused_loss": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("how", ["megatron-deepspeed", "trainer"])
def test_given_settings_are_in_possible_plans_alone(how, settings):
    work, framework = Workload(load_model("llama3-8b"), 8192, 8), framework_caps(how)
    result = search(
        load_cluster("h200"),
        work,
        8,
        framework.with_settings_of(ParallelConfig(**settings)),
        base=ParallelConfig(**settings),
    )
    assert result.plans
    for plan in (*result.plans, *result.best_with.values()):
        assert infeasible_reason(work, plan.config, 8) is None
        assert not (plan.config.fused_loss and plan.config.pp > 1)
        assert {name: getattr(plan.config, name) for name in settings} == settings


def test_the_gpus_that_are_named_hold_the_nearest_plan():
    result = find("llama3-8b", 2**21, 1, 8, how="megatron-deepspeed", budget_gib=40)
    near = result.closest_to_fitting
    assert near is not None and near.over_budget_bytes > 0
    last, workspace = infeasibility(result)[-1], result.cluster.workspace_bytes
    gpus, ring, gib = re.findall(
        r"on (\d+) GPUs, with ring (\d+), this plan needs ([\d.]+) GiB", last
    )[0]
    assert int(gpus) * near.config.ring == 8 * int(ring) > 8 * near.config.ring
    larger, half = (near.config.replace(ring=degree) for degree in (int(ring), int(ring) // 2))
    assert memory(result.work, half, workspace).total > result.budget_bytes
    needs = memory(result.work, larger, workspace)
    assert needs.total <= result.budget_bytes and f"{needs.total / GIB:.1f}" == gib


@pytest.mark.parametrize(
    ("run", "cuts", "seconds"),
    [  # 1 s and 2 s on one core that nobody shares
        (("llama-70b", 262144, 16, 1024, "h100"), 0, 15),
        (("llama-175b", 8192, 1024, 1024, "h100"), 100_000, 25),
    ],
    ids=str,
)
def test_a_thousand_gpus_in_seconds(run, cuts, seconds):
    start = time.process_time()
    result = find(*run)
    assert result.plans and result.considered > cuts
    assert time.process_time() - start < seconds


def test_auto_chooses_ulysses_and_keeps_all_else():
    cluster, work = load_cluster("h100"), Workload(load_model("llama-7b"), 262144, 4)
    run = ParallelConfig(dp=2, recompute="full", micro_batch=2, zero=2)
    run = run.replace(overlap_gradients=True, unsharded_grad_reduce=True, tp_sequence=False)
    choice = choose_ulysses(cluster, work, framework_caps("megatron-deepspeed"), run, 32)
    splits = [run.replace(ulysses=u, ring=16 // u) for u in (1, 2, 4, 8, 16)]
    seconds = {x.ulysses: step_time(cluster, work, x).total for x in splits}
    assert seconds[choice.ulysses] <= min(seconds.values()) / (1 - STATED_ERROR)
    assert choice.ulysses == rule_degrees(16, 32, 8)[0] == 8
    assert all(f"{u} x {16 // u} {seconds[u]:.3g} s" in choice.why[0] for u in seconds)
    alone = choose_ulysses(
        cluster, work, framework_caps("megatron-deepspeed"), run.replace(dp=32), 32
    )
    assert alone.ulysses == 1


def test_what_is_cut_off_unevaluated_would_not_fit(monkeypatch):
    """One GPU of 1M tokens, where offload leaves two layers."""
    run = functools.partial(find.__wrapped__, "llama3.2-1b", 2**20, 4, 1, "h200", "transformers")
    plans = run().plans
    monkeypatch.setattr(_Collector, "_cannot_fit", lambda *_: False)
    assert [plan.config for plan in plans] == [plan.config for plan in run().plans]
