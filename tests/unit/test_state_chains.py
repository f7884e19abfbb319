"""State chains: every token in one piece, states and halos as by brute force."""

from itertools import pairwise
from typing import Any

import pytest
from cases import random_tree
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from test_layout import MESHES

from ds_usp import ConfigError, LayoutError, MaskSpec, TokenLayout
from ds_usp.geometry.state_chains import MAX_DIRECT_PIECES, Piece, StateChains, state_chains


@st.composite
def batches(draw: st.DrawFn) -> tuple[StateChains, dict[Piece, list[Piece]]]:
    """Chains of any layout of consecutive tokens, with the documents or trees of all rows or of
    each; and what the state before each piece has come through."""
    ulysses, ring = draw(st.sampled_from(MESHES))
    tokens = 2 * ulysses * ring + draw(st.integers(0, 40))
    kind = draw(st.sampled_from(["contiguous", "zigzag", "context_parallel", "balanced"]))
    rows = draw(st.integers(1, 3))

    def borders() -> list[int]:
        inner = draw(st.sets(st.integers(1, tokens - 1), max_size=8))
        return [0, *sorted(inner), tokens]

    documents: Any = borders()
    layout = TokenLayout(
        kind, tokens, ulysses, ring, documents=documents if kind == "balanced" else ()
    )
    if kind != "balanced":
        documents = draw(st.sampled_from([(), documents, [borders() for _ in range(rows)]]))
    mask = MaskSpec.causal(documents)
    if draw(st.booleans()):
        count = 1 if kind == "balanced" else draw(st.sampled_from([1, rows]))
        mask = MaskSpec.tree([random_tree(draw(st.randoms()), tokens) for _ in range(count)])
    chains = state_chains(layout, mask.documents, rows, mask.parents)
    ends, through = dict[tuple[int, int], list[Piece]](), dict[Piece, list[Piece]]()
    for chain in chains.chains:
        row, document = chain[0].row or 0, chain[0].document
        parent = mask.parents[row][document] if mask.parents else -1
        pieces = [*ends.get((row, parent), []), *chain]
        through |= {p: pieces[: len(pieces) - len(chain) + i] for i, p in enumerate(chain)}
        ends[row, document] = pieces
    return chains, through


def documents_of(chains: StateChains) -> list[list[tuple[int, int]]]:
    """Of each row, first and last position of every document."""
    borders = chains.documents or ((0, chains.layout.seq_len),)
    return [list(pairwise(borders[row if chains.folded else 0])) for row in range(chains.rows)]


@given(batches())
@examples(100)
def test_every_token_is_in_one_piece_and_chains_are_documents(batch):
    (chains, through), seen = batch, set()
    layout, sources = chains.layout, {p for before in through.values() for p in before}
    for chain in chains.chains:
        rows = range(chains.rows) if chain[0].row is None else [chain[0].row]
        assert (chain[0].start, chain[-1].stop) == (chain[0].first, chain[0].last)
        assert all(a.stop == b.start for a, b in pairwise(chain))
        assert [p.imports for p in chain] == [bool(through[p]) for p in chain]
        assert [p.exports for p in chain] == [p in sources for p in chain]
        for row in rows:
            assert (chain[0].first, chain[0].last) in documents_of(chains)[row]
        for piece in chain:
            skipped = (piece.row or 0) * layout.length(piece.rank)
            stored = layout.positions(piece.rank)[piece.offset - skipped :][: piece.length]
            assert stored == list(range(piece.start, piece.stop))
            seen |= {(row, position) for row in rows for position in stored}
    assert len(seen) == chains.rows * layout.seq_len
    for rank, own in enumerate(chains.by_rank):
        ends = [(piece.offset, piece.offset + piece.length) for piece in own]
        assert all(a[1] == b[0] for a, b in pairwise(ends)) and ends[0][0] == 0
        assert ends[-1][1] == layout.length(rank) * (chains.rows if chains.folded else 1)


@given(batches())
@examples(100)
def test_rounds_bring_each_piece_the_pieces_before_it(batch):
    """Maps as the sets of pieces that they are of; without A, all from the root's begin."""
    chains, through = batch
    before: dict[Piece, set[Piece]] = {p: set() for p in through}
    wanted = {p: set(pieces) for p, pieces in through.items()}
    place = {p: len(pieces) for p, pieces in through.items()}
    maps = {p: {p} for p in before if p.exports}
    for number, moves in enumerate(chains.rounds):
        arriving = [(move, maps[move.source]) for move in moves]
        last = number == len(chains.rounds) - 1
        for move, pieces in arriving:
            first = min(place[p] for p in pieces)
            if chains.doubles and not last:
                assert move.transition == (first > 0)
                assert first + len(pieces) == min(place[p] for p in maps[move.target])
                maps[move.target] = maps[move.target] | pieces
            else:
                assert move.transition == (first > 0 and not chains.doubles)
                later = [p for p in wanted if p.rank == move.target.rank and pieces <= wanted[p]]
                assert move.target in later
                for p in later:
                    before[p] |= pieces if p == move.target or not chains.doubles else set()
    assert before == wanted
    assert chains.longest == 1 + max(place.values())
    # Back along the same ways: each piece has the sums of all that it goes on to.
    mirrored, back = chains.mirrored, dict[Piece, set[Piece]]()
    for piece, pieces in mirrored.before.items():
        back[piece] = set().union(pieces, *(back[p] for p in pieces))
    length = chains.layout.seq_len
    for piece, (own, later) in zip(reversed(through), back.items(), strict=True):
        assert (own.rank, own.offset, own.start) == (piece.rank, piece.offset, length - piece.stop)
        assert len(later) == sum(piece in pieces for pieces in through.values())
        assert (own.imports, own.exports) == (piece.exports, piece.imports)
    assert chains.doubles == (chains.longest > MAX_DIRECT_PIECES)


@given(batches(), st.integers(0, 5))
@examples(100)
def test_halos_are_the_tokens_before_each_piece(batch, width):
    chains, through = batch
    layout, ranks = chains.layout, range(chains.layout.degree)
    halos = [chains.halo(rank, width) for rank in ranks]
    crosses = False
    for rank, halo in enumerate(halos):
        assert sum(halo.lengths) == sum(p.length for p in chains.by_rank[rank])
        received: list[tuple[int, int]] = []  # row and position of what arrives
        for source, other in enumerate(halos):
            starts = [sum(other.lengths[:cut]) for cut in range(len(other.lengths))]
            for cut in other.sends[rank]:
                for token in range(starts[cut], starts[cut] + other.lengths[cut]):
                    row, place = divmod(token, layout.length(source))
                    received.append((row, layout.positions(source)[place]))
            arrived = sum(halo.received[: source + 1])
            assert len(received) == arrived
        for piece, (first, stop), head, spans in zip(
            chains.by_rank[rank], halo.pieces, halo.heads, halo.halos, strict=True
        ):
            assert sum(halo.lengths[:first]) == piece.offset
            assert sum(halo.lengths[first:stop]) == piece.length
            assert head[0] == first
            assert sum(halo.lengths[slice(*head)]) == min(width, piece.length)
            found = [received[i] for begin, end in spans for i in range(begin, end)]
            positions = [x for p in through[piece] for x in range(p.start, p.stop)]
            positions = positions[max(0, len(positions) - width) :]
            assert found == [(piece.row or 0, position) for position in positions]
            crosses |= any(i not in layout.positions(rank) for i in positions)
    assert all(halo.crosses == crosses for halo in halos)
    for backward in (False, True):
        sent = [chains.halo_bytes(rank, width, 3, 2, backward=backward) for rank in ranks]
        own = sum(halo.received[rank] for rank, halo in enumerate(halos))
        moved = sum(sum(halo.received) for halo in halos) - own
        assert sum(sent) == moved * chains.rows_of_piece * 3 * 2


@pytest.mark.parametrize(("ring", "exchanges", "sent"), [(4, 1, 10), (8, 5, 13), (32, 7, 23)])
def test_doubling_keeps_the_bytes_of_long_chains(ring, exchanges, sent):
    """Zigzag, two pieces a rank: in units of a map of equal A and B, the most of any rank."""
    chains = state_chains(TokenLayout("zigzag", 64 * ring, 1, ring), (), 1)
    assert len(chains.rounds) == exchanges
    assert max(chains.sent_bytes(rank, 1, 1, 1) for rank in range(ring)) == sent


def test_what_has_no_chains_is_refused():
    with pytest.raises(LayoutError, match="tokens that are 4 apart"):
        state_chains(TokenLayout("striped", 64, 1, 4), (), 1)
    with pytest.raises(ConfigError, match="the batch has 3"):
        state_chains(TokenLayout("zigzag", 8, 1, 2), ((0, 8), (0, 4, 8)), 3)
