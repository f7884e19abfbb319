"""A double ring's plan: nothing is passed on before it is there. What crosses the network is in
test_schedule_properties.py."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_usp import ConfigError, MaskSpec, TokenLayout
from ds_usp.attention.passes import KV_HANDLERS, ChunkState, Pass
from ds_usp.attention.plan import RingCall
from ds_usp.comm.channel import RecvSpec, StagingBuffer
from ds_usp.experimental.double_ring import double_ring_schedule
from ds_usp.geometry.pipeline_schedule import Instr, Op, pipeline_schedule
from ds_usp.geometry.ring_schedule import ChunkPosition, RingSchedule, RingStep, ring_schedule
from ds_usp.geometry.ring_traffic import TokenRange
from ds_usp.geometry.tiles import ANY_BAND, TileSupport

CAUSAL = MaskSpec.causal()


def plans_of(
    layout: TokenLayout,
    mask: MaskSpec,
    inner: int,
    support: TileSupport = ANY_BAND,
    gather: bool = False,
    position: ChunkPosition = "only",
) -> list[RingSchedule]:
    """Every ring rank's plan."""
    return [
        double_ring_schedule(layout, mask, rank, support, gather, position, inner=inner)
        for rank in range(layout.ring)
    ]


def test_a_window_of_the_mask_leaves_nodes_out():
    layout = TokenLayout("contiguous", 64, 1, 8)
    plans = plans_of(layout, MaskSpec.window(8), inner=2)
    assert all(len(plan.outer_steps) == 1 for plan in plans)
    # The first rank of a node sees the last one of the node before, whose partner has it come.
    gives = [
        (plan.ring_rank, plan.outer_steps[0].send_ranges)
        for plan in plans
        if plan.outer_steps[0].send_ranges
    ]
    assert gives == [(rank, (TokenRange(rank + 2, 0, 8),)) for rank in (1, 3, 5)]
    assert {len(plans_of(layout, MaskSpec.window(0), 2)[0].steps)} == {1}


def test_one_rank_a_node_or_one_node_is_no_double_ring():
    layout = TokenLayout("zigzag", 64, 1, 4)
    straight = ring_schedule(layout, CAUSAL, 1)
    for inner in (1, 4):
        assert double_ring_schedule(layout, CAUSAL, 1, inner=inner) == straight
    for inner in (0, -1, 3, 8):
        with pytest.raises(ConfigError, match=rf"inner_ring={inner} .* 4 ranks .* one of 1, 2, 4"):
            double_ring_schedule(layout, CAUSAL, 1, inner=inner)


class Recorder:
    """A channel that fills nothing and knows which memory is being filled."""

    def __init__(self) -> None:
        self.in_flight, self.filling = False, list[torch.Tensor]()
        self.buffers: set[int] = set()

    def acquire_staging(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> StagingBuffer:
        return StagingBuffer(like.new_empty(*shape, dtype=dtype))

    def post(
        self, packed: object, sends: object, recvs: Sequence[RecvSpec], *, overlapped: bool
    ) -> None:
        assert not self.in_flight
        self.in_flight = True
        self.filling = [recv.target for recv in recvs]
        self.buffers |= {recv_buffer.untyped_storage().data_ptr() for recv_buffer in self.filling}

    def wait(self) -> None:
        assert self.in_flight
        self.in_flight, self.filling = False, []


def kv_blocks(mesh: Any, plan: RingSchedule) -> list[tuple[RingStep, torch.Tensor, set[int]]]:
    """The steps of a forward pass with a kernel call: its keys, and the memory that is then being
    filled. Executed by attention's own pass, on channels that receive nothing."""
    k, seen = torch.zeros(1, 4, 2, 8), []

    class Walk(Pass[ChunkState]):
        """Notes each step's keys."""

        def attend(self, chunk: ChunkState, instr: Instr) -> None:
            step = instr.number
            if chunk.step != step:
                self.begin_step(chunk, step)
                busy = {
                    x.untyped_storage().data_ptr()
                    for channel in mesh.channels.values()
                    for x in channel.filling
                }
                seen.append((chunk.steps[step], chunk.kv[0], busy))

        handlers = dict(KV_HANDLERS) | {Op.ATTN: attend}

    call: Any = RingCall(mesh, plan, None, 1.0)  # type: ignore[arg-type]
    whole: Any = SimpleNamespace(chunks=[None], ring_calls=[call], needs_resources=False)
    chunk = ChunkState(whole, 0)
    chunk.local_kv = k, k
    schedule = pipeline_schedule([plan], ulysses=False, backward=False)
    executed = tuple(instr for instr in schedule if instr.op in Walk.handlers)
    Walk(whole, None, [chunk], k.device, frozenset()).execute(executed)
    return seen


@pytest.mark.parametrize("inner", [2, 3, 4, 6])
def test_two_buffers_of_each_ring_serve_any_number_of_ranks(inner):
    layout = TokenLayout("contiguous", 4 * 12, 1, 12)
    for plan in plans_of(layout, MaskSpec.full(), inner):
        channels = {"ring_kv": Recorder(), "ring_kv_outer": Recorder()}
        mesh = SimpleNamespace(channels=channels, channel=lambda kind, _, of=channels: of[kind])
        blocks = kv_blocks(mesh, plan)
        assert [step for step, _, _ in blocks] == list(plan.steps)
        for _, keys, busy in blocks:
            assert keys.shape == (1, 4, 2, 8)
            assert keys.untyped_storage().data_ptr() not in busy
        assert len(channels["ring_kv"].buffers) == 2
        assert len(channels["ring_kv_outer"].buffers) == min(2, 12 // inner - 1)


def test_gradients_cross_the_network_during_the_next_outer_step():
    """A relayed block's last gradients are received in the first step after its outer step, and
    their sum is sent during the others."""
    layout = TokenLayout("contiguous", 4 * 9, 1, 9)
    plan = double_ring_schedule(layout, MaskSpec.full(), 4, inner=3)
    schedule, kinds = pipeline_schedule([plan], ulysses=False, backward=True), ("dkv", "outerdkv")
    in_flight, seen = dict.fromkeys(kinds, False), []
    for op, _, number, call in schedule:
        kind, wait, _ = op.value.partition("?")
        if kind in kinds:
            in_flight[kind] = not wait
        elif op is Op.ATTN and not call:
            step = plan.backward_steps[number]
            seen.append((step.outer_step, step.is_local, *in_flight.values()))
    inner_ring, outer_ring = (True, False), (False, True)
    assert seen == [
        *((0, True, False, False), (0, False, False, False), (0, False, *inner_ring)),
        # Gradients of the local block are not sent on: they are received at any time.
        *((1, True, *inner_ring), (1, False, *inner_ring), (1, False, *inner_ring)),
        *((2, True, *inner_ring), (2, False, *outer_ring), (2, False, True, True)),
        (0, True, *outer_ring),
    ]
