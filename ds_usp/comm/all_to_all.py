"""Heads for sequence and back: one packed exchange among the Ulysses ranks.

Letters of the shapes: B batch, s tokens of one rank, S tokens of the ring rank (all Ulysses ranks
of it), H heads of a tensor, h heads that one Ulysses rank computes, D head dim. All but B may
differ from tensor to tensor (q, k, v).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from ds_usp.comm.mesh import SequenceMesh
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
    """

    mesh: SequenceMesh
    layouts: tuple[TokenLayout, ...]
    ranges: tuple[HeadRanges, ...]

    def to_heads(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All tokens of the ring rank for this rank's heads: ``[B, s, H, D] -> [B, S, h, D]``."""
        ranks, mine = range(self.mesh.ulysses_degree), self.mesh.ulysses_rank
        outs = []
        for x, layout, ranges in zip(tensors, self.layouts, self.ranges, strict=True):
            begin, end = ranges[mine]
            tokens = layout.ring_length(self.mesh.ring_rank)
            outs.append(x.new_empty(x.shape[0], tokens, end - begin, x.shape[3]))
        if self._even:
            self._exchange_even(_by_heads(tensors, ranks), _by_tokens(outs, ranks))
        else:
            sent = [self._of_sequence(tensors, rank) for rank in ranks]
            self._exchange(sent, [self._of_heads(outs, rank) for rank in ranks])
        return tuple(outs)

    def to_sequence(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All heads for this rank's tokens: ``[B, S, h, D] -> [B, s, H, D]``."""
        ranks = range(self.mesh.ulysses_degree)
        outs = []
        for x, layout, ranges in zip(tensors, self.layouts, self.ranges, strict=True):
            shape = (x.shape[0], layout.length(self.mesh.rank), ranges[-1][1], x.shape[3])
            wide = torch.promote_types(x.dtype, torch.float32)
            outs.append(x.new_zeros(shape, dtype=wide) if _overlap(ranges) else x.new_empty(shape))
        if self._even:
            self._exchange_even(_by_tokens(tensors, ranks), _by_heads(outs, ranks))
        else:
            sent = [self._of_heads(tensors, rank) for rank in ranks]
            add = [
                _overlap(ranges)
                for layout, ranges in zip(self.layouts, self.ranges, strict=True)
                for _ in _places(layout, self.mesh.ring_rank, self.mesh.ulysses_rank)
            ]
            self._exchange(sent, [self._of_sequence(outs, rank) for rank in ranks], add)
        return tuple(out.to(x.dtype) for out, x in zip(outs, tensors, strict=True))

    @cached_property
    def _even(self) -> bool:
        """Every rank holds one run as long as any other's and uses as many heads."""
        ulysses = self.mesh.ulysses_degree
        runs = [layout.runs(self.mesh.ring_rank) for layout in self.layouts]
        return all(
            [run.ulysses_rank for run in each] == list(range(ulysses))
            and len({run.length for run in each}) == 1
            for each in runs
        ) and all(
            not _overlap(ranges) and len({end - begin for begin, end in ranges}) == 1
            for ranges in self.ranges
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

    def _exchange_even(
        self, leaving: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]
    ) -> None:
        """Pieces of one size for each rank, along dim 0: one copy in and one out a tensor."""
        sizes = [x[0].numel() for x in leaving]
        out_buffer = leaving[0].new_empty(len(leaving[0]), sum(sizes))
        in_buffer = torch.empty_like(out_buffer)
        for part, x in zip(out_buffer.split(sizes, 1), leaving, strict=True):
            part.unflatten(1, x.shape[1:]).copy_(x)
        self._send(out_buffer, in_buffer, [sum(sizes)] * len(out_buffer))
        for part, place in zip(in_buffer.split(sizes, 1), arriving, strict=True):
            place.copy_(part.unflatten(1, place.shape[1:]))

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


def _by_heads(tensors: Sequence[torch.Tensor], ranks: range) -> list[torch.Tensor]:
    """``[B, s, H, D] -> [ranks, B, s, h, D]``, views."""
    return [x.unflatten(2, (len(ranks), -1)).movedim(2, 0) for x in tensors]


def _by_tokens(tensors: Sequence[torch.Tensor], ranks: range) -> list[torch.Tensor]:
    """``[B, S, h, D] -> [ranks, B, s, h, D]``, views."""
    return [x.unflatten(1, (len(ranks), -1)).movedim(1, 0) for x in tensors]


@lru_cache(maxsize=4096)
def _places(layout: TokenLayout, ring_rank: int, ulysses_rank: int) -> tuple[tuple[int, Run], ...]:
    """A Ulysses rank's runs of tokens, each with its place in the ring rank's order."""
    runs = layout.runs(ring_rank)
    places = accumulate((run.length for run in runs), initial=0)
    pairs = zip(places, runs, strict=False)
    return tuple((at, run) for at, run in pairs if run.ulysses_rank == ulysses_rank)


def _overlap(ranges: HeadRanges) -> bool:
    return any(first[1] > second[0] for first, second in pairwise(ranges))
