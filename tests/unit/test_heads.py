"""HeadSplit: query heads cut fairly, each KV head exactly where it is used."""

from __future__ import annotations

import pytest

from ds_usp import ConfigError
from ds_usp.geometry.heads import HeadSplit

SPLITS = [
    HeadSplit(group * kv_heads, kv_heads, ulysses)
    for kv_heads in range(1, 9)
    for group in range(1, 7)
    for ulysses in range(1, min(8, group * kv_heads) + 1)
]


def heads_of(bounds: tuple[int, int]) -> list[int]:
    return list(range(*bounds))


def test_every_query_head_is_on_one_rank_and_ranks_differ_by_one_at_most() -> None:
    for split in SPLITS:
        mine = [heads_of(split.query_range(rank)) for rank in range(split.ulysses)]
        assert [head for heads in mine for head in heads] == list(range(split.heads)), split
        counts = list(map(len, mine))
        assert min(counts) >= 1 and max(counts) - min(counts) <= 1, split


def test_a_rank_has_exactly_the_kv_heads_that_its_query_heads_use() -> None:
    uneven = 0
    for split in SPLITS:
        group = split.heads // split.kv_heads
        for rank in range(split.ulysses):
            used = [head // group for head in heads_of(split.query_range(rank))]
            mine = heads_of(split.kv_range(rank))
            assert mine == sorted(set(used)), split
            index = split.kv_index(rank)
            if index is None:
                # A kernel's own grouping: equal runs of query heads share a KV head.
                run, rest = divmod(len(used), len(mine))
                assert rest == 0
                index = tuple(local // run for local in range(len(used)))
            else:
                uneven += 1
            assert [mine[local] for local in index] == used, split
    assert uneven


@pytest.mark.parametrize(
    ("split", "queries", "keys", "index"),
    [
        (
            HeadSplit(8, 2, 4),
            [(0, 2), (2, 4), (4, 6), (6, 8)],
            [(0, 1), (0, 1), (1, 2), (1, 2)],
            None,
        ),
        (HeadSplit(8, 1, 2), [(0, 4), (4, 8)], [(0, 1), (0, 1)], None),
        (
            HeadSplit(6, 2, 4),
            [(0, 1), (1, 3), (3, 4), (4, 6)],
            [(0, 1), (0, 1), (1, 2), (1, 2)],
            None,
        ),
        (HeadSplit(7, 7, 2), [(0, 3), (3, 7)], [(0, 3), (3, 7)], None),
        (HeadSplit(9, 3, 2), [(0, 4), (4, 9)], [(0, 2), (1, 3)], (0, 0, 0, 1)),
    ],
    ids=str,
)
def test_known_splits(
    split: HeadSplit,
    queries: list[tuple[int, int]],
    keys: list[tuple[int, int]],
    index: tuple[int, ...] | None,
) -> None:
    ranks = range(split.ulysses)
    assert [split.query_range(rank) for rank in ranks] == queries
    assert [split.kv_range(rank) for rank in ranks] == keys
    assert split.kv_index(0) == index


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ulysses", "message"),
    [
        (6, 4, 2, "6 query heads cannot share 4 key/value heads"),
        (4, 8, 2, "4 query heads cannot share 8 key/value heads"),
        (8, 0, 2, "8 query heads cannot share 0 key/value heads"),
        (6, 2, 8, "ulysses_degree=8 needs at least 8 query heads"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(
    heads: int, kv_heads: int, ulysses: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        HeadSplit(heads, kv_heads, ulysses)


def test_the_advice_helps() -> None:
    with pytest.raises(ConfigError, match="Use --ulysses-degree 6 or less"):
        HeadSplit(6, 2, 8)
    HeadSplit(6, 2, 6)
