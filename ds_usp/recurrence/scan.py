"""A state that goes from token to token, over the pieces of a sharded sequence.

A linear recurrence maps the state before a piece to the state after it, ``S_out = A S_in + B``, and
its outputs are affine in the state before it. Each rank computes (A, B) of its pieces, and what it
can of their outputs, without a state; the maps go to ranks with later pieces of the same document,
are folded there, and the outputs are finished with the states that come in. All of it is
autograd's: the backward exchange carries the gradients of the maps back. ``recurrences.py`` calls
it in each forward pass, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.state_chains import Move, Piece, RankRound, StateChains
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.recurrence.exchange import ExchangeCall, is_dim


class Map(NamedTuple):
    """A piece, or several that follow each other, as ``S_out = transition S_in + state``; a
    transition of None: nothing comes before, and ``state`` is S_out."""

    transition: torch.Tensor | None
    state: torch.Tensor


class PieceMap(NamedTuple):
    """Holds what a piecewise :class:`Recurrence` computes of a piece.

    Attributes:
        out: outputs of its tokens if no state came in.
        state: B ``[rows, *state_shape]``; used if the piece exports.
        transition: A ``[rows, *transition_shape]``; used if it imports and exports.
        respond: what an incoming state ``[rows, *state_shape]``, fp32 (fp64 for fp64), adds to
            ``out``; used if the piece imports. Autocast is off.
    """

    out: torch.Tensor
    state: torch.Tensor | None = None
    transition: torch.Tensor | None = None
    respond: Callable[[torch.Tensor], torch.Tensor] | None = None


class PieceMaps(NamedTuple):
    """Holds what a :class:`Recurrence` computes of all pieces of a rank.

    Attributes:
        states: B of each piece ``[rows, *state_shape]``; used of those that export.
        transitions: A ``[rows, *transition_shape]``; used of those that import and export.
        finish: the outputs of all tokens, of the states ``[rows, *state_shape]`` that come into the
            pieces, fp32 (fp64 for fp64); None: nothing is before a piece.
    """

    states: Sequence[torch.Tensor | None]
    transitions: Sequence[torch.Tensor | None]
    finish: Callable[[Sequence[torch.Tensor | None]], torch.Tensor]


# Two ways through a piece that imports, which a recurrence chooses:
#
#     one run       o_0, A, B and the response R by one run without a state; finish: o_0 + R S
#     states first  A and B alone; finish: the kernel runs from S
#
# The first waits for nothing but rounds twice in bf16; the second computes A and B apart.
@dataclass(frozen=True)
class Recurrence:
    """A linear recurrence: how consecutive tokens of one document map its state.

    Args:
        run: ``run(tensors, pieces) -> PieceMaps`` of all pieces of a rank, which follow each other
            along the tokens and are all of them; or if ``piecewise`` ``run(tensors, piece) ->
            PieceMap``, with the tokens of one piece. No collective: the ranks compare after it.
        state_shape: of S and B of one row.
        transition_shape: of A of one row: the first dims of the state's, as of a decay for each
            head, or all; if ``matrix`` ``[..., n, n]`` for states ``[..., n, m]``.
        matrix: A is a matrix on the left of the state. Else it is multiplied elementwise.
        piecewise: ``run`` takes one piece.

    Raises:
        ConfigError: an A of this shape is no transition of such a state.
    """

    run: Callable[..., Any]
    state_shape: tuple[int, ...]
    transition_shape: tuple[int, ...]
    matrix: bool = False
    piecewise: bool = False

    def __post_init__(self) -> None:
        state, transition = tuple(self.state_shape), tuple(self.transition_shape)
        fits = transition == state[: len(transition)]
        if self.matrix:
            fits = len(state) > 1 and transition == (*state[:-1], state[-2])
        if not fits:
            kind = "a matrix on the left" if self.matrix else "elementwise"
            raise ConfigError(
                f"A {list(transition)} does not fit a state {list(state)} as {kind}: it is "
                "[..., n, n] for states [..., n, m] with matrix=True, else the first dims of the "
                "state's"
            )

    def compose(self, later: Map, earlier: Map) -> Map:
        """The map of both pieces."""
        (a, b), (a0, b0) = later, earlier
        if a is None:
            raise ConfigError("nothing comes before the first piece of a document")
        if self.matrix:
            return Map(None if a0 is None else a @ a0, a @ b0 + b)
        wide = a.reshape(*a.shape, *[1] * (b0.ndim - a.ndim))
        return Map(None if a0 is None else a * a0, wide * b0 + b)


@disable_in_compile("a layer that carries a state is not in a graph: its exchanges are compared")
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
    """A linear recurrence over a sharded sequence: outputs of this rank's tokens, each with all
    tokens of its document before it. Collective over the mesh.

    A rank sends the maps of its pieces, whose bytes do not grow with the tokens
    (:meth:`StateChains.sent_bytes`); heads are not exchanged and need not divide.

    Shapes:
        tensors: of this rank's tokens, rows along dim 0; the output likewise.

    Args:
        tensors: of the recurrence; with a gradient, also the parameters that A and B depend on.
        layout: where the tokens are, ``mesh.layout(kind, seq_len)``; any but ``striped``.
        documents: where the documents of a packed sequence begin, cumulative borders as of
            :class:`~ds_usp.MaskSpec`: ``()``, one list for all rows, or one for each. A state does
            not go from one to the next. Padding is a document of its own. Or a ``MaskSpec.tree``,
            in which each segment begins with the state at the end of its parent.
        dims: of each tensor, the dim of its tokens; None: a parameter, which has none.
        out_dim: the dim of the output's tokens.

    Raises:
        ConfigError: tensors, documents or results of the recurrence that do not fit each other.
        LayoutError: a layout of another mesh, or whose ranks hold no consecutive tokens; tensors
            that are not this rank's shard.
        MeshError: another rank has an error, or makes another call; on every rank.
    """
    call = ExchangeCall("affine_scan", "states", tensors, dims, mesh, layout, documents)

    def compute(inputs: list[torch.Tensor]) -> tuple[list[str], PieceMaps]:
        if not isinstance(recurrence, Recurrence):
            raise ConfigError(f"recurrence={recurrence!r} must be a Recurrence")
        if not is_dim(out_dim):
            raise ConfigError(f"out_dim={out_dim!r} must be a whole number")
        maps, out = _run(recurrence, inputs, dims, out_dim, call)
        _check_maps(recurrence, maps, call)
        kind = "a matrix" if recurrence.matrix else "elementwise"
        shapes = list(recurrence.state_shape), list(recurrence.transition_shape)
        return ["states {}, transitions {} {}".format(*shapes, kind), f"output {out}"], maps

    maps = call.begin(compute)
    local_pieces = call.chains.by_rank[mesh.rank]
    with no_autocast(tensors[0].device):
        transfer = Transfer(recurrence, call, call.chains, state_dtype(*tensors))
        states = transfer.states(local_pieces, maps)
    with mesh.consistency.raising_everywhere():
        out = maps.finish([states.get(piece) for piece in local_pieces])
        tokens = sum(piece.length for piece in local_pieces)
        _check_out(out, out_dim, call.chains.rows_of_piece, tokens, f"rank {mesh.rank}")
    return call.leave(out, out_dim)


def _check_out(out: object, dim: int, rows: int, tokens: int, source: str) -> str:
    """The shape as text without the tokens; ConfigError if it is no output of so many tokens."""
    if not isinstance(out, torch.Tensor):
        raise ConfigError(f"the output of {source} is a {type(out).__name__}, not a tensor")
    shape = list[object](out.shape)
    fits = -out.ndim <= dim < out.ndim and dim % out.ndim != 0
    if not fits or out.shape[dim] != tokens or len(out) != rows:
        raise ConfigError(
            f"the output of {source} is {shape} with out_dim={dim}: it needs {rows} rows along dim "
            f"0 and {tokens} tokens along out_dim, another dim"
        )
    shape[dim] = "s"
    return str(shape)


def _run(
    recurrence: Recurrence,
    tensors: Sequence[torch.Tensor],
    dims: Sequence[int | None],
    out_dim: int,
    call: ExchangeCall,
) -> tuple[PieceMaps, str]:
    """Return what the recurrence computes of this rank's pieces; and a text of its output, which
    the ranks compare."""
    pieces, rows = call.chains.by_rank[call.mesh.rank], call.chains.rows_of_piece
    if not recurrence.piecewise:
        maps: PieceMaps = recurrence.run(tensors, pieces)
        if not isinstance(maps, PieceMaps):
            raise ConfigError(f"the recurrence gave a {type(maps).__name__}, not PieceMaps")
        return maps, f"along dim {out_dim}"
    # By split, whose backward is one cat: a slice's would fill the whole tensor for each piece.
    lengths = [piece.length for piece in pieces]
    split = [
        [x] * len(pieces) if dim is None else x.split(lengths, dim)
        for x, dim in zip(tensors, dims, strict=True)
    ]
    ran: list[PieceMap] = [
        recurrence.run(list(parts), piece) for *parts, piece in zip(*split, pieces, strict=True)
    ]
    shapes = list[str]()
    for piece, x in zip(pieces, ran, strict=True):
        if not isinstance(x, PieceMap):
            raise ConfigError(
                f"the recurrence gave piece {piece} a {type(x).__name__}, no PieceMap"
            )
        shapes.append(_check_out(x.out, out_dim, rows, piece.length, f"piece {piece}"))
    if len(set(shapes)) > 1:
        raise ConfigError(f"the outputs of pieces differ in more than their tokens: {shapes}")

    def finish(incoming: Sequence[torch.Tensor | None]) -> torch.Tensor:
        outs = []
        for piece_map, state in zip(ran, incoming, strict=True):
            out = piece_map.out
            if state is not None and piece_map.respond is not None:
                with no_autocast(out.device):
                    out = out + piece_map.respond(state).to(out.dtype)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, out_dim)

    missing = [p for p, x in zip(pieces, ran, strict=True) if p.imports and x.respond is None]
    if missing:
        raise ConfigError(f"the recurrence gave piece {missing[0]}, which imports, no respond")
    return PieceMaps([x.state for x in ran], [x.transition for x in ran], finish), shapes[0]


def _check_maps(recurrence: Recurrence, maps: PieceMaps, call: ExchangeCall) -> None:
    """ConfigError if A or B of a piece that needs it is missing or of another shape."""
    rows, pieces = call.chains.rows_of_piece, call.chains.by_rank[call.mesh.rank]
    if not len(pieces) == len(maps.states) == len(maps.transitions):
        raise ConfigError(
            f"the recurrence gave {len(maps.states)} states and {len(maps.transitions)} "
            f"transitions for {len(pieces)} pieces; give None where there is none"
        )
    for piece, b, a in zip(pieces, maps.states, maps.transitions, strict=True):
        needed = [("state", b, recurrence.state_shape)] if piece.exports else []
        if piece.exports and piece.imports:
            needed.append(("transition", a, recurrence.transition_shape))
        for name, x, shape in needed:
            if x is None or x.shape != (rows, *shape):
                actual = None if x is None else list(x.shape)
                raise ConfigError(
                    f"the recurrence gave piece {piece} the {name} {actual}, it needs one of "
                    f"{[rows, *shape]}"
                )
            if x.requires_grad and not call.needs_grad:
                raise ConfigError(
                    f"a {name} of {call.name} has a gradient and none of its tensors has: give the "
                    "parameters that it depends on as tensors, with None in dims. Ranks that send "
                    "no state would not know of the backward pass"
                )


def state_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype of states and decays, in pieces and between ranks: fp64 if any of the
    tensors is, else fp32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """States are folded in their own dtype: autocast would make products of A and S in bf16."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@dataclass
class Transfer:
    """The states before this rank's pieces, from the maps of all ranks, sent and folded in
    ``dtype``; or, along the call's chains mirrored, the gradients of the states after them."""

    recurrence: Recurrence
    call: ExchangeCall
    chains: StateChains
    dtype: torch.dtype

    def states(self, pieces: Sequence[Piece], maps: PieceMaps) -> dict[Piece, torch.Tensor]:
        """Return the states ``[rows, *state_shape]`` that come into this rank's pieces, where one
        does. Collective over the mesh."""
        local_maps: dict[Piece, Map] = {}
        for piece, a, b in zip(pieces, maps.transitions, maps.states, strict=True):
            if piece.exports and b is not None:
                transition = a.to(self.dtype) if piece.imports and a is not None else None
                local_maps[piece] = Map(transition, b.to(self.dtype))
        return self._by_doubling(local_maps) if self.chains.doubles else self._directly(local_maps)

    def _directly(self, local_maps: dict[Piece, Map]) -> dict[Piece, torch.Tensor]:
        """Send each map to the ranks that fold it, in one exchange."""
        maps, rank, compose = local_maps, self.call.mesh.rank, self.recurrence.compose
        for moves in self.chains.rounds_of(rank):  # one, or none
            maps = self._received(moves, local_maps)
        states, after = dict[Piece, torch.Tensor](), dict[Piece, torch.Tensor]()
        for piece, before, goes_on in self.chains.folds(rank):
            state = None
            for x in before:
                state = after[x] if state is None else state + after[x]
            if piece.rank == rank and state is not None:
                states[piece] = state
            if goes_on:
                folded = maps[piece] if state is None else compose(maps[piece], Map(None, state))
                after[piece] = folded.state
        return states

    def _by_doubling(self, local_maps: dict[Piece, Map]) -> dict[Piece, torch.Tensor]:
        """Compose over 1, 2, 4, ... pieces, an exchange each, then one of the states themselves."""
        rank = self.call.mesh.rank
        *rounds, last = self.chains.rounds_of(rank)
        for moves in rounds:
            maps = self._received(moves, local_maps)
            local_maps |= {
                move.target: self.recurrence.compose(local_maps[move.target], maps[move.source])
                for move in moves.moves
                if move.target.rank == rank
            }
        maps = self._received(last, local_maps)
        return {m.target: maps[m.source].state for m in last.moves if m.target.rank == rank}

    def _received(self, round_: RankRound, local_maps: dict[Piece, Map]) -> dict[Piece, Map]:
        """Collective: the maps that this rank has after a round, its pieces' and those received."""
        rank, degree = self.call.mesh.rank, self.chains.layout.degree
        rows = self.chains.rows_of_piece
        maps = dict(local_maps)
        if not round_.crosses:
            return maps
        shapes = [(rows, *self.recurrence.state_shape), (rows, *self.recurrence.transition_shape)]
        sizes = [prod(shape) for shape in shapes]
        parts, arriving = list[torch.Tensor](), list[Move]()
        sent, received = [0] * degree, [0] * degree
        for move in round_.sent:  # by source and target rank: the order of the buffers
            source, target = move.source.rank, move.target.rank
            elements = sum(sizes[: 1 + move.transition])
            if source == rank:
                a, b = local_maps[move.source]
                parts += [b, a] if move.transition and a is not None else [b]
                sent[target] += elements
            else:
                arriving.append(move)
                received[source] += elements
        flat = self.call.exchange(parts, sent, received, self.dtype)
        chunks = iter(flat.split([n for move in arriving for n in sizes[: 1 + move.transition]]))
        for move in arriving:
            b = next(chunks).view(shapes[0])
            a = next(chunks).view(shapes[1]) if move.transition else None
            maps[move.source] = Map(a, b)
        return maps
