"""Copy engines: the flag protocol in many interleavings, slots, buffers, mailbox records."""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from copy_engine_model import KINDS, SLOT, Call, FakeChannel, FakeFlagOpBatch, FakeMemory, World
from interleavings import advance, seconds

from ds_usp import SequenceMesh
from ds_usp.comm import copy_engine, shm_mailbox
from ds_usp.comm.call_record import RECORD_BYTES, CallRecord, Kind, Signature
from ds_usp.comm.channel import CommLedger
from ds_usp.comm.copy_engine import (
    CopyEngine,
    CopyEngineChannel,
    FlagOp,
    FlagOpBatch,
    _abort_until_idle,
    _FlagBatches,
    abort_waits,
    num_slots,
)
from ds_usp.comm.shm_mailbox import ShmMailbox
from ds_usp.errors import MeshError


def outcome(seed: int) -> tuple[int, bool]:
    """Wrong reads, and whether all streams end: of calls and of graphs, which may be launched
    several times, with calls between them."""
    draw = random.Random(seed)
    ranks, parts, steps = (draw.randint(low, 4) for low in (2, 1, 1))
    slots = {kind: num_slots(kind, ring=draw.random() < 0.7) for kind in KINDS}
    world = World(ranks, slots)
    order: list[int] = []
    with world.patched():
        for piece in range(draw.randint(1, 3)):
            graph, count = draw.choice([0, piece + 1]), draw.randint(1, 3)

            def calls(rank: int, at: int = piece, graph: int = graph, count: int = count) -> None:
                same = random.Random(f"{seed} {at}")
                for call in range(count):
                    main = world.main[rank][0 if graph else same.randrange(2)]
                    with world.on(main):
                        Call(world, rank, same, 4 * at + call).run(same.randint(1, parts), steps)

            world.piece(graph, calls)
            order += [] if graph else [piece]
            graphs = [at for at, each in enumerate(world.pieces[0]) if each.graph]
            order += draw.choices(graphs, k=draw.randint(0, 3)) if graphs else []
    return advance(world, order, draw)


@pytest.mark.parametrize("seed", range(60))
def test_no_interleaving_reads_early_or_deadlocks(seed):
    assert outcome(seed) == (0, True)


@pytest.mark.slow  # each defect below is seen within 25 seeds
@pytest.mark.parametrize("seed", range(60, 300))
def test_no_further_interleaving_does(seed):
    assert outcome(seed) == (0, True)


def without_ops(left_out: Callable[[FlagOp], Any]) -> Mutant:
    """Flag batches that lack some operations."""
    intact = FakeFlagOpBatch.__init__

    def init(batch: FakeFlagOpBatch, ops: Sequence[FlagOp]) -> None:
        intact(batch, [op for op in ops if not left_out(op)])

    return FakeFlagOpBatch, "__init__", init


def forget_own_stream(engine: CopyEngine, *args: Any) -> Any:
    for slot in engine._slots:
        slot.done_events.clear()
    return ACQUIRE(engine, *args)


def pulled_before_the_wait(engine: CopyEngine, slot: Any, *args: Any, **more: Any) -> Any:
    done = PUBLISH(engine, slot, *args, **more)
    slot.done_on = engine._current
    return done


def republish_too_early(engine: CopyEngine, slot: Any, *args: Any, **more: Any) -> Any:
    slot.published = False
    return FLAG_BATCHES(engine, slot, *args, **more)


def clear_flags_late(engine: CopyEngine, *args: Any, **more: Any) -> Any:
    """After the pull, when a flag may have been set again."""
    publish, await_ready, set_free = (x.jobs for x in FLAG_BATCHES(engine, *args, **more))  # type: ignore[attr-defined]
    late = [op for op in (*publish, *await_ready) if not (op.value or op.address[-1])]
    steps = (
        [op for op in publish if op not in late],
        [op for op in await_ready if op not in late],
        [*late, *set_free],
    )
    return _FlagBatches(*map(FakeFlagOpBatch, steps))  # type: ignore[arg-type]


def publish_twice(
    engine: CopyEngine, slot: Any, readers: Sequence[int], *args: Any, **options: Any
) -> Any:
    return PUBLISH(engine, slot, [*readers, *readers], *args, **options)


Mutant = tuple[type, str, Callable[..., Any]]
ACQUIRE, PUBLISH = CopyEngine.acquire_slot, CopyEngine.publish_and_pull
FLAG_BATCHES = CopyEngine._flag_batches_of
# Each defect of the protocol, and seeds among which the simulation must see it.
MUTANTS: dict[str, tuple[Mutant, Sequence[int]]] = {
    "flags are never cleared": (without_ops(lambda op: not op.value), range(40)),
    "no wait for free": (without_ops(lambda op: op.is_wait and op.address[-1]), range(40)),
    "no wait for ready": (without_ops(lambda op: op.is_wait and not op.address[-1]), range(40)),
    "flags are never set": (without_ops(lambda op: op.value and not op.is_wait), range(40)),
    "own stream forgotten": ((CopyEngine, "acquire_slot", forget_own_stream), range(300)),
    "pulled before the wait": (
        (CopyEngine, "publish_and_pull", pulled_before_the_wait),
        range(300),
    ),
    "republished early": ((CopyEngine, "_flag_batches_of", republish_too_early), range(300)),
    "published twice": ((CopyEngine, "publish_and_pull", publish_twice), range(40)),
    "flags cleared late": ((CopyEngine, "_flag_batches_of", clear_flags_late), range(40)),
}


@pytest.mark.parametrize(("mutant", "seeds"), MUTANTS.values(), ids=MUTANTS)
def test_the_simulation_sees_a_defect_of_the_protocol(mutant, seeds):
    with mock.patch.object(*mutant):
        assert any(outcome(seed) != (0, True) for seed in seeds)


def seconds_of(has_ring: bool, way: str, steps: int, extra: int) -> int:
    """How long four ranks compute six parts, with so many more slots than there are."""
    slots = {kind: num_slots(kind, ring=has_ring) + extra for kind in KINDS}
    world = World(4, slots)

    def calls(rank: int) -> None:
        call = Call(world, rank, random.Random(1), 0)
        call.share, call.return_lse, call.ulysses = 1.0, False, True
        call.ring, call.backward = has_ring, way != "forward"
        with world.on(world.main[rank][0]):
            call.run(6, steps)

    with (
        world.patched(),
        mock.patch.object(FakeChannel, "most", 1),
        mock.patch.object(Call, "stages_return", lambda _: True),
        mock.patch.object(Call, "starts_from_shards", lambda _: way == "from shards"),
        mock.patch.object(Call, "writes_in_place", lambda *_: True),
        mock.patch.object(Call, "merges_local", lambda *_: False),
        mock.patch.object(Call, "kernel_calls", lambda call, *_: 1 + call.rank % 2),
    ):
        world.piece(0, calls)
    return seconds(world, {"work": 20, "pull": 2})


WAYS = list(product([False, True], ["forward", "backward", "from shards"], [1, 3]))


@pytest.mark.parametrize(("has_ring", "way", "steps"), WAYS)
def test_ranks_do_not_wait_for_slots(has_ring, way, steps):
    """But once, for one pull: the third all-to-all is packed before the first chunk is computed."""
    case = has_ring, way, steps
    once = 2 if has_ring and way != "backward" else 0
    assert seconds_of(*case, 0) - seconds_of(*case, 5) == once


@pytest.mark.parametrize(
    ("has_ring", "way", "steps"), [case for case in WAYS if case[0] or case[1] != "forward"]
)
def test_with_a_slot_less_ranks_wait(has_ring, way, steps):
    """Or a staging buffer that is posted again has been acquired by another exchange."""
    case = has_ring, way, steps
    with contextlib.suppress(MeshError):
        assert seconds_of(*case, -1) > seconds_of(*case, 0)


def test_a_slot_that_was_never_published_is_acquired_again():
    world = World(2)
    engine = world.engines[0]["all_to_all"]
    with world.patched():
        _, first = engine.acquire_slot((4, 8), torch.bfloat16)
        _, again = engine.acquire_slot((4, 8), torch.bfloat16)  # an error came between
        engine.publish_and_pull(again, [], [], 1)
        _, other = engine.acquire_slot((4, 8), torch.bfloat16)
    assert first is again and other is not again and engine.exchanges == 1


def test_a_buffer_first_used_in_inference_mode_is_writable_with_gradients():
    world = World(2)
    engine = world.engines[0]["ring_kv"]
    with world.patched():
        for inference in (True, False):
            with torch.inference_mode(inference):
                buffers = []
                for _ in range(2):
                    buffer, slot = engine.acquire_slot((4, 8), torch.bfloat16)
                    engine.publish_and_pull(slot, [], [], 1)
                    buffers += [buffer.tensor, *buffer.views(((2, 4),))]
        assert buffers[0].data_ptr() == buffers[1].data_ptr() != buffers[2].data_ptr()
        for x in buffers:
            assert not x.is_inference() and x.zero_().numel() == 32


def grown(world: World, engine: CopyEngine, old: weakref.ref[Any]) -> list[bool]:
    """Give an engine more memory; whether the old one was there when it was asked for."""
    alive = []

    def larger(*_: Any) -> torch.Tensor:
        alive.append(old() is not None)
        assert not engine._slots
        return torch.empty(0)

    with (
        world.patched(),
        mock.patch.object(copy_engine, "alloc_symmetric", larger),
        mock.patch.object(copy_engine, "PeerMappedTensor", lambda own, _: FakeMemory()),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(copy_engine.dist, "barrier"),
    ):
        engine.reserve(16 * SLOT)
    return alive


@pytest.mark.parametrize("graph", [0, 7])
def test_memory_that_is_too_small_is_freed_before_more_is_allocated(graph):
    """Unless a CUDA graph goes on using it."""
    world = World(2)
    engine = world.engines[0]["ring_kv"]
    world.graph = graph
    with world.patched():
        for _ in range(3):
            _, slot = engine.acquire_slot((4, 8), torch.bfloat16)
            engine.publish_and_pull(slot, [], [], 1)
    assert engine.captured == bool(graph)
    old = weakref.ref(engine._memory)
    assert grown(world, engine, old) == [bool(graph)]
    assert [slot.start for slot in engine._slots] == [0, 16 * SLOT]
    assert engine.reserved_bytes == (32 if graph else 16) * SLOT


def test_a_buffer_that_a_later_exchange_acquired_is_not_published():
    world = World(2)
    first, later = (
        CopyEngineChannel(world.engines[0]["all_to_all"], CommLedger(), "all_to_all")
        for _ in range(2)
    )
    like = torch.empty(0, dtype=torch.bfloat16)
    with world.patched():
        buffers = [each.acquire_staging((4, 8), like, like.dtype).tensor for each in (first, later)]
        later.post(buffers[1], [], [])
        with pytest.raises(MeshError, match="all_to_all exchange was given to a later one"):
            first.post(buffers[0], [], [])
        # A packed buffer may be posted again, whichever channel has acquired another meanwhile.
        later.wait()
        first.acquire_staging((4, 8), like, like.dtype)
        later.post(buffers[1], [], [])


def test_a_graph_captures_no_call_without_reserved_memory():
    mesh = SequenceMesh(2, 2, rank=0)
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        pytest.raises(MeshError, match="make it once, forward and backward, before the capture"),
    ):
        mesh.reserve({"all_to_all": 512}, torch.device("cuda"))


def test_memory_that_a_graph_has_captured_is_not_released():
    mesh = SequenceMesh(2, 2, rank=0)
    engines = {kind: mock.Mock(captured=kind == "ring_kv") for kind in KINDS}
    mesh.copy_engines.update(engines)
    with mock.patch.object(torch.cuda, "synchronize"):
        mesh.release()
    assert mesh.copy_engines == {"ring_kv": engines["ring_kv"]}


def test_waits_of_streams_are_aborted_after_an_error():
    """An aborted wait lets a stream proceed to its next wait."""
    left = {"all_to_all": 3, "ring_kv": 5}

    def engine(kind: str) -> mock.Mock:
        def abort_waits() -> bool:
            left[kind] -= 1
            return left[kind] > 0

        return mock.Mock(abort_waits=abort_waits)

    before = set(threading.enumerate())  # of pytest's workers too, which do not end
    abort_waits({kind: engine(kind) for kind in left})
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert left == {"all_to_all": -2, "ring_kv": 0}
    lost = mock.Mock(abort_waits=mock.Mock(side_effect=RuntimeError("CUDA error")))
    _abort_until_idle([lost])
    assert lost.abort_waits.call_count == 1
    stuck = mock.Mock(abort_waits=mock.Mock(return_value=True))
    with mock.patch.object(copy_engine, "_ABORT_TIMEOUT_S", 0.02):
        _abort_until_idle([stuck])
    assert 1 < stuck.abort_waits.call_count <= 21


def test_abort_waits_sets_all_flags_of_a_busy_stream():
    world = World(2)
    engine = world.engines[0]["ring_kv"]
    flags = torch.zeros(8, dtype=torch.int32)
    busy, idle = mock.Mock(query=lambda: False), mock.Mock(query=lambda: True)
    captured = mock.Mock(query=mock.Mock(side_effect=RuntimeError("capturing")))
    engine._flags = mock.Mock(local=flags)
    with mock.patch.object(torch.cuda, "stream", mock.MagicMock()):
        for own, current, waits in (
            (idle, None, False),
            (idle, idle, False),
            (idle, busy, True),
            (busy, idle, True),
            (idle, captured, True),
        ):
            engine._stream, engine._current = own, current
            flags.zero_()
            assert engine.abort_waits() == waits
            assert bool(flags.all()) == waits
        # A replay packs nothing, so the engine has seen its stream only if it was noted.
        engine._stream = engine._current = idle
        with mock.patch.object(copy_engine, "current_stream", lambda _: busy):
            assert not engine.abort_waits()
            engine.note_replay()
            assert engine.abort_waits()


def test_an_error_aborts_the_stream_that_packed_last():
    world = World(2)
    engine = world.engines[0]["ring_kv"]
    with world.patched():
        engine.acquire_slot((4, 8), torch.bfloat16)
    assert engine._current is world.current


def test_all_memory_that_graphs_hold_is_kept():
    world = World(2)
    engine = world.engines[0]["ring_kv"]
    for graph in (1, 2):
        world.graph = graph
        with world.patched():
            engine.acquire_slot((4, 8), torch.bfloat16)
        grown(world, engine, weakref.ref(engine._memory))
    assert len(engine._captured) == 2 and engine.reserved_bytes == 3 * 16 * SLOT


def test_too_many_flag_operations_are_refused():
    with pytest.raises(
        MeshError, match="256 flag operations in one call, but the driver takes 255"
    ):
        FlagOpBatch([FlagOp(4 * at, 1) for at in range(256)])
    FlagOpBatch([FlagOp(4 * at, 1) for at in range(255)])


Pair = tuple[ShmMailbox, ShmMailbox]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Two ranks' views of one mailbox."""
    path = tmp_path / "mailbox"
    path.write_bytes(bytes(ShmMailbox.size(2)))
    first, second = (ShmMailbox(str(path), rank, 2, timeout_s=0.2) for rank in range(2))
    return first, second


def test_a_record_is_read_as_it_was_posted(pair):
    first, second = pair
    for seq in range(1, 40):
        records = [f"rank {rank}, call {seq}".encode() * (seq % 5) for rank in range(2)]
        assert first.post(records[0]) == seq
        assert second.read(seq, 1) is None
        assert second.post(records[1]) == seq
        assert first.gather(seq) == second.gather(seq) == records


def test_an_equal_record_is_not_parsed_whenever_it_comes(pair, monkeypatch):
    first, second = pair
    seq, memory = first.post(b"a call"), first._memory

    class Late:
        """The memory of a rank whose peer posts right after it has looked."""

        def __getitem__(self, at: slice) -> bytes:
            data: bytes = memory[at]
            if not second._seq and at.start == first._offsets[seq][1]:
                second.post(b"a call")
            return data

    monkeypatch.setattr(first, "_memory", Late())
    monkeypatch.setattr(first, "read", pytest.fail)
    assert first.gather(seq) == [b"a call"] * 2


def test_the_last_ten_stay_and_no_other_is_taken_for_one(pair):
    first, second = pair
    for seq in range(1, 21):
        first.post(b"%d" % seq)
    for seq in range(1, 30):
        assert second.read(seq, 0) == (b"%d" % seq if 11 <= seq <= 20 else None)


@pytest.mark.parametrize("byte", [0, 8, 12, 16, 20])
def test_an_incomplete_record_is_not_read(pair, byte):
    first, second = pair
    for _ in range(11):
        first.post(b"a call")
    assert second.read(11, 0) == b"a call"
    first._memory[shm_mailbox._SLOT_BYTES + byte] ^= 1  # record 11 is in the second of 10 slots
    assert second.read(11, 0) is None


def test_the_longest_record_fills_its_slot_only(pair):
    first, second = pair
    for seq in range(1, 9):
        second.post(b"%d" % seq)
        first.post(b"x" * RECORD_BYTES)
    for seq in range(1, 9):
        assert first.read(seq, 1) == b"%d" % seq
        assert second.read(seq, 0) == b"x" * RECORD_BYTES


@pytest.mark.parametrize("text", ["", "q [2, 16, 4, 8], causal", "ü" * 5000])
def test_a_call_record_survives_its_encoding(text):
    signature = Signature((text, "causal"), (("zigzag", 2**40), ("striped", 16)))
    record = CallRecord(signature, Kind.BACKWARD, aborted_passes=3, exchanges=2**40)
    data = record.encode()
    decoded = CallRecord.decode(data.ljust(RECORD_BYTES, b"\0"))
    assert len(data) <= RECORD_BYTES and decoded[1:] == record[1:]
    assert decoded.signature == signature or "sha256" in str(decoded.signature)
    assert decoded.signature.layouts == signature.layouts
    for other in (
        Signature((f"{text}.", "causal"), signature.layouts),
        Signature((text, "causal "), signature.layouts),
        Signature((f"{text}, causal",), signature.layouts),
        Signature(signature.fields, signature.layouts[:1]),
    ):
        assert data != CallRecord(other, *record[1:]).encode()
