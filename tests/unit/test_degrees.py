"""Degrees and ranks: which heads, axes, nodes and settings they take, and what is refused."""

import re
from argparse import Namespace
from collections.abc import Callable
from itertools import chain, combinations, permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from programs import python
from properties import examples

import ds_usp
from ds_usp import ConfigError, Degrees, RankGrid, USPConfig
from ds_usp.attention.validation import head_split
from ds_usp.config import TorchrunEnv, torchrun_env
from ds_usp.geometry.heads import HeadSplit

ROOT = Path(__file__).resolve().parents[2]
SMALL = st.integers(1, 12)
SMOOTH = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])  # many divide many


@given(*[SMOOTH] * 3, *[st.none() | SMOOTH] * 5)
@examples(500)
def test_degrees_are_taken_exactly_where_everything_divides(
    tp, sp, pp, ulysses, ring, world, heads, kv_heads
):
    degrees = Degrees(
        sp=sp, ulysses=ulysses, ring=ring, tp=tp, pp=pp, world=world, heads=heads, kv_heads=kv_heads
    )
    # A ring alone leaves the other ranks to Ulysses.
    implied = sp // ring if ring and ulysses is None else ulysses
    fits = (
        (ulysses is None or sp % ulysses == 0)
        and (ring is None or sp % ring == 0)
        and (ulysses is None or ring is None or ulysses * ring == sp)
        and (world is None or world % (tp * sp * pp) == 0)
        and (heads is None or heads % tp == 0)
        and (heads is None or implied is None or heads >= tp * implied)
        and (heads is None or kv_heads is None or heads % kv_heads == kv_heads % tp == 0)
    )
    assert (degrees.refusal() is None) == fits, degrees.refusal()
    if fits:
        assert degrees.check() is degrees
        assert implied is None or implied in degrees.valid_ulysses()
        assert ring is None or degrees.valid_ulysses() == [sp // ring]
        assert world is None or degrees.dp * tp * sp * pp == world


@given(SMALL, SMALL, st.integers(1, 48))
@examples(200)
def test_every_degree_that_a_refusal_proposes_is_taken(sp, ulysses, heads):
    refusal = Degrees(sp=sp, ulysses=ulysses, heads=heads).refusal()
    if refusal:
        proposed = re.findall(r"(\d+) \(ring (\d+)\)", refusal.message)
        for degree, ring in proposed:
            Degrees(sp=sp, ulysses=int(degree), ring=int(ring), heads=heads).check()
        valid = [u for u in range(sp, 0, -1) if sp % u == 0 and u <= heads]
        assert [int(degree) for degree, _ in proposed] == valid


# Degrees that do not fit, and the numbers and degrees that the message has.
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"sp": 0}, ("sp=0",)),
    ({"sp": None}, ("sp=None",)),
    ({"sp": 2, "ulysses": 2.0}, ("u=2.0",)),
    ({"sp": 2, "tp": True}, ("--tp True",)),
    ({"sp": 4, "ulysses": 3}, ("u=3", "sp=4", "4 (ring 1), 2 (ring 2), 1")),
    ({"sp": 4, "ring": 3}, ("the 3 rings", "sp=4", "1, 2, 4")),
    ({"sp": 4, "ulysses": 2, "ring": 4}, ("u=2 x the 4 rings = 8", "sp=4")),
    ({"sp": 8, "ring": 2, "heads": 3}, ("the 2 rings", "there are 3", "2 (ring 4), 1 (ring 8)")),
    ({"sp": 1, "heads": 0}, ("0 query heads",)),
    ({"sp": 1, "heads": 6, "kv_heads": 4}, ("6 query heads", "4 key/value heads")),
    ({"sp": 1, "heads": 6, "kv_heads": 0}, ("6 query heads", "0 key/value heads")),
    ({"sp": 1, "heads": 8, "kv_heads": 4, "tp": 8}, ("--tp 8", "4 key/value heads", "1, 2, 4")),
    ({"sp": 1, "heads": 8, "kv_heads": 1, "tp": 2}, ("--tp 2", "1 key/value head.", "one of 1;")),
    ({"sp": 1, "heads": 9, "tp": 2}, ("--tp 2", "9 query heads", "1, 3, 9")),
    ({"sp": 1, "heads": 8, "ffn": 20, "tp": 8}, ("--tp 8", "20", "1, 2, 4")),
    (
        {"sp": 8, "ulysses": 4, "heads": 6, "tp": 2},
        ("u=4", "there are 3 (6 heads, --tp 2)", "2 (ring 4), 1 (ring 8)"),
    ),
    ({"sp": 4, "tp": 2, "world": 12}, ("12 ranks", "--tp 2 x sp=4 x pp=1 = 8")),
]


@pytest.mark.parametrize(("degrees", "numbers"), REFUSED, ids=str)
def test_a_refusal_has_the_users_names_the_numbers_and_the_fix(degrees, numbers):
    with pytest.raises(ConfigError) as caught:
        Degrees(**degrees).check({"ulysses": "u", "tp": "--tp", "ring": "the {} rings"})
    assert all(number in str(caught.value) for number in numbers), caught.value


def test_shell_scripts_ask_for_the_degrees():
    def ask(flags: str) -> tuple[int, str, str]:
        done = python("-m", "ds_usp.geometry", *flags.split())
        return done.returncode, done.stdout, done.stderr

    assert ask("--sp 8 --heads 12 --tp 3 --world 48") == (0, "4 2\n", "")
    assert ask("--sp 8 --heads 12 --ulysses 2 --world 8") == (0, "2 1\n", "")
    assert ask("--sp 8 --heads 32 --ring 4 --world 8") == (0, "2 1\n", "")
    error = "error: ULYSSES_DEGREE=3 does not divide SP_SIZE=4. Use one of 4 (ring 1)"
    code, printed, message = ask("--sp 4 --ulysses 3")
    assert (code, printed) == (2, "") and message.startswith(error)


SPLITS = [
    HeadSplit(group * kv_heads, kv_heads, ulysses)
    for kv_heads in range(1, 9)
    for group in range(1, 7)
    for ulysses in range(1, min(8, group * kv_heads) + 1)
]


def heads_of(bounds: tuple[int, int]) -> list[int]:
    return list(range(*bounds))


def test_every_query_head_is_on_exactly_one_rank_and_no_rank_is_without():
    for split in SPLITS:
        rank_heads = [heads_of(split.query_range(rank)) for rank in range(split.ulysses)]
        assert [head for heads in rank_heads for head in heads] == list(range(split.heads)), split
        assert min(map(len, rank_heads)) >= 1, split


def test_a_rank_has_exactly_the_kv_heads_that_its_query_heads_use_evenly():
    for split in SPLITS:
        group = split.heads // split.kv_heads
        for rank in range(split.ulysses):
            used = [head // group for head in heads_of(split.query_range(rank))]
            rank_heads = heads_of(split.kv_range(rank))
            # A kernel's own grouping: equal runs of query heads share a KV head.
            run, rest = divmod(len(used), len(rank_heads))
            assert rest == 0 and used == [kv for kv in rank_heads for _ in range(run)], split


def test_ranks_differ_by_one_head_or_one_group_at_most():
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


def test_parts_hold_every_head_of_every_rank_once_in_order():
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


def test_chunks_inside_a_group_hold_every_query_head_once_beside_its_kv_head():
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


def test_there_are_as_many_parts_as_the_poorest_rank_has_kv_heads():
    for split in SPLITS:
        counts = [len(heads_of(split.kv_range(rank))) for rank in range(split.ulysses)]
        assert split.max_chunks == min(counts) == max(split.kv_heads // split.ulysses, 1), split
    assert HeadSplit(8, 1, 1).max_chunks == 1  # MQA: its one KV head is not cut
    assert HeadSplit(8, 2, 4).max_chunks == 1
    assert HeadSplit(8, 2, 4).max_chunks_in_groups == 2
    assert HeadSplit(9, 3, 2).max_chunks_in_groups == 1  # ranks of two groups and of one
    limits = [
        HeadSplit(4, 1, ulysses).chunk_limit(ring) for ulysses, ring in ((2, 1), (1, 1), (1, 2))
    ]
    assert limits == [2, 4, 1]  # a setting of several ranks is one of one rank


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
def test_the_first_and_the_last_part_are_small(kv_heads, sizes):
    for group in (1, 4):
        split = HeadSplit(2 * kv_heads * group, 2 * kv_heads, 2)
        parts = [split.chunk(len(sizes), index) for index in range(len(sizes))]
        for rank in (0, 1):
            assert [len(heads_of(part.keys[rank])) for part in parts] == sizes
            assert [len(heads_of(part.queries[rank])) for part in parts] == [
                group * size for size in sizes
            ]


def test_parts_are_as_even_as_whole_heads_allow():
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


def test_degrees_are_proposed_only_where_they_would_help():
    with pytest.raises(ConfigError, match=r"must be a multiple of the second$"):
        head_split(8, 3, ds_usp.SequenceMesh.single())


def test_a_split_is_made_once_for_all_calls_of_a_local_attention():
    mesh = ds_usp.SequenceMesh.single()
    assert head_split(8, 4, mesh) is head_split(8, 4, mesh)


AXES = ("tp", "cp", "dp", "pp")
SIZES = [(1, 1, 1, 1), (2, 2, 2, 2), (4, 2, 1, 3), (2, 3, 4, 1), (1, 4, 3, 2), (3, 1, 2, 5)]
TOKENS = [t for n in range(1, 5) for t in combinations(AXES, n)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("order", list(permutations(AXES)), ids="-".join)
def test_groups_are_megatrons(order, sizes):
    shape = dict(zip(AXES, sizes, strict=True))
    grid = RankGrid(shape, order=order)
    generator = parallel_state.RankGenerator(ep=1, order="-".join(order), **shape)
    assert grid.world_size == generator.world_size
    for token in TOKENS:
        groups = [list(group) for group in grid.groups(*token)]
        assert groups == generator.get_ranks("-".join(token)), token
        assert all(len(group) == grid.size(*token) for group in groups)


@pytest.mark.parametrize("order", [None, ("ring", "tp", "ulysses"), ("pp", "tp", "ring", "dp")])
def test_coords_and_rank_are_inverse(order):
    sizes = {"tp": 2, "ring": 3}
    grid = RankGrid(sizes) if order is None else RankGrid(sizes, order=order)
    assert [grid.rank(**grid.coords(rank)) for rank in range(6)] == list(range(6))
    for rank in range(grid.world_size):
        coords = grid.coords(rank)
        assert tuple(coords) == grid.order
        for axis in grid.order:
            group = grid.group_of(rank, axis)
            assert group[coords[axis]] == rank
            assert len(group) == grid.size(axis)
            others = [{**grid.coords(r), axis: 0} for r in group]
            assert others == [others[0]] * len(group)


def test_default_order_puts_tensor_parallelism_innermost_and_the_pipeline_outermost():
    grid = RankGrid({"pp": 2, "ulysses": 2, "ring": 2, "tp": 2, "dp": 2})
    steps = {axis: grid.groups(axis)[0][1] for axis in grid.order}
    assert steps == {"tp": 1, "ulysses": 2, "ring": 4, "dp": 8, "pp": 16}


GRID = RankGrid({"tp": 2, "ring": 3})
HOST = {"ds_sequence_parallel_size": 4, "ulysses_degree": 3}
# Calls that make no sense, and the numbers of the message.
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: HeadSplit(6, 4, 2), "6 query heads cannot share 4"),
    (lambda: HeadSplit(4, 8, 2), "4 query heads cannot share 8"),
    (lambda: HeadSplit(8, 0, 2), "8 query heads cannot share 0"),
    (lambda: HeadSplit(6, 2, 8), "ulysses_degree=8 needs at least 8"),
    (lambda: USPConfig(sp_degree=8, ulysses_degree=3), "4 (ring 2), 2"),
    (lambda: USPConfig(sp_degree=2, ulysses_degree=4), "of 2 (ring 1)"),
    (lambda: USPConfig.from_args(Namespace(**HOST)), "--ulysses-degree 3"),
    (lambda: USPConfig(sp_degree=0), "--ds-sequence-parallel-size 0"),
    (lambda: USPConfig(sp_degree=None), "--ds-sequence-parallel-size None"),
    (lambda: USPConfig(sp_degree=4.0), "--ds-sequence-parallel-size 4.0"),
    (lambda: USPConfig(sp_degree="4"), "--ds-sequence-parallel-size '4'"),
    (lambda: USPConfig(sp_degree=4, ulysses_degree=0), "--ulysses-degree 0"),
    (lambda: USPConfig(sp_degree=4, ulysses_degree=True), "--ulysses-degree True"),
    (lambda: USPConfig(layout="zig"), "'zig'"),
    (lambda: USPConfig(order="ring"), "ulysses-ring, ring-ulysses"),
    (lambda: RankGrid({"tp": 2, "cp": 2}), "missing axis"),
    (lambda: RankGrid({"tp": 2}, order=("tp", "tp")), "each axis once"),
    *(
        (lambda size=size: RankGrid({"tp": size}), f"{{'tp': {size!r}}}")
        for size in (0, -2, 1.5, float("nan"), True, "2")
    ),
    (lambda: GRID.groups("cp"), "'cp'"),
    (lambda: GRID.size("tp", "cp"), "'cp'"),
    (lambda: GRID.coords(6), "rank 6 is outside the grid of 6"),
    (lambda: GRID.coords(-1), "rank -1"),
    (lambda: GRID.rank(ring=3), "ring=3 is outside its axis of 3"),
    (lambda: GRID.rank(cp=1), "'cp'"),
    (lambda: GRID.group_of(6, "tp"), "rank 6"),
]


@pytest.mark.parametrize(("call", "number"), WRONG, ids=range(len(WRONG)))
def test_what_makes_no_sense_is_refused_with_the_number(call, number):
    with pytest.raises(ConfigError, match=re.escape(number)):
        call()


@pytest.mark.parametrize(
    ("sp", "ulysses", "degrees"),
    [(1, None, (1, 1)), (8, None, (8, 1)), (8, 1, (1, 8)), (8, 2, (2, 4)), (6, 3, (3, 2))],
)
def test_the_ring_takes_what_ulysses_leaves(sp, ulysses, degrees):
    config = USPConfig(sp_degree=sp, ulysses_degree=ulysses)
    assert (config.ulysses, config.ring) == degrees


HOSTS: list[tuple[dict[str, Any], USPConfig]] = [
    ({}, USPConfig()),
    ({"hidden_size": 4}, USPConfig()),
    ({"ds_sequence_parallel_size": 8}, USPConfig(sp_degree=8)),
    (
        {"ds_sequence_parallel_size": 8, "ulysses_degree": 4, "usp_layout": "striped"},
        USPConfig(sp_degree=8, ulysses_degree=4, layout="striped"),
    ),
    (
        {"usp_order": "ring-ulysses", "usp_kernel": "eager", "ulysses_degree": None},
        USPConfig(order="ring-ulysses", kernel="eager"),
    ),
]


@pytest.mark.parametrize(("given", "expected"), HOSTS)
def test_a_hosts_arguments(given, expected):
    assert USPConfig.from_args(Namespace(**given)) == expected


def test_ranks_of_torchrun(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert torchrun_env() == TorchrunEnv(0, 1, 0, 1)
    for name, value in zip(names, ("5", "8", "1", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert torchrun_env() == TorchrunEnv(5, 8, 1, 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(ConfigError, match="no LOCAL_WORLD_SIZE in its environment"):
        torchrun_env()
