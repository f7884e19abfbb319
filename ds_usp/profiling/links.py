"""Times of collectives, for groups of every size inside a node and across nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist

from ds_usp.comm.process_groups import all_gather_shards, reduce_scatter_shards
from ds_usp.geometry.ranks import RankGrid
from ds_usp.planner.hardware import MeasuredExchange
from ds_usp.profiling.problem_sizes import ProblemSizes
from ds_usp.profiling.step_timer import Step, StepTimer

Group = dist.ProcessGroup


def _buffer(timer: StepTimer, sizes: ProblemSizes, sent_bytes: int, ranks: int) -> torch.Tensor:
    """Zeros of about so many bytes, a multiple of the ranks in elements."""
    elements = max(1, sent_bytes // sizes.dtype.itemsize // ranks) * ranks
    return torch.zeros(elements, dtype=sizes.dtype, device=timer.device)


def _all_to_all(timer: StepTimer, sizes: ProblemSizes, group: Group, sent: int) -> Step:
    """A step in which each rank sends ``sent`` bytes to the others together."""
    ranks = dist.get_world_size(group)
    x = _buffer(timer, sizes, sent * ranks // (ranks - 1), ranks)
    y = torch.empty_like(x)
    return lambda: dist.all_to_all_single(y, x, group=group)


def _all_gather(timer: StepTimer, sizes: ProblemSizes, group: Group, sent: int) -> Step:
    """A step in which each rank sends ``sent`` bytes around the ring of an all-gather."""
    ranks = dist.get_world_size(group)
    full = _buffer(timer, sizes, sent * ranks // (ranks - 1), ranks)
    shard = full.new_zeros(full.numel() // ranks)
    return lambda: all_gather_shards(full, shard, group)


def _reduce_scatter(timer: StepTimer, sizes: ProblemSizes, group: Group, sent: int) -> Step:
    """A step in which each rank sends ``sent`` bytes around the ring of a reduce-scatter."""
    ranks = dist.get_world_size(group)
    full = _buffer(timer, sizes, sent * ranks // (ranks - 1), ranks)
    shard = full.new_zeros(full.numel() // ranks)
    return lambda: reduce_scatter_shards(shard, full, group)


def _all_reduce(timer: StepTimer, sizes: ProblemSizes, group: Group, sent: int) -> Step:
    ranks = dist.get_world_size(group)
    x = _buffer(timer, sizes, sent * ranks // (ranks - 1) // 2, ranks)
    return lambda: dist.all_reduce(x, group=group)


def _ring_shift(timer: StepTimer, sizes: ProblemSizes, group: Group, sent: int) -> Step:
    """A step that sends ``sent`` bytes to the group's next rank and receives as many."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    x = _buffer(timer, sizes, sent, 1)
    y = torch.empty_like(x)
    next_rank, previous_rank = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]

    def step() -> None:
        pair = [
            dist.P2POp(dist.isend, x, next_rank, group),
            dist.P2POp(dist.irecv, y, previous_rank, group),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return step


COLLECTIVES: Mapping[str, Callable[[StepTimer, ProblemSizes, Group, int], Step]] = MappingProxyType(
    {
        "all_to_all": _all_to_all,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_reduce": _all_reduce,
        "p2p": _ring_shift,
    }
)


def intra_node_groups(size: int, world: int) -> Group:
    """This rank's group of so many contiguous ranks; collective over all ranks."""
    return _groups_along(RankGrid({"ulysses": size, "dp": world // size}), "ulysses")


def inter_node_pairs(world: int, gpus_per_node: int) -> Group:
    """This rank's group of the ranks with its local rank on the other nodes."""
    return _groups_along(RankGrid({"ulysses": gpus_per_node, "dp": world // gpus_per_node}), "dp")


def _groups_along(grid: RankGrid, axis: str) -> Group:
    """This rank's group on a grid's axis; collective, as every rank must make every group."""
    own_group = None
    for ranks in grid.groups(axis):
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own_group = group
    return own_group  # type: ignore[return-value]


def exchanges(timer: StepTimer, sizes: ProblemSizes, group: Group) -> Iterator[MeasuredExchange]:
    """Every collective and size over a group, while all other groups do the same."""
    ranks = dist.get_world_size(group)
    for name, build in COLLECTIVES.items():
        for sent in sizes.exchange_bytes:
            step = build(timer, sizes, group, sent)
            yield MeasuredExchange(name, ranks, sent, timer.seconds(step, sizes.max_s / 4))
