"""The flag protocol of copy engines; see ``copy_engine_model`` and ``interleavings``."""

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

from ds_usp.comm.copy_engine import CopyEngine, FlagOp, _FlagBatches, num_slots
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


@pytest.mark.parametrize("seed", range(300))
def test_no_interleaving_reads_early_or_deadlocks(seed: int) -> None:
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
    "republished early": ((CopyEngine, "_flag_batches_of", republish_too_early), range(300)),
    "published twice": ((CopyEngine, "publish_and_pull", publish_twice), range(40)),
    "flags cleared late": ((CopyEngine, "_flag_batches_of", clear_flags_late), range(40)),
}


@pytest.mark.parametrize(("mutant", "seeds"), MUTANTS.values(), ids=MUTANTS)
def test_the_simulation_sees_a_defect_of_the_protocol(mutant: Mutant, seeds: Sequence[int]) -> None:
    with mock.patch.object(*mutant):
        assert any(outcome(seed) != (0, True) for seed in seeds)


def seconds_of(has_ring: bool, backward: bool, steps: int, extra: int) -> int:
    """How long four ranks compute six parts, with so many more slots than there are."""
    slots = {kind: num_slots(kind, ring=has_ring) + extra for kind in KINDS}
    world = World(4, slots)

    def calls(rank: int) -> None:
        call = Call(world, rank, random.Random(1), 0)
        call.share, call.return_lse, call.ulysses = 1.0, False, True
        call.ring, call.backward = has_ring, backward
        with world.on(world.main[rank][0]):
            call.run(6, steps)

    with (
        world.patched(),
        mock.patch.object(FakeChannel, "most", 1),
        mock.patch.object(Call, "stages_return", lambda _: True),
        mock.patch.object(Call, "writes_in_place", lambda *_: True),
        mock.patch.object(Call, "merges_local", lambda *_: False),
        mock.patch.object(Call, "kernel_calls", lambda call, *_: 1 + call.rank % 2),
    ):
        world.piece(0, calls)
    return seconds(world, {"work": 20, "pull": 2})


WAYS = list(product([False, True], [False, True], [1, 3]))


@pytest.mark.parametrize(("has_ring", "backward", "steps"), WAYS)
def test_ranks_do_not_wait_for_slots(has_ring: bool, backward: bool, steps: int) -> None:
    """But once, for one pull: the third all-to-all is packed before the first chunk is computed."""
    way = has_ring, backward, steps
    once = 2 if has_ring and not backward else 0
    assert seconds_of(*way, 0) - seconds_of(*way, 5) == once


@pytest.mark.parametrize(
    ("has_ring", "backward", "steps"), [way for way in WAYS if way[0] or way[1]]
)
def test_with_a_slot_less_ranks_wait(has_ring: bool, backward: bool, steps: int) -> None:
    """Or a staging buffer that is posted again has been acquired by another exchange."""
    way = has_ring, backward, steps
    with contextlib.suppress(MeshError):
        assert seconds_of(*way, -1) > seconds_of(*way, 0)


@pytest.mark.parametrize("replayed", [True, False])
def test_waits_of_a_replayed_graph_are_ended(replayed: bool) -> None:
    """A replay packs nothing, so the engine has seen its stream only if it was noted."""
    idle, busy = mock.Mock(query=lambda: True), mock.Mock(query=lambda: False)
    engine = CopyEngine.__new__(CopyEngine)
    engine.__dict__.update(
        _device=None, _stream=idle, _current=idle, _abort_stream=idle, _flags=mock.Mock()
    )
    with (
        mock.patch("ds_usp.comm.copy_engine.current_stream", lambda _: busy),
        mock.patch("torch.cuda.stream", contextlib.nullcontext),
    ):
        if replayed:
            engine.note_replay()
        assert engine.abort_waits() == replayed
    assert engine._flags.local.fill_.called == replayed
