"""The planner takes a double ring where an attention call does, and counts what it sends."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from ds_usp import ConfigError, MaskSpec, TokenLayout
from ds_usp.geometry.ring_schedule import ring_schedule
from ds_usp.planner.attention_time import YUNCHANG, attention_s, double_ring
from ds_usp.planner.explain import explain
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.models import ModelShape, load_model
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.search import search
from ds_usp.planner.traffic import (
    DIRECT,
    RankGroup,
    attention_bytes,
    exchange_s,
    layer_traffic,
    ring_ranks_per_node,
)

K = 1024
H100 = load_cluster("h100")  # nodes of 8
SMALL = ModelShape("small", 1, 64, 128, 8, 4, 100)

ON_A_NODE = [
    (ParallelConfig(ring=16), 8),
    (ParallelConfig(ulysses=2, ring=8), 4),
    (ParallelConfig(tp=2, ulysses=2, ring=4), 2),
    (ParallelConfig(ulysses=8, ring=4), 1),
    (ParallelConfig(ring=8), 8),
    (ParallelConfig(ring=4), 4),
    # Rings next to each other, of which a node holds two or half of one.
    (ParallelConfig(ulysses=4, ring=4, order="ring-ulysses"), 4),
    (ParallelConfig(ulysses=2, ring=16, order="ring-ulysses"), 8),
    # Nodes that do not hold as many each: counted as one.
    (ParallelConfig(ring=12), 12),
    (ParallelConfig(tp=3, ring=8), 8),
]


@pytest.mark.parametrize(("config", "ranks"), ON_A_NODE, ids=str)
def test_ring_ranks_of_a_node(config: ParallelConfig, ranks: int) -> None:
    assert ring_ranks_per_node(H100, config) == ranks


def test_a_double_ring_is_for_rings_that_share_nodes_and_large_blocks() -> None:
    work = Workload(load_model("llama3-8b"), 128 * K)
    assert double_ring(H100, work, ParallelConfig(ulysses=2, ring=8)) == 4
    assert double_ring(H100, work, ParallelConfig(ulysses=8, ring=2)) is None
    assert double_ring(H100, work, ParallelConfig(ulysses=4, ring=2)) is None
    # A block is 2 * 4 heads * 128 * 2 bytes a token, in one part: 512 tokens are 1 MiB.
    for tokens, inner in ((8 * 512, 4), (8 * 512 - 8, None)):
        short = Workload(load_model("llama3-8b"), tokens)
        assert double_ring(H100, short, ParallelConfig(ulysses=2, ring=8)) == inner


@pytest.mark.parametrize("backward", [False, True])
def test_the_network_carries_a_share(backward: bool) -> None:
    work, config = Workload(load_model("llama3-8b"), 64 * K), ParallelConfig(ring=16)
    traffic = layer_traffic(work, config)
    sent = traffic.ring_backward if backward else traffic.ring_forward
    # Without latencies: one of a rank's 15 blocks crosses the network, 14 stay in the node.
    far = exchange_s(H100, RankGroup(2, 8), sent / 15, DIRECT, 0)
    near = exchange_s(H100, RankGroup(8, 1), sent * 14 / 15, DIRECT, 0)
    straight = exchange_s(H100, RankGroup(16, 1), sent, DIRECT, 0)
    assert straight == pytest.approx(8 * far)
    ring_time = attention_s(H100, work, config, backward=backward).ring
    assert max(near, far) < ring_time < straight / 3
    # What relays around the ring without parts does not become a double one.
    relayed = attention_s(H100, work, config, backward=backward, impl=YUNCHANG).ring
    assert relayed > ring_time


def test_a_thin_network_is_relieved() -> None:
    thin = replace(H100.node, uplink_bytes_per_s=H100.node.uplink_bytes_per_s / 8)
    cluster = replace(H100, levels=(*H100.levels[:-1], thin), nics=1)
    work, config = Workload(load_model("llama3-8b"), 64 * K), ParallelConfig(ring=16)
    sent = layer_traffic(work, config).ring_forward
    straight = exchange_s(cluster, RankGroup(16, 1), sent, DIRECT, 0)
    ring_time = attention_s(cluster, work, config, backward=False).ring
    assert ring_time == pytest.approx(straight / 8, rel=0.1)


@pytest.mark.parametrize(("ulysses", "ring", "inner"), [(1, 4, 2), (2, 8, 4), (1, 8, 2), (1, 6, 3)])
def test_bytes_are_those_of_the_schedule_and_as_many_as_straight(
    ulysses: int, ring: int, inner: int
) -> None:
    seq_len = 2 * ring * ulysses * 5
    work, config = Workload(SMALL, seq_len), ParallelConfig(ulysses=ulysses, ring=ring)
    ranks = [attention_bytes(work, config, rank, inner_ring=inner) for rank in range(config.sp)]
    layout = TokenLayout("zigzag", seq_len, ulysses, ring)
    token = 2 * 8 * 2 * (4 // ulysses)
    for rank, sent in enumerate(ranks):
        plan = ring_schedule(layout, MaskSpec.causal(), rank // ulysses, inner=inner)
        assert sent.ring_kv_outer == token * sum(each.num_sent_tokens for each in plan.outer_steps)
        assert sent.ring_dkv_outer == token * sum(each.num_kv_tokens for each in plan.outer_steps)
        kinds = {"ring_kv_outer": 2 * sent.ring_kv_outer, "ring_dkv_outer": sent.ring_dkv_outer}
        assert kinds.items() <= sent.ledger().items()
    straight = [attention_bytes(work, config, rank) for rank in range(config.sp)]
    for way in ("forward", "backward"):
        means = (
            fmean(getattr(each, way) for each in sent_of_ranks)
            for sent_of_ranks in (ranks, straight)
        )
        assert len(set(means)) == 1
    outer = ring // inner
    total = sum(each.ring_kv_forward for each in straight)
    assert sum(each.ring_kv_outer for each in ranks) * (ring - 1) == total * (outer - 1)


def test_bytes_of_an_inner_ring_that_does_not_fit_are_refused() -> None:
    work, config = Workload(SMALL, 64), ParallelConfig(ring=4)
    with pytest.raises(ConfigError, match=r"inner_ring=3 does not divide the 4 .* one of 1, 2, 4"):
        attention_bytes(work, config, 0, inner_ring=3)
    for inner in (1, 4):
        assert attention_bytes(work, config, 0, inner_ring=inner) == attention_bytes(
            work, config, 0
        )


def test_the_choice_is_explained() -> None:
    work = Workload(load_model("llama3-8b"), 128 * K)
    result = search(H100, work, 16, fixed={"tp": 1, "ulysses": 2, "ring": 8, "pp": 1, "dp": 1})
    (line,) = (line for line in explain(result) if line.startswith("ring 8"))
    assert "across nodes, as a double ring of 4 ranks in a node" in line
