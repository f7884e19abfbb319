"""The report of exposed communication on two gloo ranks: what it counts, and what it refuses."""

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import RankContext

from ds_usp import ConfigError
from ds_usp.profiling import exposed
from ds_usp.profiling.exposed_classify import ALL_TO_ALL, GRADIENTS, OTHER, PARAMETERS

ITEMS = 2048  # fp32: 8 KiB
Counts = dict[str, tuple[int, int | None]]


def counted(step: Callable[[], object]) -> Counts:
    """Calls and bytes of this rank by kind."""
    with exposed.report(print_line=[].append) as report:
        step()
    return {
        kind: (row.calls, row.sent_bytes)
        for kind, row in report.ranks[dist.get_rank()].kinds.items()
    }


def count_calls(ctx: RankContext) -> dict[str, Counts]:
    """Each step on its own."""
    x = torch.ones(ITEMS)
    y = torch.ones(600, dtype=torch.int32)
    first = ctx.rank == 0
    parts = [x.clone(), x.clone()] if first else None

    def uneven() -> None:  # rank 0 keeps all but 24 rows, rank 1 sends all
        sends, takes = ([1000, 24], [1000, 1024]) if first else ([1024, 0], [24, 0])
        dist.all_to_all_single(torch.empty(sum(takes), 2), x.view(1024, 2), takes, sends)

    def on_a_thread() -> None:
        thread = threading.Thread(target=lambda: dist.all_reduce(x.clone()))
        thread.start()
        thread.join()

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))

    def reduced_by_ddp() -> None:
        model(torch.ones(2, 64)).sum().backward()
        dist.all_to_all_single(torch.empty_like(x), x)

    return {
        "uneven": counted(uneven),
        "scatter": counted(lambda: dist.scatter(x.clone(), parts, src=0)),
        "gather": counted(lambda: dist.gather(x, parts, dst=0)),
        "thread": counted(on_a_thread),
        "C++": counted(reduced_by_ddp),
        "parts": counted(lambda: dist.all_gather_into_tensor(torch.empty(1200), x[:600].clone())),
        "integers": counted(lambda: dist.all_gather_into_tensor(y.repeat(2), y)),
    }


def test_what_each_rank_sends_is_counted(pool):
    size = 4 * ITEMS
    first, second = pool.run(count_calls, 2)
    assert (first["uneven"], second["uneven"]) == ({ALL_TO_ALL: (1, 192)}, {ALL_TO_ALL: (1, size)})
    for name, sent in (("scatter", (size, 0)), ("gather", (0, size))):
        assert [first[name], second[name]] == [{PARAMETERS: (1, bytes_)} for bytes_ in sent]
    assert first["thread"] == second["thread"] == {GRADIENTS: (1, size)}
    # Two parts of 2,400 bytes are 4,800 of parameters; integers are flags.
    assert (first["parts"], first["integers"]) == ({PARAMETERS: (1, 2400)}, {OTHER: (1, 2400)})
    for counts in (first["C++"], second["C++"]):  # the reducer's bytes are not in the trace
        assert counts == {ALL_TO_ALL: (1, size // 2), GRADIENTS: (1, None)}


def refusals(ctx: RankContext) -> list[str]:
    """The error of this rank where only rank 1 cannot be traced."""
    texts = []
    for number in range(2):
        broken = ctx.rank == 1
        role = "dp" if broken and number else "data"
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with (
            profiler if broken and not number else contextlib.nullcontext(),
            pytest.raises(ConfigError) as raised,
            exposed.report(groups={role: None}),
        ):
            pass
        texts.append(str(raised.value))
    return texts


def test_every_rank_refuses_what_one_cannot_trace(pool):
    first, second = pool.run(refusals, 2)
    assert first == second
    assert first[0].startswith("rank 1: a profiler records already")
    assert first[1].startswith("rank 1: a group's role must be one of tensor")
