"""The profile on gloo ranks: what it measures is what the planner reads."""

import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankContext, WorkerPool

from ds_usp.errors import ConfigError
from ds_usp.planner import ParallelConfig, Workload, load_cluster, search
from ds_usp.planner.attention_time import attention_s
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.models import ModelShape
from ds_usp.planner.step_time import head_time, layer_time
from ds_usp.planner.traffic import COLLECTIVE, RankGroup, exchange_s
from ds_usp.profiling import StepTimer, profile
from ds_usp.profiling.step_timer import Step

MODEL = ModelShape("tiny", 2, 64, 128, 4, 2, 100)
WORDS = replace(MODEL, name="the same layers, more words", vocab=120)


def on_rank(ctx: RankContext, gpus_per_node: int) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    measured = profile(
        device=torch.device("cpu"),
        models=[MODEL, WORDS, MODEL],
        budget_s=0.5,
        gpus_per_node=gpus_per_node,
        base="cpu",
        known=False,
        name="mine",
        print_line=lines.append,
    )
    return measured, lines


@pytest.fixture(scope="module")
def ranks(pool: WorkerPool) -> list[tuple[dict[str, Any], list[str]]]:
    """Four ranks on two "nodes" of two."""
    return pool.run(on_rank, 4, gpus_per_node=2)


@pytest.fixture
def cluster(ranks: list[tuple[dict[str, Any], list[str]]], tmp_path: Path) -> Cluster:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(ranks[0][0]))
    return load_cluster(str(file))


def test_every_rank_has_measured_the_same(ranks):
    """Degrees are chosen from it: no rank may see other numbers."""
    first, lines = ranks[0]
    assert all(measured == first for measured, _ in ranks)
    assert "4 ranks on cpu are warm" in lines[0] and lines[-1].endswith("done")


def test_the_planner_reads_it(cluster):
    measured = {name for name, (origin, _) in cluster.origins.items() if origin == "measured"}
    assert measured >= {
        *("peak_flop_per_s", "hbm_bytes_per_s", "host_bytes_per_s", "gemm_efficiency"),
        *("attention_efficiency", "levels", "contention", "network_latency_s", "gpus_per_node"),
        *("exchanges", "layers", "calls", "ends"),
    }
    assert cluster.gpus_per_node == 2 and cluster.node.uplink_bytes_per_s > 0
    assert {(row.ulysses, row.ring) for row in cluster.calls} == {(1, 1), (2, 1), (1, 2)}
    collectives = {"all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p"}
    assert {row.collective for row in cluster.exchanges} == collectives
    assert {row.tp for row in cluster.layers} == {1, 2}
    curves = (*cluster.gemm_efficiency, *cluster.attention_efficiency)
    assert max(share for _, share in curves) == 1
    assert search(cluster, Workload(MODEL, 384, 4), 4).plans


def test_a_shape_is_measured_once(cluster):
    """Models may have their layers in common; two rows of one size would be one too many."""
    assert [(row.tp, row.tokens) for row in cluster.layers] == list(product((1, 2), (48, 192)))
    assert [(row.vocab, row.tokens) for row in cluster.embedding_heads] == [(100, 48), (120, 48)]


def test_what_was_measured_is_what_is_predicted(cluster):
    for row in cluster.calls:
        width = row.heads * row.head_dim
        shape = ModelShape("call", 1, width, width, row.heads, row.kv_heads, 8)
        config = ParallelConfig(ulysses=row.ulysses, ring=row.ring)
        for backward, seconds in ((False, row.forward_s), (True, row.backward_s)):
            predicted = attention_s(
                cluster, Workload(shape, row.seq_len), config, backward=backward
            )
            assert predicted.total == pytest.approx(seconds)
    for row in cluster.layers:
        config = ParallelConfig(tp=row.tp)
        predicted = layer_time(cluster, Workload(MODEL, row.tokens), config)
        assert predicted.measured and predicted.matrices == pytest.approx(
            row.forward_s + row.backward_s
        )
    for row in cluster.embedding_heads:
        shape = replace(MODEL, vocab=row.vocab)
        assert (
            head_time(cluster, Workload(shape, row.tokens), ParallelConfig()).device_s
            == row.seconds
        )
    for row in cluster.exchanges:
        if row.collective == "all_gather":
            predicted = exchange_s(cluster, RankGroup(row.ranks, 1), row.sent_bytes, COLLECTIVE)
            assert predicted == pytest.approx(row.seconds)


def count_steps(ctx: RankContext, budget_s: float, max_s: float) -> tuple[int, float]:
    """Steps that one measurement runs, of which each takes 10 ms on rank 1 and none elsewhere."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        time.sleep(0.01 * ctx.rank)

    seconds = StepTimer(torch.device("cpu"), budget_s).seconds(step, max_s)
    return steps, seconds


def test_the_clock_reads_the_slowest_rank(pool):
    (steps, seconds), other = pool.run(count_steps, 2, budget_s=60, max_s=0.15)
    assert (steps, seconds) == other and 0.01 < seconds < 0.05
    assert 2 + 3 * 1 < steps <= 2 + 3 * 5


def test_a_spent_budget_leaves_one_lap(pool):
    """After one that warms up; also of a step that ``most_s`` would hold many times."""
    (steps, seconds), other = pool.run(count_steps, 2, budget_s=0, max_s=0.5)
    assert (steps, seconds) == other and steps == 2 and seconds > 0.01


def test_a_clock_alone():
    timer = StepTimer(torch.device("cpu"), 10)
    step: Step = lambda: time.sleep(0.005)  # noqa: E731
    assert 0.01 < timer.overlapped(step, step, 0.1) < 0.05  # one after the other on a CPU
    assert timer.elapsed_s > 0.05


def refused(ctx: RankContext) -> str:
    with pytest.raises(ConfigError) as error:
        on_rank(ctx, 3)
    return str(error.value)


def test_ranks_that_fill_no_nodes_are_refused(pool):
    assert set(pool.run(refused, 4)) == {"4 ranks do not fill nodes of 3"}
