"""What is gathered from the ranks of a group, and the meshes that DeviceMeshes give."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import ALL_LAYOUTS, Case, attend, errors_of, mesh_of
from harness import RankContext, WorkerPool
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ds_usp
from ds_usp import SequenceMesh, TokenLayout, USPAttention

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
            gathered = (
                layout.gather(local, group=ctx.group, dim=dim),
                mesh.gather(strided, layout, dim),
            )
            same += [torch.equal(x, full) and x.dtype == full.dtype for x in gathered]
    return same


def test_uneven_shards_are_gathered_over_a_group(pool: WorkerPool) -> None:
    for same in pool.run(round_trips, WORLD):
        assert all(same)


def test_one_process_gathers_its_own_shard() -> None:
    mesh = SequenceMesh.single()
    x = torch.randn(1, 8, 8)
    assert torch.equal(mesh.gather(x, mesh.layout("zigzag", 8), 1), x)


LAYOUT = TokenLayout("zigzag", 29, 2, 2)

# What rank 1 gives, and what every rank then says.
WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a token more": (lambda x: torch.cat([x, x[:, :1]], 1), r"rank 1 holds \d along dim 1"),
    "no such dim": (lambda x: x[0, :, 0], "rank 1 holds no dim along dim 1"),
    "another dtype": (lambda x: x.double(), "differ in more than their tokens"),
    "another batch": (lambda x: torch.cat([x, x]), "differ in more than their tokens"),
    "a gradient": (lambda x: x.requires_grad_(), r"rank 1 has a gradient.*local.detach\(\)"),
}


def gather_wrong_over_a_mesh(ctx: RankContext) -> dict[str, tuple[str, str]]:
    errors, mesh = {}, mesh_of(2)
    for how, (change, _) in WRONG.items():
        local = torch.randn(1, LAYOUT.length(ctx.rank), 3)
        with pytest.raises(ds_usp.USPError) as caught:
            mesh.gather(change(local) if ctx.rank == 1 else local, LAYOUT, 1)
        errors[how] = type(caught.value).__name__, str(caught.value)
        right = torch.full((1, LAYOUT.length(ctx.rank), 3), float(ctx.rank))
        assert mesh.gather(right, LAYOUT, 1).shape == (1, LAYOUT.seq_len, 3), how  # it continues
    return errors


def test_a_mesh_says_which_rank_holds_something_else(pool: WorkerPool) -> None:
    for rank, errors in enumerate(pool.run(gather_wrong_over_a_mesh, WORLD)):
        for how, (kind, message) in errors.items():
            at_rank_1 = how in ("a token more", "no such dim", "a gradient")  # which knows it
            assert kind == ("LayoutError" if at_rank_1 and rank == 1 else "MeshError"), (how, kind)
            assert "rank 1" in message, (how, message)


def gather_wrong(ctx: RankContext) -> dict[str, str]:
    message_of = {}
    for how, (change, _) in WRONG.items():
        local = torch.randn(1, LAYOUT.length(ctx.rank), 3)
        with pytest.raises(ds_usp.LayoutError) as caught:
            LAYOUT.gather(change(local) if ctx.rank == 1 else local, group=ctx.group, dim=1)
        message_of[how] = str(caught.value)
    return message_of


def test_a_rank_that_holds_something_else_stops_all(pool: WorkerPool) -> None:
    for message_of in pool.run(gather_wrong, WORLD):
        for how, (_, wanted) in WRONG.items():
            assert re.search(wanted, message_of[how]), (how, message_of[how])


def given_groups(ctx: RankContext) -> list[str]:
    """What is said to what is no group of the layout's ranks."""
    device_mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("sp",))
    half, _ = dist.new_subgroups(2)
    local, messages = torch.randn(1, LAYOUT.length(ctx.rank), 3), []
    attention = {"mask": ds_usp.MaskSpec.causal(), "dropout_p": 0.0, "ulysses_degree": 2}
    for call in (
        lambda: LAYOUT.gather(local, group=device_mesh, dim=1),
        lambda: LAYOUT.gather(local, group=half, dim=1),
        lambda: LAYOUT.gather(local, dim=1),
        lambda: LAYOUT.gather([local], group=ctx.group, dim=1),
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


def test_what_is_no_group_is_refused_with_what_is(pool: WorkerPool) -> None:
    wanted = (
        "LayoutError: group=DeviceMesh",
        "LayoutError: the group has 2 ranks",
        "gather(local, dim, group=...)",
        "is no tensor",
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


def test_a_device_mesh_gives_degrees_and_order(pool: WorkerPool) -> None:
    for rank, results in enumerate(pool.run(meshes, WORLD)):
        high, low = divmod(rank, 2)
        assert results == [
            (2, 2, "ulysses-ring", low, high),
            (2, 2, "ulysses-ring", low, high),
            (2, 2, "ring-ulysses", high, low),
            (1, 2, "ulysses-ring", 0, low),
        ]


def test_positions_are_a_tensor_like_one_that_is_given() -> None:
    layout = TokenLayout("zigzag", 29, 2, 2)
    for dtype in (torch.int64, torch.bfloat16):
        positions = layout.positions(1, like=torch.zeros(3, 2, dtype=dtype))
        assert positions.dtype == torch.int64 and positions.tolist() == layout.positions(1)
    far = TokenLayout("contiguous", 2**24 + 4, 2, 2).positions(3, like=torch.zeros(1).half())
    assert far[-1] == 2**24 + 3
    torch.nn.Embedding(29, 4)(positions)
