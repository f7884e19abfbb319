"""Validation of the sequence-parallel group that a user passes: a process group or a DeviceMesh."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ds_usp.comm.process_groups import align_group_counters, subgroup
from ds_usp.errors import ConfigError, MeshError
from ds_usp.geometry.degrees import Degrees
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, ORDERS

_AXES = ("ring", "ulysses")


def group_of_this_rank(group: object) -> dist.ProcessGroup:
    """The group itself, or the default one for None.

    Raises:
        MeshError: torch.distributed does not run, or this rank is not in the group.
        ConfigError: not a process group.
    """
    if not dist.is_initialized():
        raise MeshError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group "
            "first, or use SequenceMesh.single() for one process"
        )
    if isinstance(group, DeviceMesh):
        raise ConfigError(
            f"{group} was given as the sequence-parallel group, which is a process group. Make "
            'the mesh from it, mesh=SequenceMesh.from_device_mesh(device_mesh["sp"], '
            "ulysses_degree=...), or give one dim's group, device_mesh.get_group(...)"
        )
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and not outside and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"a {type(group).__name__} was given as the sequence-parallel group; it must be a "
            "process group of torch.distributed, or None for the default one. Give a SequenceMesh "
            "as mesh="
        )
    sp_group = cast(dist.ProcessGroup, group or dist.group.WORLD)
    if outside or dist.get_rank(sp_group) < 0:
        raise MeshError(
            f"global rank {dist.get_rank()} is not in the sequence-parallel group it was "
            "given. Pass each rank the group that holds it."
        )
    return sp_group


def grid_refusal(ranks: list[int], ulysses: int, order: str) -> ConfigError | None:
    """Why no grid of this ``ulysses`` degree lies over these ranks; None if one does."""
    if ranks != sorted(ranks):  # torch sorts the ranks of the groups that the mesh makes
        return ConfigError(
            f"the sequence-parallel group has its global ranks in the order {ranks}; make it "
            "with ascending ranks"
        )
    refusal = Degrees(sp=len(ranks), ulysses=ulysses).refusal()
    if refusal:
        return ConfigError(refusal.message)
    if order not in ORDERS:
        return ConfigError(f"unknown rank order {order!r}; there are {', '.join(ORDERS)}")
    return None


def group_of_device_mesh(
    device_mesh: DeviceMesh, ulysses_degree: int | None, order: str | None
) -> tuple[dist.ProcessGroup, int | None, str]:
    """The process group of all ranks of a DeviceMesh, the Ulysses degree and the order of the axes.
    Collective over these ranks where there are two dims.

    Raises:
        ConfigError: dims that are no sequence-parallel ranks, or that contradict the arguments.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise ConfigError(f"{device_mesh!r} must be a DeviceMesh of torch.distributed")
    if device_mesh.ndim == 1:
        return device_mesh.get_group(), ulysses_degree, order or DEFAULT_SP_ORDER
    names = device_mesh.mesh_dim_names or ()
    if device_mesh.ndim != 2 or tuple(sorted(names)) != _AXES:
        raise ConfigError(
            f"a DeviceMesh of {device_mesh.ndim} dims {names}: give the dim whose ranks share a "
            'sequence, device_mesh["sp"], or two dims with the names ulysses and ring'
        )
    degree, mesh_order = device_mesh[("ulysses")].size(), "-".join(reversed(names))
    if ulysses_degree not in (None, degree) or order not in (None, mesh_order):
        raise ConfigError(
            f"ulysses_degree={ulysses_degree}, order={order!r} were given, and the DeviceMesh has "
            f"ulysses {degree} and the order {mesh_order!r}: leave both out"
        )
    ranks = device_mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):  # torch sorts the ranks of a group
        raise ConfigError(
            f"the DeviceMesh has its global ranks in the order {ranks}; make it with ascending "
            "ranks"
        )
    groups = [device_mesh.get_group(name) for name in names]
    for group in groups:  # first along one axis, then along the other: then all ranks are even
        align_group_counters(group)
    sp_group = subgroup(groups[0], ranks) if min(device_mesh.shape) > 1 else None
    longer_axis = groups[0] if device_mesh.shape[0] > 1 else groups[1]
    return sp_group or longer_axis, degree, mesh_order
