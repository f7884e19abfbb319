"""Ring schedules of any layout, mask and kernel, executed on integers: every allowed
pair is computed once, and each rank receives exactly what its peers send."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import get_args

import pytest
from cases import ALL_LAYOUTS, ALL_ORDERS, random_tree
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp import MaskSpec, TokenLayout
from ds_usp.geometry.ring_schedule import ChunkPosition, RingSchedule, RingStep, ring_schedule
from ds_usp.geometry.ring_traffic import TokenRange
from ds_usp.geometry.tiles import KernelCall, Tile, TileSupport

POSITIONS: tuple[ChunkPosition, ...] = get_args(ChunkPosition)
# (ulysses, ring). A plan takes time with the square of the ring.
MESHES = [
    *[(1, 1), (4, 1), (1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (1, 5), (3, 5), (1, 7), (1, 16)],
    *[(1, 4), (2, 4), (1, 6), (2, 6), (1, 8), (1, 9), (1, 12)],
]
Tokens = list[int]  # positions in the sequence


@dataclass(frozen=True)
class Problem:
    layout: TokenLayout
    kv_layout: TokenLayout | None
    mask: MaskSpec
    support: TileSupport
    gather: bool
    position: ChunkPosition

    def schedules(self) -> list[RingSchedule]:
        """Every ring rank's schedule."""
        args = self.support, self.gather, self.position, self.kv_layout
        return [ring_schedule(self.layout, self.mask, r, *args) for r in range(self.layout.ring)]

    @property
    def keys(self) -> TokenLayout:
        return self.kv_layout or self.layout

    def visible(self, sample: int) -> list[int]:
        """The keys that each query sees, as bits, straight from the definition of the mask."""
        mask, tokens = self.mask, self.keys.seq_len
        if mask.areas:
            bits = [0] * tokens
            for q_start, q_stop, k_start, k_stop, _, right in mask.areas:
                for query in range(q_start, q_stop):
                    # Of a causal one the last query sees the last key.
                    stop = k_stop if right is None else k_stop - (q_stop - 1 - query)
                    bits[query] |= (1 << max(stop, k_start)) - (1 << k_start)
            return bits
        borders = (
            mask.documents[sample] if mask.documents else (0, max(tokens, self.layout.seq_len))
        )
        bits = []
        for begin, end in pairwise(borders):
            for query in range(begin, min(end, self.layout.seq_len)):
                low = begin if mask.left is None else max(begin, query - mask.left)
                high = end if mask.right is None else min(end, query + mask.right + 1)
                high = min(high, tokens)
                bits.append(
                    (((1 << high) - (1 << low)) if low < high else 0) | (1 << mask.prefix) - 1
                )
        for start, stop in mask.blocks[sample] if mask.blocks and mask.right is not None else ():
            for query in range(start, stop):
                bits[query] |= (1 << stop) - (1 << query)
        paths: list[list[int]] = []  # the tokens of each document's row, to its last one
        for index, parent in enumerate(mask.parents[sample] if mask.parents else ()):
            begin, end = mask.documents[sample][index : index + 2]
            above = paths[parent] if parent >= 0 else []
            paths.append([*above, *range(begin, end)])
            for query in range(begin, end):
                before = paths[index][: len(above) + query - begin]
                before = before if mask.left is None else before[max(0, len(before) - mask.left) :]
                bits[query] = sum(1 << key for key in (*before, query))
        return bits


def borders_of(tokens: int) -> st.SearchStrategy[list[int]]:
    """Few documents or many, of any lengths."""
    inner = st.sets(st.integers(1, tokens - 1), max_size=8) | st.just(set(range(1, tokens)))
    return inner.map(lambda borders: [0, *sorted(borders), tokens])


@st.composite
def blocks_in(draw: st.DrawFn, borders: list[int]) -> tuple[tuple[int, int], ...]:
    """Blocks inside of documents, some next to each other."""
    cuts = sorted({*borders, *draw(st.sets(st.integers(1, borders[-1] - 1), max_size=12))})
    return tuple(block for block in pairwise(cuts) if draw(st.booleans()))


@st.composite
def problems(draw: st.DrawFn, what: str) -> Problem:
    ulysses, ring = draw(st.sampled_from(MESHES))
    shortest, kinds = 2 * ulysses * ring, st.sampled_from(ALL_LAYOUTS)
    # Gaps that are sent along need some tokens a rank.
    more = st.integers(0, 30) | st.integers(60, 150) if ring < 4 else st.integers(0, 30)
    tokens = shortest + draw(more)
    shape = ulysses, ring, draw(st.sampled_from(ALL_ORDERS))
    left, right = draw(st.integers(0, 20)), draw(st.integers(0, 6))
    bounds = [(None, 0), (None, None), (left, 0), (left, right), (None, right), (left, None)]
    window = draw(st.sampled_from(bounds))
    layout, kv_layout, mask = TokenLayout(draw(kinds), tokens, *shape), None, MaskSpec(*window)
    if what in ("documents", "balanced", "blocks"):
        samples = draw(st.lists(borders_of(tokens), min_size=1, max_size=2))
        blocks = tuple(draw(blocks_in(x)) for x in samples) if what == "blocks" else ()
        mask = MaskSpec(*window, samples, blocks=blocks)
        if what == "balanced":  # for these documents, or for others
            documents = draw(st.just(samples[0]) | borders_of(tokens))
            layout = TokenLayout("balanced", tokens, *shape, documents)
    elif what == "tree":
        trees = [random_tree(draw(st.randoms()), tokens) for _ in range(draw(st.integers(1, 2)))]
        mask = MaskSpec.tree(trees, draw(st.none() | st.integers(0, 20)))
        if draw(st.booleans()):  # for this tree, or for another
            one = draw(st.just(trees[0]) | st.randoms().map(lambda x: random_tree(x, tokens)))
            layout = TokenLayout("balanced", tokens, *shape, MaskSpec.tree(one))
    elif what == "rectangles":
        blocks = list(
            pairwise(draw(borders_of(tokens) if tokens < 50 else st.just([0, 9, tokens])))
        )
        kinds_of = [("causal", "full"), ("causal", "full", "none")]
        given = [
            (*rows, *columns, draw(st.sampled_from(kinds_of[rows != columns])))
            for rows, columns in product(blocks, blocks)
            if len(blocks) < 12 or rows == columns
        ]
        mask = MaskSpec.rectangles([x for x in given if x[4] != "none"], tokens)
    elif what == "prefix":
        mask = MaskSpec(*window, prefix=draw(st.integers(0, tokens)))
    elif what == "other keys":
        mask, keys = MaskSpec.full(), shortest + draw(st.integers(0, 30))
        kv_layout = TokenLayout(draw(kinds), keys, *shape)
    support = TileSupport(draw(st.booleans()), mask.band.left is not None or draw(st.booleans()))
    support = TileSupport(support.rectangular, support.window, tall=draw(st.booleans()))
    gather, position = draw(st.booleans()), draw(st.sampled_from(POSITIONS))
    return Problem(layout, kv_layout, mask, support, gather, position)


# ------------------------------------------------------------------ what is computed


def check_call(call: KernelCall) -> None:
    """Tiles ascend, share no row and no column, and one window is right for all of them."""
    for tiles in call.tiles:
        for before, tile in pairwise(tiles):
            assert tile.q_start >= before.q_stop and tile.k_start >= before.k_stop
        for tile in tiles:
            assert call.q_start <= tile.q_start and tile.q_stop <= call.q_stop
            assert call.k_start <= tile.k_start and tile.k_stop <= call.k_stop
            for row in range(tile.rows if tile.window != call.window else 0):
                assert _columns(tile, row, tile.window) == _columns(tile, row, call.window)


def _columns(tile: Tile, row: int, window: tuple[int | None, int | None]) -> tuple[int, int]:
    """Half-open columns of a row of a rectangle under a window aligned to its bottom right."""
    diagonal, (left, right) = row + tile.columns - tile.rows, window
    low = 0 if left is None else max(0, diagonal - left)
    return low, tile.columns if right is None else min(tile.columns, diagonal + right + 1)


def check_pairs(problem: Problem, plans: list[RingSchedule], name: str) -> None:
    """All ranks together compute every allowed pair once, of every sample."""
    mask = problem.mask
    for sample in range(max(1, len(mask.documents))):
        seen = [0] * problem.layout.seq_len
        for rank, plan in enumerate(plans):
            rows = problem.layout.ring_positions(rank)
            for step in getattr(plan, name):
                keys = [0, *accumulate(1 << key for key in keys_of(problem, step))]
                for call in step.calls:
                    check_call(call)
                    for tile in call.tiles[sample if len(call.tiles) > 1 else 0]:
                        for row in range(tile.rows):
                            low, high = _columns(tile, row, tile.window)
                            new = keys[tile.k_start + high] - keys[tile.k_start + low]
                            query = rows[tile.q_start + row]
                            assert new and not seen[query] & new
                            seen[query] |= new
        assert seen == problem.visible(sample)


def keys_of(problem: Problem, step: RingStep) -> Tokens:
    """The positions of a step's keys, in the buffer's order."""
    positions = problem.keys.ring_positions
    keys = [key for x in step.kv_ranges for key in positions(x.rank)[x.start : x.stop]]
    assert len(keys) == step.num_kv_tokens
    return keys


# ------------------------------------------------------------------ what is exchanged


def packed(problem: Problem, plan: RingSchedule) -> Tokens:
    """A rank's own keys as others can read them: -1 for those that it does not pack."""
    runs, positions = plan.packed_runs, problem.keys.ring_positions(plan.ring_rank)
    assert all(before < after for (_, before), (after, _) in pairwise(runs))
    packs = {index for run in runs for index in range(*run)}
    return [key if index in packs else -1 for index, key in enumerate(positions)]


def receive(
    recv_ranges: Sequence[TokenRange],
    peers: dict[int, tuple[Sequence[TokenRange], Sequence[int], Tokens]],
    rank: int,
) -> Tokens:
    """What a rank receives from its peers, of which each has send ranges, offsets and tokens."""
    queues = {}
    for peer, (send_ranges, peer_offsets, tokens) in peers.items():
        sends = zip(send_ranges, peer_offsets, strict=True)
        queues[peer] = [(at, tokens[x.start : x.stop]) for x, at in sends if x.rank == rank]
    received: Tokens = []
    for peer, start, stop in recv_ranges:
        if peer == rank:  # its own keys come last; they are not received
            assert (peer, start, stop) == recv_ranges[-1]
            continue
        offset, tokens = queues[peer].pop(0)
        assert offset == len(received) and len(tokens) == stop - start
        received += tokens
    assert not any(queues.values()), "sent and not received"
    return received


def check_exchanges(problem: Problem, plans: list[RingSchedule], name: str) -> None:
    """A step's keys are this rank's own, or what other ranks send of what they have packed; ranks
    post their exchanges in step, and none in vain."""
    tokens = [packed(problem, plan) for plan in plans]
    for rank, plan in enumerate(plans):
        for step in getattr(plan, name):
            if step.is_local:
                assert keys_of(problem, step) == list(problem.keys.ring_positions(rank))
                assert not step.send_ranges
    remote = ([step for step in getattr(plan, name) if not step.is_local] for plan in plans)
    for steps in zip(*remote, strict=True):
        assert any(step.pairs for step in steps)
        for rank, step in enumerate(steps):
            peers = {r: (x.send_ranges, x.peer_offsets, tokens[r]) for r, x in enumerate(steps)}
            received = receive(step.kv_ranges, peers, rank)
            own = [x for x in step.kv_ranges if x.rank == rank]
            assert keys_of(problem, step) == received + (tokens[rank] if own else [])
            distances = [(rank - x.rank) % len(plans) for x in step.kv_ranges if x.rank != rank]
            assert distances == sorted(distances, reverse=True)


def runs_of(visible: list[int], owned: int) -> list[tuple[int, int]]:
    """Half-open runs of ascending tokens, split at gaps of a 32nd of what their owner has."""
    pairs = enumerate(pairwise(visible), 1)
    edges = [0, *(i for i, (a, b) in pairs if 32 * (b - a - 1) >= max(owned, 1)), len(visible)]
    runs = [visible[a:b] for a, b in pairwise(edges)]
    return [(run[0], run[-1] + 1) for run in runs if run]


def check_traffic(problem: Problem, plans: list[RingSchedule]) -> None:
    """Nothing else is received than the runs of another rank's keys that queries see, once."""
    queries, owners = problem.layout.ring_positions, problem.keys.ring_positions
    samples = [problem.visible(sample) for sample in range(max(1, len(problem.mask.documents)))]

    def seen(user: int, owner: int) -> list[int]:
        bits = 0
        for query in queries(user):
            for visible in samples:
                bits |= visible[query]
        return [index for index, key in enumerate(owners(owner)) if bits >> key & 1]

    for user, plan in enumerate(plans):
        received = [x for step in plan.steps if not step.is_local for x in step.kv_ranges]
        wanted = [
            (owner, *run)
            for owner in range(len(plans))
            if owner != user
            for run in runs_of(seen(user, owner), len(owners(owner)))
        ]
        assert sorted(x for x in received if x.rank != user) == wanted


# ------------------------------------------------------------------ in which order


def check_order(problem: Problem, plans: list[RingSchedule]) -> None:
    """The local block comes first, in place; backward it is last in the last chunk, and in an only
    chunk its rows are in two halves around the others. Merged it is the last of its step's."""
    for rank, plan in enumerate(plans):
        assert (plan.ring_rank, plan.ring_degree) == (rank, len(plans))
        first, *others = plan.steps
        length, own = problem.layout.ring_length(rank), problem.keys.ring_length(rank)
        if problem.gather:
            assert len(others) <= 1 + (problem.position == "only")
        if not first.is_local:
            assert problem.position == "local_merged" and problem.gather and not others
            assert plan.backward_steps == plan.steps
            assert first.kv_ranges[-1] == (rank, 0, own) and len(first.kv_ranges) > 1
            continue
        assert not any(step.is_local for step in others)
        assert all(x.rank != rank for step in others for x in step.kv_ranges)
        if problem.position == "local_last":
            assert plan.backward_steps == (*others, first)
            continue
        early, *middle = plan.backward_steps
        late = [middle.pop()] if others and problem.position == "only" else []
        assert middle == others
        for step in (first, early, *late):
            assert step.is_local and step.kv_ranges == ((rank, 0, own),)
        ends = accumulate(x.length for x in problem.layout.ring_segments(rank))
        half = length // 2 + (length % 2 and length // 2 + 1 in ends) if late else length
        assert all(call.q_stop <= half for call in early.calls)
        assert all(call.q_start >= half for step in late for call in step.calls)


def check_bounds(problem: Problem, plans: list[RingSchedule]) -> None:
    """What buffers are allocated for, the same on all ranks."""
    merged, received = [0], [0]
    for plan in plans:
        remote = [step for step in plan.steps if not step.is_local]
        received += [sum(x.length for x in s.kv_ranges if x.rank != plan.ring_rank) for s in remote]
        own = [[x for x in s.kv_ranges if x.rank == plan.ring_rank] for s in remote]
        merged += [s.num_kv_tokens for s, has in zip(remote, own, strict=True) if has]
        sends = [x for s in plan.steps + plan.backward_steps for x in s.send_ranges]
        sends += [x for ranges in own for x in ranges]
        edges = {edge for x in sends for edge in x[1:]}
        assert edges >= {edge for run in plan.packed_runs for edge in run}, "nothing else is packed"
    assert {plan.max_local_tokens for plan in plans} == {
        max(map(problem.keys.ring_length, range(len(plans))))
    }
    bound = plans[0].max_merged_tokens  # exact for small rings without documents
    assert max(merged) <= bound
    assert max(merged) == bound or problem.mask.documents or len(plans) > 8
    assert len({(p.max_recv_tokens, p.max_merged_tokens) for p in plans}) == 1
    assert plans[0].max_recv_tokens == max(received)


WHAT = ["window", "documents", "balanced", "blocks", "tree", "rectangles", "prefix", "other keys"]


@pytest.mark.parametrize("what", WHAT)
@given(data=st.data())
@examples(60)
def test_schedules_compute_every_pair_once_from_what_peers_send(what, data):
    problem = data.draw(problems(what))
    plans = problem.schedules()
    for name in ("steps", "backward_steps"):
        check_pairs(problem, plans, name)
        check_exchanges(problem, plans, name)
    check_traffic(problem, plans)
    check_order(problem, plans)
    check_bounds(problem, plans)
