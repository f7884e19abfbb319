"""A ring of rings: whose tokens a rank holds for the ranks of its node, one window after another.

The double ring of LoongTrain (arXiv 2406.18485). Ring ranks ``0 .. inner - 1`` are one node, the
next ``inner`` another one. In window ``w`` a rank holds what its node sees of the rank with its
place ``w`` nodes before; the tokens cross the network once, and the ranks of the node take them
from there. Window 0 is what each rank owns; with one node it is the only one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import divisors
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.segments import Segment, slice_segments
from ds_usp.geometry.visibility import Runs, merge_runs, min_gap, visible_runs


class TokenRange(NamedTuple):
    """Tokens ``start : stop`` of what a ring rank owns or holds, and that rank or one that uses
    them."""

    rank: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.rank}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class OuterStep:
    """What crosses the network for a window.

    Args:
        comes: what this rank is to hold for its node, by owner, in the order in which it lies.
        gives: this rank's own tokens that leave, and the rank that will hold them.
    """

    recv_ranges: tuple[TokenRange, ...]
    send_ranges: tuple[TokenRange, ...]

    @property
    def num_kv_tokens(self) -> int:
        """Tokens held."""
        return sum(token_range.length for token_range in self.recv_ranges)

    @property
    def num_sent_tokens(self) -> int:
        """Tokens that leave, as often as they do."""
        return sum(token_range.length for token_range in self.send_ranges)

    @property
    def peer_offsets(self) -> tuple[int, ...]:
        """For each of them, the first of its tokens among all that its holder gets."""
        return tuple(
            accumulate((token_range.length for token_range in self.send_ranges), initial=0)
        )[:-1]

    def __str__(self) -> str:
        texts = (
            " ".join(map(str, each)) or "nothing" for each in (self.recv_ranges, self.send_ranges)
        )
        return "holds {}, gives {}".format(*texts)


def validate_inner_ring(ring: int, inner: int | None) -> int | None:
    """Check that a ring is whole nodes of so many ranks; None where that makes no double ring, as
    one rank, which has nothing to pass on, never does.

    Raises:
        ConfigError: it is not.
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
    """Which tokens each rank of a ring holds and takes.

    Args:
        queries, keys: where they are.
        mask: which of them meet.
        inner: ring ranks in a row that are one node; None, or a node a rank: all of the ring.

    Raises:
        ConfigError: the ring is not whole nodes.
    """

    def __init__(
        self, queries: TokenLayout, keys: TokenLayout, mask: MaskSpec, inner: int | None = None
    ) -> None:
        self.queries, self.keys, self.mask = queries, keys, mask
        self.ring = queries.ring
        self.inner = validate_inner_ring(self.ring, inner) or self.ring
        self._runs = visible_runs(queries, mask, keys)
        self._relayed_runs: dict[tuple[int, int], Runs] = {}

    @property
    def outer_steps(self) -> range:
        """All windows, useful or not."""
        return range(self.ring // self.inner)

    def inner_peer(self, rank: int, offset: int) -> int:
        """The rank of the same node so many places before a rank, around the node."""
        first = rank - rank % self.inner
        return first + (rank - first - offset) % self.inner

    def owner(self, holder: int, outer_step: int) -> int:
        """Whose tokens a rank holds in a window."""
        return (holder - outer_step * self.inner) % self.ring

    def relayed_runs(self, holder: int, outer_step: int) -> Runs:
        """Which of them: all of its own; of another rank's, what its node sees of them."""
        owner = self.owner(holder, outer_step)
        length = self.keys.ring_length(owner)
        if not outer_step:
            return ((0, length),)
        key = holder, outer_step
        if key not in self._relayed_runs:
            first = holder - holder % self.inner
            users = range(first, first + self.inner)
            seen = (run for user in users for run in self._runs[user][owner])
            self._relayed_runs[key] = merge_runs(seen, min_gap(length))
        return self._relayed_runs[key]

    def relayed_segments(self, holder: int, outer_step: int) -> tuple[Segment, ...]:
        """The positions of what a rank holds."""
        owned = self.keys.ring_segments(self.owner(holder, outer_step))
        runs = self.relayed_runs(holder, outer_step)
        return tuple(segment for run in runs for segment in slice_segments(owned, *run))

    def offsets(self, outer_step: int) -> tuple[int, ...]:
        """How far before their users, in the node, the holders stand of which anything is seen."""
        ranks = range(self.ring)
        return tuple(
            offset
            for offset in range(self.inner)
            if any(self._runs[r][self.owner(self.inner_peer(r, offset), outer_step)] for r in ranks)
        )

    def recv_ranges(
        self, rank: int, outer_step: int, offsets: Sequence[int]
    ) -> tuple[tuple[TokenRange, TokenRange], ...]:
        """What a rank takes from those some offsets before it, the farthest first: tokens of their
        owner, and the same ones among those that are held. Of itself it takes all that it holds.

        In this order the keys that a causal zigzag's front half sees lie next to each other, and
        those of both halves end at their diagonals.
        """
        found = []
        for offset in sorted(offsets, reverse=True):
            holder = self.inner_peer(rank, offset)
            owner, relayed_runs = (
                self.owner(holder, outer_step),
                self.relayed_runs(holder, outer_step),
            )
            firsts = [first for first, _ in relayed_runs]
            places = list(accumulate((stop - start for start, stop in relayed_runs), initial=0))
            for start, stop in self._runs[rank][owner] if offset else relayed_runs:
                at = bisect_right(firsts, start) - 1
                place = places[at] + start - firsts[at]
                token_range = TokenRange(holder, place, place + stop - start)
                found.append((TokenRange(owner, start, stop), token_range))
        return tuple(found)

    def outer_step(self, rank: int, outer_step: int) -> OuterStep:
        """What comes to a rank and leaves it for a window."""
        recv_ranges = (
            TokenRange(self.owner(rank, outer_step), *run)
            for run in self.relayed_runs(rank, outer_step)
        )
        user = (rank + outer_step * self.inner) % self.ring
        send_ranges = (TokenRange(user, *run) for run in self.relayed_runs(user, outer_step))
        return OuterStep(tuple(recv_ranges), tuple(send_ranges))
