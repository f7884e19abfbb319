"""Masks: bounds in global positions, and the tiles that follow, against brute force."""

from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import LaterMask, random_tree
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp import ConfigError, LayoutError, MaskSpec, TokenLayout, UnsupportedAttentionError
from ds_usp import testing as oracle
from ds_usp.attention.local_attention import FrameworkArgumentChecks, LocalAttention
from ds_usp.comm.readings import Readings
from ds_usp.errors import USPError
from ds_usp.geometry.chunking import visible_pairs
from ds_usp.geometry.ring_schedule import ring_schedule
from ds_usp.geometry.segments import Segment
from ds_usp.geometry.tiles import Tile, TileSupport, plan_tiles
from ds_usp.recurrence.exchange import _documents_of
from ds_usp.training.data_loader import ShardedBatch

BOUND = st.none() | st.integers(0, 12)


@given(BOUND, BOUND, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 9))
@examples(150)
def test_a_query_sees_its_document_through_its_window_and_the_prefix(left, right, lengths, prefix):
    tokens = range(sum(lengths))
    window = oracle.window(tokens, tokens, left, right)
    mask = MaskSpec(left, right, [0, *accumulate(lengths)])
    allowed = torch.tensor([[mask.allows(q, k) for k in tokens] for q in tokens])
    assert torch.equal(allowed, window & oracle.same_document(tokens, tokens, lengths))
    assert allowed.diagonal().all(), "every token sees itself"
    blocks = (((0, lengths[0]),),)
    mask = MaskSpec(left, right, [0, *accumulate(lengths)], blocks=blocks)
    within = torch.tensor([[mask.allows(q, k) for k in tokens] for q in tokens])
    lifted = oracle.window(tokens, tokens, left, None)[: lengths[0], : lengths[0]]
    assert torch.equal(within[: lengths[0], : lengths[0]], lifted)
    assert torch.equal(within[lengths[0] :], allowed[lengths[0] :])
    mask = MaskSpec(left, right, prefix=prefix)
    allowed = torch.tensor([[mask.allows(q, k) for k in tokens] for q in tokens])
    assert torch.equal(allowed, window | (torch.tensor(tokens) < prefix))


@pytest.mark.parametrize(
    ("mask", "bounds", "text", "causal"),
    [
        (MaskSpec.causal(), (None, 0), "causal", True),
        (MaskSpec.full(), (None, None), "full", False),
        (MaskSpec(), (None, None), "full", False),
        (MaskSpec.window(3), (3, 0), "window(3, 0)", False),
        (MaskSpec.window(3, None), (3, None), "window(3, None)", False),
        (MaskSpec.window(None, 2), (None, 2), "window(None, 2)", False),
        (MaskSpec.window(None), (None, 0), "causal", True),
    ],
    ids=str,
)
def test_names(mask, bounds, text, causal):
    assert ((mask.left, mask.right), str(mask), mask.is_causal) == (bounds, text, causal)
    assert mask == MaskSpec(*bounds) and hash(mask) == hash(MaskSpec(*bounds))


@pytest.mark.parametrize("bound", [-1, 2.0, 2.5, "3", True, float("nan"), float("inf"), [1]])
@pytest.mark.parametrize("side", ["left", "right", "prefix"])
def test_what_is_no_number_of_tokens_is_refused(side, bound):
    with pytest.raises(ConfigError) as caught:
        MaskSpec(**{side: bound})
    assert f"{side}={bound!r}" in str(caught.value)


def test_a_prefix_is_the_whole_sequences():
    assert str(MaskSpec.prefix_lm(5)) == "causal with a prefix of 5"
    with pytest.raises(ConfigError, match="a prefix of 2 tokens"):
        MaskSpec(None, 0, [0, 4], 2)


SUPPORTS = [TileSupport(*flags) for flags in product((True, False), repeat=3)]


def band_of(rows: int, columns: int, left: int | None, right: int | None) -> torch.Tensor:
    """The pairs of a bottom-right aligned window, by its definition in flash-attn's README."""
    shift = columns - rows
    distance = torch.arange(columns)[None, :] - torch.arange(rows)[:, None] - shift
    allowed = torch.ones(rows, columns, dtype=torch.bool)
    if left is not None:
        allowed &= distance >= -left
    if right is not None:
        allowed &= distance <= right
    return allowed


def check_tile(tile: Tile, support: TileSupport) -> torch.Tensor:
    """Check what a tile says of itself; return its pairs ``[rows, columns]``."""
    left, right = tile.window
    pairs = band_of(tile.rows, tile.columns, left, right)
    assert pairs.any(0).all() and pairs.any(1).all(), f"empty row or column in {tile}"
    assert tile.pairs == int(pairs.sum())
    assert tile.is_full == bool(pairs.all())
    causal = band_of(tile.rows, tile.columns, None, 0)
    assert tile.is_causal == (torch.equal(pairs, causal) and not tile.is_full)
    rows = torch.arange(tile.q_start, tile.q_stop)[:, None]
    distance = torch.arange(tile.k_start, tile.k_stop)[None, :] - rows
    assert torch.equal(pairs, (distance >= tile.low) & (distance <= tile.high))
    # Bounds are None where they bind nothing, so that a kernel takes its fast path.
    for bound, other in ((left, (None, right)), (right, (left, None))):
        if bound is not None:
            assert not torch.equal(pairs, band_of(tile.rows, tile.columns, *other))
    if not support.window:
        assert tile.is_full or tile.is_causal
    if not support.rectangular and left is None and not tile.is_full:
        assert tile.rows == tile.columns and right == 0
    if not support.tall:
        assert tile.is_full or tile.rows <= tile.columns
    return pairs


@st.composite
def problems(
    draw: st.DrawFn,
) -> tuple[tuple[Segment, ...], tuple[Segment, ...], MaskSpec, TileSupport]:
    """Two shards of one stride, not necessarily of one layout, a mask, a kernel."""
    stride = draw(st.sampled_from([1, 1, 1, 2, 3, 5]))
    gaps = st.tuples(st.integers(1, 9), st.sampled_from([0, 0, 1, 3, 8]))
    shards = []
    for start in draw(st.tuples(st.integers(0, 12), st.integers(0, 12))):
        segments = []
        for length, gap in draw(st.lists(gaps, min_size=1, max_size=4)):
            segments.append(Segment(start, length, stride))
            start = segments[-1].positions.stop + gap * stride
        shards.append(tuple(segments))
    mask = MaskSpec(draw(st.none() | st.integers(0, 12)), draw(st.none() | st.integers(0, 9)))
    supports = [support for support in SUPPORTS if support.window or mask.left is None]
    return shards[0], shards[1], mask, draw(st.sampled_from(supports))


def positions(segments: tuple[Segment, ...]) -> torch.Tensor:
    return torch.tensor([p for segment in segments for p in segment.positions])


@given(problems())
@examples(200)
def test_tiles_cover_every_allowed_pair_exactly_once_and_are_tight(problem):
    queries, keys, mask, support = problem
    q, k = positions(queries), positions(keys)
    covered = torch.zeros(len(q), len(k), dtype=torch.int64)
    for tile in plan_tiles(queries, keys, mask, support):
        kind = str(tile).split()[-1].split("(")[0]
        assert kind == ("full" if tile.is_full else "causal" if tile.is_causal else "window")
        pairs = check_tile(tile, support)
        covered[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] += pairs
    distance = k[None, :] - q[:, None]
    wanted = torch.ones_like(covered, dtype=torch.bool)
    if mask.left is not None:
        wanted &= distance >= -mask.left
    if mask.right is not None:
        wanted &= distance <= mask.right
    assert torch.equal(covered, wanted.to(covered.dtype))


def one(length: int, start: int = 0, stride: int = 1) -> tuple[Segment, ...]:
    return (Segment(start, length, stride),)


ZIGZAG = (Segment(0, 4), Segment(12, 4))  # the first and the last quarter of 16 tokens
MIDDLE = (Segment(4, 4), Segment(8, 4))
CALLS: dict[str, tuple[tuple[Segment, ...], tuple[Segment, ...], MaskSpec, list[str]]] = {
    "own block": (one(8), one(8), MaskSpec.causal(), ["q[0:8] k[0:8] causal"]),
    "block before": (one(8, 8), one(8), MaskSpec.causal(), ["q[0:8] k[0:8] full"]),
    "block after": (one(8), one(8, 8), MaskSpec.causal(), []),
    "zigzag, own": (ZIGZAG, ZIGZAG, MaskSpec.causal(), ["q[0:8] k[0:8] causal"]),
    "zigzag, later": (MIDDLE, ZIGZAG, MaskSpec.causal(), ["q[0:8] k[0:4] full"]),
    "zigzag, earlier": (ZIGZAG, MIDDLE, MaskSpec.causal(), ["q[4:8] k[0:8] full"]),
    "stripe before": (one(8, 1, 2), one(8, 0, 2), MaskSpec.causal(), ["q[0:8] k[0:8] causal"]),
    "stripe after": (one(8, 0, 2), one(8, 1, 2), MaskSpec.causal(), ["q[1:8] k[0:7] causal"]),
    "full": (ZIGZAG, MIDDLE, MaskSpec.full(), ["q[0:8] k[0:8] full"]),
    "window": (one(8), one(8), MaskSpec.window(2, 1), ["q[0:8] k[0:8] window(2,1)"]),
    "window reaching back": (
        one(8, 8),
        one(8),
        MaskSpec.window(2),
        ["q[0:2] k[6:8] window(0,None)"],
    ),
    "window on zigzag": (
        ZIGZAG,
        ZIGZAG,
        MaskSpec.window(2),
        ["q[0:4] k[0:4] window(2,0)", "q[4:8] k[4:8] window(2,0)"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_known_blocks_take_the_calls_one_would_draw(name):
    queries, keys, mask, expected = CALLS[name]
    assert [str(tile) for tile in plan_tiles(queries, keys, mask)] == expected


def test_what_a_kernel_cannot_do_in_one_call_is_cut():
    # 4 queries at the end of 8 keys: a rectangle with a diagonal.
    queries, keys = one(4, 4), one(8)
    plain = plan_tiles(queries, keys, MaskSpec.causal(), TileSupport(False, False))
    assert [str(tile) for tile in plain] == ["q[0:4] k[0:4] full", "q[0:4] k[4:8] causal"]
    ahead = plan_tiles(one(8), one(8), MaskSpec(None, 2), TileSupport(False, False))
    assert all(tile.is_full or (tile.is_causal and tile.rows == tile.columns) for tile in ahead)


def test_a_tall_band_is_cut_in_three_at_most():
    # 12 queries that meet 4 keys one after the other and leave them again.
    def plan(support: TileSupport) -> list[str]:
        return [str(tile) for tile in plan_tiles(one(12), one(4), MaskSpec(8, 0), support)]

    assert plan(TileSupport()) == ["q[0:12] k[0:4] window(0,8)"]
    assert plan(TileSupport(tall=False)) == [
        "q[0:4] k[0:4] causal",
        "q[4:9] k[0:4] full",
        "q[9:12] k[1:4] window(0,None)",
    ]


def test_a_window_needs_a_kernel_with_windows():
    with pytest.raises(UnsupportedAttentionError, match="window of 3 tokens to the left"):
        plan_tiles(one(8), one(8), MaskSpec.window(3), TileSupport(window=False))
    # One that binds nothing does not.
    assert len(plan_tiles(one(4), one(4), MaskSpec.window(3), TileSupport(window=False))) == 1


def test_shards_of_different_stride_are_refused():
    with pytest.raises(LayoutError, match="stride 2 do not see keys of stride 3"):
        plan_tiles(one(4, 0, 2), one(4, 0, 3), MaskSpec.causal())


# ------------------------------------------------------------------ trees

FOREST = [(0, 4, None), (4, 6, 0), (6, 9, 0), (9, 10, 2), (10, 12, 2), (12, 16, None)]


@given(st.randoms(), st.integers(1, 60), st.none() | st.integers(0, 30))
@examples(100)
def test_a_query_sees_its_segment_and_its_ancestors(draw, tokens, left):
    segments = random_tree(draw, tokens)
    mask, positions = MaskSpec.tree(segments, left), range(tokens)
    allowed = torch.tensor([[mask.allows(q, k) for k in positions] for q in positions])
    whole = oracle.same_branch(positions, positions, segments)
    whole &= oracle.causal(positions, positions)
    # Of those that a token sees as many follow a key as lie between the two in the row.
    expected = whole & (
        whole.int().flip(1).cumsum(1).flip(1) <= (tokens if left is None else left + 1)
    )
    assert torch.equal(allowed, expected)
    assert visible_pairs(mask, tokens, tokens) == int(expected.sum())
    # A token's position is the number of tokens before it on its branch.
    layout = TokenLayout("contiguous", tokens)
    assert layout.positions(0, mask=mask) == [int(row.sum()) - 1 for row in whole]


def test_what_does_not_branch_is_packed_documents():
    assert MaskSpec.tree([(0, 4, None), (4, 6, 0), (6, 9, 1)]) == MaskSpec.causal([0, 9])
    assert MaskSpec.tree([(0, 4, -1), (4, 9, -1)]) == MaskSpec.causal([0, 4, 9])
    joined = MaskSpec.tree([(0, 2, None), (2, 4, 0), (4, 6, 1), (6, 7, 2), (7, 9, 1)])
    assert joined == MaskSpec.tree([(0, 4, None), (4, 7, 0), (7, 9, 0)])
    assert MaskSpec.tree(torch.tensor([[0, 4, -1], [4, 6, 0], [6, 9, 0]])).contexts() == (0, 4, 4)
    both = MaskSpec.tree([FOREST, [(0, 16, None)]])
    assert both.parents == ((-1, 0, 0, 2, 2, -1), (-1,)) and both.samples == 2
    assert MaskSpec.tree(FOREST) != MaskSpec.tree([*FOREST[:-1], (12, 16, 0)])
    assert str(MaskSpec.tree(FOREST)) != str(MaskSpec.tree([*FOREST[:-1], (12, 16, 0)]))
    assert "a tree of 6 segments of 1 samples" in str(MaskSpec.tree(FOREST))


def test_a_tree_of_depth_first_segments_takes_two_calls():
    """A prompt and answers: every answer's rows with the prompt in one call, all triangles in
    another; however many answers there are."""
    answers = [(100 + 10 * i, 110 + 10 * i, 0) for i in range(40)]
    (step,) = ring_schedule(
        TokenLayout("contiguous", 500), MaskSpec.tree([(0, 100, None), *answers]), 0
    ).steps
    assert [str(call) for call in step.calls] == [
        "q[100:500] k[0:100] full",
        "41 tiles in q[0:500] k[0:500] window(None, 0)",
    ]


def test_positions_restart_after_the_parent():
    mask, layout = MaskSpec.tree(FOREST), TokenLayout("zigzag", 16, 1, 2)
    assert layout.positions(0, mask=mask) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert layout.positions(1, mask=mask) == [4, 5, 4, 5, 6, 7, 7, 8]
    like = torch.zeros(1, 8, dtype=torch.int32)
    assert layout.positions(1, like=like, mask=mask).dtype == torch.int64
    both = MaskSpec.tree([FOREST, [(0, 16, None)]])
    assert layout.positions(0, like=like, mask=both).tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 3],
        [0, 1, 2, 3, 12, 13, 14, 15],
    ]
    assert layout.positions(1, mask=MaskSpec.causal([0, 5, 16])) == [4, 0, 1, 2, 3, 4, 5, 6]
    assert layout.positions(1, mask=MaskSpec.causal()) == layout.positions(1)
    with pytest.raises(ConfigError, match="end at 16, the sequence has 8"):
        TokenLayout("zigzag", 8, 1, 2).positions(0, mask=mask)


# Segments that are no tree, and the numbers of the message.
WRONG_TREES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a parent that begins later": ([(0, 4, 1), (4, 9, None)], ("0 (0-4)", "1 (4-9)")),
    "a cycle of one": ([(0, 4, None), (4, 9, 1)], ("1 (4-9)", "itself")),
    "a cycle of two": ([(0, 4, None), (4, 9, 2), (9, 12, 1)], ("2 (9-12)",)),
    "overlapping": ([(0, 4, None), (3, 9, 0)], ("1 (3-9)", "segment 0", "4")),
    "a gap": ([(0, 4, None), (6, 9, 0)], ("tokens 4 to 6", "6-9")),
    "not from 0": ([(1, 4, None)], ("tokens 0 to 1",)),
    "empty": ([(0, 4, None), (4, 4, 0)], ("1 (4-4)",)),
    "backwards": ([(0, 4, None), (4, 2, 0)], ("1 (4-2)",)),
    "no such parent": ([(0, 4, None), (4, 9, 7)], ("parent 7", "2 segments", "0 to 1")),
    "a negative parent": ([(0, 4, -2)], ("parent -2", "1 segments")),
    "half a parent": ([(0, 4, None), (4, 9, 0.5)], ("parent 0.5",)),
    "in the second sample": ([[(0, 9, None)], [(0, 4, None), (4, 9, 2)]], ("sample 1",)),
    "no parents": ([(0, 4), (4, 9)], ("(start, end, parent)",)),
    "half a token": ([(0, 4.5, None)], ("[0, 4.5, None]",)),
    "no segments": ([], ("none",)),
    "a number": (7, ("segments=7",)),
}


@pytest.mark.parametrize("name", WRONG_TREES)
def test_what_is_no_tree_is_refused(name):
    segments, numbers = WRONG_TREES[name]
    with pytest.raises(ConfigError) as caught:
        MaskSpec.tree(segments)
    assert all(number in str(caught.value) for number in numbers), caught.value


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (lambda: MaskSpec(3, 2, [0, 4, 9], parents=((-1, 0),)), r"the mask is window\(3, 2\)"),
        (lambda: MaskSpec(None, None, [0, 4, 9], parents=((-1, 0),)), "the mask is full"),
        (lambda: MaskSpec(None, 0, [0, 9], 0, (((0, 4),),), ((-1,),)), "with 1 blocks"),
        (lambda: MaskSpec(None, 0, [0, 4, 9], parents=((-1,),)), r"of \[1\] documents, .* \[2\]"),
        (lambda: MaskSpec(None, 0, parents=((-1,),)), r"of \[1\] documents, there are \[\]"),
        (lambda: MaskSpec(None, 0, [0, 4], parents=((-1,), (-1,))), r"of \[1, 1\] documents"),
    ],
)
def test_parents_of_other_masks_are_refused(mask, text):
    with pytest.raises(ConfigError, match=text):
        mask()


# ------------------------------------------------------------------ rectangles


def test_rectangles_are_what_they_show():
    tree = [(0, 6, 0, 6, "causal"), (6, 9, 0, 6, "full"), (6, 9, 6, 9, "causal")]
    tree += [(9, 14, 0, 6, "full"), (9, 14, 9, 14, "causal")]
    mask = MaskSpec.rectangles(tree, 14)
    same = MaskSpec.tree([(0, 6, None), (6, 9, 0), (9, 14, 0)])
    pairs = list(product(range(14), repeat=2))
    assert [mask.allows(*pair) for pair in pairs] == [same.allows(*pair) for pair in pairs]
    assert visible_pairs(mask, 14, 14) == visible_pairs(same, 14, 14)
    # A causal one is aligned at its last query and its last key.
    wide = MaskSpec.rectangles([(0, 4, 0, 4, "causal"), (4, 7, 2, 7, "causal")], 7)
    assert [[k for k in range(7) if wide.allows(q, k)] for q in (4, 6)] == [
        [2, 3, 4],
        [*range(2, 7)],
    ]
    assert str(wide) != str(MaskSpec.rectangles([(0, 7, 0, 7, "causal")], 7))
    assert MaskSpec.rectangles([(0, 7, 0, 7, "full")], 7).band == MaskSpec.causal()


SQUARE = (0, 9, 0, 9, "causal")
WRONG_RECTANGLES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "beyond the sequence": ([SQUARE, (8, 12, 0, 4, "full")], ("0 to 9",)),
    "empty": ([SQUARE, (4, 4, 0, 4, "full")], ("(4, 4, 0, 4, 'full')",)),
    "a pair in two": ([SQUARE, (5, 9, 8, 9, "full")], ("(5, 9, 8, 9, 'full')", "(0, 9, 0, 9")),
    "a token without itself": (
        [(0, 4, 0, 4, "full"), (6, 9, 0, 9, "full")],
        ("tokens 4 to 6", "(4, 6, 4, 6, 'causal')"),
    ),
    "twice": ([(0, 9, 0, 9, "full"), SQUARE], ("'causal')", "(0, 9, 0, 9, 'full')")),
    "another kind": ([(0, 9, 0, 9, "window")], ("'window')", "rectangle 0")),
    "four numbers": ([(0, 9, 0, 9)], ("rectangle 0",)),
    "none": ([], ("none",)),
}


@pytest.mark.parametrize("name", WRONG_RECTANGLES)
def test_rectangles_that_are_no_mask_are_refused(name):
    rectangles, numbers = WRONG_RECTANGLES[name]
    with pytest.raises(ConfigError) as caught:
        MaskSpec.rectangles(rectangles, 9)
    assert all(number in str(caught.value) for number in numbers), caught.value


def test_disjoint_parts_of_overlapping_rectangles_are_no_pair_twice():
    """The upper triangle of the causal square is free for another one."""
    mask = MaskSpec.rectangles([SQUARE, (0, 4, 4, 9, "full")], 9)
    assert mask.allows(0, 8) and mask.allows(8, 0) and not mask.allows(5, 8)


def test_rectangles_with_other_fields_are_refused():
    areas = MaskSpec.rectangles([SQUARE], 9).areas
    bounded = {"areas": [(0, 9, 0, 9, 3, 0)]}
    for fields in (
        {"left": 3},
        {"documents": [0, 4, 9]},
        {"documents": ()},
        {"prefix": 2},
        bounded,
    ):
        with pytest.raises(ConfigError):
            MaskSpec(**{"right": 0, "documents": [0, 9], "areas": areas, **fields})


def framework_check(mask, *args, **kwargs):
    checks = FrameworkArgumentChecks(LocalAttention(mask, None, 0.0), Readings())
    return checks.check(4, 8, args, kwargs)


READERS = {
    "a recurrence": _documents_of,
    "a causal flag": lambda mask: framework_check(mask, is_causal=True),
    "a dense mask": lambda mask: framework_check(mask, oracle.causal(range(4), range(4))),
    "documents of a batch": lambda mask: ShardedBatch.documents.fget(SimpleNamespace(mask=mask)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_field_of_a_later_version_is_refused_by_who_reads_field_by_field(name):
    READERS[name](LaterMask(None, 0))
    with pytest.raises(USPError):
        READERS[name](LaterMask(None, 0, stride=2))
