"""The process groups of one ulysses x ring grid, as a value that is passed in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_usp.comm.ledger import CommLedger
from ds_usp.errors import ConfigError, MeshError
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, ORDERS, TokenLayout
from ds_usp.geometry.ranks import RankGrid

_TEXT_BYTES = 2048


@dataclass(frozen=True, eq=False)
class SequenceMesh:
    """The ranks that share one sequence, seen from one of them.

    Frozen and free of globals: as many meshes as you like live side by side in one process.
    Build it with :meth:`from_group`, :meth:`build` or :meth:`single`, at start, on every rank of
    the group; it makes communicators of its own for the ring.

    Attributes:
        ulysses_degree, ring_degree: sizes of the two axes.
        rank: this process in the sequence-parallel group.
        ulysses_rank, ring_rank: this process along the two axes.
        order: which axis varies fastest over the ranks of the group.
        sp_group, ulysses_group: process groups; None where one process needs none.
        kv_group, dkv_group: two communicators over the same ring ranks, so that gradients and
            keys/values do not queue behind each other.
        control_group: where ranks compare each call before it moves anything, on the host.
        ledger: what this rank has sent through the mesh.
    """

    ulysses_degree: int
    ring_degree: int
    rank: int
    ulysses_rank: int = 0
    ring_rank: int = 0
    order: str = DEFAULT_SP_ORDER
    sp_group: dist.ProcessGroup | None = None
    ulysses_group: dist.ProcessGroup | None = None
    kv_group: dist.ProcessGroup | None = None
    dkv_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    ledger: CommLedger = field(default_factory=CommLedger)

    @classmethod
    def single(cls) -> SequenceMesh:
        """One process that holds the whole sequence; torch.distributed need not run."""
        return cls(ulysses_degree=1, ring_degree=1, rank=0)

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        ulysses_degree: int | None = None,
        order: str = DEFAULT_SP_ORDER,
    ) -> SequenceMesh:
        """Lay a ulysses x ring grid over an existing sequence-parallel group.

        Collective over the group: every rank of it calls this with the same arguments.

        Args:
            group: the sequence-parallel group; None is the default group.
            ulysses_degree: ranks that exchange heads; the ring takes the rest. None: all.
            order: ``ulysses-ring`` puts Ulysses ranks next to each other (the fastest links),
                ``ring-ulysses`` the ring.

        Raises:
            MeshError: torch.distributed does not run, this rank is not in the group, or the ranks
                of the group ask for different grids (all of them raise).
            ConfigError: a degree that does not divide the group, or an unknown order.
        """
        if not dist.is_initialized():
            raise MeshError(
                "torch.distributed is not initialized: call torch.distributed.init_process_group "
                "first, or use SequenceMesh.single() for one process"
            )
        if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
            raise MeshError(
                f"global rank {dist.get_rank()} is not in the sequence-parallel group it was "
                "given. Pass each rank the group that holds it."
            )
        whole = cast(dist.ProcessGroup, group or dist.group.WORLD)
        size = dist.get_world_size(whole)
        ulysses = size if ulysses_degree is None else ulysses_degree
        # Before any group is made: making it with ranks that see another grid would not end.
        agree(whole, f"ulysses_degree {ulysses}, {order}", _refusal(size, ulysses, order))
        _even_out_group_counts(whole)
        return cls._over(whole, ulysses, size // ulysses, order)

    @classmethod
    def shared(
        cls, group: dist.ProcessGroup | None, ulysses_degree: int | None, order: str
    ) -> SequenceMesh:
        """:meth:`from_group`, but one mesh for all equal calls: the layers of a model share it."""
        return _shared_mesh(group or dist.group.WORLD, ulysses_degree, order)

    @classmethod
    def build(cls, grid: RankGrid) -> SequenceMesh:
        """The mesh of this process in a grid that has axes ``ulysses`` and ``ring``.

        Collective over each sequence-parallel group of the grid.

        Raises:
            ConfigError: the grid is not as large as the world.
        """
        if not dist.is_initialized() or dist.get_world_size() != grid.world_size:
            have = dist.get_world_size() if dist.is_initialized() else 0
            raise ConfigError(f"the grid has {grid.world_size} ranks, the world has {have}")
        order = "-".join(axis for axis in grid.order if axis in ("ulysses", "ring"))
        ranks = grid.group_of(dist.get_rank(), "ulysses", "ring")
        _even_out_group_counts(cast(dist.ProcessGroup, dist.group.WORLD))
        group = dist.new_group(list(ranks), use_local_synchronization=True, sort_ranks=False)
        return cls.from_group(group, grid.size("ulysses"), order)

    @classmethod
    def _over(cls, group: dist.ProcessGroup, ulysses: int, ring: int, order: str) -> SequenceMesh:
        ranks = dist.get_process_group_ranks(group)
        rank = dist.get_rank(group)
        grid = RankGrid({"ulysses": ulysses, "ring": ring}, order=order.split("-"))
        coords = grid.coords(rank)
        peers = {
            axis: [ranks[i] for i in grid.group_of(rank, axis)] for axis in ("ulysses", "ring")
        }
        whole_is_ulysses = ring == 1 and ulysses > 1  # no group of its own needed
        ulysses_group = group if whole_is_ulysses else _subgroup(group, peers["ulysses"])
        return cls(
            ulysses_degree=ulysses,
            ring_degree=ring,
            rank=rank,
            ulysses_rank=coords["ulysses"],
            ring_rank=coords["ring"],
            order=order,
            sp_group=group,
            ulysses_group=ulysses_group,
            kv_group=_subgroup(group, peers["ring"]),
            dkv_group=_subgroup(group, peers["ring"]),
            control_group=_control_group(group, ranks),
        )

    @property
    def sp_degree(self) -> int:
        """Ranks that share the sequence."""
        return self.ulysses_degree * self.ring_degree

    @property
    def ring_group(self) -> dist.ProcessGroup | None:
        """The ranks of this process's ring."""
        return self.kv_group

    def layout(self, kind: str, seq_len: int) -> TokenLayout:
        """The token layout of that kind that fits this mesh."""
        return TokenLayout(kind, seq_len, self.ulysses_degree, self.ring_degree, self.order)

    def agree(self, text: str, error: Exception | None = None) -> None:
        """Check that every rank of the mesh says the same; collective over it, on the host.

        See :func:`agree`.
        """
        agree(self.control_group, text, error)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.sp_degree}: ulysses {self.ulysses_rank} of "
            f"{self.ulysses_degree}, ring {self.ring_rank} of {self.ring_degree}"
        )


def _refusal(size: int, ulysses: object, order: str) -> ConfigError | None:
    """Why no grid of this ``ulysses`` degree lies over ``size`` ranks; None if one does."""
    if isinstance(ulysses, bool) or not isinstance(ulysses, int) or ulysses < 1:
        return ConfigError(f"ulysses_degree={ulysses!r} must be a whole number of 1 or more")
    if size % ulysses:
        fits = ", ".join(str(u) for u in range(1, size + 1) if size % u == 0)
        return ConfigError(
            f"ulysses_degree={ulysses} does not divide the {size} ranks of the "
            f"sequence-parallel group. Use one of {fits}."
        )
    if order not in ORDERS:
        return ConfigError(f"unknown rank order {order!r}; there are {', '.join(ORDERS)}")
    return None


def agree(group: dist.ProcessGroup | None, text: str, error: Exception | None = None) -> None:
    """Check that every rank of a group says the same; collective over it.

    Args:
        group: the ranks; None is this process alone.
        text: what this rank is about to do.
        error: what this rank already knows to be wrong; all ranks then fail with it.

    Raises:
        MeshError: the ranks differ; the message shows each rank's text. On every rank.
        Exception: ``error`` itself, on the rank that passed it.
    """
    said = f"error: {error}" if error else text
    if group is not None:
        digests = _all_gather(hashlib.sha256(said.encode()).digest(), group)
        if len(set(digests)) > 1:
            texts = _all_gather(_clipped(said).ljust(_TEXT_BYTES, b"\0"), group)
            if error is None:
                said_by = (each.rstrip(b"\0").decode(errors="replace") for each in texts)
                table = "\n".join(f"  rank {rank}: {each}" for rank, each in enumerate(said_by))
                raise MeshError(f"the ranks of the sequence-parallel group disagree:\n{table}")
    if error is not None:
        raise error


def _clipped(text: str) -> bytes:
    data = text.encode()
    if len(data) <= _TEXT_BYTES:
        return data
    digest = f"... (sha256 {hashlib.sha256(data).hexdigest()[:16]})".encode()
    return data[: _TEXT_BYTES - len(digest)] + digest


def _all_gather(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device(group))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [bytes(row.tolist()) for row in torch.stack(everyone).cpu()]


def _device(group: dist.ProcessGroup) -> torch.device:
    """The device whose tensors the group's backend sends; the CPU if it can."""
    if "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise MeshError(f"backend {dist.get_backend(group)} needs an accelerator, there is none")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _subgroup(
    parent: dist.ProcessGroup, ranks: list[int], backend: str | None = None
) -> dist.ProcessGroup | None:
    """A communicator of its own over some ranks of a group, with its backend and timeout."""
    if len(ranks) == 1:
        return None
    # Only members call: the ranks of other sequence-parallel groups need not take part.
    return dist.new_group(
        ranks,
        timeout=parent._get_backend(_device(parent)).options._timeout,
        backend=backend or dist.get_backend(parent),
        use_local_synchronization=True,
        sort_ranks=False,  # ranks keep their places in the parent's order
    )


def _control_group(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup | None:
    """Where ranks compare what they are about to do: on the host, so that no stream waits."""
    if dist.get_backend(group) == "gloo":
        return group
    return _subgroup(group, ranks, backend="gloo")


def _even_out_group_counts(group: dist.ProcessGroup) -> None:
    """Let all ranks have made as many groups as the one that has made most.

    torch names a group that only its members make after the number of groups that a process
    has, so ranks with other numbers would wait for each other under other names.
    """
    count = len(c10d._world.pg_names)
    counts = [int.from_bytes(each, "big") for each in _all_gather(count.to_bytes(8, "big"), group)]
    for _ in range(max(counts) - count):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


@lru_cache(maxsize=64)
def _shared_mesh(group: dist.ProcessGroup, ulysses_degree: int | None, order: str) -> SequenceMesh:
    return SequenceMesh.from_group(group, ulysses_degree, order)
