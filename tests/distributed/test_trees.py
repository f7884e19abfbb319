"""What is true of trees alone; random ones are test_documents.py's."""

from dataclasses import replace

import pytest
from cases import ONE_TREE, Case, attend, check, mesh_of
from harness import RankContext

from ds_usp import ConfigError, MeshError, TokenLayout, Tuning


def test_scores_of_a_tree_are_the_oracles(pool):
    changed = {"kernel": "eager", "sinks": True, "softcap": 3.0, "kv_heads": 2}
    check(pool, [Case(40, layout="zigzag", tree=(ONE_TREE,), **changed)], 1, 2)


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
    attend(mesh, case)


@pytest.mark.parametrize(
    ("differ", "kind", "text"),
    [
        ("ranks", MeshError, "5 segments of 1 sample"),
        ("length", ConfigError, "end at 32, the sequence has 40 tokens"),
        ("samples", ConfigError, "given for 2 samples, the batch has 1"),
    ],
)
def test_every_rank_refuses(pool, differ, kind, text):
    for error in pool.errors(other_trees, 4, differ=differ):
        assert isinstance(error, kind) and text in str(error)
