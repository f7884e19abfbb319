"""Packed documents, random trees and joint tokens through real groups, against the fp64 oracle."""

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cases import ALL_LAYOUTS, MASKS, Case, attend_by_module, check, errors_of, mesh_of, random_tree
from harness import RankContext
from joint_attention_cases import FULL, Joint, run

import ds_usp
from ds_usp import MaskSpec
from ds_usp.geometry.joint import ConcatenatedShards, JointLayout
from ds_usp.geometry.layout import TokenLayout

LAYOUTS = (*ALL_LAYOUTS, "balanced")
GATHERED = ds_usp.Tuning(1, True)
TUNINGS = (ds_usp.Tuning(1, False), GATHERED, ds_usp.Tuning(2, False), ds_usp.Tuning(2, True))


def lengths_of(draw: random.Random, tokens: int) -> tuple[int, ...]:
    """Random lengths of documents that fill a sequence: many short ones, few, or one."""
    longest = draw.choice([1, 4, 12, tokens // 2, tokens])
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(draw.randint(1, longest), tokens - sum(lengths)))
    return tuple(lengths)


RANDOM_MESHES = [
    (1, 2, "ulysses-ring"),
    (1, 4, "ulysses-ring"),
    (2, 2, "ring-ulysses"),
    (2, 3, "ulysses-ring"),
    (2, 4, "ulysses-ring"),
    (4, 1, "ulysses-ring"),
]


# No multiple of 3, so that each mask meets each mesh.
RANDOM_MASKS = (*MASKS, "tree", "tree as rectangles", "trees")


def random_mask(draw: random.Random, mask: str, tokens: int, batch: int) -> dict[str, Any]:
    """Fields of a case: documents, which samples share or have of their own, or trees."""
    if mask in MASKS:
        samples = batch if draw.random() < 0.5 else 1
        return {"mask": mask, "documents": tuple(lengths_of(draw, tokens) for _ in range(samples))}
    trees = tuple(random_tree(draw, tokens) for _ in range(batch if mask == "trees" else 1))
    left = draw.choice([None, draw.randint(0, 30)]) if mask != "tree as rectangles" else None
    return {"tree": trees, "as_rectangles": mask == "tree as rectangles", "left": left}


def random_cases(ulysses: int, ring: int, third: int) -> list[Case]:
    """Every third pair of a mask and a layout, on the next two meshes the others."""
    draw, cases, ranks = random.Random(ulysses * 10 + ring), [], ulysses * ring
    for index, (layout, mask) in enumerate(product(LAYOUTS, RANDOM_MASKS)):
        tokens, batch = draw.randint(2 * ranks, 2 * ranks + 70), draw.randint(1, 3)
        heads, kv_heads = draw.choice([(8, 8), (8, 4), (8, 2)])
        cases.append(
            Case(
                seq_len=tokens,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=8,
                batch=batch,
                layout=layout,
                kernel=draw.choice(["auto", "eager"]),
                tuning=draw.choice(TUNINGS if kv_heads >= 2 * ulysses else TUNINGS[:2]),
                seed=index,
                **random_mask(draw, mask, tokens, batch),
            )
        )
    return cases[third::3]


@pytest.mark.parametrize(("ulysses", "ring", "order"), RANDOM_MESHES)
def test_random_documents_and_trees_are_the_oracles(pool, ulysses, ring, order):
    third = RANDOM_MESHES.index((ulysses, ring, order)) % 3
    check(pool, random_cases(ulysses, ring, third), ulysses, ring, order=order)


# The long one is on both ranks; the last one is padding.
ODD_LENGTHS = (1, 7, 2039, 1, 1, 255)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_documents_of_1_7_and_2039_tokens(pool, layout):
    case = Case(sum(ODD_LENGTHS), 1, 1, 8, 1, layout, documents=(ODD_LENGTHS,))
    check(pool, [case], 1, 2)


@pytest.mark.parametrize("mask", ["causal", "full", "window both sides"])
def test_a_rank_may_hold_padding_alone_and_a_block_may_be_masked_for_all(pool, mask):
    base = Case(64, mask=mask, layout="contiguous")
    cases = [
        replace(base, documents=((48, 16),)),  # the last rank has nothing but padding
        replace(base, documents=((16,) * 4,)),  # no rank sees another's block
        replace(base, documents=((16,) * 4,), tuning=GATHERED),
        replace(base, documents=((64,),)),  # one document over all shards
        replace(base, documents=((1,) * 64,)),
        replace(base, documents=((1,) * 64, (64,))),  # every block is masked for one sample
        replace(base, documents=((1,) * 64, (64,)), tuning=GATHERED),
    ]
    check(pool, cases, 1, 4)


class Causal(torch.nn.Module):
    """A local attention of no known class; documents must not reach it."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the local attention was called")


def drop_in(ctx: RankContext, *, case: Case, ulysses: int, batch_dim: int) -> dict[str, float]:
    """Relative errors of ``USPAttention(...)(q, k, v, documents=borders)``."""
    mesh, known = mesh_of(ulysses), {"mask": MaskSpec.causal(), "dropout_p": 0.0}
    documents = {"documents": case.mask_spec.documents}
    known |= {"layout": case.layout_on(mesh)}
    actual = attend_by_module(mesh, case, Causal(), batch_dim=batch_dim, call=documents, **known)
    return errors_of(mesh, case, actual)


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_the_drop_in_takes_documents_with_each_call(pool, ulysses):
    for layout, batch_dim in (("zigzag", 0), ("balanced", 1)):
        case = Case(layout=layout, documents=((20, 4, 40), (64,)))
        errors_of_ranks = pool.run(drop_in, 4, case=case, ulysses=ulysses, batch_dim=batch_dim)
        assert max(max(errors.values()) for errors in errors_of_ranks) <= 1e-5


def refused_by_the_drop_in(ctx: RankContext) -> list[str]:
    mesh, x = mesh_of(4), torch.randn(1, 16, 4, 8)
    known: dict[str, Any] = {"mask": MaskSpec.causal(), "dropout_p": 0.0}

    def attend(*more: Any, documents: Any, **options: Any) -> Any:
        return ds_usp.USPAttention(Causal(), mesh=mesh, **options)(
            x, x, x, 0, *more, documents=documents
        )

    mask, said = torch.ones(64, 64).tril().bool(), []
    for call in (
        lambda: ds_usp.USPAttention(Causal(), mesh=mesh, mask=MaskSpec.causal([0, 64])),
        lambda: attend(documents=[0, 64]),
        lambda: attend(None, mask, documents=[0, 64], **known),
        lambda: attend(documents=[0, 63], **known),
        lambda: attend(documents=[[0, 64]] * 2, **known),
    ):
        with pytest.raises(ds_usp.USPError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_what_the_drop_in_cannot_serve_is_refused_on_every_rank(pool):
    numbers = ("documents=borders", "mask", "Leave it out", "end at 63", "2 samples")
    for said in pool.run(refused_by_the_drop_in, 4):
        assert all(number in text for number, text in zip(numbers, said, strict=True)), said


MESHES = [(1, 1), (4, 1), (2, 2), (1, 4), (4, 2)]


def joint_cases(mesh: int) -> list[Joint]:
    """One end of each layout, on the next mesh the other, then one case of each other kind."""
    masks = (FULL, MaskSpec.causal(), MaskSpec.window(9, 4))
    base = [
        Joint(layout, front=front, mask=masks[at % 3], kv_heads=(4, 8, 2)[at % 3])
        for at, (layout, front) in enumerate(product(ALL_LAYOUTS, (True, False)))
        if (at + at // 2 + mesh) % 2
    ]
    gather = ds_usp.Tuning(gather=True)
    return [
        *base,
        Joint(tokens=64, joint=16, tuning=gather),
        Joint(joint=41, dtype=torch.float64, layout="striped", front=False, tuning=gather),
        Joint(value_dim=24, sinks=True),
        Joint(layout="contiguous", joint=8),  # a token a rank on eight of them
    ]


@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_equals_the_oracle_on_both_as_one(pool, ulysses, ring):
    check(pool, joint_cases(MESHES.index((ulysses, ring))), ulysses, ring, run)


@pytest.mark.parametrize("kind", ALL_LAYOUTS)
@pytest.mark.parametrize("front", [True, False])
def test_every_position_is_on_one_rank(kind, front):
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


def refused(ctx: RankContext, rows: list[tuple[dict[str, Any], tuple[int, ...]]]) -> list[str]:
    """What each call of joint attention raises, of which some ranks' has changes."""
    mesh, said = mesh_of(2), []
    q, joint = torch.randn(1, 8, 2, 8), torch.randn(1, 6, 2, 8)
    for changes, odd in rows:
        options: dict[str, Any] = dict.fromkeys(("joint_q", "joint_k", "joint_v"), joint)
        options |= changes if ctx.rank in odd else {}
        layout = options.pop("layout", mesh.layout("zigzag", 32))
        try:
            ds_usp.usp_joint_attention(q, q, q, mesh=mesh, layout=layout, mask=FULL, **options)
            said.append("")
        except ds_usp.USPError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def joint(*shape: int) -> dict[str, torch.Tensor]:
    return dict.fromkeys(("joint_q", "joint_k", "joint_v"), torch.randn(shape))


# What all ranks change, or the third alone; the error, and its numbers.
REFUSED_JOINT: list[tuple[dict[str, Any], tuple[int, ...], str, str]] = [
    ({}, (0, 1, 2, 3), "", ""),
    ({"joint_k": torch.randn(1, 6, 1, 8)}, (0, 1, 2, 3), "ConfigError", "[1, 6, 1, 8]"),
    ({"joint_k": torch.randn(1, 3, 2, 8)}, (0, 1, 2, 3), "ConfigError", "[1, 3, 2, 8]"),
    ({"joint_v": torch.randn(1, 6, 2, 8).double()}, (0, 1, 2, 3), "ConfigError", "dtype"),
    ({"joint_q": torch.randn(6, 2, 8)}, (0, 1, 2, 3), "ConfigError", "[6, 2, 8]"),
    (joint(1, 3, 2, 8), (0, 1, 2, 3), "LayoutError", "3 tokens"),
    ({"layout": TokenLayout("zigzag", 16, 1, 2)}, (0, 1, 2, 3), "LayoutError", "1 x ring 2"),
    ({"joint_front": "rear"}, (0, 1, 2, 3), "ConfigError", "'rear'"),
    ({"joint_front": False}, (2,), "MeshError", "rank 2"),
    (joint(1, 7, 2, 8), (2,), "MeshError", "rank 2"),
]


def test_joint_tokens_that_do_not_fit_or_differ_are_refused_everywhere(pool):
    rows = [row[:2] for row in REFUSED_JOINT]
    for said in pool.run(refused, 4, rows=rows):
        for text, (*_, kind, number) in zip(said, REFUSED_JOINT, strict=True):
            assert text.startswith(kind) and bool(text) == bool(kind) and number in text, text


def test_a_layout_of_documents_takes_no_joint_tokens():
    with pytest.raises(ds_usp.LayoutError, match=r"joint tokens are in no document of balanced"):
        JointLayout.of(TokenLayout("balanced", 32, documents=[0, 9, 32]), 8, True)
