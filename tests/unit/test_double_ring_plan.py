"""A double ring's plan: every pair once, a block across the network once for all of a node, and
nothing passed on before it is there."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from cases import ALL_ORDERS
from test_document_schedules import LAYOUTS, cover, random_borders, wanted
from test_schedule import runs_of

from ds_usp import ConfigError, MaskSpec, TokenLayout
from ds_usp.attention.ring import KVStream, RingCall, RingGradReducer
from ds_usp.comm.channel import RecvSpec, StagingBuffer
from ds_usp.geometry.double_ring import TokenRange
from ds_usp.geometry.ring_schedule import ChunkPosition, RingSchedule, RingStep, ring_schedule
from ds_usp.geometry.tiles import ANY_BAND, TileSupport
from ds_usp.kernels.api import KernelCaps

CAUSAL = MaskSpec.causal()
PLACES: tuple[ChunkPosition, ...] = get_args(ChunkPosition)
Tokens = list[int]  # global positions


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


def packed(layout: TokenLayout, plan: RingSchedule) -> Tokens:
    """What a rank owns as others find it: -1 for tokens that it does not pack."""
    runs = plan.packed_runs
    return [
        token if any(start <= at < stop for start, stop in runs) else -1
        for at, token in enumerate(layout.ring_positions(plan.ring_rank))
    ]


def sent(gives: Sequence[TokenRange], has: Tokens, to: int) -> list[Tokens]:
    """The parcels for a rank, of what one has."""
    return [has[piece.start : piece.stop] for piece in gives if piece.rank == to]


def come(comes: Sequence[TokenRange], at: int, parcels: dict[int, list[Tokens]]) -> Tokens:
    """What comes to a rank from others, parcel by parcel, each of the length that is expected."""
    found: Tokens = []
    for piece in comes:
        if piece.rank != at:
            parcel = parcels[piece.rank].pop(0)
            assert len(parcel) == piece.length
            found += parcel
    assert not any(parcels.values()), "sent and not taken"
    return found


def held(layout: TokenLayout, plans: list[RingSchedule], window: int, inner: int) -> list[Tokens]:
    """What every rank holds in a window, as the ranks before it give it: tokens of the rank with
    its place in another node."""
    if not window:
        return [layout.ring_positions(rank) for rank in range(layout.ring)]
    owned = [packed(layout, plan) for plan in plans]
    found = []
    for rank, plan in enumerate(plans):
        there = [each.outer_steps[window - 1] for each in plans]
        for piece in there[rank].recv_ranges:
            assert piece.rank % inner == rank % inner and piece.rank // inner != rank // inner
        parcels = {
            r: sent(there[r].send_ranges, owned[r], rank) for r in range(layout.ring) if r != rank
        }
        found.append(come(plan.outer_steps[window - 1].recv_ranges, rank, parcels))
        for at, piece in zip(there[rank].peer_offsets, there[rank].send_ranges, strict=True):
            theirs = there[piece.rank].recv_ranges
            assert at == sum(each.length for each in theirs[: theirs.index((rank, *piece[1:]))])
    return found


def check_keys(
    layout: TokenLayout, plans: list[RingSchedule], walks: list[tuple[RingStep, ...]], inner: int
) -> None:
    """A step's keys are what its rank holds or what the ranks of its node give of what they do."""
    holds = [held(layout, plans, window, inner) for window in range(len(plans[0].outer_steps) + 1)]
    for rank, steps in enumerate(walks):
        for step in steps:
            if step.is_local:
                assert (
                    keys_of(layout, step) == holds[step.outer_step][rank] and not step.send_ranges
                )
    # Ranks walk together, but for own blocks that some of them compute beside others.
    for here in zip(*([x for x in steps if not x.is_local] for steps in walks), strict=True):
        (window,) = {step.outer_step for step in here}
        for rank, step in enumerate(here):
            node = range(rank - rank % inner, rank - rank % inner + inner)
            assert all(piece.rank in node for piece in (*step.recv_ranges, *step.send_ranges))
            has = holds[window] if window else [packed(layout, plan) for plan in plans]
            parcels = {r: sent(here[r].send_ranges, has[r], rank) for r in node if r != rank}
            own = [piece for piece in step.recv_ranges if piece.rank == rank]
            assert len(own) <= 1 and own == list(
                step.recv_ranges[len(step.recv_ranges) - len(own) :]
            )
            arrived = come(step.recv_ranges, rank, parcels)
            assert keys_of(layout, step) == arrived + (has[rank] if own else [])


def keys_of(layout: TokenLayout, step: RingStep) -> Tokens:
    """The positions of a step's keys."""
    return [
        token
        for piece in step.kv_ranges
        for token in layout.ring_positions(piece.rank)[piece.start : piece.stop]
    ]


def check_crossing(
    layout: TokenLayout, mask: MaskSpec, plans: list[RingSchedule], inner: int, allowed: Any
) -> None:
    """Into every other node goes what any of its ranks sees of a block, and that once."""
    ring = layout.ring
    crossed: Counter[tuple[int, int]] = Counter()
    for plan in plans:
        for window in plan.outer_steps:
            for piece in window.send_ranges:
                tokens = layout.ring_positions(plan.ring_rank)[piece.start : piece.stop]
                crossed.update((token, piece.rank // inner) for token in tokens)
    assert not crossed or max(crossed.values()) == 1
    for owner in range(ring):
        k = layout.ring_positions(owner)
        for node in range(ring // inner):
            ranks = range(node * inner, (node + 1) * inner)
            q = [token for rank in ranks for token in layout.ring_positions(rank)]
            seen = allowed[q][:, k].any(0).nonzero().flatten().tolist()
            runs = runs_of(seen, len(k)) if node != owner // inner else []
            want = {k[i] for start, stop in runs for i in range(start, stop)}
            assert {token for token in k if (token, node) in crossed} == want


@pytest.mark.parametrize("seed", range(4))
def test_pairs_once_and_blocks_across_once(seed: int) -> None:
    draw = random.Random(seed)
    for index in range(100):
        inner, outer, ulysses = (
            draw.choice([2, 2, 3, 4]),
            draw.choice([2, 2, 3]),
            draw.choice([1, 2]),
        )
        ring = inner * outer
        tokens = 2 * ulysses * ring + draw.randint(0, 30)
        borders = random_borders(draw, tokens)
        left, right = draw.randint(0, 12), draw.randint(0, 4)
        bounds = [(None, 0), (None, 0), (None, None), (left, 0), (left, right), (None, right)]
        mask = MaskSpec(*draw.choice(bounds), borders if draw.random() < 0.4 else ())
        kind = LAYOUTS[index % len(LAYOUTS)]
        cut = borders if kind == "balanced" else ()
        layout = TokenLayout(kind, tokens, ulysses, ring, draw.choice(ALL_ORDERS), cut)
        support = TileSupport(draw.random() < 0.5, True, tall=draw.random() < 0.5)
        gather, position = draw.random() < 0.4, draw.choice(PLACES)
        plans = plans_of(layout, mask, inner, support, gather, position)
        want = wanted(mask, borders if mask.documents else [0, tokens])
        for name in ("steps", "backward_steps"):
            walks = [getattr(plan, name) for plan in plans]
            seen = [0] * tokens
            for rank, steps in enumerate(walks):
                for step in steps:
                    cover(seen, layout, rank, step, 0)
            assert seen == want
            check_keys(layout, plans, walks, inner)
            for steps in walks:
                windows = [step.outer_step for step in steps]
                if len(windows) > 1 and windows[-1] == 0:
                    windows.pop()  # of the own block, the last rows
                assert windows == sorted(windows)
                assert set(windows) == set(range(len(plans[0].outer_steps) + 1))
        allowed = torch.tensor([[bits >> k & 1 for k in range(tokens)] for bits in want]) > 0
        check_crossing(layout, mask, plans, inner, allowed)


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
