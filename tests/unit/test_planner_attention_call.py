"""The call that ``ds-usp explain`` shows is priced as the planner prices it."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
from test_tuning import resolve

from ds_usp import MaskSpec, TokenLayout
from ds_usp.geometry.pipeline_timeline import CONTENTION
from ds_usp.planner.attention_call import AttentionCall
from ds_usp.planner.attention_time import attention_s
from ds_usp.planner.hardware import Cluster, load_cluster
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload

H200 = load_cluster("h200")


def call(
    seq_len: int,
    heads: tuple[int, int],
    ulysses: int,
    ring: int,
    mask: MaskSpec | None = None,
    rank: int = 0,
    cluster: Cluster = H200,
    inner: int | None = None,
) -> AttentionCall:
    layout = TokenLayout("zigzag", seq_len, ulysses, ring)
    config = ParallelConfig(ulysses=ulysses, ring=ring)
    return AttentionCall(
        cluster, layout, mask or MaskSpec.causal(), *heads, 128, config, rank=rank, inner=inner
    )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("heads", "ulysses", "ring"),
    [((32, 8), 1, 4), ((32, 8), 2, 2), ((32, 8), 8, 1), ((32, 32), 4, 2), ((16, 16), 2, 4)],
)
def test_ranks_take_in_the_mean_what_the_planner_predicts(
    heads: tuple[int, int], ulysses: int, ring: int, backward: bool
) -> None:
    """In a node: across nodes the ring's exchanges are exposed, and ranks with more bytes wait."""
    width = heads[0] * 128
    work = Workload(ModelShape("call", 1, width, width, *heads, 1, 128), 131072)
    config = ParallelConfig(ulysses=ulysses, ring=ring)
    predicted = attention_s(H200, work, config, backward=backward)
    calls = [call(131072, heads, ulysses, ring, rank=rank) for rank in range(config.sp)]
    totals = [x.simulate(backward=backward).total for x in calls]
    assert {x.num_chunks for x in calls} == {predicted.chunks}
    assert fmean(totals) == pytest.approx(predicted.total, rel=0.02)


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (4, 2), (1, 4)])
def test_a_full_mask_has_the_chunks_that_a_call_takes(ulysses: int, ring: int) -> None:
    full = MaskSpec.full()
    shown = call(75776, (40, 40), ulysses, ring, full)
    sizes: Any = {"seq_len": 75776, "heads": 40, "ulysses": ulysses, "ring": ring, "node": ring}
    assert shown.num_chunks == resolve(**sizes, mask=full).chunks
    assert shown.num_chunks < shown._size._replace(head_blocks=0).num_chunks()


def test_a_window_takes_less_and_exposes_less() -> None:
    window, causal = (
        call(131072, (32, 8), 1, 8, mask).simulate(backward=False)
        for mask in (MaskSpec.window(4096), MaskSpec.causal())
    )
    assert window.total < causal.total / 8
    assert window.alone["ring_kv"] < causal.alone["ring_kv"] / 4
    assert set(window.exposed) <= {"ring_kv", CONTENTION}


def test_a_ring_across_nodes_is_a_double_one_where_it_is_asked_for() -> None:
    h100 = load_cluster("h100")
    plain, double = (call(131072, (32, 8), 2, 8, cluster=h100, inner=x) for x in (None, 4))
    assert plain.inner_ring is None and plain.simulate(backward=True).alone["ring_dkv_outer"] == 0
    assert double.inner_ring == 4 and double.simulate(backward=True).alone["ring_dkv_outer"] > 0
