"""Where products stand between the exchanges of an attention call: printed, and for any call."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp import MaskSpec, TokenLayout
from ds_usp.experimental.projected_schedule import (
    ProjectedOp,
    projected_backward,
    projected_forward,
)
from ds_usp.geometry.pipeline_schedule import (
    Op,
    Schedule,
    exposed_posts,
    parse,
    pipeline_schedule,
    render,
)
from ds_usp.geometry.ring_schedule import ring_schedule

OPERATIONS = (Op, ProjectedOp)


def schedules(
    ring: int, chunks: int, *, ulysses: bool, backward: bool
) -> tuple[Schedule, Schedule]:
    """Of one rank, without and with products."""
    layout = TokenLayout("contiguous", 16, 1, ring)
    of_chunk = ring_schedule(layout, MaskSpec.full(), 0, position="local_first")
    attention = pipeline_schedule(
        [of_chunk] * chunks, ulysses=ulysses, backward=backward, kv_saved=False
    )
    return attention, (projected_backward if backward else projected_forward)(attention)


# (ring, chunks, ulysses, backward) -> the schedule.
PRINTED = {
    (1, 2, True, False): "0mmqkv 0a2a 1mmqkv 1a2a 0a2a? 0attn0.0 0end 0ret"
    " 1a2a? 1attn0.0 0ret? 1end 1ret 1ret? 1mmout",
    (1, 1, True, False): "0mmqkv 0a2a 0a2a? 0attn0.0 0end 0ret 0ret? 0mmout",
    (2, 1, False, False): "0mmqkv 0slice 0kv0 0attn0.0 0kv0? 0attn1.0 0end 0store 0mmout",
    (1, 2, True, True): "1mmqkv 1first 1mmdout 1a2a 0mmqkv 0first 0mmdout 0a2a 1mmwout"
    " 1first? 1a2a? 1attn0.0 1end 1ret 0first? 0a2a? 0attn0.0 1ret? 1mmwqkv 0end 0ret 0ret?"
    " 0mmwqkv 0mmdx",
    (2, 1, False, True): "0mmqkv 0mmdout 0mmwout 0slice 0kv0 0attn0.0 0kv0? 0attn1.0 0dkv0"
    " 0end 0dkv0? 0store 0mmwqkv 0mmdx",
}


@pytest.mark.parametrize("mode", PRINTED, ids=str)
def test_products_stand_before_their_post_or_under_an_exchange(mode):
    ring, chunks, ulysses, backward = mode
    _, schedule = schedules(ring, chunks, ulysses=ulysses, backward=backward)
    assert render(schedule) == PRINTED[mode]
    assert parse(PRINTED[mode], OPERATIONS) == schedule


@given(
    ring=st.integers(1, 3), chunks=st.integers(1, 5), ulysses=st.booleans(), backward=st.booleans()
)
@examples(100)
def test_every_product_is_made_once_and_attention_stays_in_its_order(
    ring, chunks, ulysses, backward
):
    attention, schedule = schedules(ring, chunks, ulysses=ulysses, backward=backward)
    assert tuple(x for x in schedule if not isinstance(x.op, ProjectedOp)) == attention
    at = {instr: index for index, instr in enumerate(schedule)}
    assert len(at) == len(schedule)
    for wait in (op for kind in OPERATIONS for op in kind if op.is_wait):
        post = type(wait)(wait.value[:-1])
        assert post.is_post and post.channel == wait.channel
        posted = [x for x in schedule if x.op is post]
        assert {x.chunk for x in posted} == {x.chunk for x in schedule if x.op is wait}
        assert all(at[x] < at[x._replace(op=wait)] for x in posted)
    each = (ProjectedOp.PROJECT, ProjectedOp.GRAD_OUT, ProjectedOp.GRAD_WEIGHT)
    once = (ProjectedOp.GRAD_OUT_WEIGHT, ProjectedOp.GRAD_INPUT)
    wanted = {**dict.fromkeys(each, chunks), **dict.fromkeys(once, 1)}
    if not backward:
        wanted = {ProjectedOp.PROJECT: chunks, ProjectedOp.PROJECT_OUT: 1}
    assert Counter(x.op for x in schedule if x.op.value.startswith("mm")) == wanted


def test_a_return_that_covers_no_product_is_known_to_be_exposed():
    _, schedule = schedules(1, 1, ulysses=True, backward=True)
    assert {str(instr) for instr in exposed_posts(schedule)} == {"0ret"}
