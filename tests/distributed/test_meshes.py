"""Meshes are values: several in one process, any rank order, copies, DeviceMeshes."""

import contextlib
import copy
import datetime
import os
import random
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import ALL_LAYOUTS, Case, attend, errors_of, mesh_of
from harness import RankContext
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ds_usp
from ds_usp import SequenceMesh, TokenLayout, USPAttention
from ds_usp.comm import shm_mailbox
from ds_usp.comm.consistency import ConsistencyChecker
from ds_usp.comm.process_groups import timeout_of
from ds_usp.comm.shm_mailbox import open_mailbox
from ds_usp.testing import causal, dense_attention, relative_error


def gathered(mesh: ds_usp.SequenceMesh, kind: str, qkv: list[torch.Tensor]) -> torch.Tensor:
    """The full output, gathered from all ranks of the mesh."""
    layout = mesh.layout(kind, qkv[0].shape[1])
    q, k, v = (layout.shard(x, 1, mesh.rank) for x in qkv)
    out = ds_usp.usp_attention(q, k, v, mesh=mesh, layout=layout, mask=ds_usp.MaskSpec.causal())
    shards = [torch.empty_like(out) for _ in range(mesh.sp_degree)]
    dist.all_gather(shards, out, group=mesh.sp_group)
    return layout.gather(shards, dim=1)


def side_by_side(ctx: RankContext) -> list[float]:
    """Errors of four meshes used in turn, twice, in one process; one of the ranks belongs to more
    groups than the others, two are in a mesh that the others do not know, and then all make a
    group."""
    dist.new_group([0])
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
            errors.append(relative_error(gathered(mesh, kind, qkv), dense))
    if ctx.rank < 2:
        ds_usp.SequenceMesh.from_group(halves[0], 1, "ring-ulysses")
    dist.barrier(dist.new_group())  # torch 2.14 counts groups that only some ranks have made
    return errors


def test_meshes_of_different_degrees_live_side_by_side(pool):
    for errors in pool.run(side_by_side, 4):
        assert max(errors) <= 1e-5


def built_from_grid(ctx: RankContext, order: tuple[str, ...]) -> tuple[tuple[int, ...], float]:
    """Global ranks of this rank's sequence group, and the error of attention over it."""
    grid = ds_usp.RankGrid({"tp": 2, "ulysses": 2, "ring": 2}, order=order)
    options = ctx.group._get_backend(torch.device("cpu")).options
    before, options._timeout = options._timeout, datetime.timedelta(seconds=177)
    mesh = ds_usp.SequenceMesh.build(grid)
    options._timeout = before
    # Groups that are made of hers wait as long as a user's, not torch's half hour.
    assert {timeout_of(x).seconds for x in (mesh.sp_group, mesh.kv_group)} == {177}
    coords = grid.coords(ctx.rank)
    assert (mesh.ulysses_rank, mesh.ring_rank) == (coords["ulysses"], coords["ring"])
    qkv = [torch.randn(1, 40, 4, 16) for _ in range(3)]
    dense, _ = dense_attention(*qkv, causal(range(40), range(40)))
    ranks = tuple(dist.get_process_group_ranks(mesh.sp_group))
    return ranks, relative_error(gathered(mesh, "zigzag", qkv), dense)


@pytest.mark.parametrize(
    "order", [("tp", "ulysses", "ring"), ("ulysses", "ring", "tp"), ("ring", "tp", "ulysses")]
)
def test_a_mesh_is_built_from_a_grid_in_any_order(pool, order):
    grid = ds_usp.RankGrid({"tp": 2, "ulysses": 2, "ring": 2}, order=order)
    for rank, (ranks, error) in enumerate(pool.run(built_from_grid, 8, order=order)):
        assert ranks == grid.group_of(rank, "ulysses", "ring")
        assert error <= 1e-5


def opened() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def made_again(ctx: RankContext) -> tuple[list[bool], list[bool], int]:
    """Which meshes of equal arguments are the same one, which of other arguments are, and by how
    many files and threads 40 more have grown the process."""
    group = dist.new_group()
    grid = ds_usp.RankGrid({"ulysses": 2, "dp": 2})
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    makers: list[Callable[[], SequenceMesh]] = [
        lambda: SequenceMesh.from_group(group, 2),
        lambda: SequenceMesh.from_group(group, 2, "ring-ulysses"),
        lambda: SequenceMesh.from_group(group),
        lambda: SequenceMesh.from_group(dist.new_group(), 2),
        lambda: SequenceMesh.build(grid),
        lambda: SequenceMesh.from_device_mesh(device_mesh),
    ]
    meshes = [make() for make in makers]
    del makers[3]  # which has another group each time
    same = [make() in meshes for make in makers]
    same += [SequenceMesh.shared(group, degree, "ulysses-ring") in meshes for degree in (2, None)]
    before = opened()
    for make in 10 * [*makers[:2], *makers[-2:]]:
        make()
    grown = max(after - old for after, old in zip(opened(), before, strict=True))
    return same, [meshes.count(mesh) > 1 for mesh in meshes], grown


def test_equal_arguments_give_one_mesh(pool):
    for same, others, grown in pool.run(made_again, 4):
        assert all(same) and not any(others)
        assert grown <= 0


def after_a_failure(ctx: RankContext) -> tuple[bool, bool, float]:
    """Whether a mesh that fails for good on one rank is replaced, by one mesh, that computes; the
    layers of a model wait for no rank that would not come."""
    group = dist.new_group()
    failed = SequenceMesh.from_group(group, 2)
    if ctx.rank == 1:
        failed.consistency._fail(ds_usp.MeshError("for good"))
        with pytest.raises(ds_usp.MeshError, match=r"from_group.*on every rank"):
            SequenceMesh.shared(group, 2, "ulysses-ring")
    else:
        assert SequenceMesh.shared(group, 2, "ulysses-ring") is failed
    mesh = SequenceMesh.from_group(group, 2)
    case = Case(batch=1)
    worst = max(errors_of(mesh, case, attend(mesh, case)).values())
    return mesh is not failed, SequenceMesh.from_group(group, 2) is mesh, worst


def test_a_mesh_that_failed_is_not_given_again(pool):
    for is_new, is_kept, error in pool.run(after_a_failure, 4):
        assert is_new and is_kept and error <= 1e-5


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
    checker.in_pass = True
    if how != "aborted" or ctx.rank:
        checker.in_pass = False
    text = "other" if how == "another" and not ctx.rank else "new"
    wrong = ValueError("no such head") if how == "error" and not ctx.rank else None
    calls_of_free = []
    for call in ("check_call", "check_now"):
        with contextlib.suppress(ds_usp.MeshError, ValueError):
            getattr(checker, call)(f"{text} {call}", error=wrong)
        calls_of_free.append(freed.call_count)
    return calls_of_free


@pytest.mark.parametrize(
    ("how", "freed"), [("aborted", 1), ("another", 0), ("error", 0), ("equal", 0)]
)
def test_stream_waits_are_aborted_where_a_pass_was_aborted(pool, how, freed):
    assert pool.run(after_passes, 4, how=how) == [[freed, freed]] * 4


@both_transports
def test_a_verified_call_that_differs_raises_a_few_calls_later(pool, use_mailbox):
    for messages, calls in pool.run(late_difference, 3, use_mailbox=use_mailbox):
        assert len(messages) == 2 and messages[0] == messages[1]
        assert "a on ranks 0, 2, b on rank 1" in messages[0]
        assert calls == 5  # four comparisons are in flight at a time; then every call says so


def difference_in_backward(ctx: RankContext, use_mailbox: bool) -> str:
    checker = checker_of(ctx, use_mailbox)
    for text in ("a", "b"):
        checker.check_call(text, wait=False)
    checker.check_call("b" if ctx.rank == 1 else "a", wait=False)
    with pytest.raises(ds_usp.MeshError) as caught:
        checker.drain()
    return str(caught.value)


@both_transports
def test_a_backward_pass_does_not_begin_before_the_ranks_have_agreed(pool, use_mailbox):
    for message in pool.run(difference_in_backward, 3, use_mailbox=use_mailbox):
        assert "a on ranks 0, 2, b on rank 1" in message


def error_meets_a_known_call(ctx: RankContext, use_mailbox: bool) -> None:
    checker = checker_of(ctx, use_mailbox)
    for text in ("a", "b", "a"):
        checker.check_call(text, wait=False)
    if ctx.rank == 1:
        checker.check_call("", error=ValueError("no such head"))
    checker.check_call("a", wait=False)
    checker.drain()


@both_transports
def test_an_error_on_one_rank_is_raised_where_a_verified_call_was_made(pool, use_mailbox):
    first, second, third = pool.errors(error_meets_a_known_call, 3, use_mailbox=use_mailbox)
    assert isinstance(second, ValueError) and str(second) == "no such head"
    assert isinstance(first, ds_usp.MeshError) and "rank 1: no such head" in str(first)
    assert str(first) == str(third)


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


def test_no_record_is_lost_at_any_pace(pool):
    assert pool.run(many_calls, 4, calls=600) == [601] * 4


def end_behind_another(ctx: RankContext) -> str:
    """What rank 0 hears of rank 2, which has ended, while rank 1 makes no call."""
    checker = checker_of(ctx, use_mailbox=True)
    assert checker.mailbox is not None
    message = ""
    if ctx.rank == 0:
        with pytest.raises(ds_usp.MeshError) as caught:
            checker.check_now("alone")
        message = str(caught.value)
    if ctx.rank == 2:
        checker.mailbox._file.close()
    dist.barrier(group=ctx.group)  # the others are where they are until rank 0 has heard
    return message


def test_a_rank_that_has_ended_is_found_behind_one_that_makes_no_call(pool):
    message, *_ = pool.run(end_behind_another, 3)
    assert "rank 2 of the sequence-parallel group has ended" in message
    assert float(message.split(" for it for ")[1].split()[0]) < 3.0


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
def test_a_late_rank_does_not_continue_without_those_that_aborted(pool, known):
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


def test_without_shared_memory_there_is_no_mailbox(pool):
    assert all(pool.run(on_several_nodes, 2)) and all(pool.run(without_shared_memory, 2))


def unsorted(ctx: RankContext) -> None:
    with pytest.raises(ds_usp.ConfigError, match=r"\[1, 0, 2\]"):
        ds_usp.SequenceMesh.from_group(dist.new_group([1, 0, 2], sort_ranks=False), 1)


@pytest.mark.skipif(
    "sort_ranks" not in signature(dist.new_group).parameters, reason="this torch sorts all groups"
)
def test_a_group_out_of_order_is_refused(pool):
    pool.run(unsorted, 3)


def test_the_set_of_verified_signatures_is_bounded():
    checker = ConsistencyChecker()
    for step in range(3000):
        checker.check_call(f"call {step}", wait=False)
    assert len(checker._verified) <= 1024


WORLD = 4


def round_trips(ctx: RankContext) -> list[bool]:
    """Whether the shards of all ranks, gathered over their group, are the full tensor again."""
    mesh, same = mesh_of(2), []
    for kind in ALL_LAYOUTS:
        for seq_len, dim, dtype in ((32, 1, torch.float32), (29, -2, torch.int64), (29, 0, None)):
            layout = mesh.layout(kind, seq_len)
            shape = [2, 3, 5]
            shape[dim] = seq_len
            full = torch.randn(shape) if dtype is None else torch.randint(99, shape).to(dtype)
            local = layout.shard(full, dim, mesh.rank)
            strided = torch.stack([local, local], -1)[..., 0]
            gathered = mesh.gather(strided, layout, dim)
            same.append(torch.equal(gathered, full) and gathered.dtype == full.dtype)
    return same


def test_uneven_shards_are_gathered_over_a_group(pool):
    for same in pool.run(round_trips, WORLD):
        assert all(same)


LAYOUT = TokenLayout("zigzag", 29, 2, 2)

# What rank 1 gives.
WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "a token more": lambda x: torch.cat([x, x[:, :1]], 1),
    "no such dim": lambda x: x[0, :, 0],
    "another dtype": lambda x: x.double(),
    "another batch": lambda x: torch.cat([x, x]),
    "a gradient": lambda x: x.requires_grad_(),
}


def gather_wrong(ctx: RankContext) -> dict[str, tuple[str, str]]:
    """The error that every rank raises."""
    errors, mesh = {}, mesh_of(2)
    for how, change in WRONG.items():
        local = torch.randn(1, LAYOUT.length(ctx.rank), 3)
        with pytest.raises(ds_usp.USPError) as caught:
            mesh.gather(change(local) if ctx.rank == 1 else local, LAYOUT, 1)
        errors[how] = type(caught.value).__name__, str(caught.value)
        right = torch.full((1, LAYOUT.length(ctx.rank), 3), float(ctx.rank))
        assert mesh.gather(right, LAYOUT, 1).shape == (1, LAYOUT.seq_len, 3), how  # it continues
    return errors


def test_a_rank_that_holds_something_else_stops_all_and_is_named(pool):
    for rank, errors in enumerate(pool.run(gather_wrong, WORLD)):
        for how, (kind, message) in errors.items():
            at_rank_1 = how in ("a token more", "no such dim", "a gradient")  # which knows it
            assert kind == ("LayoutError" if at_rank_1 and rank == 1 else "MeshError"), (how, kind)
            assert "rank 1" in message, (how, message)


def given_groups(ctx: RankContext) -> list[str]:
    """What is said to what is no group of the layout's ranks."""
    device_mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("sp",))
    local, messages = torch.randn(1, LAYOUT.length(ctx.rank), 3), []
    attention = {"mask": ds_usp.MaskSpec.causal(), "dropout_p": 0.0, "ulysses_degree": 2}
    for call in (
        lambda: LAYOUT.gather(local, dim=1),
        lambda: SequenceMesh.from_group(device_mesh, 2),
        lambda: USPAttention(torch.nn.Identity(), device_mesh, **attention),
        lambda: SequenceMesh.from_group("sp"),
        lambda: SequenceMesh.from_device_mesh(ctx.group),
        lambda: SequenceMesh.from_device_mesh(init_device_mesh("cpu", (2, 2))),
        lambda: SequenceMesh.from_device_mesh(device_mesh, ulysses_degree=3),
        lambda: SequenceMesh.from_device_mesh(two_dims(), ulysses_degree=4),
        lambda: SequenceMesh.from_device_mesh(two_dims(), order="ring-ulysses"),
        lambda: SequenceMesh.from_device_mesh(
            DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("ring", "ulysses"))
        ),
    ):
        with pytest.raises(ds_usp.USPError) as caught:
            call()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    return messages


def two_dims(names: tuple[str, str] = ("ring", "ulysses")) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def test_what_is_no_group_is_refused_with_what_is(pool):
    wanted = (
        "mesh.gather(local, layout, dim)",
        "SequenceMesh.from_device_mesh(device_mesh",
        "SequenceMesh.from_device_mesh(device_mesh",
        "ConfigError: a str was given as the sequence-parallel group",
        "must be a DeviceMesh",
        "two dims with the names ulysses and ring",
        "ConfigError: ulysses_degree=3 does not divide the 4 ranks",
        "ulysses_degree=4, order=None were given",
        "order='ring-ulysses' were given, and the DeviceMesh has ulysses 2",
        "global ranks in the order [0, 2, 1, 3]",
    )
    for messages in pool.run(given_groups, WORLD):
        for text, fragment in zip(messages, wanted, strict=True):
            assert fragment in text, text


def contradicting(ctx: RankContext, shape: tuple[int, int]) -> list[str]:
    """Errors of a DeviceMesh's two dims where one rank alone contradicts them, before they have a
    mesh and after."""
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    errors = []
    for rank, wrong in ((1, {"ulysses_degree": 3}), (WORLD - 1, {"order": "ring-ulysses"})) * 2:
        if len(errors) == 2:
            SequenceMesh.from_device_mesh(device_mesh)
        with pytest.raises(ds_usp.USPError) as caught:
            SequenceMesh.from_device_mesh(device_mesh, **(wrong if ctx.rank == rank else {}))
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
    return errors


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_one_rank_that_contradicts_a_device_mesh_stops_all(pool, shape):
    wanted = (1, "ulysses_degree=3"), (WORLD - 1, "order='ring-ulysses'")
    for rank, errors in enumerate(pool.run(contradicting, WORLD, timeout=30, shape=shape)):
        for text, (wrong, number) in zip(errors, wanted * 2, strict=True):
            kind = "ConfigError" if rank == wrong else "MeshError"
            assert text.startswith(kind) and number in text, text
            assert f"the DeviceMesh has ulysses {shape[1]}" in text, text


def meshes(ctx: RankContext) -> list[tuple[Any, ...]]:
    """Degrees, order, places and the error of a call of each mesh that a DeviceMesh gives."""
    replicas = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "ring", "ulysses"))
    results, case = [], Case(batch=1, seq_len=29)
    for mesh in (
        SequenceMesh.from_device_mesh(
            init_device_mesh("cpu", (WORLD,), mesh_dim_names=("sp",))["sp"], ulysses_degree=2
        ),
        SequenceMesh.from_device_mesh(two_dims()),
        SequenceMesh.from_device_mesh(two_dims(("ulysses", "ring"))),
        SequenceMesh.from_device_mesh(replicas["ring", "ulysses"]),
    ):
        worst = max(errors_of(mesh, case, attend(mesh, case)).values())
        results.append(
            (mesh.ulysses_degree, mesh.ring_degree, mesh.order, mesh.ulysses_rank, mesh.ring_rank)
        )
        assert worst <= 1e-5
    return results


def test_a_device_mesh_gives_degrees_and_order(pool):
    for rank, results in enumerate(pool.run(meshes, WORLD)):
        high, low = divmod(rank, 2)
        assert results == [
            (2, 2, "ulysses-ring", low, high),
            (2, 2, "ulysses-ring", low, high),
            (2, 2, "ring-ulysses", high, low),
            (1, 2, "ulysses-ring", 0, low),
        ]


def test_positions_are_a_tensor_like_one_that_is_given():
    layout = TokenLayout("zigzag", 29, 2, 2)
    for dtype in (torch.int64, torch.bfloat16):
        positions = layout.positions(1, like=torch.zeros(3, 2, dtype=dtype))
        assert positions.dtype == torch.int64 and positions.tolist() == layout.positions(1)
    far = TokenLayout("contiguous", 2**24 + 4, 2, 2).positions(3, like=torch.zeros(1).half())
    assert far[-1] == 2**24 + 3
    torch.nn.Embedding(29, 4)(positions)


def copy_differs(ctx: RankContext) -> float:
    local = torch.nn.functional.scaled_dot_product_attention
    module = ds_usp.USPAttention(local, mesh=mesh_of(2), gather_idx=1)
    heads = torch.ones(1, 4, 4, 4)
    out: torch.Tensor = copy.deepcopy(module)(heads, heads, heads) - module(heads, heads, heads)
    return float(out.abs().max())


def test_a_copied_module_runs_on_the_same_mesh(pool):
    assert pool.run(copy_differs, 2) == [0.0, 0.0]
