"""Heads for sequence and back: one packed exchange among the Ulysses ranks.

Letters of the shapes: B batch, s tokens of one rank, S tokens of the ring rank (all Ulysses ranks
of it), H heads of a tensor, h heads that one Ulysses rank computes, D head dim. All but B may
differ from tensor to tensor (q, k, v).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.ring import Channel
from ds_usp.dense import dense_copy
from ds_usp.geometry.layout import Run, TokenLayout

HeadRanges = tuple[tuple[int, int], ...]
Pieces = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class HeadExchange:
    """Which tokens and heads go where among the Ulysses ranks of one ring rank.

    Args:
        mesh: the ranks.
        layouts: for each tensor, where its tokens are.
        ranges: for each tensor, the half-open head range that each Ulysses rank uses. Ranges may
            overlap: such a head travels to each of its users, and on the way back their parts
            are summed (in fp32).
        copies: where each rank has as much, copy engines carry it.
    """

    mesh: SequenceMesh
    layouts: tuple[TokenLayout, ...]
    ranges: tuple[HeadRanges, ...]
    copies: bool = False

    def to_heads(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All tokens of the ring rank for this rank's heads: ``[B, s, H, D] -> [B, S, h, D]``.

        What comes back may be views, dense in their features, of one tensor.
        """
        ranks, mine = range(self.mesh.ulysses_degree), self.mesh.ulysses_rank
        if len(ranks) == 1:
            return tuple(_heads(x, each[0]) for x, each in zip(tensors, self.ranges, strict=True))
        if self._even:
            return self._to_heads_even(tensors)
        outs = []
        for x, layout, ranges in zip(tensors, self.layouts, self.ranges, strict=True):
            begin, end = ranges[mine]
            tokens = layout.ring_length(self.mesh.ring_rank)
            outs.append(x.new_empty(x.shape[0], tokens, end - begin, x.shape[3]))
        sent = [self._of_sequence(tensors, rank) for rank in ranks]
        self._exchange(sent, [self._of_heads(outs, rank) for rank in ranks])
        return tuple(outs)

    def to_sequence(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        """All of these heads for this rank's tokens: ``[B, S, h, D] -> [B, s, H, D]``.

        Args:
            places: ``[B, s, H, D]``, whose heads of the exchange are written. Where ranges
                overlap all are, so they must be all of the tensor's.
        """
        ranks = range(self.mesh.ulysses_degree)
        if len(ranks) == 1:
            for place, x, each in zip(places, tensors, self.ranges, strict=True):
                dense_copy(_heads(place, each[0]), x)
            return
        if self._even:
            self._to_sequence_even(tensors, places)
            return
        wide = [
            self._accumulator(place, each) for place, each in zip(places, self.ranges, strict=True)
        ]
        sent = [self._of_heads(tensors, rank) for rank in ranks]
        add = [
            _overlap(ranges)
            for layout, ranges in zip(self.layouts, self.ranges, strict=True)
            for _ in _places(layout, self.mesh.ring_rank, self.mesh.ulysses_rank)
        ]
        self._exchange(sent, [self._of_sequence(wide, rank) for rank in ranks], add)
        for place, total in zip(places, wide, strict=True):
            if total is not place:
                place.copy_(total)

    def places(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Room for what :meth:`to_sequence` brings, where the exchange is of all heads."""
        return tuple(
            x.new_empty(x.shape[0], layout.length(self.mesh.rank), ranges[-1][1], x.shape[3])
            for x, layout, ranges in zip(tensors, self.layouts, self.ranges, strict=True)
        )

    def widths(self) -> tuple[int, ...]:
        """Heads of each tensor that this rank computes."""
        return self._widths

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        mine = self.mesh.ulysses_rank
        return tuple(each[mine][1] - each[mine][0] for each in self.ranges)

    @staticmethod
    def _accumulator(place: torch.Tensor, ranges: HeadRanges) -> torch.Tensor:
        """Where parts of a head are summed, in fp32; where there are none, the place itself."""
        if not _overlap(ranges):
            return place
        return torch.zeros_like(place, dtype=torch.promote_types(place.dtype, torch.float32))

    @cached_property
    def _even(self) -> bool:
        """Every rank holds one run as long as any other's and uses as many heads, evenly apart."""
        ulysses = self.mesh.ulysses_degree
        runs = [layout.runs(self.mesh.ring_rank) for layout in self.layouts]
        return (
            all(
                [run.ulysses_rank for run in each] == list(range(ulysses))
                and len({run.length for run in each}) == 1
                for each in runs
            )
            and len({each[0].length for each in runs}) == 1
            and all(_evenly_apart(ranges) for ranges in self.ranges)
        )

    def _of_sequence(self, tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Of sequence shards: this rank's runs, for the heads of another."""
        return [
            x[:, run.start : run.stop, begin:end]
            for x, layout, ranges in zip(tensors, self.layouts, self.ranges, strict=True)
            for begin, end in [ranges[rank]]
            for _, run in _places(layout, self.mesh.ring_rank, self.mesh.ulysses_rank)
        ]

    def _of_heads(self, tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Of head shards: the runs of another rank."""
        return [
            x.narrow(1, at, run.length)
            for x, layout in zip(tensors, self.layouts, strict=True)
            for at, run in _places(layout, self.mesh.ring_rank, rank)
        ]

    def _to_heads_even(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """As many tokens and heads on each rank: what comes needs no copy.

        Tokens are the first dim of what travels, so the ranks' pieces lie one after the other as
        the ring rank's tokens do.
        """
        batch, tokens = tensors[0].shape[:2]
        dims = [x.shape[3] for x in tensors]
        shape = self._packed_shape(tokens, batch, dims)
        parts = [_by_heads(x, each) for x, each in zip(tensors, self.ranges, strict=True)]
        got = tensors[0].new_empty(shape)
        if self.copies:
            channel, sent = self._packed(parts, shape)
            mine, piece = self.mesh.ulysses_rank, sent[0].numel()
            channel.post(
                [(rank, sent[rank]) for rank in self._others],
                [(rank, got[rank], mine * piece, 0) for rank in self._others],
            )
            with closing(channel):  # which waits for what has been posted
                got[mine].copy_(sent[mine])
        else:
            sent = torch.empty_like(got)
            for place, part in zip(self._unpacked(sent, dims), parts, strict=True):
                dense_copy(place, part)
            self._send(sent, got, [sent[0].numel()] * len(sent))
        whole = self._unpacked(got.flatten(0, 1), dims)
        return tuple(x.transpose(0, 1) for x in whole)

    def _to_sequence_even(
        self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]
    ) -> None:
        """The way back. By messages, what leaves needs no copy if it is one dense tensor of one
        sample; copy engines bring what comes to its place."""
        ranks = self.mesh.ulysses_degree
        batch, tokens = places[0].shape[:2]
        dims = [x.shape[3] for x in places]
        shape = self._packed_shape(tokens, batch, dims)
        parts = [x.transpose(0, 1).unflatten(0, (ranks, tokens)) for x in tensors]
        goals = [_by_heads(x, each) for x, each in zip(places, self.ranges, strict=True)]
        if self.copies:
            self._copy_home(parts, goals, shape)
            return
        if len(tensors) == batch == 1 and tensors[0].is_contiguous():
            sent = tensors[0].view(shape)
        else:
            sent = tensors[0].new_empty(shape)
            for place, part in zip(self._unpacked(sent, dims), parts, strict=True):
                dense_copy(place, part)
        got = torch.empty_like(sent)
        self._send(sent, got, [sent[0].numel()] * ranks)
        for goal, part in zip(goals, self._unpacked(got, dims), strict=True):
            dense_copy(goal, part)

    def _copy_home(
        self,
        parts: Sequence[torch.Tensor],
        goals: Sequence[torch.Tensor],
        shape: tuple[int, ...],
    ) -> None:
        """Each rank's tokens ``[ranks, s, B, h, D]`` to their places there, by copy engines."""
        channel, sent = self._packed(parts, shape)
        mine, piece, token = self.mesh.ulysses_rank, sent[0].numel(), sent[0, 0].numel()
        starts = accumulate((goal.shape[3:].numel() for goal in goals), initial=0)
        placed = list(zip(goals, starts, strict=False))
        channel.post(
            [(rank, sent[rank]) for rank in self._others],
            [
                (rank, goal[rank], mine * piece + start, token)
                for rank in self._others
                for goal, start in placed
            ],
        )
        with closing(channel):  # which waits for what has been posted
            for goal, part in zip(goals, parts, strict=True):
                dense_copy(goal[mine], part[mine])

    def _packed(
        self, parts: Sequence[torch.Tensor], shape: tuple[int, ...]
    ) -> tuple[Channel, torch.Tensor]:
        """A channel, and what every rank gets of ``[ranks, s, B, h, D]``, packed in its room. This
        rank's own is there too: to leave it out takes twice the calls, which the host pays for."""
        channel = self.mesh.channel("all_to_all", self.copies)
        sent = channel.room(shape, parts[0], parts[0].dtype)
        dims = [part.shape[4] for part in parts]
        for place, part in zip(self._unpacked(sent, dims), parts, strict=True):
            dense_copy(place, part)
        return channel, sent

    def _packed_shape(self, tokens: int, batch: int, dims: Sequence[int]) -> tuple[int, ...]:
        """Of all that travels, ``[ranks, s, B, features]``: a token's heads of every tensor lie one
        after the other."""
        features = sum(width * dim for width, dim in zip(self.widths(), dims, strict=True))
        return self.mesh.ulysses_degree, tokens, batch, features

    def _unpacked(self, packed: torch.Tensor, dims: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The tensors ``[..., h, D]`` in ``[..., features]``, views."""
        shapes = list(zip(self.widths(), dims, strict=True))
        parts = packed.split([width * dim for width, dim in shapes], -1)
        front = packed.shape[:-1]
        return tuple(x.view(*front, *shape) for x, shape in zip(parts, shapes, strict=True))

    @cached_property
    def _others(self) -> list[int]:
        """The other Ulysses ranks, the next one first."""
        ranks, mine = self.mesh.ulysses_degree, self.mesh.ulysses_rank
        return [(mine + step) % ranks for step in range(1, ranks)]

    def staging_bytes(self, batch: int, dims: Sequence[int], size: int) -> int:
        """What a rank packs at most for one exchange that copy engines carry.

        Args:
            batch, dims, size: samples, each tensor's head dim, bytes of an element.
        """
        if not self.copies or self.mesh.ulysses_degree == 1 or not self._even:
            return 0
        tokens = self.layouts[0].length(self.mesh.rank)
        return math.prod(self._packed_shape(tokens, batch, dims)) * size

    def _exchange(self, leaving: Pieces, arriving: Pieces, add: Sequence[bool] = ()) -> None:
        """Any pieces, the same number for each rank; ``add`` says which ones are summed."""
        sent = [sum(piece.numel() for piece in pieces) for pieces in leaving]
        received = [sum(piece.numel() for piece in pieces) for pieces in arriving]
        out_buffer = leaving[0][0].new_empty(sum(sent))
        in_buffer = out_buffer.new_empty(sum(received))
        at = 0
        for piece in (piece for pieces in leaving for piece in pieces):
            out_buffer[at : at + piece.numel()].view(piece.shape).copy_(piece)
            at += piece.numel()
        self._send(out_buffer, in_buffer, sent, received)
        at = 0
        for pieces in arriving:
            for place, adds in zip(pieces, add or [False] * len(pieces), strict=True):
                piece = in_buffer[at : at + place.numel()].view(place.shape)
                place.add_(piece) if adds else place.copy_(piece)
                at += place.numel()

    def _send(
        self,
        out_buffer: torch.Tensor,
        in_buffer: torch.Tensor,
        sent: list[int],
        received: list[int] | None = None,
    ) -> None:
        dist.all_to_all_single(
            in_buffer.view(-1),
            out_buffer.view(-1),
            received or sent,
            sent,
            group=self.mesh.ulysses_group,
        )
        to_others = sum(sent) - sent[self.mesh.ulysses_rank]
        self.mesh.ledger.add("all_to_all", to_others * out_buffer.element_size())


def _heads(x: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    """Some heads of ``[B, s, H, D]``, a view; the tensor itself if they are all."""
    return x if span == (0, x.shape[2]) else x[:, :, span[0] : span[1]]


def _by_heads(x: torch.Tensor, ranges: HeadRanges) -> torch.Tensor:
    """Each rank's heads of ``[B, s, H, D]``, which lie evenly: ``[ranks, s, B, h, D]``, a view."""
    first, width = ranges[0][0], ranges[0][1] - ranges[0][0]
    apart = ranges[1][0] - first
    batch, tokens, _, dim = x.shape
    stride = (apart * x.stride(2), x.stride(1), x.stride(0), x.stride(2), x.stride(3))
    offset = x.storage_offset() + first * x.stride(2)
    return x.as_strided((len(ranges), tokens, batch, width, dim), stride, offset)


@lru_cache(maxsize=4096)
def _places(layout: TokenLayout, ring_rank: int, ulysses_rank: int) -> tuple[tuple[int, Run], ...]:
    """A Ulysses rank's runs of tokens, each with its place in the ring rank's order."""
    runs = layout.runs(ring_rank)
    places = accumulate((run.length for run in runs), initial=0)
    pairs = zip(places, runs, strict=False)
    return tuple((at, run) for at, run in pairs if run.ulysses_rank == ulysses_rank)


def _evenly_apart(ranges: HeadRanges) -> bool:
    """As many heads for each rank, none shared, at equal distances."""
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ranges)}
    return not _overlap(ranges) and len(steps) == 1 and len(set(next(iter(steps)))) == 1


def _overlap(ranges: HeadRanges) -> bool:
    return any(first[1] > second[0] for first, second in pairwise(ranges))
