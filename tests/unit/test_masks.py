"""Masks: bounds in global positions, and the tiles that follow, against brute force."""

from itertools import accumulate, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp import ConfigError, LayoutError, MaskSpec, UnsupportedAttentionError
from ds_usp import testing as oracle
from ds_usp.geometry.segments import Segment
from ds_usp.geometry.tiles import Tile, TileSupport, plan_tiles

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
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_no_number_of_tokens_is_refused(side, bound):
    with pytest.raises(ConfigError) as caught:
        MaskSpec(**{side: bound})
    assert f"window {side}={bound!r}" in str(caught.value)
    assert "None leaves that side open" in str(caught.value)


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
    with pytest.raises(LayoutError, match="stride 2 cannot meet keys of stride 3"):
        plan_tiles(one(4, 0, 2), one(4, 0, 3), MaskSpec.causal())
