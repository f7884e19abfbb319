"""Which ranks of a ring share a node."""

from __future__ import annotations

import pytest

from ds_usp.comm.process_groups import count_ring_ranks_per_node
from ds_usp.geometry.ranks import RankGrid

# Node of each rank, Ulysses and ring degree, ring ranks per node; Ulysses varies fastest.
NODES = [
    ("aaaa", 1, 4, 4),
    ("aabb", 1, 4, 2),
    ("abcd", 1, 4, 1),
    ("aabb", 2, 2, 1),
    ("aabb", 4, 1, 1),
    ("aaaabbbb", 2, 4, 2),
    ("aabbccddeeff", 1, 12, 2),
    # Runs of different lengths: as if on one node.
    ("aaab", 1, 4, 4),
    ("aaaaaabb", 1, 8, 8),
    ("aaabbb", 2, 3, 3),
    # A node that repeats is another run, as a relay inside it would need.
    ("abab", 1, 4, 1),
]


@pytest.mark.parametrize(("nodes", "ulysses", "ring", "ranks"), NODES)
def test_count_ring_ranks_per_node(nodes: str, ulysses: int, ring: int, ranks: int) -> None:
    grid = RankGrid({"ulysses": ulysses, "ring": ring})
    assert count_ring_ranks_per_node([name.encode() for name in nodes], grid) == ranks


def test_count_ring_ranks_per_node_of_adjacent_rings() -> None:
    grid = RankGrid({"ulysses": 2, "ring": 4}, order=["ring", "ulysses"])
    assert count_ring_ranks_per_node([name.encode() for name in "aaaabbbb"], grid) == 4
    assert count_ring_ranks_per_node([name.encode() for name in "aabbccdd"], grid) == 2
