"""HeadSplit: query heads cut fairly, each KV head exactly where it is used."""

from __future__ import annotations

from itertools import chain

import pytest

import ds_usp
from ds_usp import ConfigError
from ds_usp.attention.validation import head_split
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
        rank_heads = [heads_of(split.query_range(rank)) for rank in range(split.ulysses)]
        assert [head for heads in rank_heads for head in heads] == list(range(split.heads)), split
        assert min(map(len, rank_heads)) >= 1, split


def test_a_rank_has_exactly_the_kv_heads_that_its_query_heads_use_evenly() -> None:
    for split in SPLITS:
        group = split.heads // split.kv_heads
        for rank in range(split.ulysses):
            used = [head // group for head in heads_of(split.query_range(rank))]
            rank_heads = heads_of(split.kv_range(rank))
            # A kernel's own grouping: equal runs of query heads share a KV head.
            run, rest = divmod(len(used), len(rank_heads))
            assert rest == 0 and used == [kv for kv in rank_heads for _ in range(run)], split


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


def test_parts_hold_every_head_of_every_rank_once_in_order() -> None:
    for split in SPLITS:
        group = split.heads // split.kv_heads
        for count in range(1, split.max_chunks + 1):
            parts = [split.chunk(count, index) for index in range(count)]
            for rank in range(split.ulysses):
                queries = [heads_of(part.queries[rank]) for part in parts]
                keys = [heads_of(part.keys[rank]) for part in parts]
                assert list(chain(*queries)) == heads_of(split.query_range(rank)), (split, count)
                assert list(chain(*keys)) == heads_of(split.kv_range(rank)), (split, count)
                for rank_heads, rank_kv_heads in zip(queries, keys, strict=True):
                    assert rank_heads, (split, count)
                    # As for the whole: equal runs of query heads share a KV head, the right one.
                    assert [head // group for head in rank_heads] == [
                        kv
                        for kv in rank_kv_heads
                        for _ in range(len(rank_heads) // len(rank_kv_heads))
                    ], (split, count)


def test_chunks_inside_a_group_hold_every_query_head_once_beside_its_kv_head() -> None:
    for split in SPLITS:
        group, ranks = split.heads // split.kv_heads, range(split.ulysses)
        for count in range(split.max_chunks + 1, split.max_chunks_in_groups + 1):
            chunks = [split.chunk(count, index) for index in range(count)]
            for rank in ranks:
                queries = [heads_of(chunk.queries[rank]) for chunk in chunks]
                assert list(chain(*queries)) == heads_of(split.query_range(rank)), (split, count)
                for index, (heads, chunk) in enumerate(zip(queries, chunks, strict=True)):
                    assert heads, (split, count)
                    assert {head // group for head in heads} == set(heads_of(chunk.keys[rank]))
                    # Exchanged with the first chunk that uses the KV head.
                    users = [other for other in chunks if other.keys[rank] == chunk.keys[rank]]
                    assert chunk.kv_chunk == chunks.index(users[0]) <= index


def test_there_are_as_many_parts_as_the_poorest_rank_has_kv_heads() -> None:
    for split in SPLITS:
        counts = [len(heads_of(split.kv_range(rank))) for rank in range(split.ulysses)]
        assert split.max_chunks == min(counts) == max(split.kv_heads // split.ulysses, 1), split
    assert HeadSplit(8, 1, 1).max_chunks == 1  # MQA: its one KV head is not cut
    assert HeadSplit(8, 2, 4).max_chunks == 1
    assert HeadSplit(8, 2, 4).max_chunks_in_groups == 2
    assert HeadSplit(9, 3, 2).max_chunks_in_groups == 1  # ranks of two groups and of one


# KV heads of a rank, and what each part of them has.
PARTS = [
    (8, [8]),
    (8, [2, 6]),
    (8, [1, 6, 1]),
    (8, [1, 3, 3, 1]),
    (8, [1, 2, 2, 2, 1]),
    (8, [1] * 8),
    (16, [2, 12, 2]),
    (32, [4, 12, 12, 4]),
    (28, [1, 5, 4, 4, 4, 4, 5, 1]),
]


@pytest.mark.parametrize(("kv_heads", "sizes"), PARTS, ids=str)
def test_the_first_and_the_last_part_are_small(kv_heads: int, sizes: list[int]) -> None:
    for group in (1, 4):
        split = HeadSplit(2 * kv_heads * group, 2 * kv_heads, 2)
        parts = [split.chunk(len(sizes), index) for index in range(len(sizes))]
        for rank in (0, 1):
            assert [len(heads_of(part.keys[rank])) for part in parts] == sizes
            assert [len(heads_of(part.queries[rank])) for part in parts] == [
                group * size for size in sizes
            ]


def test_parts_are_as_even_as_whole_heads_allow() -> None:
    for kv_heads in (*range(4, 24), 32, 48, 64):
        split = HeadSplit(kv_heads, kv_heads, 1)
        for count in range(4, kv_heads + 1):
            sizes = [len(heads_of(split.chunk(count, at).keys[0])) for at in range(count)]
            third = kv_heads / (3 * count - 4)
            ideal = [third, *[3 * third] * (count - 2), third]
            assert max(sizes[0], sizes[-1]) <= min(sizes[1:-1]), (kv_heads, sizes)
            # Where a third is less than one head, every part still has one.
            slack = 1 if third >= 1 else 3 - third
            assert all(abs(a - b) <= slack for a, b in zip(sizes, ideal, strict=True)), sizes


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


def test_degrees_are_proposed_only_where_they_would_help() -> None:
    with pytest.raises(ConfigError, match=r"must be a multiple of the second$"):
        head_split(8, 3, ds_usp.SequenceMesh.single())


def test_a_split_is_made_once_for_all_calls_of_a_local_attention() -> None:
    mesh = ds_usp.SequenceMesh.single()
    assert head_split(8, 4, mesh) is head_split(8, 4, mesh)
