"""Which ranks of a ring share a host."""

from __future__ import annotations

import pytest

from ds_usp.comm.process_groups import count_ring_ranks_per_node
from ds_usp.geometry.ranks import RankGrid

# Host of each rank, Ulysses and ring degree, ring ranks of a host; Ulysses varies fastest.
HOSTS = [
    ("aaaa", 1, 4, 4),
    ("aabb", 1, 4, 2),
    ("abcd", 1, 4, 1),
    ("aabb", 2, 2, 1),
    ("aabb", 4, 1, 1),
    ("aaaabbbb", 2, 4, 2),
    ("aabbccddeeff", 1, 12, 2),
    # No two runs of one length: taken as one host.
    ("aaab", 1, 4, 4),
    ("aaaaaabb", 1, 8, 8),
    ("aaabbb", 2, 3, 3),
    # Hosts that come again are other runs, as a relay inside them would need.
    ("abab", 1, 4, 1),
]


@pytest.mark.parametrize(("hosts", "ulysses", "ring", "ranks"), HOSTS)
def test_ring_ranks_of_a_host(hosts: str, ulysses: int, ring: int, ranks: int) -> None:
    grid = RankGrid({"ulysses": ulysses, "ring": ring})
    assert count_ring_ranks_per_node([name.encode() for name in hosts], grid) == ranks


def test_rings_next_to_each_other() -> None:
    grid = RankGrid({"ulysses": 2, "ring": 4}, order=["ring", "ulysses"])
    assert count_ring_ranks_per_node([name.encode() for name in "aaaabbbb"], grid) == 4
    assert count_ring_ranks_per_node([name.encode() for name in "aabbccdd"], grid) == 2
