"""Trees of segments through real groups, against the fp64 oracle."""

import random
from itertools import product

import pytest
from cases import ALL_LAYOUTS, Case, check, random_tree
from test_documents import RANDOM_MESHES, TUNINGS

LAYOUTS = (*ALL_LAYOUTS, "balanced")


def random_cases(ulysses: int, ring: int) -> list[Case]:
    """Every layout with trees that samples share, and with others for each."""
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
                seed=index,
            )
        )
    return cases


@pytest.mark.parametrize(("ulysses", "ring", "order"), RANDOM_MESHES)
def test_random_trees_are_the_oracles(pool, ulysses, ring, order):
    check(pool, random_cases(ulysses, ring), ulysses, ring, order=order)
