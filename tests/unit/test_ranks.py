"""RankGrid against megatron-core's own rank generator, for every order of the axes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations, permutations
from typing import Any

import pytest
from megatron.core import parallel_state

from ds_usp import ConfigError, RankGrid

AXES = ("tp", "cp", "dp", "pp")
SIZES = [(1, 1, 1, 1), (2, 2, 2, 2), (4, 2, 1, 3), (2, 3, 4, 1), (1, 4, 3, 2), (3, 1, 2, 5)]
TOKENS = [t for n in range(1, 5) for t in combinations(AXES, n)]
# (tp, ulysses, ring, dp, pp)
HIERARCHICAL = [(2, 2, 2, 1, 1), (1, 4, 2, 2, 1), (2, 2, 4, 1, 2), (2, 3, 2, 2, 2), (1, 1, 4, 2, 2)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("order", list(permutations(AXES)), ids="-".join)
def test_groups_are_megatrons(order: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    shape = dict(zip(AXES, sizes, strict=True))
    grid = RankGrid(shape, order=order)
    generator = parallel_state.RankGenerator(ep=1, order="-".join(order), **shape)
    assert grid.world_size == generator.world_size
    for token in TOKENS:
        groups = [list(group) for group in grid.groups(*token)]
        assert groups == generator.get_ranks("-".join(token)), token
        assert all(len(group) == grid.size(*token) for group in groups)


@pytest.mark.parametrize("shape", HIERARCHICAL, ids=str)
def test_ulysses_and_ring_are_megatrons_hierarchical_context_parallel_groups(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = RankGrid(dict(zip(("tp", "ulysses", "ring", "dp", "pp"), shape, strict=True)))
    made: list[list[int]] = []
    monkeypatch.setattr(parallel_state, "create_group", lambda ranks, **_: made.append(ranks))
    tp, ulysses, ring, dp, pp = shape
    generator = parallel_state.RankGenerator(
        tp=tp, ep=1, dp=dp, pp=pp, cp=ulysses * ring, order="tp-cp-ep-dp-pp"
    )
    assert [list(group) for group in grid.groups("ulysses", "ring")] == generator.get_ranks("cp")
    for ranks in generator.get_ranks("cp"):
        parallel_state.create_hierarchical_groups(ranks[0], ranks, [ulysses, ring])
    # Level by level within each context-parallel group: first the Ulysses groups, then the rings.
    ours = [grid.groups("ulysses"), grid.groups("ring")]
    expected = [
        [list(group) for group in level if group[0] in ranks]
        for ranks in generator.get_ranks("cp")
        for level in ours
    ]
    assert made == list(chain.from_iterable(expected))


@pytest.mark.parametrize("order", [None, ("ring", "tp", "ulysses"), ("pp", "tp", "ring", "dp")])
def test_coords_and_rank_are_inverse(order: tuple[str, ...] | None) -> None:
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


def test_default_order_puts_tensor_parallelism_innermost_and_the_pipeline_outermost() -> None:
    grid = RankGrid({"pp": 2, "ulysses": 2, "ring": 2, "tp": 2, "dp": 2})
    steps = {axis: grid.groups(axis)[0][1] for axis in grid.order}
    assert steps == {"tp": 1, "ulysses": 2, "ring": 4, "dp": 8, "pp": 16}


def test_a_grid_is_a_value() -> None:
    grid = RankGrid({"tp": 2})
    assert grid == RankGrid({"tp": 2, "dp": 1}) and hash(grid) == hash(RankGrid({"tp": 2}))
    assert grid != RankGrid({"dp": 2})
    with pytest.raises(AttributeError):
        grid.order = ("dp",)  # type: ignore[misc]


GRID = RankGrid({"tp": 2, "ring": 3})
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown axis": (lambda: RankGrid({"tp": 2, "cp": 2}), "Add the missing axis"),
    "repeated axis": (lambda: RankGrid({"tp": 2}, order=("tp", "tp")), "name each axis once"),
    "size 0": (lambda: RankGrid({"tp": 0}), "{'tp': 0}"),
    "negative size": (lambda: RankGrid({"tp": -2}), "{'tp': -2}"),
    "broken size": (lambda: RankGrid({"tp": 1.5}), "{'tp': 1.5}"),  # type: ignore[dict-item]
    "size NaN": (lambda: RankGrid({"tp": float("nan")}), "{'tp': nan}"),  # type: ignore[dict-item]
    "size True": (lambda: RankGrid({"tp": True}), "{'tp': True}"),
    "size as text": (lambda: RankGrid({"tp": "2"}), "{'tp': '2'}"),  # type: ignore[dict-item]
    "groups over nothing known": (lambda: GRID.groups("cp"), "no axis 'cp'"),
    "size over nothing known": (lambda: GRID.size("tp", "cp"), "no axis 'cp'"),
    "rank beyond the grid": (lambda: GRID.coords(6), "rank 6 is outside the grid of 6 ranks"),
    "negative rank": (lambda: GRID.coords(-1), "rank -1 is outside"),
    "coordinate beyond its axis": (lambda: GRID.rank(ring=3), "ring=3 is outside its axis of 3"),
    "coordinate of no axis": (lambda: GRID.rank(cp=1), "no axis 'cp'"),
    "group of a rank beyond": (lambda: GRID.group_of(6, "tp"), "rank 6 is outside"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_makes_no_sense_is_refused_with_the_number(wrong: str) -> None:
    call, message = WRONG[wrong]
    with pytest.raises(ConfigError) as caught:
        call()
    assert message in str(caught.value)
