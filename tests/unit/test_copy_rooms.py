"""The rooms of copy engines: who gets which, and for how long."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from test_copy_engine import SLOT, FakeMemory, World

from ds_usp import MeshError
from ds_usp.comm import copy_engine
from ds_usp.comm.copy_engine import CopyChannel
from ds_usp.comm.ledger import CommLedger


def test_room_that_was_packed_and_never_told_of_is_packed_again() -> None:
    world = World(2, 0)
    engine = world.engines[0]["all_to_all"]
    with world.patched():
        _, first = engine.pack((4, 8), torch.bfloat16)
        _, again = engine.pack((4, 8), torch.bfloat16)  # an error came between
        engine.start(again, [], [])
        _, other = engine.pack((4, 8), torch.bfloat16)
    assert first is again and other is not again


def test_room_that_was_first_used_without_gradients_serves_with_them() -> None:
    world = World(2, 0)
    engine = world.engines[0]["ring_kv"]
    with world.patched():
        for inference in (True, False):
            with torch.inference_mode(inference):
                rooms = []
                for _ in range(2):
                    room, slot = engine.pack((4, 8), torch.bfloat16)
                    engine.start(slot, [], [])
                    rooms += [room.whole, *room.parts(((2, 4),))]
        assert rooms[0].data_ptr() == rooms[1].data_ptr() != rooms[2].data_ptr()
        for x in rooms:
            assert not x.is_inference() and x.zero_().numel() == 32


def test_memory_that_is_too_small_is_free_before_more_is_asked_for() -> None:
    world = World(2, 0)
    engine = world.engines[0]["ring_kv"]
    with world.patched():
        engine.pack((4, 8), torch.bfloat16)
    old = weakref.ref(engine._memory)

    def larger(*_: Any) -> torch.Tensor:
        assert old() is None and not engine._slots
        return torch.empty(0)

    with (
        mock.patch.object(copy_engine, "_symmetric", larger),
        mock.patch.object(copy_engine, "_Shared", lambda own, _: FakeMemory()),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(copy_engine.dist, "barrier"),
    ):
        engine.reserve(4 * SLOT)
    assert [slot.start for slot in engine._slots] == [0, 4 * SLOT, 8 * SLOT]


def test_room_that_a_later_exchange_has_got_is_not_told_of() -> None:
    world = World(2, 0)
    first, later = (
        CopyChannel(world.engines[0]["all_to_all"], CommLedger(), "all_to_all") for _ in range(2)
    )
    like = torch.empty(0, dtype=torch.bfloat16)
    with world.patched(), mock.patch.object(torch.cuda, "is_current_stream_capturing", bool):
        rooms = [each.room((4, 8), like, like.dtype).whole for each in (first, later)]
        later.post(rooms[1], [], [])
        with pytest.raises(MeshError, match="all_to_all exchange was given to a later one"):
            first.post(rooms[0], [], [])
        # What is packed once may be told of again, whoever has been given room meanwhile.
        later.take()
        first.room((4, 8), like, like.dtype)
        later.post(rooms[1], [], [])
