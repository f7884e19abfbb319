"""State chains: which pieces of which documents the ranks hold, and what layers that carry a state
from token to token send between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from ds_usp.errors import LayoutError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import Borders, MaskSpec
from ds_usp.geometry.segments import with_offsets

# Chains of more pieces than this are folded by doubling: a map to every later rank costs
# ``pieces - 1`` maps of the first rank, doubling ``log2(pieces) + 1`` exchanges of one or two.
MAX_DIRECT_PIECES = 8


class Piece(NamedTuple):
    """Consecutive tokens of one document on one rank.

    Attributes:
        rank: of the sequence-parallel group.
        row: of the batch; None: of all rows, which have the same documents.
        document: its number in the row.
        start, stop: positions in the sequence.
        offset: of its first token in the rank's shard. Where rows differ in their documents they
            lie one after the other, as in ``x.flatten(0, 1)`` of ``x [rows, tokens]``.
        first, last: positions where its document begins and ends.
    """

    rank: int
    row: int | None
    document: int
    start: int
    stop: int
    offset: int
    first: int
    last: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def imports(self) -> bool:
        """A state comes in: the document begins before it."""
        return self.start > self.first

    @property
    def exports(self) -> bool:
        """Its state goes to a later piece."""
        return self.stop < self.last

    def __str__(self) -> str:
        return f"{self.rank}[{self.start}:{self.stop}]"


Chain = tuple[Piece, ...]  # of one document, in token order


class Move(NamedTuple):
    """The map of a piece, on its way to a rank.

    Attributes:
        source: whose map it is.
        target: the piece that takes it, on the rank it goes to.
        transition: A goes too; else B is the state itself, for nothing comes before it.
    """

    source: Piece
    target: Piece
    transition: bool

    @property
    def crosses(self) -> bool:
        return self.source.rank != self.target.rank


Round = tuple[Move, ...]  # of one exchange, of all ranks, in the order in which buffers have them


class RankRound(NamedTuple):
    """A round as one rank sees it.

    Attributes:
        moves: from or to its pieces.
        crosses: some rank sends: all take part in an exchange.
    """

    moves: Round
    crosses: bool


class Halo(NamedTuple):
    """Says where one rank finds the tokens before each of its pieces.

    Attributes:
        lengths: into which its shard is cut, so that pieces, heads and what is sent are whole cuts.
        pieces: for each piece its cuts, as a half-open range.
        heads: for each piece the cuts of its first ``width`` tokens, or of all where it has fewer.
        sends: for each rank, the cuts that it is sent, in the order of its need.
        received: tokens from each rank; this rank's own are among them.
        halos: for each piece, the tokens of the receive buffer that come before it, as half-open
            ranges in token order.
        width: tokens before a piece; zeros where the document has fewer.
        crosses: some rank needs tokens of another.
    """

    lengths: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]
    heads: tuple[tuple[int, int], ...]
    sends: tuple[tuple[int, ...], ...]
    received: tuple[int, ...]
    halos: tuple[tuple[tuple[int, int], ...], ...]
    width: int
    crosses: bool


# A layer with a state sees the mesh as one line of ranks, whichever its degrees: each computes its
# own tokens, all heads. 16 tokens in documents of 10 and 6, zigzag on ring 2, as it prints:
#
#     document 0   0[0:4] -> 1[4:10]                 rank[start:stop]
#     document 1   1[10:12] -> 0[12:16]
#
# A piece is an affine map of the state, S_out = A S_in + B. Two ways to the state before a piece:
#
#     direct      each map to all ranks with a later piece, which fold: one exchange
#     doubling    round k composes a map with that of the piece 2^k before it; the last round hands
#                 each state on to the next piece: log2 exchanges of a map a piece
#
# Who sends and who needs follow from one list of moves, so they cannot differ.
@dataclass(frozen=True, eq=False)
class StateChains:
    """The pieces of all ranks as chains. Make it with :func:`state_chains`.

    Attributes:
        layout: which tokens each rank holds.
        documents: cumulative borders of each row, or of all rows.
        rows: of the batch.
        chains: by row and document; pieces in token order.
    """

    layout: TokenLayout
    documents: tuple[Borders, ...]
    rows: int
    chains: tuple[Chain, ...]

    @property
    def folded(self) -> bool:
        """Rows differ in their documents and lie one after the other, as one row."""
        return len(self.documents) > 1

    @property
    def rows_of_piece(self) -> int:
        """Rows of a tensor of a piece's states."""
        return 1 if self.folded else self.rows

    @cached_property
    def longest(self) -> int:
        """Pieces of the longest chain."""
        return max(map(len, self.chains))

    @cached_property
    def by_rank(self) -> tuple[tuple[Piece, ...], ...]:
        """Each rank's pieces, as its shard has them: one after the other, all of it."""
        pieces: list[list[Piece]] = [[] for _ in range(self.layout.degree)]
        for chain in self.chains:
            for piece in chain:
                pieces[piece.rank].append(piece)
        return tuple(tuple(sorted(own, key=lambda piece: piece.offset)) for own in pieces)

    @property
    def doubles(self) -> bool:
        """States are folded by doubling."""
        return self.longest > MAX_DIRECT_PIECES

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The exchanges of states; moves within a rank send nothing. Empty: no document is on two
        ranks, or in two pieces."""
        if self.longest == 1:
            return ()
        if not self.doubles:
            return (_sorted(move for chain in self.chains for move in _direct(chain)),)
        rounds, step = [], 1
        while step < self.longest - 1:
            pairs = [
                Move(chain[i], chain[i + step], i >= step)
                for chain in self.chains
                for i in range(len(chain) - 1 - step)
            ]
            rounds.append(_sorted(pairs))
            step *= 2
        last = (Move(a, b, False) for chain in self.chains for a, b in pairwise(chain))
        return (*rounds, _sorted(last))

    def rounds_of(self, rank: int) -> tuple[RankRound, ...]:
        """The rounds as one rank sees them."""
        return _rounds_of(self, rank)

    def folds(self, rank: int) -> tuple[Chain, ...]:
        """Return what a rank folds where maps go directly: chains up to their last piece there."""
        return _folds(self, rank)

    @cached_property
    def mirrored(self) -> StateChains:
        """The chains from their ends to their begins, along which gradients of states go: what
        imports exports. A rank's pieces keep their order."""
        length = self.layout.seq_len

        def mirror(piece: Piece) -> Piece:
            start, first = length - piece.stop, length - piece.last
            stop, last = length - piece.start, length - piece.first
            return piece._replace(start=start, stop=stop, first=first, last=last)

        chains = tuple(tuple(map(mirror, reversed(chain))) for chain in self.chains)
        return replace(self, chains=chains)

    def sent_bytes(
        self, rank: int, state: int, transition: int, itemsize: int = 4, *, backward: bool = False
    ) -> int:
        """Bytes of states that a rank sends to others in one pass of a layer.

        Args:
            state, transition: elements of S and of A of one row.
            itemsize: of the wire, fp32; 8 for fp64.
            backward: of the backward pass, which sends a gradient for all that was received.
        """
        elements = 0
        for move in (move for moves in self.rounds for move in moves if move.crosses):
            if rank == (move.target.rank if backward else move.source.rank):
                elements += state + (transition if move.transition else 0)
        return elements * self.rows_of_piece * itemsize

    def halo_bytes(
        self, rank: int, width: int, channels: int, itemsize: int, *, backward: bool = False
    ) -> int:
        """Bytes of a causal convolution's halo that a rank sends to others in one pass.

        Args:
            width: taps less one.
            backward: of the backward pass.
        """
        halo = self.halo(rank, width)
        if backward:
            tokens = sum(halo.received) - halo.received[rank]
        else:
            to_others = (cuts for other, cuts in enumerate(halo.sends) if other != rank)
            tokens = sum(halo.lengths[cut] for cuts in to_others for cut in cuts)
        return tokens * self.rows_of_piece * channels * itemsize

    def halo(self, rank: int, width: int) -> Halo:
        """Return what a causal convolution of ``width + 1`` taps exchanges, seen from a rank."""
        return _halos(self, width)[rank]

    def __str__(self) -> str:
        lines = [f"state chains of {self.layout}, {self.rows} rows"]
        for chain in self.chains:
            row = "" if chain[0].row is None else f"row {chain[0].row} "
            lines.append(f"{row}document {chain[0].document}   {' -> '.join(map(str, chain))}")
        for number, moves in enumerate(self.rounds):
            crossing = sum(move.crosses for move in moves)
            kind = "doubling" if self.doubles else "direct"
            lines.append(f"exchange {number} ({kind}): {crossing} maps between ranks")
        return "\n".join(lines)


@lru_cache(maxsize=64)
def state_chains(layout: TokenLayout, documents: tuple[Borders, ...], rows: int) -> StateChains:
    """The chains of a batch.

    Args:
        documents: as :class:`~ds_usp.geometry.masks.MaskSpec` keeps them: none, borders for all
            rows, or for each.
        rows: of the batch.

    Raises:
        LayoutError: a layout whose ranks do not hold runs of consecutive tokens.
        ConfigError: documents that are not of such a batch.
    """
    MaskSpec.causal(documents).check_length(layout.seq_len, rows)
    segments = (segment for rank in range(layout.degree) for segment in layout.segments(rank))
    stride = max((segment.stride for segment in segments if segment.length > 1), default=1)
    if stride > 1:
        raise LayoutError(
            f"{layout} gives each rank tokens that are {stride} apart, and a layer that carries a "
            "state from token to token needs runs of consecutive ones: use 'zigzag', 'contiguous' "
            "or 'balanced'"
        )
    alike = tuple(dict.fromkeys(documents))
    documents = alike if len(alike) < 2 else documents
    lines: list[tuple[int | None, Borders]] = list(enumerate(documents))
    if len(documents) < 2:
        lines = [(None, documents[0] if documents else (0, layout.seq_len))]
    chains: list[list[Piece]] = []
    for row, borders in lines:
        chains += _chains_of_row(layout, row, borders)
    return StateChains(layout, documents, rows, tuple(map(tuple, chains)))


def _chains_of_row(layout: TokenLayout, row: int | None, borders: Borders) -> list[list[Piece]]:
    held = []  # (position, stop, rank, offset in the row's shard)
    for rank in range(layout.degree):
        for segment, offset in with_offsets(layout.segments(rank)):
            held.append((segment.start, segment.start + segment.length, rank, offset))
    chains: list[list[Piece]] = [[] for _ in borders[1:]]
    document = 0
    for begin, end, rank, offset in sorted(held):
        start, skipped = begin, (row or 0) * layout.length(rank)
        while start < end:
            while borders[document + 1] <= start:
                document += 1
            first, last = borders[document : document + 2]
            stop, at = min(last, end), skipped + offset + start - begin
            chains[document].append(Piece(rank, row, document, start, stop, at, first, last))
            start = stop
    return chains


def _direct(chain: Chain) -> Iterator[Move]:
    """Each piece's map to the last piece of every rank that has a later one."""
    latest = {piece.rank: index for index, piece in enumerate(chain)}
    for index, piece in enumerate(chain):
        for last in latest.values():
            if index < last:
                yield Move(piece, chain[last], piece.imports)


def _sorted(moves: Iterator[Move] | list[Move]) -> Round:
    def key(move: Move) -> tuple[int, ...]:
        source, target = move.source, move.target
        return source.rank, target.rank, source.offset, target.offset

    return tuple(sorted(moves, key=key))


# By rank, as calls ask for it: a batch may have thousands of documents that are none of a rank's.
@lru_cache(maxsize=64)
def _rounds_of(chains: StateChains, rank: int) -> tuple[RankRound, ...]:
    return tuple(
        RankRound(
            tuple(move for move in moves if rank in (move.source.rank, move.target.rank)),
            any(move.crosses for move in moves),
        )
        for moves in chains.rounds
    )


@lru_cache(maxsize=64)
def _folds(chains: StateChains, rank: int) -> tuple[Chain, ...]:
    lasts = [
        (chain, max((i for i, piece in enumerate(chain) if piece.rank == rank), default=0))
        for chain in chains.chains
    ]
    return tuple(chain[: last + 1] for chain, last in lasts if last > 0)


@lru_cache(maxsize=64)
def _halos(chains: StateChains, width: int) -> tuple[Halo, ...]:
    degree = chains.layout.degree
    # What each rank needs of each other one, in the order of its pieces and their tokens; and for
    # each piece, which of those it is made of.
    sends: list[list[list[tuple[int, int]]]] = [[[] for _ in range(degree)] for _ in range(degree)]
    needs: dict[Piece, list[tuple[int, int]]] = {}  # (source, number among that source's)
    for chain in chains.chains:
        for index, piece in enumerate(chain):
            own, end = [], piece.start
            begin = max(piece.first, piece.start - width)
            while end > begin:
                index -= 1
                source = chain[index]
                start = max(begin, source.start)
                span = source.offset + start - source.start, source.offset + end - source.start
                spans = sends[source.rank][piece.rank]
                own.append((source.rank, len(spans)))
                spans.append(span)
                end = start
            needs[piece] = own[::-1]
    crosses = any(source != piece.rank for piece, own in needs.items() for source, _ in own)
    return tuple(
        _halo_of_rank(chains, rank, width, sends, needs)._replace(crosses=crosses)
        for rank in range(degree)
    )


def _halo_of_rank(
    chains: StateChains,
    rank: int,
    width: int,
    sends: list[list[list[tuple[int, int]]]],
    needs: dict[Piece, list[tuple[int, int]]],
) -> Halo:
    own = chains.by_rank[rank]
    edges = {edge for piece in own for edge in (piece.offset, piece.offset + piece.length)}
    behind = [piece.offset + min(width, piece.length) for piece in own]
    edges |= set(behind)
    edges |= {edge for spans in sends[rank] for span in spans for edge in span}
    ordered = sorted(edges)
    cut_at = {edge: index for index, edge in enumerate(ordered)}
    pieces = tuple((cut_at[p.offset], cut_at[p.offset + p.length]) for p in own)
    heads = tuple((first, cut_at[edge]) for (first, _), edge in zip(pieces, behind, strict=True))
    to_ranks = tuple(
        tuple(cut for a, b in spans for cut in range(cut_at[a], cut_at[b])) for spans in sends[rank]
    )
    spans_of = [spans[rank] for spans in sends]
    received = tuple(sum(b - a for a, b in spans) for spans in spans_of)
    begins, total = [], 0
    for spans, tokens in zip(spans_of, received, strict=True):
        begins.append(list(accumulate((b - a for a, b in spans), initial=total)))
        total += tokens
    halos = tuple(tuple((begins[s][n], begins[s][n + 1]) for s, n in needs[piece]) for piece in own)
    lengths = tuple(b - a for a, b in pairwise(ordered))
    return Halo(lengths, pieces, heads, to_ranks, received, halos, width, False)
