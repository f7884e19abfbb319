"""An affine state over the pieces of a sharded sequence.

A linear recurrence maps the state before a piece to the state after it, ``S_out = A S_in + B``, and
its outputs are affine in the state before it. Each rank computes what it can of its pieces without
a state; maps (A, B) travel to the ranks with later pieces of the same document, are folded there,
and the outputs are finished with the states that come in. All of it is autograd's: the backward
exchange carries the gradients of the maps back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from ds_usp.comm.call_record import Signature
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, LayoutError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import normalize_documents
from ds_usp.geometry.state_chains import Move, Piece, Round, StateChains, state_chains
from ds_usp.recurrence.exchange import ExchangeCall

Map = tuple[torch.Tensor | None, torch.Tensor]  # (A, B); without A, B is the state


class PieceMap(NamedTuple):
    """What a piecewise :class:`Recurrence` computes of a piece.

    Attributes:
        out: outputs of its tokens if no state came in.
        state: B ``[rows, *state_shape]``; None unless the piece exports.
        transition: A ``[rows, *transition_shape]``; None unless it imports and exports.
        respond: what an incoming state ``[rows, *state_shape]`` adds to ``out``; None unless the
            piece imports.
    """

    out: torch.Tensor
    state: torch.Tensor | None = None
    transition: torch.Tensor | None = None
    respond: Callable[[torch.Tensor], torch.Tensor] | None = None


class PieceMaps(NamedTuple):
    """What a :class:`Recurrence` computes of all pieces of a rank.

    Attributes:
        states: B of each piece ``[rows, *state_shape]``; None where it does not export.
        transitions: A ``[rows, *transition_shape]``; None where it does not import or not export.
        finish: the outputs of all tokens, of the state that comes into each piece (None: none).
    """

    states: Sequence[torch.Tensor | None]
    transitions: Sequence[torch.Tensor | None]
    finish: Callable[[Sequence[torch.Tensor | None]], torch.Tensor]


@dataclass(frozen=True)
class Recurrence:
    """A linear recurrence: how a piece of consecutive tokens maps the state.

    Args:
        run: ``run(tensors, pieces) -> PieceMaps`` of all pieces of a rank, which lie one after the
            other along the tensors' tokens; or, with ``piecewise``, ``run(tensors, piece) ->
            PieceMap`` with the tensors of one piece. It may run a kernel once, without a state, and
            add the response in ``finish``; or compute the maps alone, and run the kernel in
            ``finish``, from the states.
        state_shape: of S and B of one row.
        transition_shape: of A of one row: the state's first dims (a decay a head, or for each
            element), or with ``matrix`` ``[..., n, n]`` for a state ``[..., n, m]``.
        matrix: A is a matrix on the left of the state; else it is multiplied elementwise.
        piecewise: ``run`` takes one piece.
    """

    run: Callable[..., Any]
    state_shape: tuple[int, ...]
    transition_shape: tuple[int, ...]
    matrix: bool = False
    piecewise: bool = False

    def compose(self, later: Map, earlier: Map) -> Map:
        """The map of both pieces."""
        (a, b), (a0, b0) = later, earlier
        if a is None:
            raise RuntimeError("nothing comes before a document's first piece")
        if self.matrix:
            return None if a0 is None else a @ a0, a @ b0 + b
        wide = a.reshape(*a.shape, *[1] * (b0.ndim - a.ndim))
        return None if a0 is None else a * a0, wide * b0 + b

    def maps_of(
        self,
        tensors: Sequence[torch.Tensor],
        dims: Sequence[int | None],
        out_dim: int,
        pieces: Sequence[Piece],
    ) -> PieceMaps:
        if not self.piecewise:
            maps: PieceMaps = self.run(tensors, pieces)
            return maps
        lengths = [piece.length for piece in pieces]
        split = [
            [x] * len(pieces) if dim is None else x.split(lengths, dim)
            for x, dim in zip(tensors, dims, strict=True)
        ]
        ran: list[PieceMap] = [
            self.run(list(parts), piece) for *parts, piece in zip(*split, pieces, strict=True)
        ]

        def finish(incoming: Sequence[torch.Tensor | None]) -> torch.Tensor:
            outs = [
                x.out
                if state is None or x.respond is None
                else x.out + x.respond(state).to(x.out.dtype)
                for x, state in zip(ran, incoming, strict=True)
            ]
            return outs[0] if len(outs) == 1 else torch.cat(outs, out_dim)

        return PieceMaps([x.state for x in ran], [x.transition for x in ran], finish)


def affine_scan(
    recurrence: Recurrence,
    tensors: Sequence[torch.Tensor],
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    documents: Any = (),
    dims: Sequence[int | None],
    out_dim: int,
) -> torch.Tensor:
    """Outputs of this rank's tokens, each with all tokens of its document before it. Collective
    over the mesh.

    Args:
        tensors: inputs of the recurrence, rows along dim 0; also parameters that states depend on.
        layout: where the tokens are: ``mesh.layout(kind, seq_len)``.
        documents: their borders, as of :class:`~ds_usp.MaskSpec`: ``()``, those of all rows, or a
            list for each row. Padding is a document of its own.
        dims: of each tensor, the dim of its tokens; None: a parameter, which has none.
        out_dim: the dim of tokens of the output.
    """
    call = ExchangeCall(mesh, "states", tensors)
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32

    def begin() -> tuple[Signature, tuple[StateChains, PieceMaps]]:
        chains = chains_of(tensors, dims, mesh, layout, documents)
        inputs = call.inputs
        if chains.folded:
            inputs = [fold_rows(x, dim) for x, dim in zip(inputs, dims, strict=True)]
        maps = recurrence.maps_of(inputs, dims, out_dim, chains.by_rank[mesh.rank])
        return signature(chains), (chains, maps)

    chains, maps = call.compare(begin)
    own = chains.by_rank[mesh.rank]
    known = {
        piece: (None if a is None else a.to(dtype), b.to(dtype))
        for piece, a, b in zip(own, maps.transitions, maps.states, strict=True)
        if b is not None
    }
    transfer = _Transfer(recurrence, chains, call, dtype)
    states = (transfer.by_doubling if chains.doubles else transfer.directly)(known)
    out = maps.finish([states.get(piece) for piece in own])
    if chains.folded:
        out = unfold_rows(out, out_dim, chains.rows)
    return call.leave(out)


def signature(chains: StateChains) -> Signature:
    return Signature((str(chains.layout),))


def chains_of(
    tensors: Sequence[torch.Tensor],
    dims: Sequence[int | None],
    mesh: SequenceMesh,
    layout: TokenLayout,
    documents: Any,
) -> StateChains:
    if not isinstance(layout, TokenLayout):
        raise LayoutError(f"layout={layout!r} must be a TokenLayout")
    rows = next(len(x) for x, dim in zip(tensors, dims, strict=True) if dim is not None)
    return state_chains(layout, normalize_documents(documents), rows)


def fold_rows(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The rows one after the other, as one: ``[rows, tokens] -> [1, rows * tokens]``."""
    if dim is None:
        return x
    dim %= x.ndim
    return x.movedim(0, dim - 1).flatten(dim - 1, dim)[None]


def unfold_rows(x: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    dim %= x.ndim
    return x[0].unflatten(dim - 1, (rows, -1)).movedim(dim - 1, 0)


@dataclass
class _Transfer:
    recurrence: Recurrence
    chains: StateChains
    call: ExchangeCall
    dtype: torch.dtype

    def directly(self, known: dict[Piece, Map]) -> dict[Piece, torch.Tensor]:
        got, states = dict(known), {}
        for moves in self.chains.rounds:
            got |= {move.source: value for move, value in self._received(moves, known)}
        rank = self.call.mesh.rank
        for chain in self.chains.chains:
            last = max((i for i, piece in enumerate(chain) if piece.rank == rank), default=0)
            before: Map | None = None
            for piece in chain[: last + 1]:
                if piece.rank == rank and before is not None:
                    states[piece] = before[1]
                if piece is not chain[last]:
                    value = got[piece]
                    before = value if before is None else self.recurrence.compose(value, before)
        return states

    def by_doubling(self, known: dict[Piece, Map]) -> dict[Piece, torch.Tensor]:
        *rounds, last = self.chains.rounds
        for moves in rounds:
            earlier = {move.target: value for move, value in self._received(moves, known)}
            known = known | {
                piece: self.recurrence.compose(known[piece], value)
                for piece, value in earlier.items()
            }
        return {move.target: value[1] for move, value in self._received(last, known)}

    def _received(self, moves: Round, known: dict[Piece, Map]) -> list[tuple[Move, Map]]:
        """The maps that this rank's pieces are sent in a round, also by its own."""
        rank, ranks = self.call.mesh.rank, range(self.chains.layout.degree)
        rows, recurrence = self.chains.rows_of_piece, self.recurrence
        here = [(m, known[m.source]) for m in moves if m.source.rank == m.target.rank == rank]
        if not any(move.crosses for move in moves):
            return here
        shapes = (rows, *recurrence.state_shape), (rows, *recurrence.transition_shape)
        sizes = [prod(shape) for shape in shapes]
        parts, sent, received, arriving = [], [0] * len(ranks), [0] * len(ranks), list[Move]()
        for move in moves:
            source, target = move.source.rank, move.target.rank
            elements = sizes[0] + (sizes[1] if move.transition else 0)
            if source == rank != target:
                a, b = known[move.source]
                parts += [b, a] if move.transition and a is not None else [b]
                sent[target] += elements
            elif target == rank != source:
                arriving.append(move)
                received[source] += elements
        flat = self.call.exchange(parts, sent, received, self.dtype)
        lengths = [n for move in arriving for n in sizes[: 1 + move.transition]]
        chunks = iter(flat.split(lengths))
        for move in arriving:
            b = next(chunks).view(shapes[0])
            a = next(chunks).view(shapes[1]) if move.transition else None
            here.append((move, (a, b)))
        return here
