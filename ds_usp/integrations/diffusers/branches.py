"""Branches of classifier-free guidance on ranks of their own: samples are split, not tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import align_group_counters, all_gather_bytes, subgroup
from ds_usp.comm.shards import all_gather_shards
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.integrations.diffusers.plans import Plan


@dataclass(frozen=True, eq=False)
class Branches:
    """The ranks of a mesh in ``degree`` parts, each of which computes as many samples of a batch.

    Attributes:
        degree: how many parts; 1: the mesh itself computes the whole batch.
        index: this rank's part, and the index of its samples among those of the others.
        mesh: the ranks of this part, which share the tokens of its samples.
        group: the ranks that hold the same tokens of other samples, by ``index``; None for one.
    """

    degree: int
    index: int
    mesh: SequenceMesh
    group: dist.ProcessGroup | None = None

    def of_batch(
        self, name: str, arguments: dict[str, Any], plan: Plan, whole: SequenceMesh
    ) -> Branches:
        """These parts of ``whole``, or all of it as one part for a batch that they cannot share: an
        odd one, and one branch by itself, as where guidance has ended or layers are skipped.

        Raises:
            UnsupportedAttentionError: autograd is on, or nothing says how large the batch is.
        """
        if self.degree == 1:
            return self
        if torch.is_grad_enabled():
            raise UnsupportedAttentionError(
                f"{name}: cfg_degree={self.degree} is for sampling, and autograd is on: call it "
                "under torch.no_grad(), or enable it with cfg_degree=1"
            )
        batched = plan.batched
        if batched not in arguments:
            raise UnsupportedAttentionError(
                f"{name}: cfg_degree={self.degree} splits the batch, and {batched} is not given: "
                "name an argument that has it (batched= of the plan), or use cfg_degree=1"
            )
        return Branches(1, 0, whole) if len(arguments[batched]) % self.degree else self

    def split(self, name: str, arguments: dict[str, Any], plan: Plan) -> dict[str, Any]:
        """The arguments for this part's samples, of those that the plan says have a batch.

        Raises:
            UnsupportedAttentionError: an argument that the parts cannot share.
        """
        if self.degree == 1:
            return arguments
        batched = plan.batched
        batch = len(arguments[batched])
        for key in plan.zero_or_not:
            _refuse_some_zero(f"{name}: {key}", arguments.get(key))
        listed = isinstance(arguments[batched], list)
        parts = dict(arguments)
        for key, value in arguments.items():
            if key not in plan.unbatched:
                take = self._samples if listed and isinstance(value, list) else self._part
                parts[key] = take(f"{name}: {key}", value, batch)
        return parts

    def _samples(self, where: str, value: Any, batch: int) -> Any:
        if len(value) != batch:
            of = f"{where} {list(value.shape)}" if isinstance(value, Tensor) else where
            raise UnsupportedAttentionError(
                f"{of} has {len(value)} samples, where the batch has {batch}: "
                f"cfg_degree={self.degree} cannot split it; use cfg_degree=1"
            )
        size = batch // self.degree
        return value[self.index * size : (self.index + 1) * size]

    def _part(self, where: str, value: Any, batch: int) -> Any:
        """This part's samples of an argument; what is one for all samples as it is."""
        if isinstance(value, Mapping):
            return {key: self._part(f"{where}.{key}", x, batch) for key, x in value.items()}
        if isinstance(value, (list, tuple)) and any(isinstance(x, Tensor) for x in value):
            return type(value)(self._part(where, x, batch) for x in value)
        size = batch // self.degree
        if isinstance(value, Tensor):
            if value.ndim == 0 or value.shape[0] == 1:
                return value
            return self._samples(where, value, batch)
        if isinstance(value, (list, tuple)) and len(value) == batch:
            if any(x != value[0] for x in value):  # diffusers reads the first one for all
                raise UnsupportedAttentionError(
                    f"{where} differs between samples of a batch: use cfg_degree=1"
                )
            return value[:size]
        return value

    def join(self, out: Any, whole: SequenceMesh) -> Any:
        """The outputs of all samples, from those of the parts of ``whole``. Collective.

        Raises:
            MeshError: outputs of other shapes or dtypes on some ranks.
        """
        if self.degree == 1:
            return out
        # The gather would hang, or mix up what ranks with other shapes send.
        whole.agree(f"outputs of a part, {', '.join(_shapes(out))}")
        return self._join(out)

    def _join(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            layout = TokenLayout("contiguous", out.shape[0] * self.degree, self.degree, 1)
            group = cast(dist.ProcessGroup, self.group)
            return layout.gather(all_gather_shards(layout, out, 0, group), 0)
        if isinstance(out, Mapping):  # the outputs of diffusers, which are dataclasses too
            return type(out)(**{key: self._join(value) for key, value in out.items()})
        if isinstance(out, list):  # of samples, all of one shape
            return list(self._join(torch.stack(out)).unbind())
        if isinstance(out, tuple):
            return tuple(self._join(value) for value in out)
        return out


def _refuse_some_zero(where: str, value: Tensor | None) -> None:
    # A pass that asks whether all of a batch is zero may answer otherwise for a part of it.
    if value is not None and len(set((value != 0).flatten(1).any(1).tolist())) > 1:
        raise UnsupportedAttentionError(
            f"{where} is zero for some samples and not for others, and the pass asks whether it is "
            "for all: a part of the batch may have another answer. Use cfg_degree=1"
        )


def _shapes(out: Any) -> Iterator[str]:
    if isinstance(out, Tensor):
        yield f"{list(out.shape)} {out.dtype}"
    elif isinstance(out, (Mapping, list, tuple)):
        for value in out.values() if isinstance(out, Mapping) else out:
            yield from _shapes(value)


_MADE: WeakKeyDictionary[SequenceMesh, dict[int, Branches]] = WeakKeyDictionary()


def branches_of(mesh: SequenceMesh, degree: int) -> Branches:
    """The parts of a mesh, each a block of its ranks: of 1 / degree of the ring where the degree
    divides it, else of the Ulysses axis. Collective over the mesh."""
    if degree == 1:
        return Branches(1, 0, mesh)
    ulysses, ring = degrees_of_branch(mesh, degree)
    by_degree = _MADE.setdefault(mesh, {})
    made = by_degree.get(degree)
    # As of meshes, SequenceMesh.from_group: anew if one has failed for good, on any rank.
    usable = made is not None and not made.mesh.consistency.has_failed
    flags = [] if mesh.sp_group is None else all_gather_bytes(bytes([usable]), mesh.sp_group)
    if made is None or b"\0" in flags:
        by_degree[degree] = made = _create(mesh, degree, ulysses, ring)
    return made


def degrees_of_branch(mesh: SequenceMesh, degree: int) -> tuple[int, int]:
    """Ulysses and ring degree of one part; ConfigError for a degree that divides neither axis."""
    ulysses, ring = mesh.ulysses_degree, mesh.ring_degree
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
        raise ConfigError(f"cfg_degree={degree!r} must be a whole number of 1 or more")
    if ring % degree == 0:
        return ulysses, ring // degree
    if ulysses % degree == 0:
        return ulysses // degree, ring
    raise ConfigError(
        f"cfg_degree={degree} divides neither the ring degree {ring} nor the Ulysses degree "
        f"{ulysses} of the mesh, which is of all ranks that share a batch. Use {degree} times as "
        "many ranks as a branch needs"
    )


def _create(mesh: SequenceMesh, degree: int, ulysses: int, ring: int) -> Branches:
    # Collective over the mesh: each rank creates the group of its part, then the one across parts.
    # torch names groups that only their members create by how many the process has, so these
    # numbers are aligned first. A part of one rank has no group; across parts there is always one.
    sp_group = mesh.sp_group
    if sp_group is None:
        raise ConfigError(f"cfg_degree={degree}: the mesh has no process group")
    ranks, size = dist.get_process_group_ranks(sp_group), ulysses * ring
    index, place = divmod(mesh.rank, size)
    align_group_counters(sp_group)
    group = subgroup(sp_group, ranks[index * size : (index + 1) * size])
    across = subgroup(sp_group, ranks[place::size])
    if group is None:
        return Branches(degree, index, SequenceMesh.single(), across)
    return Branches(degree, index, SequenceMesh.from_group(group, ulysses, mesh.order), across)
