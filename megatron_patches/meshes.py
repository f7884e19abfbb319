"""The meshes of a host: one for each sequence-parallel group, whatever number of layers asks."""

from __future__ import annotations

import torch.distributed as dist

import ds_usp


class Meshes:
    """Makes a mesh when its group is first asked for, and gives the same one ever after.

    A mesh has communicators of its own, so a model must not make one for each layer.
    """

    def __init__(self) -> None:
        self._of: dict[dist.ProcessGroup | None, ds_usp.SequenceMesh] = {}

    def over(
        self, group: dist.ProcessGroup | None, ulysses_degree: int | None
    ) -> ds_usp.SequenceMesh:
        """The mesh over a group. The first call for each group is collective over it.

        Args:
            group: the sequence-parallel group; None is the default group.
            ulysses_degree: for the first call; None: all ranks of the group.

        Raises:
            ConfigError: a degree that does not divide the group, on every rank of it.
            MeshError: ranks that ask for different degrees, on every rank of the group.
        """
        if group not in self._of:
            self._of[group] = ds_usp.SequenceMesh.from_group(group, ulysses_degree)
        return self._of[group]
