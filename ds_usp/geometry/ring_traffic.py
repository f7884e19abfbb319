"""Which tokens each ring rank sends and receives, on integers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.segments import Runs, Segment, ShardIndex, slice_segments
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
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.rank}[{self.start}:{self.stop}]"


def total_length(ranges: Iterable[TokenRange]) -> int:
    """Number of tokens in all ranges."""
    return sum([stop - start for _, start, stop in ranges])


@dataclass(frozen=True, slots=True)
class OuterStep:
    """What a rank of a double ring exchanges across the network before the ring steps of an outer
    step.

    Args:
        recv_ranges: what this rank is to relay in its node, by owner, in the buffer's order.
        send_ranges: this rank's own tokens that are sent, and the rank that will relay them.

    Attributes:
        num_kv_tokens, num_sent_tokens, peer_offsets: as of ``RingStep``.
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


class Ring:
    """Which tokens each rank of a ring sends and receives. A node of a double ring in one outer
    step is one too, whose ranks hold what they relay (``ds_usp.experimental.double_ring``).

    Args:
        queries, keys: layouts of the query and of the key tokens.
        mask: which of them attend to each other.
    """

    def __init__(self, queries: TokenLayout, keys: TokenLayout, mask: MaskSpec) -> None:
        self.queries, self.keys, self.mask = queries, keys, mask
        self.degree = queries.ring
        self.visible = visible_runs(queries, mask, keys)

    @property
    def size(self) -> int:
        """Ranks that exchange with each other."""
        return self.degree

    def peer(self, rank: int, offset: int) -> int:
        """The rank ``offset`` ranks before ``rank``, around those that exchange."""
        return (rank - offset) % self.degree

    def owner(self, rank: int) -> int:
        """The ring rank whose tokens a rank holds."""
        return rank

    def held_runs(self, rank: int) -> Runs:
        """The runs of the owner's tokens that a rank holds."""
        return ((0, self.keys.ring_length(rank)),)

    def held_segments(self, rank: int) -> tuple[Segment, ...]:
        owned = self.keys.ring_segments(self.owner(rank))
        runs = self.held_runs(rank)
        return tuple(segment for run in runs for segment in slice_segments(owned, *run))

    def offsets(self) -> tuple[int, ...]:
        """Those at which any rank sees anything of what that peer holds."""
        ranks = range(self.degree)
        return tuple(
            offset
            for offset in range(self.size)
            if any(self.visible[rank][self.owner(self.peer(rank, offset))] for rank in ranks)
        )

    def recv_ranges(
        self, rank: int, offsets: Sequence[int]
    ) -> tuple[tuple[TokenRange, TokenRange], ...]:
        """What a rank receives from its peers at some offsets, the farthest first: ranges of the
        tokens' owner, and the same tokens among those that the peer holds. At offset 0, its own, it
        has all that it holds."""
        ranges = []
        for offset in sorted(offsets, reverse=True):
            peer = self.peer(rank, offset)
            owner, held = self.owner(peer), self.held_runs(peer)
            firsts = [first for first, _ in held]
            held_at = list(accumulate((stop - start for start, stop in held), initial=0))
            for start, stop in self.visible[rank][owner] if offset else held:
                index = bisect_right(firsts, start) - 1
                at_peer = held_at[index] + start - firsts[index]
                of_peer = TokenRange(peer, at_peer, at_peer + stop - start)
                ranges.append((TokenRange(owner, start, stop), of_peer))
        return tuple(ranges)


@lru_cache(maxsize=64)
def visible_runs(
    layout: TokenLayout, mask: MaskSpec, kv_layout: TokenLayout | None = None
) -> tuple[tuple[Runs, ...], ...]:
    """Half-open runs of the owner's tokens that the user's queries see, by user and owner; of
    several samples, what any of them sees. Short gaps are included."""
    ranks = range(layout.ring)
    kv_layout = kv_layout or layout
    # One index of all ranks' tokens, one after the other, and where each rank's begin.
    (queries, q_firsts), (keys, k_firsts) = (_index_of_ranks(x) for x in (layout, kv_layout))
    visible: list[list[list[tuple[int, int]]]] = [[[] for _ in ranks] for _ in ranks]
    for sample in range(max(1, len(mask.documents))):
        for area in chain.from_iterable(mask.areas_of(sample)):
            rows = queries.between(area.q_start, area.q_stop)
            for k, k_at in keys.between(area.k_start, area.k_stop):
                owner = bisect_right(k_firsts, k_at) - 1
                for q, q_at in rows:
                    if seen := visible_columns(q, k, area[4:]):
                        start = k_at - k_firsts[owner]
                        runs = visible[bisect_right(q_firsts, q_at) - 1][owner]
                        runs.append((start + seen[0], start + seen[1]))
    gaps = [min_gap(kv_layout.ring_length(owner)) for owner in ranks]
    return tuple(
        tuple(merge_runs(runs, gap) for runs, gap in zip(row, gaps, strict=True)) for row in visible
    )


def _index_of_ranks(layout: TokenLayout) -> tuple[ShardIndex, list[int]]:
    shards = [layout.ring_segments(rank) for rank in range(layout.ring)]
    lengths = map(layout.ring_length, range(layout.ring))
    return ShardIndex(chain.from_iterable(shards)), list(accumulate(lengths, initial=0))


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
