"""Replicated tokens before or after a sequence that is sharded over the ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from cases import ALL_LAYOUTS, mesh_of
from harness import RankContext, WorkerPool
from joint_attention_cases import FULL, Joint, run

import ds_usp
from ds_usp import MaskSpec
from ds_usp.geometry.joint import ConcatenatedShards, JointLayout
from ds_usp.geometry.layout import TokenLayout

MESHES = [(1, 1), (4, 1), (2, 2), (1, 4), (4, 2)]


def cases() -> list[Joint]:
    """Both ends of each layout, then one case of each other kind."""
    masks = (FULL, MaskSpec.causal(), MaskSpec.window(9, 4))
    base = [
        Joint(layout, front=front, mask=masks[at % 3], kv_heads=(4, 8, 2)[at % 3])
        for at, (layout, front) in enumerate(product(ALL_LAYOUTS, (True, False)))
    ]
    gather = ds_usp.Tuning(gather=True)
    return [
        *base,
        Joint(tokens=64, joint=16, tuning=gather),
        Joint(joint=41, dtype=torch.float64, layout="striped", front=False, tuning=gather),
        Joint(value_dim=24, sinks=True, dropout_p=0.2),
        Joint(layout="contiguous", joint=8),  # a token a rank on eight of them
    ]


@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_equals_the_oracle_on_both_as_one(pool: WorkerPool, ulysses: int, ring: int) -> None:
    made = cases()
    results = pool.run(run, ulysses * ring, cases=made, ulysses=ulysses)
    for case, *by_rank in zip(made, *results, strict=True):
        limit = 1e-12 if case.dtype == torch.float64 else 1e-5
        worst = {name: max(errors[name] for errors in by_rank) for name in by_rank[0]}
        assert max(worst.values()) <= limit, f"{case}: {worst}"


@pytest.mark.parametrize("kind", ALL_LAYOUTS)
@pytest.mark.parametrize("front", [True, False])
def test_every_position_is_on_one_rank(kind: str, front: bool) -> None:
    layout = JointLayout.of(TokenLayout(kind, 53, 2, 3, "ring-ulysses"), 19, front)
    assert sorted(layout.permutation()) == list(range(72))
    joint = range(19) if front else range(53, 72)
    for rank in range(6):
        expected = [position for position in layout.positions(rank) if position in joint]
        shift = joint.start
        assert [shift + position for position in layout.layouts[0].positions(rank)] == expected
    shards = ConcatenatedShards.of(layout.layouts[0])
    assert shards.permutation() == shards.ring_positions(0) == list(range(19))
    assert [shards.length(r) for r in range(6)] == [layout.layouts[0].length(r) for r in range(6)]


def refused(ctx: RankContext, changes: dict[str, Any], odd: tuple[int, ...]) -> str:
    mesh = mesh_of(2)
    q, joint = torch.randn(1, 8, 2, 8), torch.randn(1, 6, 2, 8)
    options: dict[str, Any] = {"joint_q": joint, "joint_k": joint, "joint_v": joint}
    options |= changes if ctx.rank in odd else {}
    layout = options.pop("layout", mesh.layout("zigzag", 32))
    try:
        ds_usp.usp_joint_attention(q, q, q, mesh=mesh, layout=layout, mask=FULL, **options)
    except ds_usp.USPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


SHORT = torch.randn(1, 3, 2, 8)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "right": ({}, "nothing"),
    "heads": ({"joint_k": torch.randn(1, 6, 1, 8)}, "ConfigError: joint tensors must share"),
    "tokens": ({"joint_k": SHORT}, "ConfigError: joint tensors must share"),
    "dtype": ({"joint_v": torch.randn(1, 6, 2, 8).double()}, "ConfigError: joint tensors must"),
    "dims": ({"joint_q": torch.randn(6, 2, 8)}, "ConfigError: joint tensors must share"),
    "fewer than ranks": (
        {"joint_q": SHORT, "joint_k": SHORT, "joint_v": SHORT},
        "LayoutError: 3 tokens leave a rank of ulysses 2 x ring 2 (zigzag) without any",
    ),
    "layout": (
        {"layout": TokenLayout("zigzag", 16, 1, 2)},
        "LayoutError: the layout is for ulysses 1 x ring 2",
    ),
    "end": ({"joint_front": "rear"}, "ConfigError: joint_front='rear' must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_everywhere(pool: WorkerPool, name: str) -> None:
    changes, text = REFUSED[name]
    for message in pool.run(refused, 4, changes=changes, odd=(0, 1, 2, 3)):
        assert message.startswith(text), message


def test_a_layout_of_documents_takes_no_joint_tokens() -> None:
    with pytest.raises(ds_usp.LayoutError, match=r"joint tokens are in no document of balanced"):
        JointLayout.of(TokenLayout("balanced", 32, documents=[0, 9, 32]), 8, True)


LONGER = torch.randn(1, 7, 2, 8)


@pytest.mark.parametrize(
    "changes",
    [{"joint_front": False}, {"joint_q": LONGER, "joint_k": LONGER, "joint_v": LONGER}],
    ids=["end", "tokens"],
)
def test_ranks_that_differ_hear_of_it(pool: WorkerPool, changes: dict[str, Any]) -> None:
    for message in pool.run(refused, 4, changes=changes, odd=(2,)):
        assert message.startswith("MeshError: the ranks"), message
