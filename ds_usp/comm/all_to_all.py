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
from ds_usp.comm.packing import DeferredSum
from ds_usp.comm.uniform_all_to_all import (
    PendingExchange,
    PreallocatedSend,
    UniformAllToAll,
    copy_or_sum_into,
)
from ds_usp.geometry.layout import Run, TokenLayout

HeadRanges = tuple[tuple[int, int], ...]
PieceLists = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class HeadAllToAll:
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
        return self.post_to_heads(tensors).wait()

    def to_sequence(
        self, sources: Sequence[torch.Tensor | DeferredSum], places: Sequence[torch.Tensor]
    ) -> None:
        """All of these heads for this rank's tokens: ``[B, S, h, D] -> [B, s, H, D]``.

        Args:
            sources: tensors, or sums of what places take, which are written where they leave from.
            places: ``[B, s, H, D]``, whose heads of the exchange are written. Where ranges
                overlap all are, so they must be all of the tensor's.
        """
        self.post_to_sequence(sources, places).wait()

    def post_to_heads(self, tensors: Sequence[torch.Tensor]) -> PendingExchange:
        """Begin :meth:`to_heads`."""
        ranks, mine = range(self.mesh.ulysses_degree), self.mesh.ulysses_rank
        if len(ranks) == 1:
            here = [_heads(x, each[0]) for x, each in zip(tensors, self.ranges, strict=True)]
            return PendingExchange(lambda: tuple(here))
        if self._uniform is not None:
            return self._uniform.post_to_heads(tensors, self._send)
        outs = []
        for x, layout, ranges in zip(tensors, self.layouts, self.ranges, strict=True):
            begin, end = ranges[mine]
            tokens = layout.ring_length(self.mesh.ring_rank)
            outs.append(x.new_empty(x.shape[0], tokens, end - begin, x.shape[3]))
        leaving = [self._sequence_side(tensors, rank) for rank in ranks]
        work, received = self._exchange(leaving, [self._heads_side(outs, rank) for rank in ranks])

        def unpack() -> tuple[torch.Tensor, ...]:
            _unpack(received, [self._heads_side(outs, rank) for rank in ranks])
            return tuple(outs)

        return PendingExchange(unpack, work)

    def preallocate_send(
        self, like: torch.Tensor, sizes: Sequence[torch.Size]
    ) -> PreallocatedSend | None:
        """Room for what :meth:`send_to_sequence` will send to places of these sizes, where it may
        be written; None if it is packed in another way, or stays."""
        return None if self._uniform is None else self._uniform.preallocate_send(like, sizes)

    def post_to_sequence(
        self,
        sources: Sequence[torch.Tensor | DeferredSum],
        places: Sequence[torch.Tensor],
        prealloc: PreallocatedSend | None = None,
    ) -> PendingExchange:
        """Begin :meth:`to_sequence`; the places are written when it is taken."""
        ranks = range(self.mesh.ulysses_degree)
        if len(ranks) == 1:
            for place, x, each in zip(places, sources, self.ranges, strict=True):
                copy_or_sum_into(_heads(place, each[0]), x)
            return PendingExchange(tuple)
        if self._uniform is not None:
            return self._uniform.post_to_sequence(sources, places, self._send, prealloc)
        tensors = [x if isinstance(x, torch.Tensor) else x.result() for x in sources]
        like = [
            self._accumulator(place, each) for place, each in zip(places, self.ranges, strict=True)
        ]
        sent = [self._heads_side(tensors, rank) for rank in ranks]
        work, received = self._exchange(sent, [self._sequence_side(like, rank) for rank in ranks])
        add = [
            _overlap(ranges)
            for layout, ranges in zip(self.layouts, self.ranges, strict=True)
            for _ in _token_ranges(layout, self.mesh.ring_rank, self.mesh.ulysses_rank)
        ]

        def unpack() -> tuple[torch.Tensor, ...]:
            _unpack(received, [self._sequence_side(like, rank) for rank in ranks], add)
            for place, total in zip(places, like, strict=True):
                if total is not place:
                    place.copy_(total)
            return ()

        return PendingExchange(unpack, work)

    def places(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Room for what :meth:`to_sequence` brings, where the exchange is of all heads."""
        return tuple(
            x.new_empty(x.shape[0], layout.length(self.mesh.rank), ranges[-1][1], x.shape[3])
            for x, layout, ranges in zip(tensors, self.layouts, self.ranges, strict=True)
        )

    def widths(self) -> tuple[int, ...]:
        """Heads of each tensor that this rank computes."""
        return self._num_local_heads

    @cached_property
    def _num_local_heads(self) -> tuple[int, ...]:
        mine = self.mesh.ulysses_rank
        return tuple(each[mine][1] - each[mine][0] for each in self.ranges)

    @staticmethod
    def _accumulator(place: torch.Tensor, ranges: HeadRanges) -> torch.Tensor:
        """Where parts of a head are summed, in fp32; where there are none, the place itself."""
        if not _overlap(ranges):
            return place
        return torch.zeros_like(place, dtype=torch.promote_types(place.dtype, torch.float32))

    @cached_property
    def _uniform(self) -> UniformAllToAll | None:
        """Where every rank holds one run as long as any other's and uses as many heads, evenly
        apart."""
        ulysses = self.mesh.ulysses_degree
        runs = [layout.runs(self.mesh.ring_rank) for layout in self.layouts]
        uniform = (
            ulysses > 1
            and all(
                [run.ulysses_rank for run in each] == list(range(ulysses))
                and len({run.length for run in each}) == 1
                for each in runs
            )
            and len({each[0].length for each in runs}) == 1
            and all(_is_uniform(ranges) for ranges in self.ranges)
        )
        return UniformAllToAll(self.mesh, self.ranges, self.copies) if uniform else None

    def _sequence_side(self, tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Of sequence shards: this rank's runs, for the heads of another."""
        return [
            x[:, run.start : run.stop, begin:end]
            for x, layout, ranges in zip(tensors, self.layouts, self.ranges, strict=True)
            for begin, end in [ranges[rank]]
            for _, run in _token_ranges(layout, self.mesh.ring_rank, self.mesh.ulysses_rank)
        ]

    def _heads_side(self, tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Of head shards: the runs of another rank."""
        return [
            x.narrow(1, at, run.length)
            for x, layout in zip(tensors, self.layouts, strict=True)
            for at, run in _token_ranges(layout, self.mesh.ring_rank, rank)
        ]

    def staging_bytes(self, batch: int, dims: Sequence[int], size: int) -> int:
        """What a rank packs at most for one exchange that copy engines carry.

        Args:
            batch, dims, size: samples, each tensor's head dim, bytes of an element.
        """
        if self._uniform is None:
            return 0
        return self._uniform.staging_bytes(
            self.layouts[0].length(self.mesh.rank), batch, dims, size
        )

    def _exchange(
        self, leaving: PieceLists, arriving: PieceLists
    ) -> tuple[dist.Work, torch.Tensor]:
        """Send any pieces, as many for each rank, by messages."""
        sent = [sum(piece.numel() for piece in pieces) for pieces in leaving]
        received = [sum(piece.numel() for piece in pieces) for pieces in arriving]
        out_buffer = leaving[0][0].new_empty(sum(sent))
        in_buffer = out_buffer.new_empty(sum(received))
        at = 0
        for piece in (piece for pieces in leaving for piece in pieces):
            out_buffer[at : at + piece.numel()].view(piece.shape).copy_(piece)
            at += piece.numel()
        return self._send(out_buffer, in_buffer, sent, received), in_buffer

    def _send(
        self,
        out_buffer: torch.Tensor,
        in_buffer: torch.Tensor,
        sent: list[int],
        received: list[int] | None = None,
    ) -> dist.Work:
        to_others = sum(sent) - sent[self.mesh.ulysses_rank]
        self.mesh.ledger.add("all_to_all", to_others * out_buffer.element_size())
        work: dist.Work = dist.all_to_all_single(
            in_buffer.view(-1),
            out_buffer.view(-1),
            received or sent,
            sent,
            group=self.mesh.ulysses_group,
            async_op=True,
        )
        return work


def _unpack(buffer: torch.Tensor, arriving: PieceLists, add: Sequence[bool] = ()) -> None:
    """Write what has come, the ranks' pieces one after the other, to its places; ``add`` says of
    each rank's which ones are summed."""
    at = 0
    for pieces in arriving:
        for place, adds in zip(pieces, add or [False] * len(pieces), strict=True):
            piece = buffer[at : at + place.numel()].view(place.shape)
            place.add_(piece) if adds else place.copy_(piece)
            at += place.numel()


def _heads(x: torch.Tensor, head_range: tuple[int, int]) -> torch.Tensor:
    """Some heads of ``[B, s, H, D]``, a view; the tensor itself if they are all."""
    return x if head_range == (0, x.shape[2]) else x[:, :, head_range[0] : head_range[1]]


@lru_cache(maxsize=4096)
def _token_ranges(
    layout: TokenLayout, ring_rank: int, ulysses_rank: int
) -> tuple[tuple[int, Run], ...]:
    """A Ulysses rank's runs of tokens, each with its place in the ring rank's order."""
    runs = layout.runs(ring_rank)
    places = accumulate((run.length for run in runs), initial=0)
    pairs = zip(places, runs, strict=False)
    return tuple((at, run) for at, run in pairs if run.ulysses_rank == ulysses_rank)


def _is_uniform(ranges: HeadRanges) -> bool:
    """As many heads for each rank, none shared, at equal distances."""
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ranges)}
    return not _overlap(ranges) and len(steps) == 1 and len(set(next(iter(steps)))) == 1


def _overlap(ranges: HeadRanges) -> bool:
    return any(first[1] > second[0] for first, second in pairwise(ranges))
