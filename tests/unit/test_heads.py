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


def test_every_query_head_is_on_exactly_one_rank_and_no_rank_is_without() -> None:
    for split in SPLITS:
        mine = [heads_of(split.query_range(rank)) for rank in range(split.ulysses)]
        assert [head for heads in mine for head in heads] == list(range(split.heads)), split
        assert min(map(len, mine)) >= 1, split


def test_a_rank_has_exactly_the_kv_heads_that_its_query_heads_use_evenly() -> None:
    for split in SPLITS:
        group = split.heads // split.kv_heads
        for rank in range(split.ulysses):
            used = [head // group for head in heads_of(split.query_range(rank))]
            mine = heads_of(split.kv_range(rank))
            # A kernel's own grouping: equal runs of query heads share a KV head.
            run, rest = divmod(len(used), len(mine))
            assert rest == 0 and used == [kv for kv in mine for _ in range(run)], split


def test_ranks_differ_by_one_head_or_one_group_at_most() -> None:
    for split in SPLITS:
        ranks = range(split.ulysses)
        counts = [len(heads_of(split.query_range(rank))) for rank in ranks]
        group = split.heads // split.kv_heads
        if split.kv_heads >= split.ulysses:
            assert max(counts) - min(counts) in (0, group), split
        else:
            # A KV head has as many users as another or one more, who share its group.
            users = split.ulysses // split.kv_heads
            assert max(counts) <= -(-group // users) and min(counts) >= group // (users + 1), split


@pytest.mark.parametrize(
    ("split", "queries", "keys"),
    [
        (HeadSplit(8, 4, 4), [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (HeadSplit(8, 2, 4), [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (HeadSplit(8, 1, 2), [(0, 4), (4, 8)], [(0, 1), (0, 1)]),
        (HeadSplit(6, 2, 4), [(0, 2), (2, 3), (3, 5), (5, 6)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (HeadSplit(7, 7, 2), [(0, 4), (4, 7)], [(0, 4), (4, 7)]),
        (HeadSplit(9, 3, 2), [(0, 6), (6, 9)], [(0, 2), (2, 3)]),
    ],
    ids=str,
)
def test_known_splits(
    split: HeadSplit, queries: list[tuple[int, int]], keys: list[tuple[int, int]]
) -> None:
    ranks = range(split.ulysses)
    assert [split.query_range(rank) for rank in ranks] == queries
    assert [split.kv_range(rank) for rank in ranks] == keys


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
