"""A double ring (LoongTrain, arXiv 2406.18485): blocks cross the network once for a whole node.

Ring ranks ``0 .. inner - 1`` are one node, the next ``inner`` another. In outer step ``w`` a rank
relays, for its node, what the node sees of the rank with its index ``w`` nodes before: the tokens
cross the network once, and the ranks of the node receive them from there. In outer step 0 each rank
has its own tokens. Each outer step is thus a ring of the node's ranks, and the steps of a rank are
those of these rings, one after the other, while the next outer step's tokens are received.

What would bring it back into the defaults: a committed result on GPUs of two nodes in which
``Tuning(inner_ring=...)`` is faster than the plain ring by NCCL, as it is by gloo between two hosts
of namespaces (``hosts_times.jsonl``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import divisors
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_schedule import (
    ChunkPosition,
    RingSchedule,
    RingStep,
    local_step,
    remote_step,
    ring_schedule,
    schedule_of_ring,
)
from ds_usp.geometry.ring_traffic import OuterStep, Ring, TokenRange, merge_runs, min_gap
from ds_usp.geometry.segments import Runs
from ds_usp.geometry.tiles import ANY_BAND, TileSupport


def validate_inner_ring(ring: int, inner: int | None) -> int | None:
    """``inner``; None where that is no double ring, as with one rank, which has nothing to relay.
    ConfigError if it does not divide the ring."""
    if inner is None or ring == 1:
        return None
    if inner < 1 or ring % inner:
        fits = ", ".join(map(str, divisors(ring)))
        raise ConfigError(
            f"inner_ring={inner} does not divide the {ring} ranks of the ring. Use one of {fits}"
        )
    return None if inner in (1, ring) else inner


class NodeRing(Ring):
    """The rings of all nodes in one outer step.

    Args:
        inner: adjacent ring ranks that are one node.
        outer_step: 0: each rank has its own tokens.
    """

    def __init__(
        self, queries: TokenLayout, keys: TokenLayout, mask: MaskSpec, inner: int, outer_step: int
    ) -> None:
        super().__init__(queries, keys, mask)
        self.inner, self.outer_step = inner, outer_step
        self._relayed: dict[int, Runs] = {}

    @property
    def size(self) -> int:
        return self.inner

    def peer(self, rank: int, offset: int) -> int:
        first = rank - rank % self.inner
        return first + (rank - first - offset) % self.inner

    def owner(self, rank: int) -> int:
        """The rank with its index, so many nodes before."""
        return (rank - self.outer_step * self.inner) % self.degree

    def held_runs(self, rank: int) -> Runs:
        """All of its own tokens; of another rank's, those that its node sees."""
        if not self.outer_step:
            return super().held_runs(rank)
        if rank not in self._relayed:
            owner, first = self.owner(rank), rank - rank % self.inner
            users = range(first, first + self.inner)
            visible = (run for user in users for run in self.visible[user][owner])
            self._relayed[rank] = merge_runs(visible, min_gap(self.keys.ring_length(owner)))
        return self._relayed[rank]

    def outer_exchange(self, rank: int) -> OuterStep:
        """What a rank receives and sends across the network for the outer step."""
        owner, relay = self.owner(rank), (rank + self.outer_step * self.inner) % self.degree
        return OuterStep(
            tuple(TokenRange(owner, *run) for run in self.held_runs(rank)),
            tuple(TokenRange(relay, *run) for run in self.held_runs(relay)),
        )


@lru_cache(maxsize=64)
def double_ring_schedule(
    layout: TokenLayout,
    mask: MaskSpec,
    ring_rank: int,
    support: TileSupport = ANY_BAND,
    gather: bool = False,
    position: ChunkPosition = "only",
    kv_layout: TokenLayout | None = None,
    *,
    inner: int | None,
) -> RingSchedule:
    """Plan one rank's steps, as ``ring_schedule`` does.

    Args:
        gather: the blocks of all other ranks of a node in one step.
        inner: ring ranks of a node; where that is no double ring, the schedule of a plain one.

    Raises:
        LayoutError: no such rank.
        ConfigError: ``inner`` does not divide the ring.
    """
    size = validate_inner_ring(layout.ring, inner)
    if size is None:
        return ring_schedule(layout, mask, ring_rank, support, gather, position, kv_layout)
    first, *others = (
        NodeRing(layout, kv_layout or layout, mask, size, outer_step)
        for outer_step in range(layout.ring // size)
    )
    outer_steps: list[OuterStep] = []
    relayed: list[RingStep] = []
    for node in others:
        offsets = node.offsets()
        if not offsets:  # no rank sees anything of it
            continue
        outer_steps.append(node.outer_exchange(ring_rank))
        peers = [offset for offset in offsets if offset]
        visits = [peers] if gather and peers else [[offset] for offset in peers]
        # What this rank relays comes first, seen or not: it overlaps the first receive.
        steps = [local_step(node, ring_rank, support)]
        steps += [remote_step(node, ring_rank, x, support) for x in visits]
        relayed += [replace(step, outer_step=len(outer_steps)) for step in steps]
    return schedule_of_ring(
        first, ring_rank, support, gather, position, tuple(outer_steps), tuple(relayed)
    )
