"""The order in which the chunks of a call are exchanged and computed, and its simulation."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp import MaskSpec, TokenLayout
from ds_usp.geometry.pipeline_schedule import (
    CHANNELS,
    Instr,
    Op,
    Schedule,
    exchange_order,
    exposed_posts,
    parse,
    pipeline_schedule,
    render,
)
from ds_usp.geometry.ring_schedule import ring_schedule
from ds_usp.planner.pipeline_timeline import CONTENTION, Cost, Timeline, simulate

# Each line up to the next chunk's first kernel call.
PRINTED = {
    "ulysses 4, forward": (
        {"ring": 1, "ulysses": True, "backward": False},
        "0a2a 1a2a 0a2a?"
        " 0attn0.0 0end 0ret 2a2a 1a2a?"
        " 1attn0.0 0ret? 1end 1ret 2a2a?"
        " 2attn0.0 1ret? 2end 2ret 2ret?",
    ),
    "ulysses 4, backward, returned from where the kernel writes": (
        {"ring": 1, "ulysses": True, "backward": True, "stage_return": True},
        "2a2a 1a2a 2a2a? 2stage"
        " 2attn0.0 2end 2ret 0a2a 1a2a? 1stage"
        " 1attn0.0 2ret? 1end 1ret 0a2a? 0stage"
        " 0attn0.0 1ret? 0end 0ret 0ret?",
    ),
    "ring 2, forward": (
        {"ring": 2, "ulysses": False, "backward": False},
        "0slice 0kv0 1slice 1kv0"
        " 0attn0.0 0kv0? 0attn1.0 0end 0store 2slice 2kv0"
        " 1attn0.0 1kv0? 1attn1.0 1end 1store"
        " 2attn0.0 2kv0? 2attn1.0 2end 2store",
    ),
    "ulysses 2 x ring 2, forward": (
        {"ring": 2, "ulysses": True, "backward": False},
        "0a2a 1a2a 0a2a? 0kv0 2a2a"
        " 0attn0.0 1a2a? 1kv0 0kv0? 0attn1.0 0end 0ret"
        " 1attn0.0 2a2a? 2kv0 0ret? 1kv0? 1attn1.0 1end 1ret"
        " 2attn0.0 1ret? 2kv0? 2attn1.0 2end 2ret 2ret?",
    ),
    "ulysses 2 x ring 2, forward with the log-sum-exp, one chunk": (
        {"ring": 2, "ulysses": True, "backward": False, "return_lse": True, "chunks": 1},
        "0a2a 0a2a? 0kv0 0attn0.0 0kv0? 0attn1.0 0end 0ret 0ret? 0lse 0lse?",
    ),
    "ulysses 2 x ring 2, backward": (
        {"ring": 2, "ulysses": True, "backward": True},
        "2a2a 1a2a 2kv0 1kv0 2a2a?"
        " 2attn0.0 2kv0? 2attn1.0 2dkv0 2end 0a2a 0kv0 1a2a?"
        " 1attn0.0 2dkv0? 2ret 1kv0? 1attn1.0 1dkv0 1end 0a2a?"
        " 0attn0.0 1dkv0? 1ret 2ret? 0kv0? 0attn1.0 0dkv0 0end 0dkv0? 0ret 1ret? 0ret?",
    ),
    "ulysses 2 x ring 2, backward, from shards": (
        {"ring": 2, "ulysses": True, "backward": True, "from_shards": True},
        "2a2a 1a2a 2a2a? 2kv0 0a2a"
        " 2attn0.0 1a2a? 1kv0 2kv0? 2attn1.0 2dkv0 2end"
        " 1attn0.0 2dkv0? 2ret 0a2a? 0kv0 1kv0? 1attn1.0 1dkv0 1end"
        " 0attn0.0 1dkv0? 1ret 2ret? 0kv0? 0attn1.0 0dkv0 0end 0dkv0? 0ret 1ret? 0ret?",
    ),
    "ring 4, backward, one chunk": (
        {"ring": 4, "ulysses": False, "backward": True, "chunks": 1},
        "0slice 0kv0 0attn0.0 0kv0? 0kv1 0attn1.0 0dkv0 0kv1? 0kv2 0attn2.0 0dkv0? 0dkv1"
        " 0kv2? 0attn3.0 0dkv1? 0dkv2 0dkv2? 0end 0store",
    ),
}


@pytest.mark.parametrize(("mode", "text"), PRINTED.values(), ids=PRINTED)
def test_a_schedule_prints_in_one_line(mode, text):
    ring, chunks = mode.pop("ring"), mode.pop("chunks", 3)
    layout = TokenLayout("contiguous", 16, 1, ring)
    # A chunk among others, whose local block is not divided.
    of_chunk = ring_schedule(layout, MaskSpec.full(), 0, position="local_first")
    schedule = pipeline_schedule([of_chunk] * chunks, **mode)
    assert render(schedule) == text
    assert parse(text) == schedule


@pytest.mark.parametrize("word", ["a2a", "0a3a", "0a2a??", "x0kv1", "0attn1.", "-1kv0"])
def test_a_word_that_is_no_instruction_is_refused(word):
    with pytest.raises(ValueError, match="is no instruction, as '0a2a' or '1kv0\\?'"):
        parse(f"0a2a {word}")


class Mode(NamedTuple):
    """A call; ``ranks`` have the same exchanges and kernel calls of their own."""

    ranks: list[list[Any]]
    flags: dict[str, bool]

    def schedules(self) -> list[Schedule]:
        return [pipeline_schedule(chunks, **self.flags) for chunks in self.ranks]


@st.composite
def modes(draw: st.DrawFn) -> Mode:
    """Any call: chunks and ring steps, some of which have no kernel call."""
    chunks, ring = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    remote = draw(st.integers(0, ring - 1))
    ends_local, merged = draw(st.booleans()), draw(st.booleans()) and remote == 1

    def steps(calls: st.SearchStrategy[int]) -> list[Any]:
        are_local = [True, *[False] * remote, *[True] * ends_local]
        if merged and draw(st.booleans()):  # the local block with the remote one: on some ranks
            are_local = [False]
        return [SimpleNamespace(is_local=local, calls=range(draw(calls))) for local in are_local]

    def rank() -> list[Any]:
        calls = st.integers(0, 2)
        return [
            SimpleNamespace(steps=steps(calls), backward_steps=steps(calls), ring_degree=ring)
            for _ in range(chunks)
        ]

    backward, ulysses = draw(st.booleans()), draw(st.booleans())
    flags = {
        "backward": backward,
        "ulysses": ulysses,
        "return_lse": not backward and draw(st.booleans()),
        "stage_return": backward and ulysses and ring == 1 and draw(st.booleans()),
        "from_shards": backward and draw(st.booleans()),
    }
    return Mode([rank() for _ in range(draw(st.integers(1, 3)))], flags)


OWN_POST_OF = {op: Op(op.value[:-1]) for op in Op if op.is_wait}


def test_exchanges_that_overlap_nothing_are_known():
    text = "0a2a 0a2a? 0kv0 0kv0? 0attn0.0 1kv0 0end 1kv0? 0ret 1a2a 0ret? 1a2a?"
    assert exposed_posts(parse(text)) == set(parse("0a2a 0kv0"))
    backward = "0kv0 0attn0.0 0kv0? 0attn1.0 0dkv0 1attn0.0 0dkv0? 1dkv0 1end 1dkv0? 1store"
    assert exposed_posts(parse(backward)) == set(parse("1dkv0"))


@given(modes())
@examples(300)
def test_every_exchange_is_posted_once_and_then_waited_for_once(mode):
    for schedule in mode.schedules():
        assert parse(render(schedule)) == schedule
        assert len(set(schedule)) == len(schedule)
        at = {instr: index for index, instr in enumerate(schedule)}
        posts = [instr for instr in schedule if instr.op.is_post]
        waits = [instr for instr in schedule if instr.op in OWN_POST_OF]
        assert len(posts) == len(waits)
        for wait in waits:
            assert at[wait._replace(op=OWN_POST_OF[wait.op])] < at[wait]


@given(modes())
@examples(300)
def test_a_kernel_runs_when_its_tensors_are_there_and_results_leave_after_it(mode):
    backward = mode.flags["backward"]
    name = "backward_steps" if backward else "steps"
    for chunks, schedule in zip(mode.ranks, mode.schedules(), strict=True):
        at = {instr: index for index, instr in enumerate(schedule)}
        first = {(x.op, x.chunk): at[x] for x in reversed(schedule)}
        last = {(x.op, x.chunk): at[x] for x in schedule}
        take = Op.A2A_WAIT if mode.flags["ulysses"] else Op.SLICE_HEADS
        leave = Op.RETURN_POST if mode.flags["ulysses"] else Op.STORE
        sends_kv = [x for x in schedule if x.op is Op.KV_POST]
        if not backward or mode.flags["from_shards"]:  # they come with the chunk's heads
            assert all(first[take, x.chunk] < at[x] for x in sends_kv)
        for chunk, ring in enumerate(chunks):
            received = 0
            for index, step in enumerate(getattr(ring, name)):
                calls = [at[x] for x in schedule if x[:3] == (Op.ATTN, chunk, index)]
                assert len(calls) == len(step.calls)
                received += not step.is_local
                awaited = [first[take, chunk]]
                if not step.is_local:
                    awaited.append(at[parse(f"{chunk}kv{received - 1}?")[0]])
                assert all(wait < call for wait in awaited for call in calls)
                if backward and not step.is_local:
                    sent = at[parse(f"{chunk}dkv{received - 1}")[0]]
                    assert all(call < sent for call in calls)
            end, left = first[Op.END, chunk], first[leave, chunk]
            assert last.get((Op.ATTN, chunk), 0) < end < left
            assert last.get((Op.DKV_WAIT, chunk), 0) < left


def max_in_flight(schedule: Schedule, kind: str) -> int:
    """Most exchanges of a kind that are posted, or staged, and not yet waited for."""
    staged: set[int] = set()
    now = most = 0
    for op, chunk, *_ in schedule:
        if op is Op.RETURN_STAGE and kind == "all_to_all":
            staged.add(chunk)
            now += 1
        elif op.channel == kind and op.is_wait:
            now -= 1
        elif op.channel == kind and not (op is Op.RETURN_POST and chunk in staged):
            now += 1
        most = max(most, now)
    return most


@given(modes())
@examples(300)
def test_buffers_are_bounded_whatever_the_number_of_chunks_and_steps(mode):
    """A chunk's ring exchanges are in flight one at a time; three all-to-alls at most."""
    for schedule in mode.schedules():
        for kind in CHANNELS:
            bound = 3 if kind == "all_to_all" else 2
            assert max_in_flight(schedule, kind) <= bound
        for chunk in {x.chunk for x in schedule}:
            of_chunk = tuple(x for x in schedule if x.chunk == chunk)
            assert all(max_in_flight(of_chunk, kind) <= 1 for kind in CHANNELS)


@given(modes())
@examples(300)
def test_ranks_post_in_one_order_and_never_wait_for_each_other(mode):
    """Even where a wait blocks the CPU (gloo), and however many kernel calls each rank has."""
    schedules = mode.schedules()
    assert len({exchange_order(schedule) for schedule in schedules}) == 1
    position, posted = [0] * len(schedules), [set[Any]() for _ in schedules]
    progress = True
    while progress:
        progress = False
        for rank, schedule in enumerate(schedules):
            while position[rank] < len(schedule):
                instr = schedule[position[rank]]
                if instr.op in OWN_POST_OF:
                    post = instr._replace(op=OWN_POST_OF[instr.op])
                    if not all(post in of_rank for of_rank in posted):
                        break
                posted[rank].add(instr)
                position[rank] += 1
                progress = True
    assert position == list(map(len, schedules))


# Two chunks of ulysses 2 x ring 2: each exchange by itself, kernel calls of 4 seconds.
SECONDS = {"a2a": Cost(0, 3), "kv": Cost(0, 6), "attn": Cost(4), "end": Cost(1), "ret": Cost(0, 2)}
TWO_CHUNKS = (
    "0a2a 1a2a 0a2a? 0kv0 0attn0.0 1a2a? 1kv0 0kv0? 0attn1.0 0end 0ret"
    " 1attn0.0 0ret? 1kv0? 1attn1.0 1end 1ret 1ret?"
)


def by_name(instr: Instr) -> Cost:
    return SECONDS.get(instr.op.value, Cost())


@pytest.mark.parametrize(
    ("contention", "exposed"),
    [
        # All-to-all and KV share the link equally: 1a2a is done at second 9 and not at 6, 0kv0 at
        # 12, 1kv0 at 19 beside 0ret. Waits: 0a2a 0 to 3, 1a2a 7 to 9, 0kv 9 to 12, 1ret 26 to 28.
        (0.0, {"all_to_all": 3 + 2 + 2, "ring_kv": 3}),
        # At half speed while anything is in flight: 0attn0.0 from 3 to 11, 0kv0? to 12; 1kv0 done
        # at 18 and 0attn1.0 at 19, 0end at 20, 0ret at 22 and 1attn0.0 at 25; 1ret 30 to 32.
        (0.5, {"all_to_all": 3 + 2, "ring_kv": 1, CONTENTION: 4 + 3 + 1}),
    ],
)
def test_a_timeline_by_hand(contention, exposed):
    timeline = simulate(parse(TWO_CHUNKS), by_name, contention)
    assert timeline.compute == 2 * (4 + 4 + 1)
    assert timeline.exposed == exposed
    assert timeline.total == timeline.compute + sum(exposed.values())


def test_a_wait_for_what_was_not_posted_is_refused():
    with pytest.raises(ValueError, match="0a2a\\? waits for 0a2a, which was not posted"):
        simulate(parse("0a2a? 0a2a"), by_name)


class Run(NamedTuple):
    """A schedule with seconds of its instructions."""

    schedule: Schedule
    costs: dict[Instr, Cost]
    contention: float

    def simulate(self) -> Timeline:
        return simulate(self.schedule, self.costs.__getitem__, self.contention)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A call of any kind, with seconds of all orders of magnitude, and none."""
    ring = draw(st.sampled_from([1, 2, 4]))
    flags = {"ulysses": draw(st.booleans()), "backward": draw(st.booleans())}
    layout, gather = TokenLayout("contiguous", 4 * ring, 1, ring), draw(st.booleans())
    positions = st.sampled_from(["only", "local_first", "local_merged", "local_last"])
    chunks = [
        ring_schedule(layout, MaskSpec.full(), 0, gather=gather, position=position)
        for position in draw(st.lists(positions, min_size=1, max_size=4))
    ]
    schedule = pipeline_schedule(chunks, **flags)
    seconds = st.sampled_from([0.0, 1e-6, 0.1, 0.3, 1.0, 7.0])
    costs = {
        instr: Cost(draw(seconds), draw(seconds) if instr.op.is_post else 0.0) for instr in schedule
    }
    return Run(schedule, costs, draw(st.sampled_from([0.0, 0.3, 1.0])))


@given(runs())
@examples(200)
def test_all_seconds_are_work_or_exposed(run):
    timeline = run.simulate()
    work = sum(cost.compute for cost in run.costs.values())
    assert timeline.compute == pytest.approx(work)
    assert all(seconds > 0 for seconds in timeline.exposed.values())
    # Never worse than one after the other: some exchange always has at least its fair part.
    exchanges = sum(cost.exchange for cost in run.costs.values())
    assert timeline.total <= (work + exchanges) * (1 + 1e-9)
    # Nor better than the kinds one after the other on one link, once they are all waited for.
    assert timeline.total >= exchanges * (1 - 1e-6)


@given(runs())
@examples(200)
def test_exchanges_that_take_no_time_expose_nothing(run):
    free = {instr: Cost(cost.compute) for instr, cost in run.costs.items()}
    timeline = run._replace(costs=free).simulate()
    assert timeline.total == timeline.compute and not timeline.exposed
