"""Consistency checks of backward passes, as GPUs of one node make them, and the counts."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from harness import RankContext, WorkerPool
from test_meshes import both_transports, checker_of

import ds_usp
from ds_usp.comm.consistency import ConsistencyChecker
from ds_usp.comm.shm_mailbox import open_mailbox


def backward_after_an_aborted_pass(ctx: RankContext, aborted: list[int]) -> str:
    """The error of a backward pass after a copy-engine pass that some ranks aborted."""
    consistency = checker_of(ctx, True)
    try:
        consistency.check_call("a call", wait=False)
        for _ in range(2):
            consistency.check_backward(1, wait=False)
            consistency.begin_pass()
            if ctx.rank not in aborted:
                consistency.end_pass()
        consistency.drain()
    except ds_usp.MeshError as error:
        return str(error)
    return ""


def test_no_backward_pass_follows_one_that_one_rank_aborted(pool: WorkerPool) -> None:
    assert pool.run(backward_after_an_aborted_pass, 3, aborted=[]) == [""] * 3
    assert pool.run(backward_after_an_aborted_pass, 3, aborted=[0, 1, 2]) == [""] * 3
    for message in pool.run(backward_after_an_aborted_pass, 3, aborted=[1]):
        assert "aborted copy-engine passes: 0 on ranks 0, 2, " in message
        assert "1, the last after 0 exchanges on rank 1" in message


def many_passes(ctx: RankContext, odd: bool) -> tuple[str, int]:
    """Passes of verified calls as GPUs compare them: the error, and after how many of them. The
    others answer only when this rank has continued, so a rank that waited would never end."""
    consistency = checker_of(ctx, True)
    numbers = []
    for _ in range(9):
        consistency.check_call("a call", wait=False)
        numbers.append(consistency.number)
    consistency.check_backward(numbers.pop(), wait=False)  # the first one waits
    if odd and ctx.rank == 1:
        numbers[-1], numbers[-2] = numbers[-2], numbers[-1]
    count = 0
    try:
        while numbers:
            consistency.check_backward(numbers.pop(), wait=False)
            count += 1
        consistency.check()
    except ds_usp.MeshError as error:
        return str(error), count
    return "", count


def test_passes_that_differ_on_gpus_are_found_a_few_passes_later(pool: WorkerPool) -> None:
    assert pool.run(many_passes, 3, odd=False) == [("", 8)] * 3
    for message, count in pool.run(many_passes, 3, odd=True):
        assert "backward pass of call: 8 on ranks 0, 2, 7 on rank 1" in message
        assert count == 4


def verified_passes_wait_for_nobody(ctx: RankContext) -> int:
    """How many verified passes rank 0 begins before the others begin one."""
    consistency = checker_of(ctx, True)
    consistency.check_call("a call", wait=False)
    consistency.check_backward(1, wait=False)
    consistency.check()
    dist.barrier(ctx.group)
    count = 0
    if ctx.rank == 0:
        for _ in range(3):
            consistency.check_backward(1, wait=False)
            count += 1
    dist.barrier(ctx.group)
    if ctx.rank != 0:
        for _ in range(3):
            consistency.check_backward(1, wait=False)
    consistency.check()
    return count


def test_a_verified_pass_waits_for_nobody(pool: WorkerPool) -> None:
    assert pool.run(verified_passes_wait_for_nobody, 3, timeout=20.0)[0] == 3


def skip_one(ctx: RankContext, calls: list[int]) -> list[str]:
    """The errors of a check after as many calls on each rank, and of the next check."""
    consistency = checker_of(ctx, False)
    messages = []
    for _ in range(2):
        try:
            while consistency._calls < calls[ctx.rank]:
                consistency.check_call("a call")
            consistency.check()
        except ds_usp.MeshError as error:
            messages.append(str(error))
            calls = [2] * ctx.world
    return messages


def test_a_check_finds_a_call_that_one_rank_skipped(pool: WorkerPool) -> None:
    assert pool.run(skip_one, 3, calls=[3, 3, 3]) == [[]] * 3
    for messages in pool.run(skip_one, 3, calls=[3, 2, 3]):
        assert len(messages) == 1, messages
        assert "ranks 0, 2: a call\n" in messages[0]
        assert "rank 1: a check of the mesh, after 2 calls, after 0 backward passes" in messages[0]


def at_the_end(ctx: RankContext, mode: str) -> str:
    """What a rank prints when its process ends, where rank 1 has run a pass fewer than the
    others."""
    shared = open_mailbox(ctx.group, [b"node"] * ctx.world)
    mailboxes = (shared, "", None) if mode == "mailbox" else (None, "", shared)
    checker = ConsistencyChecker(ctx.group, *mailboxes)
    for _ in range(2):
        checker.check_call("a call", wait=mode == "group")
        checker.check_backward(1, wait=mode == "group")
    if mode == "mailbox" and ctx.rank != 1:
        checker.check_backward(1, wait=False)  # nobody waits for what was verified before
    if mode == "group":
        checker._passes -= ctx.rank == 1
    return checker.compare_at_exit()


def test_processes_that_end_print_what_differs(pool: WorkerPool) -> None:
    for text in pool.run(at_the_end, 3, mode="mailbox"):
        assert "backward pass of call 1" in text and "rank 1: the end of the process" in text
    for text in pool.run(at_the_end, 3, mode="group"):
        assert "after backward passes: 2 on ranks 0, 2, 1 on rank 1" in text


def continued_after(ctx: RankContext, use_mailbox: bool, odd: str, others_wait: bool) -> list[str]:
    """What each step says if every rank catches errors and continues: a call in which rank 1 is
    wrong, another call, its backward pass, a check."""
    # As on GPUs in a group of its own, in which a failed mesh may leave collectives behind.
    checker = checker_of(replace(ctx, group=dist.new_group()), use_mailbox)
    checker.check_call("a", wait=False)
    wrong = ValueError() if odd == "error" and ctx.rank == 1 else None
    text = "b" if odd == "call" and ctx.rank == 1 else "a"
    steps = [
        lambda: checker.check_call(text, error=wrong, wait=others_wait),
        lambda: checker.check_call("a", wait=False),
        lambda: checker.check_backward(checker.number, wait=False),
        checker.check,
    ]
    messages = []
    for step in steps:
        try:
            step()
            messages.append("")
        except (ds_usp.MeshError, ValueError) as error:
            messages.append(str(error) or repr(error))
    return [*messages, str(checker.number)]


@both_transports
@pytest.mark.parametrize(
    ("odd", "shown"), [("call", "b on rank 1"), ("error", "rank 1: ValueError")]
)
def test_ranks_can_continue_together_or_none_can(
    pool: WorkerPool, use_mailbox: bool, odd: str, shown: str
) -> None:
    """None, where ranks had started a verified call that rank 1 refuses."""
    kwargs = {"use_mailbox": use_mailbox, "odd": odd}
    for first, *later in pool.run(continued_after, 3, others_wait=True, **kwargs):
        assert shown in first or first == "ValueError()"
        assert later == ["", "", "", "4"]
    results = pool.run(continued_after, 3, timeout=20.0, others_wait=False, **kwargs)
    for rank, (first, call, backward, check, _) in enumerate(results):
        assert (shown in first or first == "ValueError()") == (rank == 1)
        # Without gradients ranks that had started it would find out some calls later.
        assert call == "" or (rank == 1 and shown in call)
        assert shown in backward and backward == check


def collected_with_a_comparison_in_flight(ctx: RankContext) -> float:
    """How long rank 0 takes to free a mesh's checker whose last comparison nobody answers yet."""
    checker = checker_of(replace(ctx, group=dist.new_group()), False)
    checker.check_call("a", wait=False)
    seconds = 0.0
    if ctx.rank == 0:
        checker.check_call("a", wait=False)
        start = time.perf_counter()
        del checker
        gc.collect()
        seconds = time.perf_counter() - start
    dist.barrier(ctx.group)
    if ctx.rank == 1:
        checker.check_call("a", wait=False)
    return seconds


def test_a_mesh_that_is_collected_waits_for_nobody(pool: WorkerPool) -> None:
    assert pool.run(collected_with_a_comparison_in_flight, 2)[0] < 2.0


def exit_ahead(ctx: RankContext) -> str:
    """What rank 1 finds out about its last calls, if rank 0 has made four more and ends."""
    checker = checker_of(ctx, True)
    assert checker.mailbox is not None
    checker.mailbox.timeout_s = 1.5
    for _ in range(5):
        checker.check_call("a", wait=False)
    dist.barrier(ctx.group)
    if ctx.rank == 0:
        for _ in range(4):
            checker.check_call("a", wait=False)
        assert checker.compare_at_exit() == ""
    dist.barrier(ctx.group)
    try:
        checker.drain()
    except ds_usp.MeshError as error:
        return str(error)
    return ""


def test_a_process_that_ends_overwrites_no_record_that_others_need(pool: WorkerPool) -> None:
    assert pool.run(exit_ahead, 2)[1] == ""
