"""Meshes are values: several in one process, any rank order, ranks that must agree."""

from __future__ import annotations

import contextlib
import random
import time
from inspect import signature
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankContext, WorkerPool

import ds_usp
from ds_usp.comm import shm_mailbox
from ds_usp.comm.consistency import ConsistencyChecker
from ds_usp.comm.shm_mailbox import open_mailbox
from ds_usp.testing import causal, dense_attention, relative_error


def attend(mesh: ds_usp.SequenceMesh, kind: str, qkv: list[torch.Tensor]) -> torch.Tensor:
    """The full output, gathered from all ranks of the mesh."""
    layout = mesh.layout(kind, qkv[0].shape[1])
    q, k, v = (layout.shard(x, 1, mesh.rank) for x in qkv)
    out = ds_usp.usp_attention(q, k, v, mesh=mesh, layout=layout, mask=ds_usp.MaskSpec.causal())
    shards = [torch.empty_like(out) for _ in range(mesh.sp_degree)]
    dist.all_gather(shards, out, group=mesh.sp_group)
    return layout.gather(shards, dim=1)


def side_by_side(ctx: RankContext) -> list[float]:
    """Errors of four meshes used in turn, twice, in one process."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    meshes = [
        (ds_usp.SequenceMesh.from_group(ctx.group, 2), "zigzag"),
        (ds_usp.SequenceMesh.from_group(ctx.group, 4), "striped"),
        (ds_usp.SequenceMesh.from_group(ctx.group, 1, "ring-ulysses"), "context_parallel"),
        (ds_usp.SequenceMesh.from_group(halves[ctx.rank // 2], 1), "zigzag"),
    ]
    errors = []
    for _ in range(2):
        for mesh, kind in meshes:
            qkv = [torch.randn(1, 32, 4, 16) for _ in range(3)]
            dense, _ = dense_attention(*qkv, causal(range(32), range(32)))
            errors.append(relative_error(attend(mesh, kind, qkv), dense))
    return errors


def test_meshes_of_different_degrees_live_side_by_side(pool: WorkerPool) -> None:
    for errors in pool.run(side_by_side, 4):
        assert max(errors) <= 1e-5


def built_from_grid(ctx: RankContext, order: tuple[str, ...]) -> tuple[tuple[int, ...], float]:
    """Global ranks of this rank's sequence group, and the error of attention over it."""
    grid = ds_usp.RankGrid({"tp": 2, "ulysses": 2, "ring": 2}, order=order)
    mesh = ds_usp.SequenceMesh.build(grid)
    coords = grid.coords(ctx.rank)
    assert (mesh.ulysses_rank, mesh.ring_rank) == (coords["ulysses"], coords["ring"])
    qkv = [torch.randn(1, 40, 4, 16) for _ in range(3)]
    dense, _ = dense_attention(*qkv, causal(range(40), range(40)))
    ranks = tuple(dist.get_process_group_ranks(mesh.sp_group))
    return ranks, relative_error(attend(mesh, "zigzag", qkv), dense)


@pytest.mark.parametrize(
    "order", [("tp", "ulysses", "ring"), ("ulysses", "ring", "tp"), ("ring", "tp", "ulysses")]
)
def test_a_mesh_is_built_from_a_grid_in_any_order(pool: WorkerPool, order: tuple[str, ...]) -> None:
    grid = ds_usp.RankGrid({"tp": 2, "ulysses": 2, "ring": 2}, order=order)
    for rank, (ranks, error) in enumerate(pool.run(built_from_grid, 8, order=order)):
        assert ranks == grid.group_of(rank, "ulysses", "ring")
        assert error <= 1e-5


def say(ctx: RankContext, texts: list[str]) -> None:
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, 1)
    mesh.agree(texts[ctx.rank])


def test_ranks_that_differ_all_raise_with_every_text(pool: WorkerPool) -> None:
    assert pool.errors(say, 2, texts=["same", "same"]) == [None, None]
    errors = pool.errors(say, 2, texts=["64 tokens", "65 tokens"])
    for error in errors:
        assert isinstance(error, ds_usp.MeshError)
        assert "tokens: 64 on rank 0, 65 on rank 1" in str(error)


def ask_for_lse(ctx: RankContext) -> str:
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, 2)
    layout = mesh.layout("zigzag", 32)
    x = torch.randn(1, 8, 4, 16)
    mask = ds_usp.MaskSpec.causal()
    try:
        ds_usp.usp_attention(x, x, x, mesh=mesh, layout=layout, mask=mask, return_lse=ctx.rank == 0)
    except ds_usp.MeshError as error:
        return str(error)
    return ""


def test_ranks_must_agree_on_the_lse_too(pool: WorkerPool) -> None:
    for message in pool.run(ask_for_lse, 4):
        assert "lse: without on ranks 1-3, with on rank 0" in message


both_transports = pytest.mark.parametrize("use_mailbox", [False, True], ids=["group", "mailbox"])


def checker_of(ctx: RankContext, use_mailbox: bool) -> ConsistencyChecker:
    """As CPUs have it, over their group, or as the GPUs of a host do, in memory that they share."""
    shared = open_mailbox(ctx.group, [b"host"] * ctx.world) if use_mailbox else None
    assert (shared is not None) == use_mailbox
    return ConsistencyChecker(ctx.group, shared)


def late_difference(ctx: RankContext, use_mailbox: bool) -> tuple[list[str], int]:
    """What a comparison that nobody waited for says later, as on GPUs, and after how many calls."""
    checker = checker_of(ctx, use_mailbox)
    for text in ("a", "b", "a"):
        checker.check_call(text, wait=False)
    checker.check_call("b" if ctx.rank == 1 else "a", wait=False)
    messages: list[str] = []
    calls = 0
    while len(messages) < 2 and calls < 9:
        calls += 1
        try:
            checker.check_call("a", wait=False)
        except ds_usp.MeshError as error:
            messages.append(str(error))
    return messages, calls


def after_passes(ctx: RankContext, how: str) -> list[int]:
    """How often waiting streams were released: at a call that is new to the ranks, and at the next,
    where one pass was broken off, a call is another one, or a rank has an error of its own."""
    checker, freed = checker_of(ctx, True), mock.Mock()
    checker.on_failure = freed
    checker.begin_pass()
    if how != "aborted" or ctx.rank:
        checker.end_pass()
    text = "other" if how == "another" and not ctx.rank else "new"
    wrong = ValueError("no such head") if how == "error" and not ctx.rank else None
    calls_of_free = []
    for call in ("check_now", "check_call"):
        with contextlib.suppress(ds_usp.MeshError, ValueError):
            getattr(checker, call)(f"{text} {call}", error=wrong)
        calls_of_free.append(freed.call_count)
    return calls_of_free


@pytest.mark.parametrize(
    ("how", "freed"), [("aborted", 1), ("another", 0), ("error", 0), ("equal", 0)]
)
def test_stream_waits_are_aborted_where_a_pass_was_aborted(
    pool: WorkerPool, how: str, freed: int
) -> None:
    assert pool.run(after_passes, 4, how=how) == [[freed, freed]] * 4


@both_transports
def test_a_verified_call_that_differs_raises_a_few_calls_later(
    pool: WorkerPool, use_mailbox: bool
) -> None:
    for messages, calls in pool.run(late_difference, 3, use_mailbox=use_mailbox):
        assert len(messages) == 2 and messages[0] == messages[1]
        assert "a on ranks 0, 2, b on rank 1" in messages[0]
        assert calls == 5  # four comparisons are in flight at a time; then every call says so


def difference_in_backward(ctx: RankContext, use_mailbox: bool) -> str:
    checker = checker_of(ctx, use_mailbox)
    for text in ("a", "b"):
        checker.check_call(text, wait=False)
    checker.check_call("b" if ctx.rank == 1 else "a", wait=False)
    try:
        checker.drain()
    except ds_usp.MeshError as error:
        return str(error)
    return ""


@both_transports
def test_a_backward_pass_does_not_begin_before_the_ranks_have_agreed(
    pool: WorkerPool, use_mailbox: bool
) -> None:
    for message in pool.run(difference_in_backward, 3, use_mailbox=use_mailbox):
        assert "a on ranks 0, 2, b on rank 1" in message


def error_meets_a_known_call(ctx: RankContext, use_mailbox: bool) -> str:
    checker = checker_of(ctx, use_mailbox)
    for text in ("a", "b", "a"):
        checker.check_call(text, wait=False)
    try:
        if ctx.rank == 1:
            checker.check_call("", error=ValueError("no such head"))
        checker.check_call("a", wait=False)
        checker.drain()
    except (ValueError, ds_usp.MeshError) as error:
        return str(error)
    return ""


@both_transports
def test_an_error_on_one_rank_is_raised_where_a_verified_call_was_made(
    pool: WorkerPool, use_mailbox: bool
) -> None:
    first, second, third = pool.run(error_meets_a_known_call, 3, use_mailbox=use_mailbox)
    assert second == "no such head"
    assert first == third and "rank 1: no such head" in first


def many_calls(ctx: RankContext, calls: int) -> int:
    """Known and new ones at every rank's own pace."""
    checker = checker_of(ctx, use_mailbox=True)
    paces = random.Random(ctx.rank)
    for call in range(calls):
        checker.check_call(f"call {call % 7 + call // 50}", wait=call % 13 == 0)
        if call % 11 == ctx.rank:
            time.sleep(paces.random() / 500)
        if call % 17 == 0:
            checker.drain()
    checker.check_now("the end")
    return checker.number


def test_no_record_is_lost_at_any_pace(pool: WorkerPool) -> None:
    assert pool.run(many_calls, 4, calls=600) == [601] * 4


def leave(ctx: RankContext) -> str:
    checker = checker_of(ctx, use_mailbox=True)
    checker.check_now("together")
    assert checker.mailbox is not None
    if ctx.rank == 1:
        checker.mailbox._file.close()  # as the system does when a process ends
        return ""
    try:
        checker.check_now("alone")
    except ds_usp.MeshError as error:
        return str(error)
    return "nobody missed rank 1"


def test_a_rank_that_has_ended_is_named(pool: WorkerPool) -> None:
    first, _, third = pool.run(leave, 3)
    assert "rank 1" in first and "has ended" in first and "rank 1" in third


def come_late(ctx: RankContext, known: bool) -> list[str]:
    """What each call says when rank 1 is late for the second one by more than the others wait."""
    checker = checker_of(ctx, use_mailbox=True)
    assert checker.mailbox is not None
    checker.check_now("together")
    checker.check_call("a", wait=False)
    checker.mailbox.timeout_s = 0.4
    messages = []
    for call in range(8):
        if ctx.rank == 1 and call == 1:
            time.sleep(1.2)
        try:
            checker.check_call("a", wait=not known)
            messages.append("")
        except ds_usp.MeshError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("known", [False, True], ids=["waits", "looks later"])
def test_a_late_rank_does_not_continue_without_those_that_aborted(
    pool: WorkerPool, known: bool
) -> None:
    first, late, third = pool.run(come_late, 3, known=known)
    for messages in (first, late, third):
        assert not messages[0] and messages[-1] and (not known or messages.count(messages[-1]) > 1)
    assert "rank 1" in first[-1] + third[-1] and "have aborted" in late[-1]
    assert bool(late[1]) or known  # before anything moves


def on_several_nodes(ctx: RankContext) -> bool:
    return open_mailbox(ctx.group, [b"one", b"two"]) is None


def without_shared_memory(ctx: RankContext) -> bool:
    if ctx.rank == 0:
        shm_mailbox._SHARED_MEMORY = Path("/proc")  # where nobody can make a file
    try:
        return open_mailbox(ctx.group, [b"one"] * ctx.world) is None
    finally:
        shm_mailbox._SHARED_MEMORY = Path("/dev/shm")


def test_without_shared_memory_there_is_no_mailbox(pool: WorkerPool) -> None:
    assert all(pool.run(on_several_nodes, 2)) and all(pool.run(without_shared_memory, 2))


def unsorted(ctx: RankContext) -> str:
    group = dist.new_group([1, 0, 2], sort_ranks=False)
    try:
        ds_usp.SequenceMesh.from_group(group, 1)
    except ds_usp.ConfigError as error:
        return str(error)
    return ""


@pytest.mark.skipif(
    "sort_ranks" not in signature(dist.new_group).parameters, reason="this torch sorts all groups"
)
def test_a_group_out_of_order_is_refused(pool: WorkerPool) -> None:
    assert all("[1, 0, 2]" in message for message in pool.run(unsorted, 3))


def after_other_groups(ctx: RankContext) -> float:
    """A mesh over ranks of which one belongs to more groups than the others."""
    dist.new_group([0])
    return max(side_by_side(ctx))


def test_ranks_may_belong_to_any_number_of_groups(pool: WorkerPool) -> None:
    assert max(pool.run(after_other_groups, 4)) <= 1e-5


def test_one_process_needs_no_process_group() -> None:
    mesh = ds_usp.SequenceMesh.single()
    qkv = [torch.randn(2, 24, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    layout = mesh.layout("zigzag", 24)
    mask = ds_usp.MaskSpec.causal()
    out, lse = ds_usp.usp_attention(*qkv, mesh=mesh, layout=layout, mask=mask, return_lse=True)
    dense, dense_lse = dense_attention(*qkv, causal(range(24), range(24)))
    assert relative_error(out, dense) <= 1e-5
    assert relative_error(lse, dense_lse) <= 1e-5
    grads = torch.autograd.grad(out.sum(), qkv)
    for grad, expected in zip(grads, torch.autograd.grad(dense.sum(), qkv), strict=True):
        assert relative_error(grad, expected) <= 1e-5


def test_the_set_of_verified_signatures_is_bounded() -> None:
    checker = ConsistencyChecker()
    for step in range(3000):
        checker.check_call(f"dropout seed {step}", wait=False)
    assert len(checker._verified) <= 1024
