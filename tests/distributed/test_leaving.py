"""A rank that leaves the common path says so, or its watchdog does; the next good call works."""

import contextlib
import sys
import time
from dataclasses import replace
from types import FrameType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import short_patience
from harness import RankContext
from programs import python, torchrun

import ds_usp
from ds_usp.comm import consistency, watchdog
from ds_usp.comm.consistency import ConsistencyChecker
from ds_usp.comm.process_groups import align_group_counters
from ds_usp.comm.shm_mailbox import MAX_LEFT, open_mailbox

WORLD, TIMEOUT_S = 4, 60.0


def checker_of(ctx: RankContext, use_mailbox: bool = True) -> ConsistencyChecker:
    shared = open_mailbox(ctx.group, [b"node"] * ctx.world) if use_mailbox else None
    return ConsistencyChecker(ctx.group, shared)


def said_by(call: object, *arguments: object, **options: object) -> str:
    """What a call raises; "" where it returns."""
    try:
        call(*arguments, **options)  # type: ignore[operator]
    except (ds_usp.MeshError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def left(ctx: RankContext, use_mailbox: bool, leaving: list[int]) -> list[str]:
    """What calls say after ranks have left the second one."""
    checker = checker_of(replace(ctx, group=dist.new_group()), use_mailbox)
    texts = [said_by(checker.check_now, "one")]
    if ctx.rank in leaving:
        checker.leave("out of memory")
        checker.leave("of the same exception, in a model around it")
    else:
        texts.append(said_by(checker.check_now, "two"))
        checker.leave("the exception that all ranks know of")
    texts += [said_by(checker.check_now, "three"), said_by(checker.check)]
    return [*texts, str(checker.number)]


@pytest.mark.parametrize("use_mailbox", [False, True], ids=["group", "mailbox"])
def test_a_rank_that_leaves_fails_the_next_call_of_the_others_and_no_later_one(pool, use_mailbox):
    results = pool.run(left, 3, use_mailbox=use_mailbox, leaving=[1])
    assert results[1] == ["", "", "", "3"]
    for texts in (results[0], results[2]):
        assert "rank 1: out of memory" in texts[1]
        assert [*texts[:1], *texts[2:]] == ["", "", "", "3"]
    everybody = pool.run(left, 3, use_mailbox=use_mailbox, leaving=[0, 1, 2])
    assert everybody == [["", "", "", "3"]] * 3


def at_other_passes(ctx: RankContext) -> list[str]:
    """What the comparisons say where rank 1 leaves pass 1 late, when the others have ended it, or
    early in the second turn, when they are in the middle of it."""
    checker = checker_of(ctx)
    checker.begin_forward_pass()
    checker.check_now("begin")
    if ctx.rank == 1:
        checker.leave("late")
    checker.begin_forward_pass()
    texts = [said_by(checker.check_now, "begin")]
    if ctx.rank != 1:  # a backward pass, which rank 1 leaves out: it begins the next pass
        texts.append(said_by(checker.check_now, "backward"))
    checker.begin_forward_pass()
    return [*texts, said_by(checker.check_now, "begin"), str(checker.number)]


def test_ranks_that_are_ahead_wait_for_those_that_left_another_pass(pool):
    results = pool.run(at_other_passes, 3)
    assert results[1] == ["", "", "3"]
    for texts in (results[0], results[2]):
        assert texts[0] == texts[2] == "" and texts[3] == "3"
        assert "after 0 requests, in forward pass: 2 on ranks 0, 2, 3 on rank 1" in texts[1] or (
            "forward pass 3" in texts[1]
        )


def in_another_collective(ctx: RankContext, nodes: int) -> list[str]:
    """What calls say where rank 1 is in an all-reduce that the others call later."""
    checker, texts = checker_of(ctx), list[str]()
    if nodes > 1:
        each = [b"%d" % (rank % nodes) for rank in range(ctx.world)]
        align_group_counters(ctx.group)  # tests before may have made others
        checker = ConsistencyChecker.for_mesh(ctx.group, each)
        assert checker.mailbox is None
    with short_patience():
        checker.check_now("together")
        if ctx.rank == 1:
            dist.all_reduce(torch.ones(1), group=ctx.group)
        else:
            texts.append(said_by(checker.check_now, "without rank 1"))
            dist.all_reduce(torch.ones(1), group=ctx.group)
        if ctx.rank == 1:
            texts.append(said_by(checker.check_now, "too late"))
        texts.append(said_by(checker.check_now, "together again"))
        return [*texts, str(checker.number)]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_in_another_collective_is_found_and_named(pool, nodes):
    results = pool.run(in_another_collective, WORLD, timeout=TIMEOUT_S, nodes=nodes)
    for rank, (first, *later) in enumerate(results):
        assert later == ["", "2"]
        assert "all_reduce" in first and "test_leaving.py" in first
        assert ("refused the call without this rank" if rank == 1 else "rank 1: it is in") in first
        assert "rank 0 has started" in first


def legitimately_slow(ctx: RankContext, how: str) -> list[str]:
    """What the others say when rank 1 takes three times as long as a watchdog waits."""
    checker = checker_of(ctx)
    with short_patience():
        checker.check_now("together")
        if how == "p2p" and ctx.rank < 2:  # gloo counts them as collectives
            for peer in range(2, WORLD) if ctx.rank == 1 else (1,):
                with contextlib.suppress(RuntimeError):
                    if ctx.rank == 1:
                        dist.send(torch.ones(1), peer, group=ctx.group)
        elif how == "p2p":
            dist.recv(torch.ones(1), 1, group=ctx.group)
        if how == "collective of others" and ctx.rank in (1, 3):
            pair = dist.new_group([1, 3], use_local_synchronization=True)
            time.sleep(1.2 if ctx.rank == 3 else 0.0)
            dist.all_reduce(torch.ones(1), group=pair)
        elif ctx.rank == 1:
            time.sleep(1.2)
        return [said_by(checker.check_now, "after it"), str(checker.number)]


@pytest.mark.parametrize("how", ["sleep", "p2p", "collective of others"])
def test_a_rank_that_is_slow_is_waited_for(pool, how):
    results = pool.run(legitimately_slow, WORLD, timeout=TIMEOUT_S, how=how)
    assert results == [["", "2"]] * WORLD


def go_on_without(ctx: RankContext) -> list[str]:
    checker = checker_of(ctx)
    texts = []
    with short_patience():
        if ctx.rank == 1:
            dist.all_reduce(torch.ones(1), group=ctx.group)
        else:
            texts += [said_by(checker.check_now, f"call {i}") for i in range(MAX_LEFT + 2)]
            dist.all_reduce(torch.ones(1), group=ctx.group)
        return [*texts, said_by(checker.check_now, "the end")]


def test_ranks_that_go_on_without_one_lose_the_mesh(pool):
    results = pool.run(go_on_without, 3, timeout=TIMEOUT_S)
    for texts in (results[0], results[2]):
        assert all("all_reduce" in text for text in texts[:MAX_LEFT])
        assert all("have aborted" in text for text in texts[MAX_LEFT:])
    assert results[1] != [""]


def serve(ctx: RankContext, failing: list[int]) -> list[str]:
    """Requests of which the second fails on a rank before any call, with calls on the others."""
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, 2)
    texts = []
    for request in range(4):
        try:
            with mesh.together(f"request {request}"):
                if request == 1 and ctx.rank in failing:
                    raise ValueError(f"bad prompt {request}")
                mesh.consistency.begin_forward_pass()
                for step in range(2):
                    mesh.agree(f"request {request}, step {step}")
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_a_request_that_fails_on_one_rank_fails_on_all_and_the_next_is_served(pool):
    results = pool.run(serve, WORLD, failing=[1])
    for rank, texts in enumerate(results):
        assert [texts[0], *texts[2:]] == [""] * 3
        assert texts[1] == "bad prompt 1" if rank == 1 else "rank 1: bad prompt 1" in texts[1]
    for texts in pool.run(serve, WORLD, failing=[0, 1, 2, 3]):
        assert texts == ["", "bad prompt 1", "", ""]


def ended(ctx: RankContext) -> str:
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, 2)
    with mesh.together(f"request {ctx.rank // 2}"):
        pass
    return ""


def test_other_requests_do_not_end_together(pool):
    for error in pool.errors(ended, WORLD):
        assert "request: 0 on ranks 0-1, 1 on ranks 2-3" in str(error)


def test_a_process_ends_while_its_threads_ask_the_store():
    """A thread that comes back to Python while it ends aborts the process (SIGABRT)."""
    program = """if True:
        import datetime, time, torch.distributed as dist
        from types import SimpleNamespace
        from ds_usp.comm import consistency, watchdog
        store = dist.HashStore()
        def ask(*_):  # as long as a slow network takes
            store.wait(["never"], datetime.timedelta(seconds=1))
        class Slow:  # to take down, as a large program is
            def __del__(self, sleep=time.sleep):
                sleep(2)
        class Watched:
            name, posted, waiting_ranks = "mesh", 0, ask
        watched, slow = Watched(), Slow()
        watchdog.watchdog().add(watched)
        group = SimpleNamespace(size=lambda: 2, rank=lambda: 0, group_name="mesh")
        slow_store = SimpleNamespace(set=ask, add=ask)
        time.sleep(0.7)
        consistency.GroupTransport(group, slow_store).publish(1, b"")
    """
    done = python("-c", program)
    assert done.returncode == 0, done


GLOO_THREADS_AT_THE_END = """
import atexit
import os
from pathlib import Path

def tell():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    os.write(1, b"threads of gloo: %d\\n" % sum("gloo" in name for name in names))
    if "mesh" in globals():
        os.write(1, f"{mesh} has sent {mesh.ledger}\\n".encode())

atexit.register(tell)  # the first one runs last
import torch
import torch.distributed as dist
import ds_usp.training

dist.init_process_group("gloo")
mesh = ds_usp.SequenceMesh.from_group(None, 1)
x = torch.randn(1, 8, 2, 4, requires_grad=True)
out = ds_usp.usp_attention(x, x, x, mesh=mesh, layout="zigzag", mask=ds_usp.MaskSpec.causal())
out.sum().backward()
tell()
dist.destroy_process_group()
"""


def test_no_thread_of_a_destroyed_group_outlives_it(tmp_path):
    """One that frees a tensor while Python ends aborts the process; nothing but ds_usp holds the
    groups here, its mesh a name of the program, which an older handler of the program may print."""
    program = tmp_path / "program.py"
    program.write_text(GLOO_THREADS_AT_THE_END)
    done = torchrun(2, program)
    counts = [int(line.split()[-1]) for line in done.stdout.splitlines() if "of gloo" in line]
    assert done.returncode == 0 and len(counts) == 4, done
    assert sorted(counts)[:2] == [0, 0] and min(sorted(counts)[2:]) > 0
    assert done.stdout.count(" of 2: ulysses 0 of 1, ring ") == 4, done


def test_after_a_restart_nobody_waits():
    """torchrun starts ranks again on the store in which those before have published."""
    store = dist.HashStore()

    def transport(rank: int) -> consistency.GroupTransport:
        group = SimpleNamespace(size=lambda: 2, rank=lambda: rank, group_name="mesh")
        return consistency.GroupTransport(group, store)

    first, second = transport(0), transport(1)
    second.publish(1, b"waits")
    second._publishing[0].join()
    assert first.waiting_ranks(1) == [1]
    restarted, _ = transport(0), transport(1)
    assert restarted.waiting_ranks(1) == []


def test_a_stack_tells_torch_from_the_caller():
    frames: list[FrameType] = []

    class Work(dist.Work):
        def is_completed(self) -> bool:
            return False

        def wait(self, *_: object) -> bool:
            frames.append(sys._getframe(1))
            return watchdog._waits_for_work(frames[0])

    def holds_work() -> bool:
        work = Work()
        assert not watchdog._waits_for_work(sys._getframe())  # it computes meanwhile
        return work.wait()

    assert holds_work()
    here = watchdog.Stack.of(sys._getframe())
    assert not watchdog._waits_for_work(sys._getframe()) and "test_leaving.py" in here.where
    assert not here.in_collective and not here.in_comparison and not here.in_p2p
    assert here.place != watchdog.Stack.of(sys._getframe()).place  # it moved
