"""What an attention call takes: divided among its instructions, on one rank and in the mean."""

from collections import Counter
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from test_tuning import resolve

from ds_usp import MaskSpec, TokenLayout
from ds_usp.geometry.pipeline_schedule import Op
from ds_usp.planner.attention_time import (
    AttentionCall,
    PassSeconds,
    RelativeCosts,
    SentBytes,
    attention_s,
    mean_costs,
)
from ds_usp.planner.hardware import Cluster, load_cluster
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.pipeline_timeline import CONTENTION

POSTS = (Op.A2A_POST, Op.RETURN_POST, Op.KV_POST, Op.DKV_POST)
SENT = {op: SentBytes(10.0 + number, 3.0 * number) for number, op in enumerate(POSTS)}


def posted(costs: RelativeCosts) -> dict[Op, float]:
    """Bytes that the exchanges of a pass send, by the operation that posts them."""
    sent: Counter[Op] = Counter()
    for instr in costs.schedule:
        seconds = PassSeconds(0, 0, 0, SENT, lambda _, sent_bytes: sent_bytes)
        sent[instr.op] += costs.cost(instr, seconds).exchange
    return {op: sent[op] for op in POSTS if op in sent}


@given(
    heads=st.sampled_from([(6, 6), (12, 6), (6, 1)]),
    chunks=st.integers(1, 5),
    ring=st.sampled_from([1, 2, 5, 8, 40, 64]),
    ulysses=st.booleans(),
    gather=st.booleans(),
    backward=st.booleans(),
)
@examples(100)
def test_a_pass_is_divided_among_its_instructions(heads, chunks, ring, ulysses, gather, backward):
    costs, ring_steps = mean_costs(
        *heads, chunks, ring, ulysses=ulysses, gather=gather, backward=backward
    )
    exchanged = {Op.A2A_POST, Op.RETURN_POST} if ulysses else set()
    exchanged |= {Op.KV_POST} | ({Op.DKV_POST} if backward else set()) if ring > 1 else set()
    assert posted(costs) == pytest.approx({op: sum(SENT[op]) for op in exchanged})
    timeline = costs.simulate(PassSeconds(7.0, 0.0, 0.0, {}, lambda *_: 0.0), contention=0.5)
    assert timeline.total == timeline.compute == pytest.approx(7)
    packed = costs.simulate(PassSeconds(0.0, 0.0, 2.0, SENT, lambda *_: 0.0), contention=0.5)
    sent = sum(sum(SENT[op]) for op in exchanged & {Op.A2A_POST, Op.RETURN_POST})
    assert packed.total == pytest.approx(2 * sent)
    merged = costs.simulate(PassSeconds(0.0, 3.0, 0.0, {}, lambda *_: 0.0), contention=0.5)
    assert merged.total == pytest.approx(3 * costs.mean_merges)
    if not gather and ring > 1:  # a long ring is priced as a shorter one
        steps = sum(instr.op is Op.KV_POST and instr.chunk == 0 for instr in costs.schedule)
        assert (steps + 1) * ring_steps == ring


@pytest.mark.parametrize("backward", [False, True])
def test_a_call_takes_its_kernels_and_at_most_all_one_after_the_other(backward):
    cluster = load_cluster("h200").with_gpus_per_node(4)
    shape = ModelShape("call", 1, 4096, 4096, 32, 8, 1)
    for config in (ParallelConfig(ulysses=4), ParallelConfig(ulysses=2, ring=2)):
        time = attention_s(cluster, Workload(shape, 65536), config, backward=backward)
        assert time.chunks > 1 and time.ulysses > 0
        one_after_the_other = time.kernel + time.merge + time.ulysses + time.ring
        assert time.kernel + time.merge < time.total < one_after_the_other


# ------------------------------------------------------------------ a call of one rank
# That `ds-usp explain` shows, priced as the planner prices it.


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
def test_ranks_take_in_the_mean_what_the_planner_predicts(heads, ulysses, ring, backward):
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
def test_a_full_mask_has_the_chunks_that_a_call_takes(ulysses, ring):
    full = MaskSpec.full()
    shown = call(75776, (40, 40), ulysses, ring, full)
    sizes: Any = {"seq_len": 75776, "heads": 40, "ulysses": ulysses, "ring": ring, "node": ring}
    assert shown.num_chunks == resolve(**sizes, mask=full).chunks
    assert shown.num_chunks < shown._size._replace(head_blocks=0).num_chunks()


def test_a_window_takes_less_and_exposes_less():
    window, causal = (
        call(131072, (32, 8), 1, 8, mask).simulate(backward=False)
        for mask in (MaskSpec.window(4096), MaskSpec.causal())
    )
    assert window.total < causal.total / 8
    assert window.alone["ring_kv"] < causal.alone["ring_kv"] / 4
    assert set(window.exposed) <= {"ring_kv", CONTENTION}


def test_a_ring_across_nodes_is_a_double_one_where_it_is_asked_for():
    h100 = load_cluster("h100")
    plain, double = (call(131072, (32, 8), 2, 8, cluster=h100, inner=x) for x in (None, 4))
    assert plain.inner_ring is None and plain.simulate(backward=True).alone["ring_dkv_outer"] == 0
    assert double.inner_ring == 4 and double.simulate(backward=True).alone["ring_dkv_outer"] > 0
