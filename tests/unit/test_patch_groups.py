"""Every group of Megatron-DeepSpeed under the patches, for all degrees up to 32 ranks."""

from __future__ import annotations

import math

import pytest

from ds_usp.errors import ConfigError
from megatron_patches.megatron_deepspeed.groups import group_table, make_grid

# Which of (tp, u, r, d, p) differ inside a group of this name.
DIFFER = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "t",
    "_ULYSSES_PARALLEL_GROUP": "u",
    "_RING_PARALLEL_GROUP": "r",
    "_SEQUENCE_PARALLEL_GROUP": "ur",
    "_DATA_PARALLEL_GROUP": "d",
    "_SEQUENCE_DATA_PARALLEL_GROUP": "urd",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "p",
    "_MODEL_PARALLEL_GROUP": "tp",
    "_AMAX_REDUCTION_GROUP": "turd",
}
EMBEDDINGS = {"_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GROUP"}


def all_degrees(limit: int) -> list[tuple[int, ...]]:
    """Every (tp, u, r, d, p) of at most ``limit`` ranks."""
    tuples: list[tuple[int, ...]] = [()]
    for _ in range(5):
        tuples = [(*t, n) for t in tuples for n in range(1, limit // math.prod(t) + 1)]
    return tuples


def coordinates(degrees: tuple[int, ...]) -> list[dict[str, int]]:
    """The coordinates of each rank, by the rule: tp + TP * (u + U * (r + R * (d + D * p)))."""
    tp, u, r, d, p = degrees
    return [
        {
            "t": rank % tp,
            "u": rank // tp % u,
            "r": rank // (tp * u) % r,
            "d": rank // (tp * u * r) % d,
            "p": rank // (tp * u * r * d) % p,
        }
        for rank in range(math.prod(degrees))
    ]


def expected(coords: list[dict[str, int]], differ: str) -> set[tuple[int, ...]]:
    """Groups by brute force: ranks whose other coordinates agree."""
    same = [axis for axis in "turdp" if axis not in differ]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coord in enumerate(coords):
        groups.setdefault(tuple(coord[axis] for axis in same), []).append(rank)
    return {tuple(ranks) for ranks in groups.values()}


def test_every_group_of_every_combination() -> None:
    combinations = all_degrees(32)
    assert len(combinations) == 1142
    for degrees in combinations:
        tp, u, r, _, p = degrees
        coords = coordinates(degrees)
        grid = make_grid(math.prod(degrees), tp=tp, ulysses=u, ring=r, pp=p)
        table = group_table(grid, use_fp8=True)
        assert set(table) == DIFFER.keys() | EMBEDDINGS
        for name, differ in DIFFER.items():
            assert set(table[name]) == expected(coords, differ), (degrees, name)
        pipelines = expected(coords, "p")
        ends = {(ranks[0], ranks[-1]) if p > 1 else ranks for ranks in pipelines}
        assert set(table["_EMBEDDING_GROUP"]) == ends
        assert set(table["_POSITION_EMBEDDING_GROUP"]) == {ranks[:1] for ranks in pipelines}


def test_the_groups_are_those_of_megatrons_own_example() -> None:
    """16 ranks, tp 2, pp 4: the lists in the docstring of the stock initialize_model_parallel."""
    table = group_table(make_grid(16, tp=2, ulysses=1, ring=1, pp=4))
    assert table["_DATA_PARALLEL_GROUP"] == (
        *((0, 2), (1, 3), (4, 6), (5, 7)),
        *((8, 10), (9, 11), (12, 14), (13, 15)),
    )
    assert table["_TENSOR_MODEL_PARALLEL_GROUP"] == tuple((i, i + 1) for i in range(0, 16, 2))
    assert table["_PIPELINE_MODEL_PARALLEL_GROUP"] == tuple(
        (i, i + 4, i + 8, i + 12) for i in range(4)
    )


@pytest.mark.parametrize(
    ("split", "words", "positions"), [(1, (0, 2, 6), (0, 2)), (3, (0, 6), (0, 6))]
)
def test_a_decoder_that_begins_at_a_stage_has_embeddings_too(
    split: int, words: tuple[int, ...], positions: tuple[int, ...]
) -> None:
    table = group_table(make_grid(8, tp=2, ulysses=1, ring=1, pp=4), split)
    assert table["_EMBEDDING_GROUP"][0] == words
    assert table["_POSITION_EMBEDDING_GROUP"][0] == positions


def test_a_world_that_does_not_divide_is_refused() -> None:
    for world in (6, 12):
        with pytest.raises(ConfigError, match=r"--tensor-model-parallel-size 4 x .* = 8 ranks"):
            make_grid(world, tp=4, ulysses=2, ring=1, pp=1)
