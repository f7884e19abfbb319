"""The process groups of one ulysses x ring grid, as a value that is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import cast

import torch
import torch.distributed as dist

from ds_usp.comm.ledger import CommLedger
from ds_usp.errors import ConfigError, MeshError
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, ORDERS, TokenLayout
from ds_usp.geometry.ranks import RankGrid

_AGREE_BYTES = 1024


@dataclass(frozen=True, eq=False)
class SequenceMesh:
    """The ranks that share one sequence, seen from one of them.

    Frozen and free of globals: as many meshes as you like live side by side in one process.
    Build it with :meth:`from_group`, :meth:`build` or :meth:`single`, at start, on every rank of
    the group; it makes communicators of its own for the ring.

    Attributes:
        ulysses_degree, ring_degree: sizes of the two axes.
        rank: this process in the sequence-parallel group.
        order: which axis varies fastest over the ranks of the group.
        sp_group, ulysses_group: process groups; None where one process needs none.
        kv_group, dkv_group: two communicators over the same ring ranks, so that gradients and
            keys/values do not queue behind each other.
        ledger: what this rank has sent through the mesh.
    """

    ulysses_degree: int
    ring_degree: int
    rank: int
    order: str = DEFAULT_SP_ORDER
    sp_group: dist.ProcessGroup | None = None
    ulysses_group: dist.ProcessGroup | None = None
    kv_group: dist.ProcessGroup | None = None
    dkv_group: dist.ProcessGroup | None = None
    ledger: CommLedger = field(default_factory=CommLedger)
    _agreed: set[str] = field(default_factory=set, repr=False)

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
        flat = cls(1, size, dist.get_rank(whole), sp_group=whole)
        flat.agree(f"ulysses_degree {ulysses}, {order}", _refusal(size, ulysses, order))
        return cls._over(whole, ulysses, size // ulysses, order)

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
        return cls.from_group(_new_group(ranks), grid.size("ulysses"), order)

    @classmethod
    def _over(cls, group: dist.ProcessGroup, ulysses: int, ring: int, order: str) -> SequenceMesh:
        ranks = dist.get_process_group_ranks(group)
        rank = dist.get_rank(group)
        axes = order.split("-")
        grid = RankGrid({"ulysses": ulysses, "ring": ring}, order=axes)
        peers = {
            axis: [ranks[i] for i in grid.group_of(rank, axis)] for axis in ("ulysses", "ring")
        }
        has_ring = ring > 1
        return cls(
            ulysses_degree=ulysses,
            ring_degree=ring,
            rank=rank,
            order=order,
            sp_group=group,
            ulysses_group=_new_group(peers["ulysses"]) if has_ring and ulysses > 1 else group,
            kv_group=_new_group(peers["ring"]) if has_ring else None,
            dkv_group=_new_group(peers["ring"]) if has_ring else None,
        )

    @property
    def sp_degree(self) -> int:
        """Ranks that share the sequence."""
        return self.ulysses_degree * self.ring_degree

    @property
    def ulysses_rank(self) -> int:
        """This process along the Ulysses axis."""
        return self._coords()["ulysses"]

    @property
    def ring_rank(self) -> int:
        """This process along the ring axis."""
        return self._coords()["ring"]

    @property
    def ring_group(self) -> dist.ProcessGroup | None:
        """The ranks of this process's ring."""
        return self.kv_group

    def layout(self, kind: str, seq_len: int) -> TokenLayout:
        """The token layout of that kind that fits this mesh."""
        return TokenLayout(kind, seq_len, self.ulysses_degree, self.ring_degree, self.order)

    def agree_on_call(self, text: str, error: Exception | None = None) -> None:
        """:meth:`agree`, but only the first time for each text where tensors are on GPUs.

        There an exchange of texts would stall the stream at every call.
        """
        if error is None and text in self._agreed:
            return
        self.agree(text, error)
        if self.sp_group is not None and transport_device(self.sp_group).type == "cuda":
            self._agreed.add(text)

    def agree(self, text: str, error: Exception | None = None) -> None:
        """Check that every rank of the mesh says the same; collective over it.

        Args:
            text: what this rank is about to do.
            error: what this rank already knows to be wrong; all ranks then fail with it.

        Raises:
            MeshError: the ranks differ; the message shows each rank's text. On every rank.
            Exception: ``error`` itself, on the rank that passed it.
        """
        said = f"error: {error}" if error else text
        texts = [said] if self.sp_group is None else _all_gather_text(said, self.sp_group)
        if error:
            raise error
        if len(set(texts)) > 1:
            table = "\n".join(f"  rank {rank}: {each}" for rank, each in enumerate(texts))
            raise MeshError(f"the ranks of the sequence-parallel group disagree:\n{table}")

    def _coords(self) -> dict[str, int]:
        sizes = {"ulysses": self.ulysses_degree, "ring": self.ring_degree}
        return RankGrid(sizes, order=self.order.split("-")).coords(self.rank)

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


def transport_device(group: dist.ProcessGroup) -> torch.device:
    """The kind of device whose tensors the group's backend can send."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _new_group(ranks: list[int] | tuple[int, ...]) -> dist.ProcessGroup:
    # Only members call: the ranks of other sequence-parallel groups need not take part.
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _all_gather_text(text: str, group: dist.ProcessGroup) -> list[str]:
    data = text.encode()
    if len(data) > _AGREE_BYTES:  # what is cut off must not be able to differ unseen
        digest = f"... (sha256 {sha256(data).hexdigest()[:16]})".encode()
        data = data[: _AGREE_BYTES - len(digest)] + digest
    data = data.ljust(_AGREE_BYTES, b"\0")
    device = transport_device(group)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    rows = (bytes(row.tolist()) for row in torch.stack(everyone).cpu())
    return [row.rstrip(b"\0").decode(errors="replace") for row in rows]
