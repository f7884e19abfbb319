"""The harness: results by rank, failures that show, stuck ranks that end."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RankContext, RankError, RankTimeoutError, fork_world


class OddError(ValueError):
    """An exception that cannot be rebuilt from its pickle."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def describe(ctx: RankContext, offset: int = 0) -> dict[str, int]:
    return {
        "rank": ctx.rank + offset,
        "world": ctx.world,
        "group": dist.get_world_size(ctx.group),
        "default": dist.get_world_size(),
        "env": int(os.environ["RANK"]) * 100 + int(os.environ["WORLD_SIZE"]),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


def raise_on(ctx: RankContext, ranks: list[int], odd: bool = False) -> int:
    if ctx.rank in ranks:
        raise OddError(ctx.rank, ctx.world) if odd else KeyError(f"key {ctx.rank}")
    return ctx.rank


def wait_for_rank_that_raised(ctx: RankContext, culprit: int) -> None:
    if ctx.rank == culprit:
        raise ValueError("the culprit")
    dist.barrier(ctx.group)


def hang(ctx: RankContext, sleeper: int) -> None:
    if ctx.rank == sleeper:
        time.sleep(3600)
    dist.barrier(ctx.group)


def die(ctx: RankContext, victim: int) -> None:
    if ctx.rank == victim:
        os._exit(7)


def state_of(pid: int) -> str:
    """T: stopped, Z: ended; "" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_answers_in_order(pool, world):
    ranks = pool.run(describe, world, offset=10)
    assert [g["rank"] for g in ranks] == [10 + r for r in range(world)]
    assert [g["env"] for g in ranks] == [100 * r + world for r in range(world)]
    for key in ("world", "group", "default"):
        assert [g[key] for g in ranks] == [world] * world
    assert [g["threads"] for g in ranks] == [1] * world
    assert len({g["pid"] for g in ranks} | {os.getpid()}) == world + 1


@pytest.mark.skipif(sys.platform != "linux", reason="ranks do not rest here")
def test_ranks_rest_between_calls(pool):
    pids = [g["pid"] for g in pool.run(describe, 3)]
    until = time.monotonic() + 10
    while [state_of(pid) for pid in pids] != ["T"] * 3:
        assert time.monotonic() < until, [state_of(pid) for pid in pids]
    assert [g["pid"] for g in pool.run(describe, 3)] == pids


def test_first_traceback_shows_and_the_pool_goes_on(pool):
    with pytest.raises(RankError) as caught:
        pool.run(raise_on, 4, ranks=[2])
    text = str(caught.value)
    assert "rank 2 of 4 raised" in text and "KeyError: 'key 2'" in text
    assert "in raise_on" in text and "rank 3 returned" in text
    assert pool.run(raise_on, 4, ranks=[]) == [0, 1, 2, 3]


def test_ranks_stuck_behind_a_failure_do_not_hide_it(pool, monkeypatch):
    monkeypatch.setattr("harness.GRACE_S", 1.0)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)after rank 1 raised.*ValueError: the culprit"):
        pool.run(wait_for_rank_that_raised, 3, culprit=1)
    assert time.monotonic() - start < 30
    assert pool.run(raise_on, 3, ranks=[]) == [0, 1, 2]


def test_a_case_that_hangs_ends_with_every_stack(pool):
    with pytest.raises(RankTimeoutError) as caught:
        pool.run(hang, 3, sleeper=1, timeout=1.0)
    text = str(caught.value)
    assert "hang: no answer from ranks [0, 1, 2] of 3 within 1 s" in text
    for rank in range(3):
        stack = text.split(f"---- rank {rank} (stuck) ----")[1].split("----")[0]
        assert "test_harness.py" in stack and " in hang" in stack
    assert pool.run(raise_on, 3, ranks=[]) == [0, 1, 2]


def test_a_dead_rank_is_named(pool):
    with pytest.raises(RankError, match=r"rank 1 of 2 raised\nthe process died, exit code 7"):
        pool.run(die, 2, victim=1)
    assert pool.run(raise_on, 2, ranks=[]) == [0, 1]


def test_errors_returns_what_each_rank_raised(pool):
    errors = pool.errors(raise_on, 4, ranks=[0, 3])
    assert [type(e) for e in errors] == [KeyError, type(None), type(None), KeyError]
    errors = pool.errors(raise_on, 2, ranks=[0, 1], odd=True)
    assert [str(e) for e in errors] == ["OddError: 0 and 2", "OddError: 1 and 2"]
    with pytest.raises(RankTimeoutError):
        pool.errors(wait_for_rank_that_raised, 2, culprit=0, timeout=0.5)


def test_fork_world_is_fresh_every_time():
    first, second = fork_world(describe, 2), fork_world(describe, 2)
    assert [g["rank"] for g in first] == [0, 1] and [g["default"] for g in first] == [2, 2]
    assert not {g["pid"] for g in first} & {g["pid"] for g in second}
    with pytest.raises(RankError, match="KeyError: 'key 0'"):
        fork_world(raise_on, 2, ranks=[0])
