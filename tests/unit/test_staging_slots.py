"""Slots and staging buffers of copy engines: which one is acquired, and for how long."""

from __future__ import annotations

import threading
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from copy_engine_model import KINDS, SLOT, FakeMemory, World

from ds_usp import MeshError, SequenceMesh
from ds_usp.comm import copy_engine, copy_engine_channel
from ds_usp.comm.channel import CommLedger
from ds_usp.comm.copy_engine import CopyEngine
from ds_usp.comm.copy_engine_channel import CopyEngineChannel, _abort_until_idle, abort_waits
from ds_usp.comm.cuda_driver import FlagOp, FlagOpBatch


def test_a_slot_that_was_never_published_is_acquired_again() -> None:
    world = World(2)
    engine = world.engines[0]["all_to_all"]
    with world.patched():
        _, first = engine.acquire_slot((4, 8), torch.bfloat16)
        _, again = engine.acquire_slot((4, 8), torch.bfloat16)  # an error came between
        engine.publish_and_pull(again, [], [], 1)
        _, other = engine.acquire_slot((4, 8), torch.bfloat16)
    assert first is again and other is not again and engine.exchanges == 1


def test_a_buffer_first_used_in_inference_mode_is_writable_with_gradients() -> None:
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
def test_memory_that_is_too_small_is_freed_before_more_is_allocated(graph: int) -> None:
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


def test_a_buffer_that_a_later_exchange_acquired_is_not_published() -> None:
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


def test_a_graph_captures_no_call_without_reserved_memory() -> None:
    mesh = SequenceMesh(2, 2, rank=0)
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        pytest.raises(MeshError, match="make it once, forward and backward, before the capture"),
    ):
        mesh.reserve({"all_to_all": 512}, torch.device("cuda"))


def test_memory_that_a_graph_has_captured_is_not_released() -> None:
    mesh = SequenceMesh(2, 2, rank=0)
    engines = {kind: mock.Mock(captured=kind == "ring_kv") for kind in KINDS}
    mesh.copy_engines.update(engines)
    with mock.patch.object(torch.cuda, "synchronize"):
        mesh.release()
    assert mesh.copy_engines == {"ring_kv": engines["ring_kv"]}


def test_waits_of_streams_are_aborted_after_an_error() -> None:
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
    with mock.patch.object(copy_engine_channel, "_ABORT_TIMEOUT_S", 0.02):
        _abort_until_idle([stuck])
    assert 1 < stuck.abort_waits.call_count <= 21


def test_abort_waits_sets_all_flags_of_a_busy_stream() -> None:
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


def test_an_error_aborts_the_stream_that_packed_last() -> None:
    world = World(2)
    engine = world.engines[0]["ring_kv"]
    with world.patched():
        engine.acquire_slot((4, 8), torch.bfloat16)
    assert engine._current is world.current


def test_all_memory_that_graphs_hold_is_kept() -> None:
    world = World(2)
    engine = world.engines[0]["ring_kv"]
    for graph in (1, 2):
        world.graph = graph
        with world.patched():
            engine.acquire_slot((4, 8), torch.bfloat16)
        grown(world, engine, weakref.ref(engine._memory))
    assert len(engine._captured) == 2 and engine.reserved_bytes == 3 * 16 * SLOT


def test_too_many_flag_operations_are_refused() -> None:
    with pytest.raises(
        MeshError, match="256 flag operations in one call, but the driver takes 255"
    ):
        FlagOpBatch([FlagOp(4 * at, 1) for at in range(256)])
    FlagOpBatch([FlagOp(4 * at, 1) for at in range(255)])
