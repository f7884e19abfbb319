"""State chains: which pieces of which documents the ranks hold, and what layers that carry a state
from token to token send between them. ``recurrence`` executes it; the planner counts its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from ds_usp.errors import LayoutError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import Borders, MaskSpec, Parents
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
        imports: a state comes in: the piece's document begins before it, or has a parent.
        exports: its state goes to a later piece, of its document or a child of that.
    """

    rank: int
    row: int | None
    document: int
    start: int
    stop: int
    offset: int
    first: int
    last: int
    imports: bool
    exports: bool

    @property
    def length(self) -> int:
        return self.stop - self.start

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
        moves: those from or to the rank's pieces.
        sent: the moves that cross; one for a map that several pieces of a rank take.
        crosses: some rank sends: all take part in an exchange.
    """

    moves: Round
    sent: Round
    crosses: bool


class Fold(NamedTuple):
    """A step of what a rank folds where maps go directly.

    Attributes:
        piece: whose map it is.
        before: the pieces whose states, summed, come into ``piece``.
        goes_on: the state after ``piece`` comes into a later step.
    """

    piece: Piece
    before: tuple[Piece, ...]
    goes_on: bool


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
#
# In a tree a document's first piece has the last one of its parent before it, and so have all of
# its siblings: the chains are paths to a root, and nothing else changes. Gradients go from the
# leaves to the roots, and where a document branches those of its children are summed:
#
#     states     0[0:4] -> 1[4:6]     gradients    1[4:6] -> 0[0:4]
#                       -> 1[6:9]                  1[6:9] ->
@dataclass(frozen=True, eq=False)
class StateChains:
    """The pieces of all ranks as chains. Make it with :func:`state_chains`.

    Attributes:
        layout: which tokens each rank holds.
        documents: cumulative borders of each row, or of all rows.
        rows: of the batch.
        chains: by row and document; pieces in token order.
        before: the pieces whose states, summed, come into each piece: one or none; where chains
            are mirrored, one of each document that goes on from it. These are earlier keys.
    """

    layout: TokenLayout
    documents: tuple[Borders, ...]
    rows: int
    chains: tuple[Chain, ...]
    before: dict[Piece, tuple[Piece, ...]]

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
        """Pieces of the longest chain, from a root to a leaf."""
        return 1 + max(self._depths.values())

    @cached_property
    def _depths(self) -> dict[Piece, int]:
        depths: dict[Piece, int] = {}
        for piece, before in self.before.items():
            depths[piece] = max((1 + depths[x] for x in before), default=0)
        return depths

    @cached_property
    def by_rank(self) -> tuple[tuple[Piece, ...], ...]:
        """Each rank's pieces, as its shard has them: one after the other, all of it."""
        pieces: list[list[Piece]] = [[] for _ in range(self.layout.degree)]
        for chain in self.chains:
            for piece in chain:
                pieces[piece.rank].append(piece)
        return tuple(
            tuple(sorted(rank_pieces, key=lambda piece: piece.offset)) for rank_pieces in pieces
        )

    @cached_property
    def doubles(self) -> bool:
        """States are folded by doubling."""
        # Not where a state is the sum of several: a map would be of all paths to its piece.
        merges = any(len(before) > 1 for before in self.before.values())
        return self.longest > MAX_DIRECT_PIECES and not merges

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The exchanges of states; moves within a rank send nothing. Empty: no document is on two
        ranks, or in two pieces."""
        if self.longest == 1:
            return ()
        if not self.doubles:
            return (_sorted(_direct(self.before)),)
        before = {piece: x[0] for piece, x in self.before.items() if x}
        last = _sorted(Move(x, piece, False) for piece, x in before.items())
        rounds, step = [], 1
        while step < self.longest - 1:
            pairs = (
                Move(x, piece, self._depths[x] >= step)  # else x's map reaches a root, without A
                for piece, x in before.items()
                if piece.exports
            )
            rounds.append(_sorted(pairs))
            before = {piece: before[x] for piece, x in before.items() if x in before}
            step *= 2
        return (*rounds, last)

    def rounds_of(self, rank: int) -> tuple[RankRound, ...]:
        """The rounds as one rank sees them."""
        return _rounds_of(self, rank)

    def folds(self, rank: int) -> tuple[Fold, ...]:
        """Return what a rank folds for its pieces where maps go directly, in order."""
        return _folds(self, rank)

    @cached_property
    def mirrored(self) -> StateChains:
        """The chains from their ends to their begins, along which gradients of states go: what
        imports exports. A rank's pieces keep their order."""
        length = self.layout.seq_len

        def mirror(piece: Piece) -> Piece:
            start, first = length - piece.stop, length - piece.last
            stop, last = length - piece.start, length - piece.first
            imports, exports = piece.exports, piece.imports
            return piece._replace(
                start=start, stop=stop, first=first, last=last, imports=imports, exports=exports
            )

        mirrored = {piece: mirror(piece) for piece in self.before}
        after: dict[Piece, tuple[Piece, ...]] = dict.fromkeys(reversed(mirrored.values()), ())
        for piece, before in self.before.items():
            for x in before:
                after[mirrored[x]] += (mirrored[piece],)
        chains = tuple(
            tuple(mirrored[x] for x in reversed(chain)) for chain in reversed(self.chains)
        )
        return replace(self, chains=chains, before=after)

    def sent_bytes(
        self, rank: int, state: int, transition: int, itemsize: int = 4, *, backward: bool = False
    ) -> int:
        """Bytes of states that a rank sends in a pass of a layer: what the ledger counts, whose
        mean over ranks is ``chain_traffic`` of the planner.

        Args:
            state, transition: elements of S and of A of one row.
            itemsize: bytes of an element as it is sent: 4, in fp32, or 8 in fp64.
            backward: of the backward pass, which sends a gradient for all that was received.
        """
        elements = 0
        for move in (move for moves in self.rounds_of(rank) for move in moves.sent):
            if rank == (move.target.rank if backward else move.source.rank):
                elements += state + (transition if move.transition else 0)
        return elements * self.rows_of_piece * itemsize

    def halo_bytes(
        self, rank: int, width: int, channels: int, itemsize: int, *, backward: bool = False
    ) -> int:
        """Bytes of a causal convolution's halo that a rank sends to others in one pass.

        Args:
            width: taps less one.
        """
        halo = self.halo(rank, width)
        if backward:
            tokens = sum(halo.received) - halo.received[rank]
        else:
            cuts_sent = (cuts for other, cuts in enumerate(halo.sends) if other != rank)
            tokens = sum(halo.lengths[cut] for cuts in cuts_sent for cut in cuts)
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
def state_chains(
    layout: TokenLayout,
    documents: tuple[Borders, ...],
    rows: int,
    parents: tuple[Parents, ...] = (),
) -> StateChains:
    """The chains of a batch.

    Args:
        documents: as :class:`~ds_usp.geometry.masks.MaskSpec` keeps them: none, borders for all
            rows, or for each.
        rows: of the batch.
        parents: of the documents, as of ``MaskSpec``: those whose states they begin with.

    Raises:
        LayoutError: a layout whose ranks do not hold runs of consecutive tokens.
        ConfigError: documents that do not fit ``rows`` rows of the layout's tokens.
    """
    MaskSpec(None, 0, documents, parents=parents).check_length(layout.seq_len, rows)
    segments = (segment for rank in range(layout.degree) for segment in layout.segments(rank))
    stride = max((segment.stride for segment in segments if segment.length > 1), default=1)
    if stride > 1:
        raise LayoutError(
            f"{layout} gives each rank tokens that are {stride} apart, and a layer that carries a "
            "state from token to token needs runs of consecutive ones: use 'zigzag', 'contiguous' "
            "or 'balanced'"
        )
    by_row = documents or ((0, layout.seq_len),)
    trees = list(zip(by_row, parents or [(-1,) * (len(x) - 1) for x in by_row], strict=True))
    trees = trees[:1] if len(set(trees)) == 1 else trees
    chains, before = list[Chain](), dict[Piece, tuple[Piece, ...]]()
    for row, (borders, row_parents) in enumerate(trees):
        row_chains = _chains_of_row(layout, row if len(trees) > 1 else None, borders, row_parents)
        for chain, parent in zip(row_chains, row_parents, strict=True):
            last = () if parent < 0 else row_chains[parent][-1:]
            for piece in chain:
                before[piece], last = last, (piece,)
        chains += row_chains
    documents = tuple(borders for borders, _ in trees) if documents else ()
    return StateChains(layout, documents, rows, tuple(chains), before)


def _chains_of_row(
    layout: TokenLayout, row: int | None, borders: Borders, parents: Parents
) -> list[Chain]:
    """The chain of each document of a row; None: of all rows, which have the same documents."""
    placed_runs = []  # (position, stop, rank, offset in the row's shard)
    for rank in range(layout.degree):
        for segment, offset in with_offsets(layout.segments(rank)):
            placed_runs.append((segment.start, segment.start + segment.length, rank, offset))
    chains: list[list[Piece]] = [[] for _ in borders[1:]]
    document, branching = 0, set(parents)
    for begin, end, rank, offset in sorted(placed_runs):
        start, skipped = begin, (row or 0) * layout.length(rank)
        while start < end:
            while borders[document + 1] <= start:
                document += 1
            first, last = borders[document : document + 2]
            stop, piece_offset = min(last, end), skipped + offset + start - begin
            imports = start > first or parents[document] >= 0
            exports = stop < last or document in branching
            piece = Piece(
                rank, row, document, start, stop, piece_offset, first, last, imports, exports
            )
            chains[document].append(piece)
            start = stop
    return [tuple(chain) for chain in chains]


def _direct(before: dict[Piece, tuple[Piece, ...]]) -> Iterator[Move]:
    """Each piece's map once to every rank that folds it for later pieces, one of which is the
    move's target: of that the rank alone is used."""
    latest: dict[Piece, dict[int, Piece]] = {piece: {} for piece in before}
    for piece, sources in reversed(before.items()):
        for last in latest[piece].values():
            yield Move(piece, last, piece.imports)
        for source in sources:
            # From the last piece to the first: an entry that is there already is a later piece.
            latest[source] = {piece.rank: piece, **latest[piece], **latest[source]}


def _sorted(moves: Iterator[Move] | list[Move]) -> Round:
    def key(move: Move) -> tuple[int, ...]:
        source, target = move.source, move.target
        return source.rank, target.rank, source.offset, target.offset

    return tuple(sorted(moves, key=key))


# By rank, as calls ask for it: a batch may have thousands of documents that are none of a rank's.
@lru_cache(maxsize=64)
def _rounds_of(chains: StateChains, rank: int) -> tuple[RankRound, ...]:
    rounds = []
    for moves in chains.rounds:
        own_moves = tuple(move for move in moves if rank in (move.source.rank, move.target.rank))
        sent = {(move.source, move.target.rank): move for move in own_moves if move.crosses}
        crosses = any(move.crosses for move in moves)
        rounds.append(RankRound(own_moves, tuple(sent.values()), crosses))
    return tuple(rounds)


@lru_cache(maxsize=64)
def _folds(chains: StateChains, rank: int) -> tuple[Fold, ...]:
    steps, sources = list[Fold](), set[Piece]()
    for piece, before in reversed(chains.before.items()):
        goes_on = piece in sources
        if goes_on or (before and piece.rank == rank):
            steps.append(Fold(piece, before, goes_on))
            sources.update(before)
    return tuple(reversed(steps))


@lru_cache(maxsize=64)
def _halos(chains: StateChains, width: int) -> tuple[Halo, ...]:
    degree = chains.layout.degree
    # sends[source][target]: half-open tokens of the source's shard, in the order in which pieces
    # need them; and of each piece's halo, in token order, the source and the number among those.
    sends: list[list[list[tuple[int, int]]]] = [[[] for _ in range(degree)] for _ in range(degree)]
    needs: dict[Piece, list[tuple[int, int]]] = {}
    for piece in chains.before:
        parts, missing, before = [], width, chains.before[piece]
        while missing and before:
            (source,) = before
            taken, end = min(missing, source.length), source.offset + source.length
            spans = sends[source.rank][piece.rank]
            parts.append((source.rank, len(spans)))
            spans.append((end - taken, end))
            missing, before = missing - taken, chains.before[source]
        needs[piece] = parts[::-1]
    crosses = any(source != piece.rank for piece, parts in needs.items() for source, _ in parts)
    return tuple(
        _halo_of_rank(chains, rank, width, sends, needs, crosses) for rank in range(degree)
    )


def _halo_of_rank(
    chains: StateChains,
    rank: int,
    width: int,
    sends: list[list[list[tuple[int, int]]]],
    needs: dict[Piece, list[tuple[int, int]]],
    crosses: bool,
) -> Halo:
    """The halo of one rank, from what all ranks send and pieces need (:func:`_halos`)."""
    pieces = chains.by_rank[rank]
    edges = {edge for piece in pieces for edge in (piece.offset, piece.offset + piece.length)}
    behind = [piece.offset + min(width, piece.length) for piece in pieces]
    edges |= set(behind)
    edges |= {edge for spans in sends[rank] for span in spans for edge in span}
    ordered = sorted(edges)
    cut_at = {edge: index for index, edge in enumerate(ordered)}
    cuts = tuple((cut_at[p.offset], cut_at[p.offset + p.length]) for p in pieces)
    heads = tuple((first, cut_at[edge]) for (first, _), edge in zip(cuts, behind, strict=True))
    to_ranks = tuple(
        tuple(cut for a, b in spans for cut in range(cut_at[a], cut_at[b])) for spans in sends[rank]
    )
    spans_of = [spans[rank] for spans in sends]
    received = tuple(sum(b - a for a, b in spans) for spans in spans_of)
    begins, total = [], 0
    for spans, tokens in zip(spans_of, received, strict=True):
        begins.append(list(accumulate((b - a for a, b in spans), initial=total)))
        total += tokens
    halos = tuple(tuple((begins[s][n], begins[s][n + 1]) for s, n in needs[p]) for p in pieces)
    lengths = tuple(b - a for a, b in pairwise(ordered))
    return Halo(lengths, cuts, heads, to_ranks, received, halos, width, crosses)
