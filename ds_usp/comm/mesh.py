"""The process groups and communication state of one ulysses x ring grid: programs and enabled
models make it at start, on every rank, and pass it to each call."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Final, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ds_usp._version import __version__
from ds_usp.comm.call_record import Signature
from ds_usp.comm.channel import Channel, CommLedger, P2PChannel
from ds_usp.comm.consistency import ConsistencyChecker, SharedNumbers, check_same
from ds_usp.comm.copy_engine import (
    CopyEngine,
    CopyEngineChannel,
    abort_waits,
    copy_engine_unavailable_reason,
    num_slots,
)
from ds_usp.comm.deepspeed_groups import DeepSpeedCheck
from ds_usp.comm.fused_exchange import FusedExchange
from ds_usp.comm.keywords import explain_keywords
from ds_usp.comm.process_groups import (
    align_group_counters,
    all_gather_bytes,
    new_local_group,
    node_ids,
    subgroup,
    timeout_of,
    ulysses_ranks_share_node,
)
from ds_usp.comm.readings import Readings
from ds_usp.comm.shards import gather_shards
from ds_usp.errors import ConfigError, LayoutError, MeshError
from ds_usp.geometry.degrees import Degrees
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, ORDERS, TokenLayout
from ds_usp.geometry.ranks import RankGrid
from ds_usp.lowlevel import wait_for_native_threads

# Validation of the sequence-parallel group that a user passes: a process group or a DeviceMesh.


_AXES = ("ring", "ulysses")


def resolve_group(group: object) -> dist.ProcessGroup:
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


def grid_refusal(global_ranks: list[int], ulysses: int, order: str) -> ConfigError | None:
    """Why no grid of this ``ulysses`` degree lies over a group's ranks; None if one does. Returned,
    so that the caller can raise it on all of them."""
    if global_ranks != sorted(global_ranks):  # torch sorts those of the groups that the mesh makes
        return ConfigError(
            f"the sequence-parallel group has its global ranks in the order {global_ranks}; make "
            "it with ascending ranks"
        )
    refusal = Degrees(sp=len(global_ranks), ulysses=ulysses).refusal()
    if refusal:
        return ConfigError(refusal.message)
    if order not in ORDERS:
        return ConfigError(f"unknown rank order {order!r}; there are {', '.join(ORDERS)}")
    return None


def group_of_device_mesh(
    device_mesh: DeviceMesh, ulysses_degree: int | None, order: str | None
) -> tuple[dist.ProcessGroup, int | None, str]:
    """The process group of all ranks of a DeviceMesh, the Ulysses degree (None: all ranks) and the
    order of the axes. Collective over these ranks where there are two dims.

    Raises:
        ConfigError: dims that are no sequence-parallel ranks, or that contradict the arguments.
        MeshError: on the other ranks, where only some give arguments that two dims contradict.
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
    # A DeviceMesh names the axis first that varies slowest, an order the one that varies fastest.
    degree, mesh_order = device_mesh["ulysses"].size(), "-".join(reversed(names))
    ranks: list[int] = device_mesh.mesh.flatten().tolist()
    error: ConfigError | MeshError | None = None
    if ulysses_degree not in (None, degree) or order not in (None, mesh_order):
        error = ConfigError(
            f"ulysses_degree={ulysses_degree}, order={order!r} were given, and the DeviceMesh has "
            f"ulysses {degree} and the order {mesh_order!r}: leave both out"
        )
    elif ranks != sorted(ranks):  # torch sorts the ranks of a group
        error = ConfigError(
            f"the DeviceMesh has its global ranks in the order {ranks}; make it with ascending ones"
        )
    groups = [device_mesh.get_group(name) for name in names]
    for group in groups:  # what one rank raises comes along the first axis, then the second to all
        try:
            check_same(group, "from_device_mesh", error)
        except (ConfigError, MeshError) as raised:
            error = raised
    if error is not None:
        raise error
    # As from_device_mesh keeps it: another group over these ranks would stay open.
    open_mesh = _meshes_over(groups[0]).get(groups[1])
    if open_mesh is not None and open_mesh.sp_group is not None:
        return open_mesh.sp_group, degree, mesh_order
    for group in groups:  # first along one axis, then along the other: then all ranks are even
        align_group_counters(group)
    sp_group = subgroup(groups[0], ranks) if min(device_mesh.shape) > 1 else None
    longer_axis = groups[0] if device_mesh.shape[0] > 1 else groups[1]
    return sp_group or longer_axis, degree, mesh_order


# A weak registry of objects by name: ops of torch take tensors and plain values alone.


T = TypeVar("T")
ResultT = TypeVar("ResultT")


class WeakRegistry(Generic[T]):
    """Unique names of live objects. It keeps none alive: a name is free again when its object is
    gone."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()

    def register(self, obj: T, prefix: str) -> str:
        names = (f"{prefix} #{number}" for number in count())
        name = next(name for name in names if name not in self._objects)
        self._objects[name] = obj
        return name

    def objects(self) -> list[T]:
        return list(self._objects.values())

    def lookup(self, name: str) -> T:
        """The object of a name; MeshError if there is none any more."""
        obj = self._objects.get(name)
        if obj is None:
            raise MeshError(
                f"compiled code asks for the mesh {name!r}, which is gone: keep the mesh as long "
                "as what was compiled with it"
            )
        return obj


# Ops of torch, which are the process's, take a mesh by its name, as c10d's take groups.
MESH_REGISTRY: Final[WeakRegistry[SequenceMesh]] = WeakRegistry()
# By process group: a loader and an attention over one group may each have a mesh of their own.
_BATCH_LAYOUTS: Final[WeakKeyDictionary[dist.ProcessGroup, dict[int, TokenLayout]]] = (
    WeakKeyDictionary()
)
# Note [one mesh for equal arguments]
#
# A mesh has communicators of its own, and torch keeps every group until the end of the program:
# with gloo 15 file descriptors and 9 threads a mesh. Destroying them with the mesh is no way out,
# also of one that failed: torch names a group by how many there are, so that a later one would get
# a name that exists; and with NCCL it is collective, while ranks collect garbage when each likes.
# So meshes live as long as the group they were made over, and who asks again gets the one that is
# there. It keeps staging memory of copy engines, which `release` frees.
#
# By the group; within it by the degree and order, or by what a group of all ranks was made for: a
# grid of the world, the second axis of a DeviceMesh. Groups that were destroyed are forgotten.
_MESHES: Final[dict[dist.ProcessGroup, dict[Hashable, SequenceMesh]]] = {}


def _meshes_over(group: dist.ProcessGroup) -> dict[Hashable, SequenceMesh]:
    """The meshes over a group, by key, as a dict to add to. Forgets those of destroyed groups."""
    is_open = c10d._world.pg_map
    for other, meshes in list(_MESHES.items()):
        for key in [key for key, mesh in meshes.items() if mesh.sp_group not in is_open]:
            del meshes[key]
        if not meshes:
            del _MESHES[other]
    return _MESHES.setdefault(group, {})


# Attributes of a mesh that hold process groups, themselves or in what they refer to.
_HOLD_GROUPS: Final = frozenset(
    {"sp_group", "ulysses_group", "kv_group", "dkv_group"}
    | {"consistency", "copy_engines", "plans", "checks"}
)


@atexit.register
def _end_threads_of_gloo() -> None:
    """Join gloo's threads, or wait for them: one that frees a tensor while Python ends aborts the
    process ("terminate called without an active exception"), up to Python 3.13."""
    _MESHES.clear()  # the threads of a destroyed group end when nobody holds it any more
    for mesh in MESH_REGISTRY.objects():
        if mesh.sp_group not in {None, *c10d._world.pg_map}:
            for name in _HOLD_GROUPS & vars(mesh).keys():  # str(mesh) still works
                del mesh.__dict__[name]
    wait_for_native_threads("pt_gloo_runloop", timeout_s=5.0)


def _refuse_forked_process() -> None:
    for mesh in MESH_REGISTRY.objects():
        mesh.consistency.refuse_forked_process()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_refuse_forked_process)


# The two axes, sp = 4 as ulysses 2 x ring 2 in the default order "ulysses-ring":
#
#                   ulysses 0   ulysses 1
#     ring 0        rank 0  ---  rank 1      all-to-all along rows: every rank talks to all others
#                     |            |         of its row, so rows lie on the fastest links
#     ring 1        rank 2  ---  rank 3      KV blocks along columns: one message a step, hidden
#                                            under kernels, so columns may cross nodes
#
# The mesh is passed, never global: two models of one process, or a reference model beside a policy,
# may shard their sequences over different ranks at the same time.
@dataclass(frozen=True, eq=False)
class SequenceMesh:
    """The ranks that share one sequence, seen from one of them.

    Build it with :meth:`from_group`, :meth:`build` or :meth:`single`, at start, on every rank; it
    creates communicators of its own for the ring.
    Equal arguments give the same mesh. It belongs to the thread that first computes with it, until
    that thread ends; a second one needs a mesh over a group of its own, ``dist.new_group(ranks)``.

    Attributes:
        ulysses_degree, ring_degree: sizes of the two axes.
        rank: this process in the sequence-parallel group.
        ulysses_rank, ring_rank: this process along the two axes.
        order: which axis varies fastest over the ranks of the group.
        sp_group, ulysses_group: process groups; None where one process needs none.
        kv_group, dkv_group: two communicators over the ring: gradients do not queue behind KV.
        consistency: compares what the ranks are about to do.
        ledger: calls and bytes that this rank has sent through the mesh.
        copy_engine_unavailable: why copy engines cannot carry its exchanges; None if they can.
        ulysses_in_node: all-to-alls cross no network.
        other_nodes: by group (``ulysses``, ``ring``, ``sp``), its ranks that are not on this node.
        copy_engines: those in use, by kind of traffic; ``fused``: FlashInfer's exchange of heads.
        plans: validated calls over this mesh, by their arguments.
        readings: what layers have read of their batch's positions, lengths and masks.
        checks: what else :meth:`check` compares; each is given the mesh.
        batch_layouts: the layout of the last batch of each length from a data loader; meshes over
            one process group share it.
        module_numbers: of the modules that are made on the mesh, which their calls are named by.
        name: key in :data:`MESH_REGISTRY`, for compiled code. Meshes that ever have the same name
            have equal degrees, order and rank, so code compiled for one is right for the other.
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
    consistency: ConsistencyChecker = field(default_factory=ConsistencyChecker, repr=False)
    ledger: CommLedger = field(default_factory=CommLedger, repr=False)
    copy_engine_unavailable: str | None = "one process has no peer to exchange with"
    ulysses_in_node: bool = True
    other_nodes: Mapping[str, frozenset[int]] = field(default_factory=dict, repr=False)
    copy_engines: dict[str, CopyEngine | FusedExchange] = field(default_factory=dict, repr=False)
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    batch_layouts: dict[int, TokenLayout] = field(default_factory=dict, repr=False)
    readings: Readings = field(default_factory=Readings, init=False, repr=False)
    checks: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    module_numbers: Iterator[int] = field(default_factory=partial(count, 1), init=False, repr=False)
    name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # torch keeps compiled graphs on disk; versions keep old ones out: the last one counts
        # changes of what the ops of ds_usp/attention/custom_ops.py take and return.
        text = f"{self}, {self.order}, ds_usp {__version__}, ops 6"
        object.__setattr__(self, "name", MESH_REGISTRY.register(self, text))

    def __deepcopy__(self, _: dict[int, Any]) -> SequenceMesh:
        """The mesh itself: a copied module, as of an EMA, runs on the same ranks."""
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy by pickle or ``copy.copy`` is another mesh."""
        self.__dict__.update(state)
        self.__post_init__()

    @classmethod
    def single(cls) -> SequenceMesh:
        """One process that holds the whole sequence; torch.distributed need not run."""
        return cls(ulysses_degree=1, ring_degree=1, rank=0)

    @classmethod
    @explain_keywords
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        ulysses_degree: int | None = None,
        order: str = DEFAULT_SP_ORDER,
    ) -> SequenceMesh:
        """Lay a ulysses x ring grid over an existing sequence-parallel group.

        Collective over the group: every rank of it calls this with the same arguments. If they have
        done so before, it is the same mesh, unless that has failed for good.

        Args:
            group: the sequence-parallel group; None is the default group.
            ulysses_degree: ranks that exchange heads; the ring takes the rest. None: all.
            order: ``ulysses-ring`` puts Ulysses ranks next to each other (the fastest links),
                ``ring-ulysses`` the ring.

        Raises:
            MeshError: torch.distributed does not run, this rank is not in the group, or the ranks
                of the group ask for different grids (all of them raise).
            ConfigError: a degree that does not divide the group, or an unknown order; no group.
        """
        sp_group = resolve_group(group)
        size = dist.get_world_size(sp_group)
        ulysses = size if ulysses_degree is None else ulysses_degree
        # Before any group is created: with ranks that see another grid that would hang.
        refusal = grid_refusal(dist.get_process_group_ranks(sp_group), ulysses, order)
        check_same(sp_group, f"ulysses_degree {ulysses}, {order}", refusal)
        meshes, key = _meshes_over(sp_group), (ulysses, order)
        mesh = meshes.get(key)
        usable = mesh is not None and not mesh.consistency.has_failed
        # All ranks must take it: a failure is not noticed by all at once.
        flags = all_gather_bytes(bytes([usable]), sp_group)
        if mesh is None or flags.count(b"\1") < size:
            align_group_counters(sp_group)
            meshes[key] = mesh = cls._from_grid(sp_group, ulysses, size // ulysses, order)
        return mesh

    @classmethod
    def from_device_mesh(
        cls, device_mesh: DeviceMesh, *, ulysses_degree: int | None = None, order: str | None = None
    ) -> SequenceMesh:
        """:meth:`from_group` for what torch's ``init_device_mesh`` made; collective like it.

        Args:
            device_mesh: one dim, the ranks that share a sequence (``mesh["sp"]``), or two dims with
                the names ``ulysses`` and ``ring`` (``mesh["ring", "ulysses"]``), of which the last
                one has its ranks next to each other.
            ulysses_degree, order: as of :meth:`from_group`; of two dims both are known.

        Raises:
            ConfigError: other dims, or a degree or an order that two dims contradict.
        """
        group, degree, order = group_of_device_mesh(device_mesh, ulysses_degree, order)
        mesh = cls.from_group(group, degree, order)
        if device_mesh.ndim == 2:
            outer, inner = map(device_mesh.get_group, device_mesh.mesh_dim_names or ())
            _meshes_over(outer)[inner] = mesh  # where group_of_device_mesh looks for it
        return mesh

    @classmethod
    def shared(
        cls, group: dist.ProcessGroup | None, ulysses_degree: int | None, order: str
    ) -> SequenceMesh:
        """The mesh that this process has for these arguments, which the layers of a model share;
        the first call makes it by :meth:`from_group`, which is collective.

        Raises:
            ConfigError, MeshError: as :meth:`from_group`; MeshError: it has failed for good.
        """
        sp_group = resolve_group(group)
        degree = dist.get_world_size(sp_group) if ulysses_degree is None else ulysses_degree
        mesh = _meshes_over(sp_group).get((degree, order))
        if mesh is None:
            return cls.from_group(group, ulysses_degree, order)
        if mesh.consistency.has_failed:  # which others may not have noticed: they would not come
            raise MeshError(
                f"{mesh} has failed for good; call SequenceMesh.from_group(group, {degree}, "
                f"{order!r}) on every rank of the group for a new one"
            )
        return mesh

    @classmethod
    def build(cls, grid: RankGrid) -> SequenceMesh:
        """The mesh of this process in a grid with axes ``ulysses`` and ``ring``; collective over
        the world.

        Raises:
            ConfigError: the grid is not as large as the world.
            MeshError: torch.distributed does not run.
        """
        world_size = dist.get_world_size(resolve_group(None))
        if world_size != grid.world_size:
            sizes = zip(grid.order, grid.shape, strict=True)
            axes = " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1)
            raise ConfigError(
                f"the grid has {grid.world_size} ranks ({axes or 'no axis above 1'}), the world "
                f"has {world_size}. Start {grid.world_size} ranks, or change the sizes: dp is the "
                "number of replicas"
            )
        order = "-".join(axis for axis in grid.order if axis in ("ulysses", "ring"))
        ranks = grid.group_of(dist.get_rank(), "ulysses", "ring")
        world, key = cast(dist.ProcessGroup, dist.group.WORLD), f"grid {grid}"
        check_same(world, key)
        open_mesh = _meshes_over(world).get(key)
        group = None if open_mesh is None else open_mesh.sp_group
        if group is None:
            align_group_counters(world)
            group = new_local_group(ranks, timeout=timeout_of(world))
        mesh = cls.from_group(group, grid.size("ulysses"), order)
        _meshes_over(world)[key] = mesh
        return mesh

    @classmethod
    def _from_grid(
        cls, group: dist.ProcessGroup, ulysses: int, ring: int, order: str
    ) -> SequenceMesh:
        """Makes the subgroups and decides, the same on all ranks, whether copy engines and a
        shared-memory mailbox are used. Collective over the group, whose counters are aligned."""
        global_ranks = dist.get_process_group_ranks(group)
        rank = dist.get_rank(group)
        grid = RankGrid({"ulysses": ulysses, "ring": ring}, order=order.split("-"))
        coords = grid.coords(rank)
        axes = {"ulysses": ("ulysses",), "ring": ("ring",), "sp": ("ulysses", "ring")}
        members = {name: grid.group_of(rank, *of_axes) for name, of_axes in axes.items()}
        peers = {name: [global_ranks[i] for i in members[name]] for name in members}
        nodes = node_ids(group)
        # In a pure Ulysses mesh the user's group is the Ulysses group: a second communicator over
        # the same ranks would take buffers (tens of MiB on NCCL) and overlap nothing. The ring's
        # two exist beside it because their traffic runs while the all-to-alls do.
        pure_ulysses = ring == 1 and ulysses > 1
        mesh = cls(
            ulysses_degree=ulysses,
            ring_degree=ring,
            rank=rank,
            ulysses_rank=coords["ulysses"],
            ring_rank=coords["ring"],
            order=order,
            sp_group=group,
            ulysses_group=group if pure_ulysses else subgroup(group, peers["ulysses"]),
            kv_group=subgroup(group, peers["ring"]),
            dkv_group=subgroup(group, peers["ring"]),
            consistency=ConsistencyChecker.for_mesh(group, nodes),
            copy_engine_unavailable=copy_engine_unavailable_reason(group, nodes),
            ulysses_in_node=ulysses_ranks_share_node(nodes, grid),
            other_nodes={
                name: frozenset(n for n, i in enumerate(group_ranks) if nodes[i] != nodes[rank])
                for name, group_ranks in members.items()
            },
            batch_layouts=_BATCH_LAYOUTS.setdefault(group, {}),
        )
        # Streams that wait for a rank that raised are released with the error.
        engines = mesh.copy_engines
        mesh.consistency.on_failure = partial(abort_waits, engines)
        mesh.consistency.num_exchanges = lambda: sum([x.exchanges for x in engines.values()])
        mesh.consistency.refuse_backward = DeepSpeedCheck(global_ranks)
        return mesh

    @property
    def sp_degree(self) -> int:
        """Ranks that share the sequence."""
        return self.ulysses_degree * self.ring_degree

    @property
    def ring_group(self) -> dist.ProcessGroup | None:
        """The ranks of this process's ring."""
        return self.kv_group

    def channel(self, kind: str, copies: bool = False) -> Channel:
        """A new channel, for one all-to-all (``all_to_all``), or all exchanges of a head chunk in
        a pass (``ring_kv``, ``ring_dkv``); making it sends nothing. With ``copies`` by copy engines
        (by P2P without a group, as in a ring of one rank).

        Raises:
            MeshError: :meth:`reserve` has allocated no memory for the kind.
        """
        if not copies or (kind not in self.copy_engines and self._group_of(kind) is None):
            axis = "ulysses" if kind == "all_to_all" else "ring"
            others = self.other_nodes.get(axis, frozenset())
            return P2PChannel(self._group_of(kind), self.ledger, kind, others)
        if kind not in self.copy_engines:
            raise MeshError(f"copy engines have no staging memory for {kind}: call reserve first")
        engine = cast(CopyEngine, self.copy_engines[kind])
        return CopyEngineChannel(engine, self.ledger, kind)

    def reserve(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """Reserve staging memory for exchanges of up to so many bytes a rank, by kind; for
        ``fused`` the bytes of one tensor. Where a kind has to be allocated it is a collective of
        the ranks that exchange the kind, which ask for the same size.

        Args:
            device: this rank's GPU.

        Raises:
            MeshError: the memory cannot be shared, or a CUDA graph is being captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise MeshError(
                "a CUDA graph captures a call for which copy engines have no staging memory yet: "
                "make it once, forward and backward, before the capture"
            )
        # Growing is collective and waits for the GPU, so it happens at a call that is larger than
        # all before it, and never between two kernels of a call.
        for kind, size in sizes.items():
            group = self._group_of(kind)
            if size == 0 or group is None:
                continue
            try:
                if kind not in self.copy_engines and kind == "fused":
                    self.copy_engines[kind] = FusedExchange(group, device)
                elif kind not in self.copy_engines:
                    slots = num_slots(kind, ring=self.ring_degree > 1)
                    self.copy_engines[kind] = CopyEngine(group, device, slots)
                self.copy_engines[kind].reserve(size)
            except RuntimeError as error:
                fix = "'auto'" if kind == "fused" else "False"
                raise MeshError(
                    f"the GPUs of this node do not share {size / 2**20:.0f} MiB for {kind}: "
                    f"{error}. Use Tuning(copies={fix})"
                ) from error

    def needs_reserve(self, sizes: Mapping[str, int]) -> bool:
        """Whether :meth:`reserve` would allocate for these sizes; asked before each pass."""
        for kind, size in sizes.items():
            engine = self.copy_engines.get(kind)
            fits = engine is not None and engine.has_capacity(size)
            if size and not fits and self._group_of(kind) is not None:
                return True
        return False

    def flat(self) -> SequenceMesh:
        """The mesh of the same ranks and communicators with ring degree 1: one Ulysses axis, for
        exchanges among all of them, by P2P: engines and ``ulysses_in_node`` stay this axis's."""
        sp = self.other_nodes.get("sp", frozenset())
        return replace(
            self,
            ulysses_degree=self.sp_degree,
            ring_degree=1,
            ulysses_rank=self.rank,
            ring_rank=0,
            ulysses_group=self.sp_group,
            kv_group=None,
            dkv_group=None,
            other_nodes={"ulysses": sp, "sp": sp},
            plans={},
        )

    @property
    def reserved_bytes(self) -> int:
        """Bytes of this rank's GPU that copy engines hold."""
        return sum(engine.reserved_bytes for engine in self.copy_engines.values())

    def release(self) -> None:
        """Free the memory that copy engines hold, until the next call needs some. Collective; waits
        for all work in flight. Memory that CUDA graphs have captured is kept."""
        self.agree("release")
        if self.copy_engines:
            torch.cuda.synchronize()
            self.agree("released")
            for kind in [kind for kind, engine in self.copy_engines.items() if not engine.captured]:
                engine = self.copy_engines.pop(kind)
                if isinstance(engine, FusedExchange):
                    engine.close()
            self.consistency.clear_verified()  # calls wait for a comparison before they reserve

    def _group_of(self, kind: str) -> dist.ProcessGroup | None:
        groups = {"ring_kv": self.kv_group, "ring_dkv": self.dkv_group}
        return groups.get(kind, self.ulysses_group)

    def layout(self, kind: str, seq_len: int, documents: Any = ()) -> TokenLayout:
        """The :class:`TokenLayout` of a kind for the degrees and rank order of this mesh."""
        degrees = self.ulysses_degree, self.ring_degree
        return TokenLayout(kind, seq_len, *degrees, self.order, documents)

    def check_degrees(self, layout: TokenLayout) -> None:
        """LayoutError if the layout is for another mesh."""
        layout_degrees = (layout.ulysses, layout.ring, layout.order)
        mesh_degrees = (self.ulysses_degree, self.ring_degree, self.order)
        if layout_degrees != mesh_degrees:
            text = "the layout is for ulysses {} x ring {} ({}), the mesh is {} x {} ({}); "
            fix = "mesh.layout(kind, seq_len) makes one that fits"
            raise LayoutError(text.format(*layout_degrees, *mesh_degrees) + fix)

    def gather(self, local: torch.Tensor, layout: TokenLayout, dim: int) -> torch.Tensor:
        """The full tensor, on every rank, as by :meth:`TokenLayout.gather`; collective.

        Raises:
            LayoutError, MeshError: this rank, or another one, holds something else than its shard.
        """
        if not isinstance(layout, TokenLayout):
            raise LayoutError(
                f"layout={layout!r} must be a TokenLayout: mesh.layout(kind, seq_len)"
            )
        if self.sp_group is not None:
            return gather_shards(local, layout, dim, self.sp_group, self.consistency)
        return layout.gather([local], dim)

    def check(self) -> None:
        """Compare how many calls and backward passes each rank has made, and the enabled models'
        weights; collective over the mesh. A call that one rank has skipped, or a weight that it
        alone has changed, shows here at the latest: call it before a checkpoint.

        Raises:
            MeshError: which ranks differ, and in what; on every rank.
        """
        self.consistency.check()
        for check in self.checks.values():
            check(self)

    def agree(self, text: str, error: Exception | None = None) -> None:
        """Check now that every rank passes one text, as ``check_same`` of consistency.py does."""
        self.consistency.check_now(text, error)

    @contextmanager
    def agreeing(self, text: str) -> Iterator[list[str]]:
        """Raise on every rank what the body raises on one: all of them :meth:`agree` at its end,
        also after an error. Around a step of a program that catches errors it lets all ranks go on
        with the next one, unless the mesh has failed for good. Collective.

        Yields:
            the words of the text, to which the body adds what else must be the same on all ranks.

        Raises:
            Exception: what the body has raised, on that rank.
            MeshError: on the others, which quotes it; on all of them, if the texts differ.
        """
        words = [text]
        self.consistency.ranks_know = False
        try:
            yield words
        except Exception as refused:
            if not self.consistency.ranks_know:  # by a comparison in the body, in which all were
                self.agree(" ".join(words), refused)
            raise
        self.agree(" ".join(words))

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.sp_degree}: ulysses {self.ulysses_rank} of "
            f"{self.ulysses_degree}, ring {self.ring_rank} of {self.ring_degree}"
        )


def check_mesh(mesh: object, *others: object) -> None:
    """ConfigError for anything but a mesh, such as a process group.

    Args:
        others: arguments before it, with which it may have been exchanged.
    """
    if isinstance(mesh, SequenceMesh):
        return
    shown = repr(mesh)  # of a model pages
    shown = shown if len(shown) <= 100 else type(mesh).__name__
    if any(isinstance(x, SequenceMesh) for x in others):
        raise ConfigError(f"mesh={shown}, and the mesh is the argument before it: exchange the two")
    raise ConfigError(
        f"mesh={shown} must be a SequenceMesh: SequenceMesh.from_group(group, "
        "ulysses_degree=...), or SequenceMesh.single() for one process"
    )


# Note [errors are found together]
#
# A rank that raises alone leaves the others in an exchange that never ends. So a call has two
# parts: first integers only, each rank for itself, then one comparison; tensors move after that.
#
#   rank 0   plan_call ----------.                     .--- raises MeshError, which quotes it
#   rank 1   plan_call raises ---+-- check_call --------+--- raises its error
#   rank 2   plan_call ----------'   (fields or error)  `--- raises MeshError, which quotes it
#
# The fields have all that decides which messages are sent: shapes, layouts, mask, kernel, head
# chunks, and a digest of the order in which both passes post. A backward pass declares the number
# of its call: running them in another order on one rank would be a hang, too.


def check_on_all_ranks(
    mesh: SequenceMesh,
    check: Callable[[], tuple[Signature, ResultT]],
    like: object = None,
    layout: object = None,
    replicated: Mapping[str, torch.Tensor] | None = None,
) -> ResultT:
    """Run a check on every rank; returns only if all passed with the same call signature.

    Args:
        check: returns the signature of the call, and a result.
        like: a tensor of the call. Where it is on a GPU and the call is a known one, the comparison
            is deferred (``ConsistencyChecker``).
        layout: the argument of the call.
        replicated: tensors of the call, on one device, that hold the same numbers on every rank;
            ``check`` may add to them.

    Raises:
        Exception: what ``check`` raised; on the other ranks a MeshError with it.
        LayoutError: the layout is only a kind, and ranks hold different numbers of tokens.
        ConfigError: no mesh; on this rank alone.
    """
    check_mesh(mesh)
    try:
        signature, result = check()
        numbers = SharedNumbers(replicated) if replicated and mesh.sp_group is not None else None
    except Exception as error:
        mesh.consistency.check_call("", error=error)
        raise
    try:
        on_gpu = isinstance(like, torch.Tensor) and like.device.type != "cpu"
        mesh.consistency.check_call(signature, wait=not on_gpu, numbers=numbers)
    except MeshError as difference:
        named = isinstance(layout, str)
        uneven = _uneven_shards(difference.layouts, mesh.sp_degree) if named else None
        if uneven is None:
            raise
        raise uneven from difference
    return result


def _uneven_shards(layouts: Sequence[Sequence[tuple[str, int]]], ranks: int) -> LayoutError | None:
    """The error of ranks that give a layout's kind and hold different numbers of tokens; None if
    their layouts differ in something else. ``layouts``: each rank's, as kinds and lengths, which
    are ``ranks`` times the tokens that it holds."""
    if len(set(map(len, layouts))) != 1:  # one rank is wrong in another way
        return None
    for column in zip(*layouts, strict=True):
        (kind, _), lengths = column[0], sorted({tokens // ranks for _, tokens in column})
        if len(lengths) > 1 and {other for other, _ in column} == {kind}:
            return LayoutError(
                f"layout={kind!r} is only a name, which means as many tokens on every rank, and "
                f"ranks hold {', '.join(map(str, lengths))}. Make a TokenLayout of the whole "
                f"sequence, mesh.layout({kind!r}, seq_len), shard by it and give it as the layout"
            )
    return None
