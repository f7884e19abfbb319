"""Which tokens each ring rank sends, relays and receives: the traffic of a ring, on integers.

A double ring (LoongTrain, arXiv 2406.18485) groups ring ranks ``0 .. inner - 1`` as one node, the
next ``inner`` as another. In outer step ``w`` a rank relays, for its node, what the node sees of
the rank with its index ``w`` nodes before: the tokens cross the network once, and the ranks of the
node receive them from there. In outer step 0 each rank has its own tokens; with one node it is the
only one, and the ring is a plain one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import divisors
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.segments import Runs, Segment, slice_segments, split_at_documents
from ds_usp.geometry.tiles import visible_columns

# Tokens between two visible runs are not sent if they are this fraction of their owner's tokens:
# below, another message costs more than they do.
_MIN_GAP_FRACTION = 32


class TokenRange(NamedTuple):
    """Tokens ``start : stop`` of a ring rank: of its own, or of what it relays; or of this rank's,
    with the rank that receives them."""

    rank: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.rank}[{self.start}:{self.stop}]"


def total_length(ranges: Iterable[TokenRange]) -> int:
    """Number of tokens in all ranges."""
    return sum([stop - start for _, start, stop in ranges])


@dataclass(frozen=True, slots=True)
class OuterStep:
    """What a rank exchanges across the network before the ring steps of an outer step.

    Args:
        recv_ranges: what this rank is to relay in its node, by owner, in the buffer's order.
        send_ranges: this rank's own tokens that are sent, and the rank that will relay them.

    Attributes:
        num_kv_tokens: tokens relayed.
        num_sent_tokens: tokens sent, each as often as it is.
        peer_offsets: for each sent range, the index of its first token among all that its receiver
            gets.
    """

    recv_ranges: tuple[TokenRange, ...]
    send_ranges: tuple[TokenRange, ...]
    num_kv_tokens: int = field(init=False, compare=False, repr=False)
    num_sent_tokens: int = field(init=False, compare=False, repr=False)
    peer_offsets: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        lengths = (stop - start for _, start, stop in self.send_ranges)
        object.__setattr__(self, "num_kv_tokens", total_length(self.recv_ranges))
        object.__setattr__(self, "num_sent_tokens", total_length(self.send_ranges))
        object.__setattr__(self, "peer_offsets", tuple(accumulate(lengths, initial=0))[:-1])

    def __str__(self) -> str:
        received, sent = (
            " ".join(map(str, ranges)) or "nothing"
            for ranges in (self.recv_ranges, self.send_ranges)
        )
        return f"relays {received}, sends {sent}"


def validate_inner_ring(ring: int, inner: int | None) -> int | None:
    """Check that ``inner`` ring ranks a node divide the ring; None where that is no double ring, as
    with one rank, which has nothing to relay.

    Raises:
        ConfigError: it does not divide.
    """
    if inner is None or ring == 1:
        return None
    if inner < 1 or ring % inner:
        fits = ", ".join(map(str, divisors(ring)))
        raise ConfigError(
            f"inner_ring={inner} does not divide the {ring} ranks of the ring. Use one of {fits}"
        )
    return None if inner in (1, ring) else inner


class DoubleRing:
    """Which tokens each rank of a ring relays and receives.

    Args:
        queries, keys: layouts of the query and of the key tokens.
        mask: which of them attend to each other.
        inner: adjacent ring ranks that are one node; None, or a node a rank: a plain ring.

    Raises:
        ConfigError: ``inner`` does not divide the ring.
    """

    def __init__(
        self, queries: TokenLayout, keys: TokenLayout, mask: MaskSpec, inner: int | None = None
    ) -> None:
        self.queries, self.keys, self.mask = queries, keys, mask
        self.ring = queries.ring
        self.inner = validate_inner_ring(self.ring, inner) or self.ring
        self._visible = visible_runs(queries, mask, keys)
        self._relayed: dict[tuple[int, int], Runs] = {}

    @property
    def outer_steps(self) -> range:
        """The indices of all outer steps, useful or not."""
        return range(self.ring // self.inner)

    def inner_peer(self, rank: int, offset: int) -> int:
        """The rank of the same node ``offset`` ranks before ``rank``, around the node."""
        first = rank - rank % self.inner
        return first + (rank - first - offset) % self.inner

    def owner(self, relay: int, outer_step: int) -> int:
        """The ring rank whose tokens a rank relays in an outer step."""
        return (relay - outer_step * self.inner) % self.ring

    def relayed_runs(self, relay: int, outer_step: int) -> Runs:
        """The runs of the owner's tokens that a rank relays in an outer step: all of its own
        tokens; of another rank's, those that its node sees."""
        owner = self.owner(relay, outer_step)
        length = self.keys.ring_length(owner)
        if not outer_step:
            return ((0, length),)
        key = relay, outer_step
        if key not in self._relayed:
            first = relay - relay % self.inner
            users = range(first, first + self.inner)
            visible = (run for user in users for run in self._visible[user][owner])
            self._relayed[key] = merge_runs(visible, min_gap(length))
        return self._relayed[key]

    def relayed_segments(self, relay: int, outer_step: int) -> tuple[Segment, ...]:
        """The positions of what a rank relays."""
        owned = self.keys.ring_segments(self.owner(relay, outer_step))
        runs = self.relayed_runs(relay, outer_step)
        return tuple(segment for run in runs for segment in slice_segments(owned, *run))

    def offsets(self, outer_step: int) -> tuple[int, ...]:
        """Offsets in a node at which any rank sees anything of what that peer relays."""
        ranks = range(self.ring)
        return tuple(
            offset
            for offset in range(self.inner)
            if any(
                self._visible[rank][self.owner(self.inner_peer(rank, offset), outer_step)]
                for rank in ranks
            )
        )

    def recv_ranges(
        self, rank: int, outer_step: int, offsets: Sequence[int]
    ) -> tuple[tuple[TokenRange, TokenRange], ...]:
        """What a rank receives from its peers at some offsets, the farthest first: ranges of the
        tokens' owner, and the same tokens among those that the peer relays. At offset 0, its own,
        it has all that it relays.

        In this order the keys that a causal zigzag's front half sees lie next to each other, and
        those of both halves end at their diagonals.
        """
        ranges = []
        for offset in sorted(offsets, reverse=True):
            relay = self.inner_peer(rank, offset)
            owner, relayed = self.owner(relay, outer_step), self.relayed_runs(relay, outer_step)
            firsts = [first for first, _ in relayed]
            relayed_at = list(accumulate((stop - start for start, stop in relayed), initial=0))
            for start, stop in self._visible[rank][owner] if offset else relayed:
                index = bisect_right(firsts, start) - 1
                at_relay = relayed_at[index] + start - firsts[index]
                relay_range = TokenRange(relay, at_relay, at_relay + stop - start)
                ranges.append((TokenRange(owner, start, stop), relay_range))
        return tuple(ranges)

    def outer_exchange(self, rank: int, outer_step: int) -> OuterStep:
        """What a rank receives and sends across the network for an outer step."""
        owner, relay = self.owner(rank, outer_step), self.owner(rank, -outer_step)
        return OuterStep(
            tuple(TokenRange(owner, *run) for run in self.relayed_runs(rank, outer_step)),
            tuple(TokenRange(relay, *run) for run in self.relayed_runs(relay, outer_step)),
        )


@lru_cache(maxsize=64)
def visible_runs(
    layout: TokenLayout, mask: MaskSpec, kv_layout: TokenLayout | None = None
) -> tuple[tuple[Runs, ...], ...]:
    """Half-open runs of the owner's tokens that the user's queries see, by user and owner.

    Invisible tokens are included where the gap that they make is short. Of several samples, what
    any of them sees.
    """
    ranks = range(layout.ring)
    kv_layout = kv_layout or layout
    segments, kv_segments = ([x.ring_segments(r) for r in ranks] for x in (layout, kv_layout))
    visible: list[list[list[tuple[int, int]]]] = [[[] for _ in ranks] for _ in ranks]
    for borders in mask.documents or ((),):
        shards, kv_shards = (
            [split_at_documents(shard, borders) for shard in x] for x in (segments, kv_segments)
        )
        for user in ranks:
            for owner in ranks:
                queries, keys, runs = shards[user], kv_shards[owner], visible[user][owner]
                for document in queries.keys() & keys.keys():
                    runs += visible_columns(queries[document], keys[document], mask)
    gaps = [min_gap(kv_layout.ring_length(owner)) for owner in ranks]
    return tuple(
        tuple(merge_runs(runs, gap) for runs, gap in zip(row, gaps, strict=True)) for row in visible
    )


def min_gap(num_tokens: int) -> int:
    """Fewest invisible tokens between two runs that are not sent, of so many of their owner's."""
    return max(1, -(-num_tokens // _MIN_GAP_FRACTION))


def merge_runs(runs: Iterable[tuple[int, int]], gap: int) -> Runs:
    """The union of runs, and of the gaps between them that are shorter than ``gap``."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if merged and start - merged[-1][1] < gap:
            previous = merged.pop()
            start, stop = previous[0], max(previous[1], stop)
        merged.append((start, stop))
    return tuple(merged)
