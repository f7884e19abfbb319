"""The words by which copy engines take turns; see ``copy_world`` and ``copy_run``."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from unittest import mock

import pytest
from copy_engine_model import KINDS, Call, FakeChannel, FakeFlagOpBatch, World
from interleavings import advance, seconds

from ds_usp.comm.copy_engine import CopyEngine, _FlagBatches, num_slots
from ds_usp.comm.cuda_driver import FlagOp
from ds_usp.errors import MeshError


def outcome(seed: int) -> tuple[int, bool]:
    """Of calls and of graphs, which may be launched several times, whatever comes in between."""
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


# The last ones see mutants that few do.
@pytest.mark.parametrize("seed", [*range(300), 416, 702, 880, 987, 1436, 1942])
def test_nobody_reads_too_early_or_waits_for_ever(seed: int) -> None:
    assert outcome(seed) == (0, True)


WORDS = {
    "that nobody puts back": lambda job: not job.value,
    "that a rank packs without asking for": lambda job: job.is_wait and job.address[-1],
    "that a rank pulls without asking for": lambda job: job.is_wait and not job.address[-1],
    "that nobody writes": lambda job: job.value and not job.is_wait,
}


@pytest.mark.parametrize("left_out", WORDS.values(), ids=WORDS)
def test_the_simulation_sees_words(left_out: Callable[[FlagOp], bool]) -> None:
    real = FakeFlagOpBatch.__init__

    def fewer(self: FakeFlagOpBatch, jobs: Sequence[FlagOp]) -> None:
        real(self, [job for job in jobs if not left_out(job)])

    with mock.patch.object(FakeFlagOpBatch, "__init__", fewer):
        assert any(outcome(seed) != (0, True) for seed in range(40))


def test_the_simulation_sees_a_rank_that_does_not_wait_for_its_own_stream() -> None:
    real = CopyEngine.acquire_slot

    def hasty(engine: CopyEngine, *given: Any) -> Any:
        for slot in engine._slots:
            slot.done_events.clear()
        return real(engine, *given)

    with mock.patch.object(CopyEngine, "acquire_slot", hasty):
        assert any(outcome(seed) != (0, True) for seed in range(300))


def test_the_simulation_sees_a_room_that_is_told_of_again_too_early() -> None:
    real = CopyEngine._flag_batches_of

    def hasty(engine: CopyEngine, slot: Any, *given: Any, **more: Any) -> Any:
        slot.published = False
        return real(engine, slot, *given, **more)

    with mock.patch.object(CopyEngine, "_flag_batches_of", hasty):
        assert any(outcome(seed) != (0, True) for seed in range(300))


def test_the_simulation_sees_a_rank_that_is_told_twice() -> None:
    real = CopyEngine.publish_and_pull

    def twice(engine: CopyEngine, slot: Any, readers: Sequence[int], *recvs: Any) -> Any:
        return real(engine, slot, [*readers, *readers], *recvs)

    with mock.patch.object(CopyEngine, "publish_and_pull", twice):
        assert any(outcome(seed) != (0, True) for seed in range(40))


def test_the_simulation_sees_a_word_that_is_put_back_late() -> None:
    """When it may have been said again: the call after does not wait for the end of this one."""
    real = CopyEngine._flag_batches_of

    def late(engine: CopyEngine, *given: Any, **more: Any) -> Any:
        packed, come, pulled = (each.jobs for each in real(engine, *given, **more))  # type: ignore[attr-defined]
        back = [job for job in (*packed, *come) if not (job.value or job.address[-1])]
        return _FlagBatches(
            FakeFlagOpBatch([job for job in packed if job not in back]),  # type: ignore[arg-type]
            FakeFlagOpBatch([job for job in come if job not in back]),  # type: ignore[arg-type]
            FakeFlagOpBatch([*back, *pulled]),  # type: ignore[arg-type]
        )

    with mock.patch.object(CopyEngine, "_flag_batches_of", late):
        assert any(outcome(seed) != (0, True) for seed in (702, 1436, 1942))


def seconds_of(has_ring: bool, backward: bool, steps: int, extra: int) -> int:
    """How long four ranks compute six parts, with so many more slots than there are."""
    slots = {kind: num_slots(kind, ring=has_ring) + extra for kind in KINDS}
    world = World(4, slots)

    def calls(rank: int) -> None:
        call = Call(world, rank, random.Random(1), 0)
        call.share, call.return_lse, call.local_heads = 1.0, False, False
        call.has_ring, call.backward = has_ring, backward
        with world.on(world.main[rank][0]):
            call.run(6, steps)

    with (
        world.patched(),
        mock.patch.object(FakeChannel, "most", 1),
        mock.patch.object(Call, "early", lambda *_: True),
        mock.patch.object(Call, "middle", lambda call, _: 1 + call.rank % 2),
    ):
        world.piece(0, calls)
    return seconds(world, {"work": 20, "pull": 2})


WAYS = list(product([False, True], [False, True], [1, 3]))


@pytest.mark.parametrize(("has_ring", "backward", "steps"), WAYS)
def test_no_rank_waits_for_room(has_ring: bool, backward: bool, steps: int) -> None:
    assert seconds_of(has_ring, backward, steps, 0) == seconds_of(has_ring, backward, steps, 5)


@pytest.mark.parametrize(("has_ring", "backward", "steps"), WAYS)
def test_with_a_slot_less_ranks_wait(has_ring: bool, backward: bool, steps: int) -> None:
    """Or a room that is told of again has been given away."""
    way = has_ring, backward, steps
    with contextlib.suppress(MeshError):
        assert seconds_of(*way, -1) > seconds_of(*way, 0)
