"""Which data-parallel replica this rank belongs to, where sequence meshes fill the world."""

from __future__ import annotations

import struct
from typing import NamedTuple, cast

import torch.distributed as dist

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.errors import ConfigError


class DataParallelRanks(NamedTuple):
    """This rank along the data-parallel axis.

    Attributes:
        rank: index of this rank's replica: what ``DistributedSampler(rank=)`` takes.
        size: number of replicas: what ``DistributedSampler(num_replicas=)`` takes.
        ranks: global ranks of all replicas that hold the same part of their sequences.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]


def data_parallel_ranks(
    mesh: SequenceMesh, group: dist.ProcessGroup | None = None
) -> DataParallelRanks:
    """The data-parallel axis beside ``mesh``. Collective over ``group``.

    All ranks of a mesh are one replica: they read the same samples.

    Args:
        mesh: this rank's sequence mesh.
        group: the ranks that train together, a whole number of meshes; None: the default group.

    Raises:
        ConfigError: meshes of different sizes in the group; on every rank.
    """
    if not dist.is_initialized():
        return DataParallelRanks(0, 1, (0,))
    everyone = cast(dist.ProcessGroup, group or dist.group.WORLD)
    here = dist.get_rank()
    members = [here] if mesh.sp_group is None else dist.get_process_group_ranks(mesh.sp_group)
    said = struct.pack("qqq", members[0], mesh.rank, mesh.sp_degree)
    places = [struct.unpack("qqq", data) for data in all_gather_bytes(said, everyone)]
    sizes = sorted({size for _, _, size in places})
    firsts = sorted({first for first, _, _ in places})
    if len(sizes) > 1 or len(firsts) * sizes[0] != len(places):
        raise ConfigError(
            f"the {len(places)} ranks of the group hold {len(firsts)} sequence meshes of "
            f"{' and '.join(map(str, sizes))} ranks: every rank must be in one mesh, and all "
            "meshes must have one size. Build them with SequenceMesh.build(RankGrid(...))"
        )
    global_ranks = dist.get_process_group_ranks(everyone)
    peers = (global_ranks[index] for index, (_, rank, _) in enumerate(places) if rank == mesh.rank)
    return DataParallelRanks(firsts.index(members[0]), len(firsts), tuple(peers))
