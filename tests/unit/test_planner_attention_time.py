"""What an attention call takes: divided among its instructions, in the mean over ranks."""

from collections import Counter
from dataclasses import replace
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp.geometry.pipeline_schedule import Op
from ds_usp.planner.attention_time import (
    PassSeconds,
    RelativeCosts,
    SentBytes,
    attention_s,
    mean_costs,
)
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload

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
    assert merged.total == pytest.approx(3 * sum(map(mul, costs.heads, costs.merges)))
    if not gather and ring > 1:  # a long ring is priced as a shorter one
        steps = sum(instr.op is Op.KV_POST and instr.chunk == 0 for instr in costs.schedule)
        assert (steps + 1) * ring_steps == ring


@pytest.mark.parametrize("backward", [False, True])
def test_a_call_takes_its_kernels_and_at_most_all_one_after_the_other(backward):
    cluster = load_cluster("h200").with_gpus_per_node(4)
    shape = ModelShape("call", 1, 4096, 4096, 32, 8, 1)
    for config in (ParallelConfig(ulysses=4), ParallelConfig(ulysses=2, ring=2)):
        work = Workload(shape, 65536)
        time = attention_s(cluster, work, config, backward=backward)
        serial = replace(cluster, contention=1.0)  # kernels stand still under any exchange
        one_after_the_other = attention_s(serial, work, config, backward=backward)
        assert time.kernel + time.merge < time.total < one_after_the_other.total


def test_kernels_by_hand():
    """Causal: 4 b s^2 h d / 2 FLOP forward, 2.5 times as many backward (FlashAttention-2)."""
    cluster = replace(load_cluster("h200"), attention_efficiency=((1.0, 0.5),))
    work = Workload(ModelShape("call", 1, 4096, 4096, 32, 8, 1), 65536)
    for tp, batch in ((1, 1), (2, 3)):
        config = ParallelConfig(tp=tp, micro_batch=batch)
        forward = 2 * batch * 65536**2 * 4096 / tp / (0.5 * cluster.peak_flop_per_s)
        for backward, times in ((False, 1), (True, 2.5)):
            time = attention_s(cluster, work, config, backward=backward)
            assert time.total == time.kernel == pytest.approx(times * forward)
