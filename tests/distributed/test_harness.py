"""The harness: failures that show, stuck ranks that end, and then the next case."""

import os
import sys
import time
from pathlib import Path

import harness
import pytest
import torch.distributed as dist
from harness import RankContext, RankError, RankTimeoutError

TESTS = Path(harness.__file__).parent


def raise_on(ctx: RankContext, ranks: list[int]) -> int:
    if ctx.rank in ranks:
        raise KeyError(f"key {ctx.rank}")
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


def imported(ctx: RankContext) -> set[str]:
    return {*sys.modules}


def test_the_server_has_imported_our_modules(pool):
    """It leaves out in silence what does not import, and then each rank pays for it."""
    ours = {name for name in harness.PRELOAD if any(TESTS.rglob(f"{name}.py"))}
    (have,) = pool.run(imported, 1)
    assert ours >= {"cases", "without_garbage"} and ours <= have, ours - have


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
