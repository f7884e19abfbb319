"""The planner counts what a double ring sends, and does not choose it."""

from statistics import fmean

import pytest

from ds_usp import ConfigError, MaskSpec, TokenLayout
from ds_usp.experimental.double_ring import double_ring_schedule
from ds_usp.planner.attention_time import attention_s
from ds_usp.planner.explain import explain
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.models import ModelShape, load_model
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.search import search
from ds_usp.planner.traffic import DIRECT, RankGroup, attention_bytes, exchange_s, layer_traffic

K = 1024
H100 = load_cluster("h100")  # nodes of 8
SMALL = ModelShape("small", 1, 64, 128, 8, 4, 100)


@pytest.mark.parametrize(("ulysses", "ring", "inner"), [(1, 4, 2), (2, 8, 4), (1, 8, 2), (1, 6, 3)])
def test_bytes_are_those_of_the_schedule_and_as_many_as_straight(ulysses, ring, inner):
    seq_len = 2 * ring * ulysses * 5
    work, config = Workload(SMALL, seq_len), ParallelConfig(ulysses=ulysses, ring=ring)
    ranks = [attention_bytes(work, config, rank, inner_ring=inner) for rank in range(config.sp)]
    layout = TokenLayout("zigzag", seq_len, ulysses, ring)
    token = 2 * 8 * 2 * (4 // ulysses)
    for rank, sent in enumerate(ranks):
        plan = double_ring_schedule(layout, MaskSpec.causal(), rank // ulysses, inner=inner)
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


def test_bytes_of_an_inner_ring_that_does_not_fit_are_refused():
    work, config = Workload(SMALL, 64), ParallelConfig(ring=4)
    with pytest.raises(ConfigError, match=r"inner_ring=3 does not divide the 4 .* one of 1, 2, 4"):
        attention_bytes(work, config, 0, inner_ring=3)
    for inner in (1, 4):
        assert attention_bytes(work, config, 0, inner_ring=inner) == attention_bytes(
            work, config, 0
        )


def test_the_planner_does_not_choose_it():
    work, config = Workload(load_model("llama3-8b"), 64 * K), ParallelConfig(ring=16)
    sent = layer_traffic(work, config).ring_busiest
    straight = exchange_s(H100, RankGroup(16, 1), sent, DIRECT, 0)
    time = attention_s(H100, work, config, backward=False)
    assert time.exposed < 1.1 * straight
    degrees = {"tp": 1, "ulysses": 2, "ring": 8, "pp": 1, "dp": 1}
    result = search(H100, work, 16, fixed={**degrees, "order": "ulysses-ring"})
    (line,) = (line for line in explain(result) if line.startswith("ring 8"))
    assert "across nodes" in line and "double" not in line
