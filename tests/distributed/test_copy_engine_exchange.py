"""Exchanges for copy engines, on CPUs: packed as for them, and read at the same offsets."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, attend, errors_of, mesh_of
from harness import RankContext

from ds_usp import MaskSpec, MeshError, SequenceMesh, Tuning
from ds_usp.attention.plan import AttentionOptions, plan_call
from ds_usp.attention.tuning import ResolvedTuning
from ds_usp.comm.channel import P2PChannel, RecvSpec, SendSlice, StagingBuffer
from ds_usp.comm.copy_engine import num_slots
from ds_usp.comm.packing import PreallocatedSend
from ds_usp.geometry.chunking import chunk_positions
from ds_usp.kernels import merge
from ds_usp.lowlevel import strided_copy

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
Sizes = dict[str, int]


class Slots:
    """A copy engine's slots for one kind of traffic, filled with NaN when they are acquired."""

    def __init__(self, kind: str) -> None:
        count = num_slots(kind, ring=True)
        self.memory = [torch.empty(2**20, dtype=torch.uint8) for _ in range(count)]
        self.generations = [0] * count
        self.slot, self.published = 0, False

    def acquire(self, size: int) -> torch.Tensor:
        if self.published:  # else who asked before has said nothing
            self.slot, self.published = (self.slot + 1) % len(self.memory), False
        self.generations[self.slot] += 1
        self.memory[self.slot].fill_(255)
        return self.memory[self.slot][:size]


class PullingChannel(P2PChannel):
    """Copy engines on CPUs: every rank reads the others' staging buffers at the given offsets."""

    slots: ClassVar[dict[str, Slots]] = {}

    def acquire_staging(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> StagingBuffer:
        slots = self.slots.setdefault(self._kind, Slots(self._kind))
        flat = slots.acquire(torch.Size(shape).numel() * dtype.itemsize)
        self.staging = StagingBuffer(flat.view(dtype).view(*shape))
        self.slot, self.generation = slots.slot, slots.generations[slots.slot]
        return self.staging

    def post(
        self,
        packed: torch.Tensor,
        sends: Sequence[SendSlice],
        recvs: Sequence[RecvSpec],
        *,
        overlapped: bool = True,
    ) -> None:
        peers: list[Any] = [None] * dist.get_world_size(self._group)
        slots = self.slots[self._kind]
        assert packed is self.staging.tensor
        assert self.generation == slots.generations[self.slot], "another exchange acquired the slot"
        slots.published = True
        readers, sources = ({spec.rank for spec in each} for each in (sends, recvs))
        # A copy: pickle takes the whole storage of a view along.
        shown = (packed.clone(), readers, sources, self.slot)
        dist.all_gather_object(peers, shown, self._group)
        own_rank = dist.get_rank(self._group)
        for rank, (_, published, pulls, slot) in enumerate(peers):
            assert slot == self.slot, "ranks pack into different slots"
            if rank != own_rank:
                assert (own_rank in published) == (rank in sources), (
                    "published to a rank that does not pull, or the reverse"
                )
                assert (own_rank in pulls) == (rank in readers)
        for recv in recvs:
            source, place, at, pitch, view = recv
            place = place if view is None else view.of(place)
            room = peers[source][0]
            flat = room.flatten()
            if not pitch:
                place.copy_(flat[at : at + place.numel()].view(place.shape))
                continue
            rows, batch = place.shape[:2]
            width = place.shape[2:].numel()
            for row, sample in product(range(rows), range(batch)):
                start = at + row * pitch + sample * (pitch // batch)
                place[row, sample] = flat[start : start + width].view(place.shape[2:])
        self.in_flight = True


def packed(
    ctx: RankContext, case: Case, ulysses: int, *, launch_bound: bool = False
) -> tuple[float, Sizes, Sizes]:
    """The worst error when all rooms have been filled again, the bytes that were reserved and the
    most that were packed at once."""
    mesh = mesh_of(ulysses)
    PullingChannel.slots.clear()
    mesh.plans.clear()
    mesh.consistency.clear_verified()
    reserved: Sizes = {}
    used: Sizes = {}

    def resolve(self: Tuning, *args: Any, **options: Any) -> ResolvedTuning:
        cut = decide(self, *args, **options)._replace(use_copy_engines=True)
        return (
            cut._replace(chunk_positions=chunk_positions([1], launch_bound=True))
            if launch_bound
            else cut
        )

    def reserve(self: SequenceMesh, sizes: Sizes, device: torch.device) -> None:
        reserved.update(sizes)

    def channel(self: SequenceMesh, kind: str, copies: bool = False) -> P2PChannel:
        return (PullingChannel if copies else P2PChannel)(self._group_of(kind), self.ledger, kind)

    def room(
        self: PullingChannel, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> Any:
        size = torch.Size(shape).numel() * dtype.itemsize
        used[self._kind] = max(used.get(self._kind, 0), size)
        return make(self, shape, like, dtype)

    decide: Callable[..., ResolvedTuning] = Tuning.resolve
    make: Callable[..., StagingBuffer] = PullingChannel.acquire_staging
    with (
        mock.patch.object(Tuning, "resolve", resolve),
        mock.patch.object(SequenceMesh, "reserve", reserve),
        mock.patch.object(SequenceMesh, "channel", channel),
        mock.patch.object(PullingChannel, "acquire_staging", room),
    ):
        actual = attend(mesh, case)
    for slots in PullingChannel.slots.values():
        for _ in slots.memory:
            slots.published = True
            slots.acquire(0)
    errors = errors_of(mesh, case, actual)
    mesh.plans.clear()  # they are for copies
    return max(errors.values()), reserved, used


CASES = [
    Case(tuning=Tuning(chunks, gather), layout=layout, mask=mask)
    for chunks, gather in ((1, False), (2, True))
    for layout, mask in (("zigzag", "causal"), ("contiguous", "window"), ("striped", "full"))
] + [
    Case(kernel="eager"),
    Case(kernel="eager", dtype=torch.float64),
    Case(kernel="eager", dtype=torch.bfloat16, tuning=Tuning(gather=True)),
    Case(kernel="eager", layout="striped", tuning=Tuning(1, True)),  # in place, then in parts
    Case(kernel="eager", mask="window", tuning=Tuning(2, True)),
    Case(kernel="eager", mask="window", layout="contiguous", tuning=Tuning(2, False)),
    Case(seq_len=67, tuning=Tuning(2, True)),
    # Two slices of a Ulysses rank: from the front and from the back.
    Case(layout="context_parallel"),
    Case(layout="context_parallel", tuning=Tuning(2, True), kernel="eager", batch=2),
    Case(layout="context_parallel", mask="full", heads=16, kv_heads=16, kernel="eager"),
    # Own rows among others', forward; backward too, where that is one call.
    Case(kernel="eager", tuning=Tuning(3, True), heads=16, kv_heads=16),
    Case(kernel="eager", tuning=Tuning(4, True), heads=16, kv_heads=16),
    Case(heads=6, kv_heads=2, seq_len=67),
    Case(kv_heads=1, kernel="eager", dtype=torch.bfloat16, head_dim=1),
]
# Shards of unequal lengths, of one and of two slices, one to three tokens over a multiple.
UNEVEN = [
    Case(layout=layout, seq_len=seq_len, kv_heads=kv_heads, kernel=kernel, tuning=tuning)
    for layout, seq_len, kv_heads, kernel, tuning in (
        ("contiguous", 65, 4, "eager", Tuning(1, True)),  # backward writes to the staging buffer
        ("contiguous", 63, 8, "sdpa", Tuning(2, True)),
        ("zigzag", 66, 4, "sdpa", Tuning(2, False)),
        ("striped", 67, 8, "eager", Tuning(1, False)),
        ("context_parallel", 65, 8, "eager", Tuning(2, True)),
        ("context_parallel", 66, 4, "sdpa", Tuning(1, False)),
        ("context_parallel", 67, 4, "eager", Tuning(1, True)),
        ("context_parallel", 61, 8, "sdpa", Tuning(2, False)),
    )
]


# Each with both exchanges, and with the ring alone or Ulysses alone; some from shards in backward.
@pytest.mark.parametrize(
    ("ulysses", "case"),
    [
        (u, replace(case, kept=(at + u // 2) % 3 < 2))
        for at, case in enumerate(CASES)
        for u in (2, (1, 4)[at % 2])
    ],
    ids=str,
)
def test_what_is_packed_fits_into_what_every_rank_reserved(pool, ulysses, case):
    results = pool.run(packed, 4, case=case, ulysses=ulysses)
    for error, reserved, used in results:
        assert error < TOLERANCE[case.dtype]
        assert used, "nothing was packed"
        for kind, size in used.items():
            assert size <= reserved.get(kind, 0), (kind, used, reserved)
    # The ranks of a ring make room together: for as much.
    for first in range(ulysses):
        for kind in ("ring_kv", "ring_dkv"):
            assert len({reserved.get(kind, 0) for _, reserved, _ in results[first::ulysses]}) == 1


def packed_cases(ctx: RankContext, ulysses: int) -> list[tuple[float, Sizes, Sizes]]:
    """:func:`packed` of all uneven cases."""
    return [packed(ctx, case, ulysses) for case in UNEVEN]


@pytest.mark.parametrize("ulysses", [2, 4])
def test_uneven_shards_are_packed_for_copy_engines(pool, ulysses):
    results = pool.run(packed_cases, 4, ulysses=ulysses)
    for case, *of_ranks in zip(UNEVEN, *results, strict=True):
        assert max(error for error, _, _ in of_ranks) < TOLERANCE[case.dtype], case
        for _, reserved, used in of_ranks:
            assert 0 < used["all_to_all"] <= reserved["all_to_all"], case
        # Their slots start at the same bytes.
        assert len({reserved["all_to_all"] for _, reserved, _ in of_ranks}) == 1, case


def test_no_memory_for_gradients_is_reserved_without_a_backward_pass():
    mesh = SequenceMesh(ulysses_degree=2, ring_degree=2, rank=0)
    options = AttentionOptions(mesh, "zigzag", MaskSpec.causal())
    decide: Callable[..., ResolvedTuning] = Tuning.resolve

    def resolve(self: Tuning, *args: Any, **options: Any) -> ResolvedTuning:
        return decide(self, *args, **options)._replace(use_copy_engines=True)

    def reserved(requires_grad: bool, grad_enabled: bool) -> tuple[str, Sizes]:
        x = torch.zeros(1, 4, 2, 8, requires_grad=requires_grad)
        with mock.patch.object(Tuning, "resolve", resolve), torch.set_grad_enabled(grad_enabled):
            signature, plan = plan_call(x, x, x, options)
        return signature, dict(plan.staging_bytes)

    signature, sizes = reserved(True, True)
    assert sizes.pop("ring_dkv") > 0 and sizes["ring_kv"] > 0
    for flags in ((True, False), (False, True), (False, False)):
        other, forward_sizes = reserved(*flags)
        assert forward_sizes == sizes
        assert other != signature, "ranks that reserve other sizes must differ in the signature"


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_gradients_of_a_brief_call_do_not_stay_in_a_room(pool, layout):
    """Nobody takes keys of the last rank of a causal contiguous ring: nothing is summed there."""
    case = Case(kernel="eager", tuning=Tuning(1, True), layout=layout)
    for error, _, _ in pool.run(packed, 4, case=case, ulysses=1, launch_bound=True):
        assert error < TOLERANCE[case.dtype]


def in_place(ctx: RankContext, case: Case, ulysses: int, copies: bool) -> tuple[int, int]:
    """Gradients that lie where they leave from when they are to be packed for the ring, and
    exchanges of heads of which all do."""
    exchanges = {"ring": 0, "heads": 0}

    def sum_(place: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        exchanges["ring"] += len(parts) == 1 and place.is_set_to(parts[0])
        real_sum(place, parts)

    def copy(place: torch.Tensor, x: torch.Tensor) -> None:
        assert not place.is_set_to(x), "copied to where it was"
        strided_copy(place, x)

    def holds(self: PreallocatedSend, sources: Any) -> bool:
        result = real_holds(self, sources)
        exchanges["heads"] += result
        return result

    real_sum, real_holds = merge._sum_into, PreallocatedSend.already_written
    with (
        mock.patch.object(merge, "_sum_into", sum_),
        mock.patch.object(merge, "strided_copy", copy),
        mock.patch.object(PreallocatedSend, "already_written", holds),
    ):
        if copies:
            packed(ctx, case, ulysses)
        else:
            attend(mesh_of(ulysses), case)
    return exchanges["ring"], exchanges["heads"]


@pytest.mark.parametrize("copies", [False, True])
def test_gradients_are_not_packed_where_a_kernel_writes_them_to_their_place(pool, copies):
    tuning = Tuning(2, True)
    # dk and dv of both parts, beside a ring; then of dq too (by messages nobody asks).
    results = pool.run(
        in_place, 4, case=Case(kernel="eager", tuning=tuning), ulysses=1, copies=copies
    )
    assert max(ring for ring, _ in results) == 4 and not any(heads for _, heads in results)
    results = pool.run(
        in_place, 4, case=Case(kernel="eager", tuning=tuning), ulysses=4, copies=copies
    )
    assert {heads for _, heads in results} == ({2} if copies else {0})
    for ulysses in (1, 4):
        case = Case(kernel="sdpa", tuning=tuning)
        assert set(pool.run(in_place, 4, case=case, ulysses=ulysses, copies=copies)) == {(0, 0)}


def abort_pass(ctx: RankContext, exchanges: Sequence[int | None]) -> tuple[str, int]:
    """Each rank's pass by copy engines ends well, or after so many exchanges; what the next call
    says, on every rank."""
    mesh = SequenceMesh.from_group(dist.new_group(), 2)  # no other test's passes
    abort_waits = mock.Mock()
    mesh.consistency.on_failure = abort_waits
    mesh.consistency.check_call("a call")
    mesh.consistency.in_pass = True
    begun = exchanges[ctx.rank]
    if begun is None:
        mesh.consistency.in_pass = False
    else:
        mesh.copy_engines["ring_kv"] = mock.Mock(exchanges=begun)
    try:
        mesh.consistency.check_call("a call")
    except MeshError as error:
        return str(error), abort_waits.call_count
    return "", 0


def test_a_rank_that_aborted_a_pass_does_not_continue_with_the_others(pool):
    aborted = "aborted passes: "
    for text, _ in pool.run(abort_pass, 4, exchanges=[None, 3, None, None]):
        assert f"{aborted}0 on ranks 0, 2-3, 1, the last after 3 exchanges on rank 1" in text
    for text, _ in pool.run(abort_pass, 4, exchanges=[3, 3, 2, 3]):
        assert f"{aborted}1, the last after exchanges: 3 on ranks 0-1, 3, 2 on rank 2" in text
    for text, _ in pool.run(abort_pass, 4, exchanges=[3, 3, 3, 3]):
        assert not text


def without_reserve(ctx: RankContext) -> None:
    mesh = mesh_of(2)
    mesh.channel("ring_kv", copies=True)


def test_copy_engines_without_reserved_memory_are_refused(pool):
    for error in pool.errors(without_reserve, 4):
        assert isinstance(error, MeshError)
        assert "ring_kv" in str(error)
