"""A layout that is given by its name: as many tokens on every rank, or refused on all of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext, WorkerPool

import ds_usp
from ds_usp import MaskSpec, SequenceMesh, USPAttention

WORLD, CAUSAL, FULL = 4, MaskSpec.causal(), MaskSpec.full()


def tensors(tokens: int = 8, joint: int = 0) -> list[torch.Tensor]:
    drawn = [torch.randn(1, tokens, 4, 16) for _ in range(3)]
    return drawn + [torch.randn(1, joint, 4, 16) for _ in range(3 if joint else 0)]


def same_bits(ctx: RankContext, ulysses: int) -> list[bool]:
    """Whether each function gives the same for a kind as for the layout of that kind."""
    mesh = mesh_of(ulysses)
    layout, half = mesh.layout("zigzag", 32), mesh.layout("striped", 16)
    q, k, v = tensors()
    short = tensors(4)[1:]
    both = tensors(joint=6)

    def attend(**options: Any) -> torch.Tensor:
        return ds_usp.usp_attention(q, k, v, mesh=mesh, mask=CAUSAL, **options)

    def cross(**options: Any) -> torch.Tensor:
        return ds_usp.usp_attention(q, *short, mesh=mesh, mask=FULL, **options)

    def joint(**options: Any) -> torch.Tensor:
        return torch.cat(ds_usp.usp_joint_attention(*both, mesh=mesh, mask=FULL, **options), 1)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    crossing = torch.compile(cross, fullgraph=True, backend="eager")
    names, values = {"layout": "zigzag"}, {"layout": layout}
    two_names = {"layout": "zigzag", "kv_layout": "striped"}
    two_values = {"layout": layout, "kv_layout": half}
    return [
        torch.equal(attend(**names), attend(**values)),
        torch.equal(cross(**two_names), cross(**two_values)),
        torch.equal(joint(**names), joint(**values)),
        torch.equal(compiled(**names), attend(**values)),
        torch.equal(crossing(**two_names), cross(**two_values)),
    ]


@pytest.mark.parametrize("ulysses", [1, 2])
def test_a_name_is_the_layout_of_that_kind(pool: WorkerPool, ulysses: int) -> None:
    assert pool.run(same_bits, WORLD, ulysses=ulysses) == [[True] * 5] * WORLD


def refused(ctx: RankContext, how: str) -> None:
    mesh = mesh_of(2)
    tokens = 9 if ctx.rank == 3 else 8
    options: dict[str, Any] = {"mesh": mesh, "layout": "zigzag", "mask": CAUSAL}
    if how in ("function", "joint", "drop-in"):
        q, k, v, *joint = tensors(tokens, 4 if how == "joint" else 0)
    else:
        q, k, v = tensors()
    if how == "function":
        ds_usp.usp_attention(q, k, v, **options)
    elif how == "joint":
        ds_usp.usp_joint_attention(q, k, v, *joint, **options)
    elif how == "drop-in":
        USPAttention(torch.nn.Identity(), gather_idx=1, dropout_p=0.0, **options)(q, k, v, 0)
    elif how == "heads first":
        q, k, v = (torch.randn(1, 4, 8, 16) for _ in range(3))
        ds_usp.usp_attention(q, k, v, **{**options, "layout": mesh.layout("zigzag", 32)})
    else:
        ds_usp.usp_attention(q, k, v, **{**options, **REFUSED[how][0]})


# Wrong arguments, and the error on every rank.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "function": ({}, "as many tokens on every rank, and ranks hold 8, 9. Make a TokenLayout"),
    "joint": ({}, "as many tokens on every rank, and ranks hold 8, 9. Make a TokenLayout"),
    "drop-in": ({}, "as many tokens on every rank, and ranks hold 8, 9. Make a TokenLayout"),
    "heads first": ({}, r"got \[1, 4, 8, 16\], which looks like \[b, h, s, d\]: give x.transpose"),
    "none": ({"layout": None}, "layout=None must be a TokenLayout"),
    "unknown": ({"layout": "zig"}, "unknown token layout 'zig'"),
    "balanced": ({"layout": "balanced"}, "documents=borders"),
    "keys": ({"kv_layout": 3, "mask": FULL}, "layout=3 must be a TokenLayout"),
}


def messages(ctx: RankContext) -> dict[str, str]:
    """What each of these calls raises on this rank."""
    message_of = {}
    for how in REFUSED:
        try:
            refused(ctx, how)
        except ds_usp.LayoutError as error:
            message_of[how] = str(error)
        else:
            message_of[how] = "it was taken"
    return message_of


def test_uneven_shards_of_a_named_layout_are_refused_on_every_rank(pool: WorkerPool) -> None:
    for message_of in pool.run(messages, WORLD):
        for how, (_, wanted) in REFUSED.items():
            assert re.search(wanted, message_of[how]), (how, message_of[how])


def flat_mesh_differs(ctx: RankContext) -> bool:
    """Whether a named layout on the flat mesh is that mesh's own, after a call on the other."""
    mesh = SequenceMesh.from_group(None, 2)
    q, k, v = tensors()
    outputs = [
        ds_usp.usp_attention(q, k, v, mesh=each, layout="zigzag", mask=CAUSAL)
        for each in (mesh, mesh.flat())
    ]
    flat = SequenceMesh.from_group(None, 4)
    expected = ds_usp.usp_attention(q, k, v, mesh=flat, layout="zigzag", mask=CAUSAL)
    return bool(torch.allclose(outputs[1], expected, atol=1e-6))


def test_a_name_is_of_the_mesh_that_it_is_given_with(pool: WorkerPool) -> None:
    assert pool.run(flat_mesh_differs, WORLD) == [True] * WORLD
