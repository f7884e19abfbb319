"""Trees of segments through real groups, against the fp64 oracle."""

import random
from dataclasses import replace
from itertools import product

import pytest
from cases import ALL_LAYOUTS, ONE_TREE, Case, attend, check, mesh_of, random_tree, run_cases
from harness import RankContext
from test_documents import RANDOM_MESHES, TUNINGS

from ds_usp import ConfigError, MeshError, TokenLayout, Tuning, UnsupportedAttentionError

LAYOUTS = (*ALL_LAYOUTS, "balanced")


def random_cases(ulysses: int, ring: int, third: int) -> list[Case]:
    """Every third of the layouts with trees that samples share, some as rectangles, and with others
    for each; on the next two meshes the others."""
    draw, cases, ranks = random.Random(ulysses * 10 + ring), [], ulysses * ring
    for index, (layout, shared) in enumerate(product(LAYOUTS, (True, False))):
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
                tree=tuple(random_tree(draw, tokens) for _ in range(1 if shared else batch)),
                as_rectangles=shared and index % 4 == 0,
                seed=index,
            )
        )
    return cases[third::3]


@pytest.mark.parametrize(("ulysses", "ring", "order"), RANDOM_MESHES)
def test_random_trees_are_the_oracles(pool, ulysses, ring, order):
    third = RANDOM_MESHES.index((ulysses, ring, order)) % 3
    check(pool, random_cases(ulysses, ring, third), ulysses, ring, order=order)


def test_a_branch_that_sees_a_key_of_its_sibling_is_found(pool):
    case = Case(40, layout="zigzag", tree=(ONE_TREE,))
    scores = replace(case, kernel="eager", sinks=True, softcap=3.0, dropout_p=0.2, kv_heads=2)
    check(pool, [case, scores], 1, 2)
    errors = pool.run(run_cases, 2, cases=[replace(case, sees_a_sibling=True)], ulysses_degree=1)
    assert min(max(of_rank.values()) for (of_rank,) in errors) > 1e-3


def test_only_what_a_descendant_sees_is_sent(pool):
    """Of each rank's keys, counted token by token from the oracle, what another one's queries see:
    forward and backward once, and gradients back."""
    case = Case(40, 4, 2, 8, 1, "contiguous", tree=(ONE_TREE,), tuning=Tuning(1, False))
    for rank, sent in enumerate(pool.run(bytes_of_ring, 4, case=case)):
        layout, token = TokenLayout("contiguous", 40, 1, 4), 2 * 2 * 8 * 4  # k and v, 2 heads, fp32
        own, others = layout.positions(rank), [layout.positions(r) for r in range(4) if r != rank]
        seen = sum(int(case.allowed[0][x][:, own].any(0).sum()) for x in others)
        sees = sum(int(case.allowed[0][own][:, x].any(0).sum()) for x in others)
        assert sent == {"ring_kv": 2 * seen * token, "ring_dkv": sees * token}


def bytes_of_ring(ctx: RankContext, case: Case) -> dict[str, int]:
    mesh = mesh_of(1)
    mesh.ledger.reset()
    attend(mesh, case)
    return {kind: mesh.ledger.bytes[kind] for kind in ("ring_kv", "ring_dkv")}


def other_trees(ctx: RankContext, differ: str) -> None:
    mesh = mesh_of(2)
    case = Case(40, batch=1, tree=(ONE_TREE,))
    if differ == "ranks" and ctx.rank == 1:
        case = replace(case, tree=((*ONE_TREE[:-1], (32, 40, 0)),))
    if differ == "length":
        case = replace(case, tree=(ONE_TREE[:-1],))
    if differ == "samples":
        case = replace(case, tree=(ONE_TREE, ONE_TREE))
    attend(mesh, replace(case, alibi=differ == "alibi"))


@pytest.mark.parametrize(
    ("differ", "kind", "text"),
    [
        ("ranks", MeshError, "5 segments of 1 sample"),
        ("length", ConfigError, "end at 32, the sequence has 40 tokens"),
        ("samples", ConfigError, "given for 2 samples, the batch has 1"),
        ("alibi", UnsupportedAttentionError, "not as far apart as their tokens"),
    ],
)
def test_every_rank_refuses(pool, differ, kind, text):
    for error in pool.errors(other_trees, 4, differ=differ):
        assert isinstance(error, kind) and text in str(error)
