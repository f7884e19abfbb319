"""The simulation of a schedule: a case by hand, and what holds for any schedule and any seconds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp import MaskSpec, TokenLayout
from ds_usp.experimental.double_ring import double_ring_schedule
from ds_usp.geometry.pipeline_schedule import (
    CHANNELS,
    Instr,
    Op,
    Schedule,
    parse,
    pipeline_schedule,
)
from ds_usp.planner.pipeline_timeline import (
    COMPUTE,
    CONTENTION,
    LAUNCH,
    Cost,
    Timeline,
    simulate,
)

# Two chunks of ulysses 2 x ring 2: each exchange by itself, kernel calls of 4 seconds.
SECONDS = {"a2a": Cost(0, 3), "kv": Cost(0, 6), "attn": Cost(4), "end": Cost(1), "ret": Cost(0, 2)}
TWO_CHUNKS = (
    "0a2a 1a2a 0a2a? 0kv0 0attn0.0 1a2a? 1kv0 0kv0? 0attn1.0 0end 0ret"
    " 1attn0.0 0ret? 1kv0? 1attn1.0 1end 1ret 1ret?"
)


def by_name(instr: Instr) -> Cost:
    return SECONDS.get(instr.op.value, Cost())


def bars(timeline: Timeline) -> dict[str, str]:
    """Of each lane, its bars as ``instruction start-stop``."""
    lanes = {event.lane: "" for event in timeline.events}
    for lane, instr, start, stop in timeline.events:
        lanes[lane] = f"{lanes[lane]} {instr} {start:g}-{stop:g}".strip()
    return lanes


# The two links are busy on their own; one link is shared equally by all-to-all and KV (3 to 9 and
# 17 to 19 and 20); kernels at half speed while anything is in flight (0attn0.0 until second 9).
BY_HAND = {
    "a link for each kind": (
        {"links": {"ring_kv": "network"}},
        {
            "all_to_all": "0a2a 0-3 1a2a 3-6 0ret 14-16 1ret 23-25",
            "ring_kv": "0kv0 3-9 1kv0 9-15",
            COMPUTE: "0a2a? 0-3 0attn0.0 3-7 0kv0? 7-9 0attn1.0 9-13 0end 13-14 1attn0.0 14-18"
            " 1attn1.0 18-22 1end 22-23 1ret? 23-25",
        },
        {"all_to_all": 5, "ring_kv": 2},
    ),
    "one link": (
        {},
        {
            "all_to_all": "0a2a 0-3 1a2a 3-9 0ret 17-20 1ret 26-28",
            "ring_kv": "0kv0 3-12 1kv0 12-19",
            COMPUTE: "0a2a? 0-3 0attn0.0 3-7 1a2a? 7-9 0kv0? 9-12 0attn1.0 12-16 0end 16-17"
            " 1attn0.0 17-21 1attn1.0 21-25 1end 25-26 1ret? 26-28",
        },
        {"all_to_all": 7, "ring_kv": 3},
    ),
    "contention": (
        {"links": {"ring_kv": "network"}, "contention": 0.5},
        {
            "all_to_all": "0a2a 0-3 1a2a 3-6 0ret 18-20 1ret 28-30",
            "ring_kv": "0kv0 3-9 1kv0 10-16",
            COMPUTE: "0a2a? 0-3 0attn0.0 3-10 0attn1.0 10-17 0end 17-18 1attn0.0 18-23"
            " 1attn1.0 23-27 1end 27-28 1ret? 28-30",
        },
        {"all_to_all": 5, CONTENTION: 7},
    ),
}


@pytest.mark.parametrize(("rules", "lanes", "exposed"), BY_HAND.values(), ids=BY_HAND)
def test_a_timeline_by_hand(
    rules: dict[str, Any], lanes: dict[str, str], exposed: dict[str, float]
) -> None:
    timeline = simulate(parse(TWO_CHUNKS), by_name, **rules)
    assert bars(timeline) == lanes
    assert timeline.compute == 2 * (4 + 4 + 1)
    assert timeline.exposed == exposed
    assert timeline.total == timeline.events[-1].stop


def test_the_cpu_launches_instructions_one_after_the_other() -> None:
    """Without waiting: a kernel hides the launches of what follows it."""
    alone = parse("0slice 0attn0.0 0attn1.0 0end")
    late = simulate(alone, by_name, launch_s=3)
    assert bars(late) == {COMPUTE: "0attn0.0 6-10 0attn1.0 10-14 0end 14-15"}
    assert late.exposed == {LAUNCH: 6}
    assert simulate(alone, by_name, launch_s=5).exposed == {LAUNCH: 10 + 1 + 1}


def test_a_wait_for_what_was_not_posted_is_refused() -> None:
    with pytest.raises(ValueError, match="0a2a\\? waits for 0a2a, which was not posted"):
        simulate(parse("0a2a? 0a2a"), by_name)


class Run(NamedTuple):
    """A schedule with seconds of its instructions."""

    schedule: Schedule
    costs: dict[Instr, Cost]
    rules: dict[str, Any]

    def simulate(self, **changed: Any) -> Timeline:
        return simulate(self.schedule, self.costs.__getitem__, **{**self.rules, **changed})


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A call of any kind, with seconds of all orders of magnitude, and none."""
    ring, inner = draw(st.sampled_from([(1, None), (2, None), (4, None), (4, 2)]))
    flags = {"ulysses": draw(st.booleans()), "backward": draw(st.booleans())}
    layout, gather = TokenLayout("contiguous", 4 * ring, 1, ring), draw(st.booleans())
    positions = st.sampled_from(["only", "local_first", "local_merged", "local_last"])
    chunks = [
        double_ring_schedule(
            layout, MaskSpec.full(), 0, gather=gather, position=position, inner=inner
        )
        for position in draw(st.lists(positions, min_size=1, max_size=4))
    ]
    schedule = pipeline_schedule(chunks, **flags)
    seconds = st.sampled_from([0.0, 1e-6, 0.1, 0.3, 1.0, 7.0])
    costs = {
        instr: Cost(draw(seconds), draw(seconds) if instr.op.is_post else 0.0) for instr in schedule
    }
    rules = {
        "contention": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "links": {kind: draw(st.sampled_from("ab")) for kind in CHANNELS},
        "launch_s": draw(st.sampled_from([0.0, 0.05])),
    }
    return Run(schedule, costs, rules)


@given(runs())
@examples(200)
def test_all_seconds_are_work_or_exposed(run: Run) -> None:
    timeline = run.simulate()
    work = sum(cost.compute for cost in run.costs.values())
    assert timeline.compute == pytest.approx(work)
    assert all(seconds > 0 for seconds in timeline.exposed.values())
    assert timeline.total == pytest.approx(work + sum(timeline.exposed.values()))
    last = max((event.stop for event in timeline.events), default=0)
    assert last <= timeline.total * (1 + 1e-9) + 1e-12
    for lane in (COMPUTE, *CHANNELS):
        assert timeline.busy(lane) <= timeline.total * (1 + 1e-9)
    # Never worse than one after the other: some exchange always has at least its fair part.
    serial = work + sum(cost.exchange for cost in run.costs.values())
    assert timeline.total <= (serial + len(run.schedule) * run.rules["launch_s"]) * (1 + 1e-9)


@given(runs())
@examples(200)
def test_exchanges_that_take_no_time_expose_nothing(run: Run) -> None:
    free = {instr: Cost(cost.compute) for instr, cost in run.costs.items()}
    timeline = run._replace(costs=free).simulate(launch_s=0.0)
    assert timeline.total == timeline.compute and not timeline.exposed
    assert {event.lane for event in timeline.events} <= {COMPUTE}


@given(runs())
@examples(200)
def test_lanes_are_in_order_and_waits_end_with_their_exchange(run: Run) -> None:
    timeline = run.simulate()
    index_of = {instr: index for index, instr in enumerate(run.schedule)}
    by_instr = {
        (lane == COMPUTE, instr): (start, stop) for lane, instr, start, stop in timeline.events
    }
    for lane in (COMPUTE, *CHANNELS):
        of_lane = [event for event in timeline.events if event.lane == lane]
        assert of_lane == sorted(of_lane, key=lambda event: index_of[event.instr])
        for first, second in pairwise(of_lane):
            assert first.stop <= second.start * (1 + 1e-9)
    now = 0.0  # of the compute lane, in the order of the schedule
    for instr in run.schedule:
        now = max(now, by_instr.get((True, instr), (0, 0))[1])
        if instr.op.is_wait:
            posted = by_instr.get((False, instr._replace(op=Op(instr.op.value[:-1]))), (0, 0))
            assert posted[1] <= now * (1 + 1e-9)
        elif instr.op.channel and (False, instr) in by_instr:
            start, stop = by_instr[False, instr]
            assert now <= start * (1 + 1e-9)
            assert stop - start >= run.costs[instr].exchange * (1 - 1e-6)
