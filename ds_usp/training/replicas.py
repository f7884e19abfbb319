"""The data-parallel axis beside sequence meshes: this rank's replica, and its peers."""

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
        ranks: global ranks of all replicas that hold the same shard of their sequences.
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
    world_group = cast(dist.ProcessGroup, group or dist.group.WORLD)
    rank_here = dist.get_rank()
    members = [rank_here] if mesh.sp_group is None else dist.get_process_group_ranks(mesh.sp_group)
    payload = struct.pack("qqq", members[0], mesh.rank, mesh.sp_degree)
    rank_infos = [struct.unpack("qqq", data) for data in all_gather_bytes(payload, world_group)]
    sizes = sorted({size for _, _, size in rank_infos})
    firsts = sorted({first for first, _, _ in rank_infos})
    if len(sizes) > 1 or len(firsts) * sizes[0] != len(rank_infos):
        raise ConfigError(
            f"the {len(rank_infos)} ranks of the group hold {len(firsts)} sequence meshes of "
            f"{' and '.join(map(str, sizes))} ranks: every rank must be in one mesh, and all "
            "meshes must have one size. Build them with SequenceMesh.build(RankGrid(...))"
        )
    global_ranks = dist.get_process_group_ranks(world_group)
    peers = (
        global_ranks[index] for index, (_, rank, _) in enumerate(rank_infos) if rank == mesh.rank
    )
    return DataParallelRanks(firsts.index(members[0]), len(firsts), tuple(peers))
