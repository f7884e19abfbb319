"""Where products stand between the exchanges of an attention call: printed, and for any call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp import MaskSpec, TokenLayout
from ds_usp.geometry.pipeline_schedule import (
    EXCHANGES,
    Op,
    Schedule,
    exposed_posts,
    parse,
    pipeline_schedule,
    render,
)
from ds_usp.geometry.projected_schedule import PRODUCTS, projected_schedule
from ds_usp.geometry.ring_schedule import ring_schedule

SPLIT = (
    Op.A2A_FIRST_POST,
    Op.A2A_FIRST_WAIT,
    Op.RETURN_FIRST_POST,
    Op.RETURN_FIRST_WAIT,
)


def schedules(
    ring: int, chunks: int, *, ulysses: bool, backward: bool, keeps_input: bool = False
) -> tuple[Schedule, Schedule]:
    """Of one rank, without and with products."""
    layout = TokenLayout("contiguous", 16, 1, ring)
    of_chunk = ring_schedule(layout, MaskSpec.full(), 0, position="local_first")
    attention = pipeline_schedule(
        [of_chunk] * chunks,
        ulysses=ulysses,
        backward=backward,
        kv_saved=backward and not keeps_input,
    )
    return attention, projected_schedule(attention, backward=backward, keeps_input=keeps_input)


# (ring, chunks, ulysses, backward, keeps input) -> the schedule.
PRINTED = {
    (1, 2, True, False, False): "0mmqkv 0a2a 1mmqkv 1a2a 0a2a? 0attn0.0 0end 0ret"
    " 1a2a? 1attn0.0 0ret? 1end 1ret 1ret? 1mmout",
    (1, 1, True, False, False): "0mmkv 0first 0mmq 0a2a 0first? 0a2a? 0attn0.0 0end 0ret 0ret?"
    " 0mmout",
    (2, 1, False, False, False): "0mmkv 0slice 0kv0 0mmq 0attn0.0 0kv0? 0attn1.0 0end 0store"
    " 0mmout",
    (1, 2, True, True, False): "1mmdout 1a2a 0a2a 1mmwout 1a2a? 1attn0.0 1end 1ret"
    " 0a2a? 0attn0.0 1ret? 0end 0ret 0mmwrest 0ret? 0mmwqkv 0mmdx",
    (1, 1, True, True, False): "0mmdout 0a2a 0mmwout 0a2a? 0attn0.0 0end 0retfirst 0ret"
    " 0retfirst? 0mmwq 0ret? 0mmwkv 0mmdx",
    (2, 2, False, True, False): "1kv0 0kv0 1mmdout 1mmwout 1slice 1attn0.0 1kv0? 1attn1.0 1dkv0"
    " 1end 0slice 0attn0.0 1dkv0? 1store 0kv0? 0attn1.0 0dkv0 0end 0mmwq 0mmwrest 0dkv0? 0store"
    " 0mmwkv 0mmdx",
    (1, 2, True, True, True): "1mmqkv 1first 1mmdout 1a2a 0mmqkv 0first 0mmdout 0a2a 1mmwout"
    " 1first? 1a2a? 1attn0.0 1end 1ret 0first? 0a2a? 0attn0.0 1ret? 1mmwqkv 0end 0ret 0ret?"
    " 0mmwqkv 0mmdx",
    (2, 1, False, True, True): "0mmqkv 0mmdout 0mmwout 0slice 0kv0 0attn0.0 0kv0? 0attn1.0 0dkv0"
    " 0end 0dkv0? 0store 0mmwqkv 0mmdx",
}


@pytest.mark.parametrize("mode", PRINTED, ids=str)
def test_products_stand_before_their_post_or_under_an_exchange(mode: tuple[Any, ...]) -> None:
    ring, chunks, ulysses, backward, keeps_input = mode
    _, schedule = schedules(
        ring, chunks, ulysses=ulysses, backward=backward, keeps_input=keeps_input
    )
    assert render(schedule) == PRINTED[mode]
    assert parse(PRINTED[mode]) == schedule


@given(
    ring=st.integers(1, 3),
    chunks=st.integers(1, 5),
    ulysses=st.booleans(),
    backward=st.booleans(),
    keeps_input=st.booleans(),
)
@examples(100)
def test_every_product_is_made_once_and_attention_stays_in_its_order(
    ring: int, chunks: int, ulysses: bool, backward: bool, keeps_input: bool
) -> None:
    keeps_input = keeps_input and backward
    attention, schedule = schedules(
        ring, chunks, ulysses=ulysses, backward=backward, keeps_input=keeps_input
    )
    assert tuple(x for x in schedule if x.op not in PRODUCTS | {*SPLIT}) == attention
    at = {instr: index for index, instr in enumerate(schedule)}
    assert len(at) == len(schedule)
    for posts, waits in EXCHANGES.values():
        for post, wait in zip(posts, waits, strict=True):
            posted = [x for x in schedule if x.op is post]
            waited = [x for x in schedule if x.op is wait]
            assert {x.chunk for x in posted} == {x.chunk for x in waited}
            assert all(at[x] < at[x._replace(op=wait)] for x in posted)
    made = Counter(x.op for x in schedule if x.op in PRODUCTS)
    if not backward:
        whole = ulysses and chunks > 1
        parts = {Op.PROJECT: chunks} if whole else {Op.PROJECT_KV: chunks, Op.PROJECT_Q: chunks}
        assert made == {Op.PROJECT_OUT: 1, **parts}
        return
    each = chunks if keeps_input else 1
    assert (made[Op.GRAD_OUT], made[Op.GRAD_OUT_WEIGHT], made[Op.GRAD_INPUT]) == (each, 1, 1)
    # The rows of all weights: each chunk's own, or chunk 0's and those of the others.
    assert made[Op.GRAD_WEIGHT] + made[Op.GRAD_WEIGHT_Q] == each
    assert made[Op.GRAD_WEIGHT_Q] == made[Op.GRAD_WEIGHT_KV]
    assert made[Op.GRAD_WEIGHT_REST] == (chunks > 1 and not keeps_input)
    assert made[Op.PROJECT] == (chunks if keeps_input else 0)


def test_a_return_that_covers_no_product_is_known_to_be_exposed() -> None:
    for keeps_input in (False, True):
        _, schedule = schedules(1, 1, ulysses=True, backward=True, keeps_input=keeps_input)
        exposed = {str(instr) for instr in exposed_posts(schedule)}
        assert exposed == ({"0ret"} if keeps_input else set())
