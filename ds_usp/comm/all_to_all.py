"""Heads for sequence and back: one packed exchange among the Ulysses ranks.

Letters of the shapes: B batch, s tokens of one rank, S tokens of the ring rank (all Ulysses ranks
of it), H heads of a tensor, h heads that one Ulysses rank computes, D head dim. H and D may
differ from tensor to tensor (q, k, v), B and the tokens may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.geometry.layout import Run, TokenLayout

HeadRanges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class HeadExchange:
    """Which tokens and heads go where among the Ulysses ranks of one ring rank.

    Args:
        mesh: the ranks.
        layout: their tokens.
        ranges: for each tensor, the half-open head range that each Ulysses rank uses. Ranges may
            overlap: such a head travels to each of its users, and on the way back their parts
            are summed (in fp32).
    """

    mesh: SequenceMesh
    layout: TokenLayout
    ranges: tuple[HeadRanges, ...]

    def to_heads(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All tokens of the ring rank for this rank's heads: ``[B, s, H, D] -> [B, S, h, D]``."""
        if self.mesh.ulysses_degree == 1:
            return tuple(tensors)
        tokens = self.layout.ring_length(self.mesh.ring_rank)
        outs = []
        for x, ranges in zip(tensors, self.ranges, strict=True):
            begin, end = ranges[self.mesh.ulysses_rank]
            outs.append(x.new_empty(x.shape[0], tokens, end - begin, x.shape[3]))
        mine = [run for _, run in self._runs_of(self.mesh.ulysses_rank)]
        leaving = [
            [x[:, run.start : run.stop, begin:end] for run in mine for x, (begin, end) in pairs]
            for pairs in self._by_rank(tensors)
        ]
        arriving = [
            [out.narrow(1, at, run.length) for at, run in self._runs_of(rank) for out in outs]
            for rank in range(self.mesh.ulysses_degree)
        ]
        self._exchange(leaving, arriving)
        return tuple(outs)

    def to_sequence(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All heads for this rank's tokens: ``[B, S, h, D] -> [B, s, H, D]``."""
        if self.mesh.ulysses_degree == 1:
            return tuple(tensors)
        tokens = self.layout.length(self.mesh.rank)
        outs = []
        for x, ranges in zip(tensors, self.ranges, strict=True):
            shape = (x.shape[0], tokens, ranges[-1][1], x.shape[3])
            wide = torch.promote_types(x.dtype, torch.float32)
            outs.append(x.new_zeros(shape, dtype=wide) if _overlap(ranges) else x.new_empty(shape))
        mine = [run for _, run in self._runs_of(self.mesh.ulysses_rank)]
        leaving = [
            [x.narrow(1, at, run.length) for at, run in self._runs_of(rank) for x in tensors]
            for rank in range(self.mesh.ulysses_degree)
        ]
        arriving = [
            [out[:, run.start : run.stop, begin:end] for run in mine for out, (begin, end) in pairs]
            for pairs in self._by_rank(outs)
        ]
        self._exchange(leaving, arriving, add=[_overlap(ranges) for ranges in self.ranges])
        return tuple(out.to(x.dtype) for out, x in zip(outs, tensors, strict=True))

    def _by_rank(
        self, tensors: Sequence[torch.Tensor]
    ) -> list[list[tuple[torch.Tensor, tuple[int, int]]]]:
        """For each Ulysses rank, every tensor with the head range that rank uses."""
        return [
            [(x, ranges[rank]) for x, ranges in zip(tensors, self.ranges, strict=True)]
            for rank in range(self.mesh.ulysses_degree)
        ]

    def _runs_of(self, ulysses_rank: int) -> list[tuple[int, Run]]:
        """A Ulysses rank's runs of tokens, each with its place in the ring rank's order."""
        runs = self.layout.runs(self.mesh.ring_rank)
        places = accumulate((run.length for run in runs), initial=0)
        pairs = zip(places, runs, strict=False)
        return [(at, run) for at, run in pairs if run.ulysses_rank == ulysses_rank]

    def _exchange(
        self,
        leaving: Sequence[Sequence[torch.Tensor]],
        arriving: Sequence[Sequence[torch.Tensor]],
        add: Sequence[bool] | None = None,
    ) -> None:
        """Send each rank its pieces in one flat buffer; copy (or add) what comes to its place.

        Pieces cycle through the tensors, so ``add[i % len(add)]`` speaks of the ``i``-th.
        """
        sent = [sum(piece.numel() for piece in pieces) for pieces in leaving]
        received = [sum(piece.numel() for piece in pieces) for pieces in arriving]
        out_buffer = leaving[0][0].new_empty(sum(sent))
        in_buffer = out_buffer.new_empty(sum(received))
        _copy(out_buffer, [piece for pieces in leaving for piece in pieces])
        dist.all_to_all_single(in_buffer, out_buffer, received, sent, group=self.mesh.ulysses_group)
        to_others = sum(sent) - sent[self.mesh.ulysses_rank]
        self.mesh.ledger.add("all_to_all", to_others * out_buffer.element_size())
        at = 0
        for i, place in enumerate(piece for pieces in arriving for piece in pieces):
            piece = in_buffer[at : at + place.numel()].view(place.shape)
            if add and add[i % len(add)]:
                place.add_(piece)
            else:
                place.copy_(piece)
            at += place.numel()


def _copy(buffer: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    at = 0
    for piece in pieces:
        buffer[at : at + piece.numel()].view(piece.shape).copy_(piece)
        at += piece.numel()


def _overlap(ranges: HeadRanges) -> bool:
    return any(first[1] > second[0] for first, second in pairwise(ranges))
