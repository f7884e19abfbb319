"""A double ring's plan: every pair once, a block across the network once for all of a node, and
nothing passed on before it is there."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_usp import ConfigError, MaskSpec, TokenLayout
from ds_usp.attention.ring import KVStream, RingCall, RingGradReducer
from ds_usp.comm.channel import RecvSpec, StagingBuffer
from ds_usp.geometry.double_ring import TokenRange
from ds_usp.geometry.ring_schedule import ChunkPosition, RingSchedule, ring_schedule
from ds_usp.geometry.tiles import ANY_BAND, TileSupport
from ds_usp.kernels.api import KernelCaps

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
        ring_schedule(layout, mask, rank, support, gather, position, inner=inner)
        for rank in range(layout.ring)
    ]


def test_a_causal_zigzag_crosses_the_network_an_inner_rings_share() -> None:
    layout = TokenLayout("zigzag", 16 * 16, 1, 8)
    for inner in (2, 4):
        straight, double = (
            [ring_schedule(layout, CAUSAL, rank, inner=each) for rank in range(8)]
            for each in (None, inner)
        )
        across = sum(
            piece.length
            for plan in straight
            for step in plan.steps
            for piece in step.send_ranges
            if piece.rank // inner != plan.ring_rank // inner
        )
        assert across == inner * sum(
            each.num_sent_tokens for plan in double for each in plan.outer_steps
        )
        # What is sent is as much as straight: a rank in `inner` gets it from far, the others near.
        near = sum(step.num_sent_tokens for plan in double for step in plan.steps)
        whole = sum(step.num_sent_tokens for plan in straight for step in plan.steps)
        assert near + across // inner == whole


def test_a_window_of_the_mask_leaves_nodes_out() -> None:
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


def test_one_rank_a_node_or_one_node_is_no_double_ring() -> None:
    layout = TokenLayout("zigzag", 64, 1, 4)
    straight = ring_schedule(layout, CAUSAL, 1)
    for inner in (1, 4):
        assert ring_schedule(layout, CAUSAL, 1, inner=inner) == straight
    for inner in (0, -1, 3, 8):
        with pytest.raises(ConfigError, match=rf"inner_ring={inner} .* 4 ranks .* one of 1, 2, 4"):
            ring_schedule(layout, CAUSAL, 1, inner=inner)


class Recorder:
    """A channel that fills nothing and knows which memory is being filled."""

    def __init__(self) -> None:
        self.in_flight, self.filling = False, list[torch.Tensor]()
        self.buffers: set[int] = set()

    def acquire_staging(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> StagingBuffer:
        return StagingBuffer(like.new_empty(*shape, dtype=dtype))

    def post(self, packed: object, sends: object, recvs: Sequence[RecvSpec]) -> None:
        assert not self.in_flight
        self.in_flight = True
        self.filling = [recv_buffer for _, recv_buffer, _, _ in recvs]
        self.buffers |= {recv_buffer.untyped_storage().data_ptr() for recv_buffer in self.filling}

    def wait(self) -> None:
        assert self.in_flight
        self.in_flight, self.filling = False, []


@pytest.mark.parametrize("inner", [2, 3, 4, 6])
def test_two_buffers_near_and_two_far_serve_any_ring(inner: int) -> None:
    layout = TokenLayout("contiguous", 4 * 12, 1, 12)
    for plan in plans_of(layout, MaskSpec.full(), inner):
        channels = {"ring_kv": Recorder(), "ring_kv_outer": Recorder()}
        mesh = SimpleNamespace(
            channel=lambda kind, use_copy_engines=False, here=channels: here[kind]
        )
        k = torch.zeros(1, 4, 2, 8)
        call: Any = RingCall(mesh, plan, None, 1.0)  # type: ignore[arg-type]
        blocks = 0
        for _, keys, values in KVStream(call, plan.steps, k, k):
            blocks += 1
            assert keys.shape == values.shape == k.shape
            busy = {
                recv_buffer.untyped_storage().data_ptr()
                for channel in channels.values()
                for recv_buffer in channel.filling
            }
            assert keys.untyped_storage().data_ptr() not in busy
        assert blocks == 12
        assert len(channels["ring_kv"].buffers) == 2
        assert len(channels["ring_kv_outer"].buffers) == min(2, 12 // inner - 1)


def test_sums_go_home_under_the_next_window_and_the_last_under_the_own_block() -> None:
    layout = TokenLayout("contiguous", 4 * 9, 1, 9)
    plan = ring_schedule(layout, MaskSpec.full(), 4, inner=3)
    kinds = ("ring_kv", "ring_kv_outer", "ring_dkv", "ring_dkv_outer")
    channels = {kind: Recorder() for kind in kinds}
    mesh = SimpleNamespace(channel=lambda kind, use_copy_engines=False: channels[kind])
    kernel = SimpleNamespace(caps=KernelCaps(frozenset(), frozenset()))
    call: Any = RingCall(mesh, plan, kernel, 1.0)  # type: ignore[arg-type]
    k = torch.zeros(1, 4, 2, 8)
    grads, under_way = RingGradReducer(call, k, k, k), []
    for step, keys, values in KVStream(call, plan.backward_steps, k, k):
        sums = grads.accumulators_for(step, keys, values)
        under_way.append(
            (step.outer_step, step.is_local, *(channels[x].in_flight for x in kinds[2:]))
        )
        if not step.is_local:
            grads.post_step_grads(step, sums[1:])
    near, far = (True, False), (False, True)
    assert under_way == [
        *((0, True, False, False), (0, False, False, False), (0, False, *near)),
        # The own block's last ones need nothing sent on and come when they come.
        *((1, True, *near), (1, False, *near), (1, False, *near)),
        # Held in window 1: the last ones come under the first step, the sum leaves under the next.
        *((2, True, *near), (2, False, *far), (2, False, True, True)),
        (0, True, *far),
    ]
