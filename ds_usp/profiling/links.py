"""What ranks send each other: every collective, for groups of every size inside a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist

from ds_usp.geometry.ranks import RankGrid
from ds_usp.planner.profile_rows import MeasuredExchange
from ds_usp.profiling.problem_sizes import Sizes
from ds_usp.profiling.step_timer import Clock, Step

Group = dist.ProcessGroup


def _buffer(clock: Clock, sizes: Sizes, sent_bytes: int, ranks: int) -> torch.Tensor:
    """As many elements as make a multiple of the ranks."""
    elements = max(1, sent_bytes // sizes.dtype.itemsize // ranks) * ranks
    return torch.zeros(elements, dtype=sizes.dtype, device=clock.device)


def _all_to_all(clock: Clock, sizes: Sizes, group: Group, sent: int) -> Step:
    ranks = dist.get_world_size(group)
    x = _buffer(clock, sizes, sent * ranks // (ranks - 1), ranks)
    y = torch.empty_like(x)
    return lambda: dist.all_to_all_single(y, x, group=group)


def _all_gather(clock: Clock, sizes: Sizes, group: Group, sent: int) -> Step:
    ranks = dist.get_world_size(group)
    whole = _buffer(clock, sizes, sent * ranks // (ranks - 1), ranks)
    part = whole.new_zeros(whole.numel() // ranks)
    return lambda: dist.all_gather_into_tensor(whole, part, group=group)


def _reduce_scatter(clock: Clock, sizes: Sizes, group: Group, sent: int) -> Step:
    ranks = dist.get_world_size(group)
    whole = _buffer(clock, sizes, sent * ranks // (ranks - 1), ranks)
    part = whole.new_zeros(whole.numel() // ranks)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def _all_reduce(clock: Clock, sizes: Sizes, group: Group, sent: int) -> Step:
    ranks = dist.get_world_size(group)
    x = _buffer(clock, sizes, sent * ranks // (ranks - 1) // 2, ranks)
    return lambda: dist.all_reduce(x, group=group)


def _to_the_next(clock: Clock, sizes: Sizes, group: Group, sent: int) -> Step:
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    x = _buffer(clock, sizes, sent, 1)
    y = torch.empty_like(x)
    after, before = ranks[(me + 1) % len(ranks)], ranks[me - 1]

    def step() -> None:
        pair = [
            dist.P2POp(dist.isend, x, after, group),
            dist.P2POp(dist.irecv, y, before, group),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return step


COLLECTIVES: Mapping[str, Callable[[Clock, Sizes, Group, int], Step]] = MappingProxyType(
    {
        "all_to_all": _all_to_all,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_reduce": _all_reduce,
        "p2p": _to_the_next,
    }
)


def neighbours(size: int, world: int) -> Group:
    """This rank's group of so many ranks in a row; collective over all ranks."""
    return _one_of_all(RankGrid({"ulysses": size, "dp": world // size}), "ulysses")


def across(world: int, gpus_per_node: int) -> Group:
    """This rank's group of the ranks that have its place on the other nodes."""
    return _one_of_all(RankGrid({"ulysses": gpus_per_node, "dp": world // gpus_per_node}), "dp")


def _one_of_all(grid: RankGrid, axis: str) -> Group:
    mine = None
    for ranks in grid.groups(axis):
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            mine = group
    return mine  # type: ignore[return-value]


def exchanges(clock: Clock, sizes: Sizes, group: Group) -> Iterator[MeasuredExchange]:
    """Every collective and size over a group, while all groups beside it do the same."""
    ranks = dist.get_world_size(group)
    for name, make in COLLECTIVES.items():
        for sent in sizes.exchange_bytes:
            step = make(clock, sizes, group, sent)
            yield MeasuredExchange(name, ranks, sent, clock.seconds(step, sizes.most_s / 4))
