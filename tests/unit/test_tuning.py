"""Tuning: bad values are refused, and ``"auto"`` depends on what every rank knows alike."""

from bisect import bisect_left
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import ALL_LAYOUTS
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_usp import ConfigError, MaskSpec, SequenceMesh, TokenLayout, Tuning
from ds_usp.attention.tuning import AUTO_TUNING, ResolvedTuning
from ds_usp.comm import fused_exchange
from ds_usp.geometry.chunking import chunk_positions, visible_pairs
from ds_usp.geometry.heads import HeadSplit

K = 1024
CAUSAL = MaskSpec.causal()
NO_COPIES = "no copy engines here"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_P2P_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)


def tensor(tokens: int, heads: int, device: str, batch: int) -> Any:
    """What :meth:`Tuning.resolve` reads of q ``[b, tokens, heads, 128]`` in bf16, on any device."""
    return SimpleNamespace(
        shape=(batch, tokens, heads, 128),
        device=torch.device(device),
        is_cuda=device == "cuda",
        element_size=lambda: 2,
    )


def resolve(
    tuning: Tuning = AUTO_TUNING,
    *,
    kind: str = "zigzag",
    seq_len: int = 32 * K,
    heads: int = 32,
    kv_heads: int | None = None,
    ulysses: int = 1,
    ring: int = 4,
    rank: int = 0,
    device: str = "cuda",
    mask: MaskSpec = CAUSAL,
    no_copies: str | None = NO_COPIES,
    in_node: bool = True,
    backward: bool = True,
    varlen: bool = True,
    batch: int = 1,
    keys: int | None = None,
) -> ResolvedTuning:
    """``tuning`` for one call; ``in_node``: all Ulysses ranks of a ring rank are on one node."""
    layout = TokenLayout(kind, seq_len, ulysses, ring)
    mesh = SequenceMesh(
        ulysses,
        ring,
        rank=0,
        ulysses_in_node=in_node,
        copy_engine_unavailable=no_copies,
    )
    split = HeadSplit(heads, kv_heads or heads, ulysses)
    q = tensor(layout.length(rank), heads, device, batch)
    return tuning.resolve(split, layout, q, mesh, mask, keys, backward=backward, varlen=varlen)


def test_a_kernel_without_varlen_calls_each_document_once():
    documents = tuple(range(0, 32 * K + 1, 4 * K))
    shape: dict[str, Any] = {"kind": "contiguous", "kv_heads": 8, "ulysses": 2, "ring": 1}
    shape["mask"] = MaskSpec.causal(documents=documents)
    assert resolve(**shape).chunks == 2
    assert resolve(**shape, varlen=False).chunks == 1


@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, True, None, "all", "2"])
def test_chunks_that_are_no_number_are_refused(value):
    with pytest.raises(ConfigError, match=f"chunks={value!r} must be 'auto' or a number of 1"):
        Tuning(chunks=value)


@pytest.mark.parametrize("value", [None, "yes", 0, 1, 2, "True"])
@pytest.mark.parametrize("name", ["gather", "copies"])
def test_switches_that_are_no_bool_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r} must be 'auto',.* True or False"):
        Tuning(**{name: value})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_chunks_than_heads_are_refused_with_the_numbers(device):
    sizes = {"kv_heads": 8, "ulysses": 2, "ring": 2}
    assert resolve(Tuning(chunks=4), device=device, **sizes).chunks == 4  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        resolve(Tuning(chunks=5), device=device, **sizes)  # type: ignore[arg-type]
    for fragment in ("chunks=5", "only 4 key/value heads", "8 key/value heads among 2 Ulysses"):
        assert fragment in str(caught.value)
    assert "Use at most 4" in str(caught.value)


@pytest.mark.parametrize(
    ("ulysses", "ring", "message"),
    [
        (4, 1, "only 8 query heads .32 query and 4 key/value heads among 4 Ulysses.* at most 8"),
        (2, 2, "only 2 key/value heads"),
        (1, 1, "only 32 query heads"),
    ],
)
def test_chunks_are_smaller_than_a_kv_group_without_a_ring(ulysses, ring, message):
    with pytest.raises(ConfigError, match=message):
        resolve(Tuning(chunks=33), kv_heads=4, ulysses=ulysses, ring=ring)


def test_one_rank_takes_the_chunks_of_several():
    assert resolve(Tuning(chunks=8), kv_heads=4, ulysses=1, ring=1).chunks == 4


def test_exchanges_that_would_be_exposed_have_more_chunks():
    """Llama-3-8B at Ulysses 8: one KV head a rank, four query heads."""
    tokens = [8 * K, 32 * K, 128 * K, 1024 * K]
    sizes: Any = {"kv_heads": 8, "ulysses": 8, "ring": 1}
    in_node = [resolve(seq_len=n, **sizes).chunks for n in tokens]
    network = [resolve(seq_len=n, **sizes, in_node=False).chunks for n in tokens]
    assert (in_node, network) == ([1, 1, 3, 3], [1, 3, 3, 3])


@pytest.mark.parametrize(
    ("seq_len", "heads", "degrees", "in_node", "chunks"),
    [
        (64 * K, (32, 8), (2, 1), False, 4),
        (512 * K, (32, 8), (2, 1), True, 4),
        (192 * K, (64, 8), (2, 1), True, 4),
        (256 * K, (48, 8), (2, 1), True, 4),
        (128 * K, (32, 32), (2, 2), True, 16),
        (128 * K, (32, 32), (1, 4), True, 12),
        (32 * K, (32, 8), (8, 1), False, 3),
        (1024 * K, (32, 8), (4, 2), True, 2),
    ],
)
def test_causal_calls_have_the_chunks_that_were_measured(seq_len, heads, degrees, in_node, chunks):
    sizes: Any = {"seq_len": seq_len, "heads": heads[0], "kv_heads": heads[1], "in_node": in_node}
    assert resolve(**sizes, ulysses=degrees[0], ring=degrees[1]).chunks == chunks


@pytest.mark.parametrize(
    ("seq_len", "heads", "ulysses", "ring", "backward", "usual"),
    [
        (75600, 40, 2, 1, True, 16),
        (75600, 40, 1, 2, True, 16),
        (75600, 40, 2, 2, True, 16),
        (75600, 40, 4, 1, True, 10),
        (75600, 40, 8, 1, False, 4),
        (120000, 24, 2, 2, False, 4),
        # 256 blocks take nearly whole waves for any number of heads.
        (32760, 40, 2, 1, True, 10),
        (75600, 40, 1, 2, False, 4),
    ],
)
def test_equal_blocks_fill_the_last_waves_of_kernels(
    seq_len, heads, ulysses, ring, backward, usual
):
    """Against a count of waves made here, of half to all of the usual chunks."""
    blocks, split = -(-seq_len // ring // 128), HeadSplit(heads, heads, ulysses)

    def waves(chunks: int) -> int:
        of_chunks = (split.chunk(chunks, i).queries[0] for i in range(chunks))
        return sum(-(-blocks * (end - begin) // 132) for begin, end in of_chunks)

    sizes: Any = {"kind": "contiguous", "heads": heads, "ulysses": ulysses, "ring": ring}
    sizes |= {"seq_len": seq_len, "backward": backward, "mask": MaskSpec.full()}
    chosen = resolve(**sizes).chunks
    fewest = min(map(waves, range(-(-usual // 2), usual + 1)))
    if waves(usual) - fewest < 0.02 * blocks * heads // ulysses / 132:
        assert chosen == usual
    else:
        assert chosen < usual and waves(chosen) == fewest


@pytest.mark.parametrize("seq_len", [2 * K, 128 * K])
def test_cpus_and_single_ranks_use_one_chunk_stepwise(seq_len):
    alone = (1, False, False, (("only", "only"),), False)
    for ring, device in ((1, "cpu"), (4, "cpu"), (1, "cuda")):
        assert resolve(ring=ring, seq_len=seq_len, device=device) == alone


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_explicit_values_are_kept(device):
    for chunks, gather in product((1, 2, 3, 32), (True, False)):
        assert resolve(Tuning(chunks, gather), device=device)[:2] == (chunks, gather)
    # There is nothing to gather without a ring.
    assert resolve(Tuning(2, True), ulysses=4, ring=1, device=device)[:2] == (2, False)


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 4), (2, 2), (4, 1)])
def test_long_sequences_have_more_chunks(ulysses, ring):
    lengths = [2 * K, 8 * K, 16 * K, 32 * K, 128 * K, 1024 * K]
    chunks = [resolve(seq_len=n, ulysses=ulysses, ring=ring).chunks for n in lengths]
    assert chunks == sorted(chunks), chunks
    assert chunks[0] == 1 < chunks[3 if ulysses > 1 else 4]
    assert max(chunks) == min(16, 32 // ulysses)
    # At most as many chunks as key/value heads of a rank.
    for kv_heads in (1, 2, 4, 8):
        auto = resolve(seq_len=128 * K, kv_heads=kv_heads, ulysses=ulysses, ring=ring)
        most = max(kv_heads // ulysses, 1)
        assert auto.chunks == (max(most, 3) if ring == 1 else most)
    forward = [resolve(seq_len=n, ulysses=ulysses, ring=ring, backward=False) for n in lengths]
    assert [x.chunks for x in forward] == [min(n, 4) for n in chunks]


FIRST, MERGED, LAST = "local_first", "local_merged", "local_last"
# Heads of the chunks, and each one's position forward and backward.
POSITIONS = [
    ([4], [("only", "only")]),
    ([1, 1], [(FIRST, LAST), (MERGED, FIRST)]),
    ([2, 6], [(FIRST, LAST), (FIRST, FIRST)]),
    ([4, 3, 4], [(FIRST, LAST), (MERGED, MERGED), (MERGED, FIRST)]),
    ([1, 6, 1], [(FIRST, LAST), (FIRST, FIRST), (MERGED, FIRST)]),
    ([1, 3, 3, 1], [(FIRST, LAST), (FIRST, MERGED), (MERGED, FIRST), (MERGED, FIRST)]),
]


@pytest.mark.parametrize(("sizes", "expected"), POSITIONS, ids=str)
def test_a_chunk_overlaps_the_next_exchange_if_it_is_as_large(sizes, expected):
    assert list(chunk_positions(sizes)) == expected
    launch_bound = [(MERGED, MERGED)] if len(sizes) == 1 else expected
    assert list(chunk_positions(sizes, launch_bound=True)) == launch_bound


@pytest.mark.parametrize(
    ("seq_len", "position"), [(2 * K, MERGED), (8 * K, MERGED), (32 * K, "only")]
)
def test_launch_bound_calls_have_few_kernel_calls(seq_len, position):
    copied = resolve(Tuning(1), seq_len=seq_len, no_copies=None)
    assert copied.chunk_positions == ((position, position),)
    # NCCL and gloo have a latency that the local block has to overlap.
    for options in ({"device": "cuda"}, {"device": "cpu", "no_copies": None}):
        exchanged = resolve(Tuning(1), seq_len=seq_len, **options)  # type: ignore[arg-type]
        assert exchanged.chunk_positions == (("only", "only"),)


def test_chunks_follow_the_visible_pairs():
    documents = list(range(0, 129 * K, 16 * K))
    chunks = {
        CAUSAL: 16,
        MaskSpec.full(): 16,
        MaskSpec.causal(documents): 4,
        MaskSpec.causal([documents, [0, 128 * K]]): 16,
        MaskSpec.window(4 * K): 3,  # the exchanges take half as long as the kernels
        MaskSpec.window(64): 1,
    }
    for mask, expected in chunks.items():
        assert resolve(seq_len=128 * K, ulysses=2, ring=2, mask=mask).chunks == expected, mask


BOUND = st.none() | st.integers(0, 40)
BORDERS = st.sets(st.integers(1, 39), max_size=4).map(lambda cuts: [0, *sorted(cuts), 40])


@settings(deadline=None, max_examples=40, derandomize=True)
@given(left=BOUND, right=BOUND, prefix=st.integers(0, 40), borders=st.none() | BORDERS)
def test_visible_pairs_counts_what_the_mask_allows(left, right, prefix, borders):
    mask = (
        MaskSpec(left, right, prefix=prefix) if borders is None else MaskSpec(left, right, borders)
    )
    visible = sum(mask.allows(q, k) for q in range(40) for k in range(40))
    assert visible_pairs(mask, 40, 40) == visible


def test_visible_pairs_of_two_sequences():
    assert visible_pairs(MaskSpec.full(), 40, 7) == 280


def test_a_chunk_is_worth_launching():
    # 32 heads of 128, causal or not the same: 2 * heads * dim * S * S / ranks a rank.
    for seq_len in (2 * K, 8 * K, 16 * K, 24 * K, 32 * K):
        chunks = resolve(seq_len=seq_len).chunks
        flop = 2 * 32 * 128 * seq_len**2 / 4
        assert chunks == 1 or flop / chunks > 1.6e11, (seq_len, chunks)


def test_kv_is_gathered_where_that_takes_no_more_memory():
    def gathered(chunks: int | None = 1, seq_len: int = 1024 * K, **options: Any) -> bool:
        tuning = AUTO_TUNING if chunks is None else Tuning(chunks)
        return resolve(tuning, seq_len=seq_len, **options).gather_kv

    # Enough chunks: the whole ring's keys of one are no more than this rank's of all.
    assert [gathered(chunks) for chunks in (1, 3, 4)] == [False, False, True]
    # Few bytes: 2 * 32 heads * 128 * 2 bytes are 16 KiB a token, up to 512 MiB.
    assert gathered(seq_len=32 * K) and not gathered(seq_len=32 * K + 8)
    assert gathered(seq_len=128 * K, kv_heads=8)
    assert not gathered(seq_len=8 * K, device="cpu")
    assert not gathered(None, 32 * K, ulysses=4, ring=1)
    assert [gathered(n, heads=8, ring=8) for n in (2, 4, 8)] == [False, False, True]


@pytest.mark.parametrize("kind", ALL_LAYOUTS)
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 4), (2, 4), (4, 2)])
def test_every_rank_resolves_the_same(kind, ulysses, ring):
    def of_all_ranks(seq_len: int) -> set[ResolvedTuning]:
        layout = TokenLayout(kind, seq_len, ulysses, ring)
        ranks = {layout.length(rank): rank for rank in range(layout.degree)}.values()
        sizes = {"kind": kind, "seq_len": seq_len, "ulysses": ulysses, "ring": ring}
        return {resolve(rank=rank, **sizes) for rank in ranks}  # type: ignore[arg-type]

    # Around the lengths at which one more chunk begins, where shards that differ by a token or two
    # would lead ranks to different numbers.
    seen = set()
    for chunks in range(2, 9):
        length = bisect_left(range(1024 * K), chunks, K, key=lambda n: min(of_all_ranks(n))[0])
        for seq_len in range(length - 9, length + 10):
            resolved = of_all_ranks(seq_len)
            assert len(resolved) == 1, seq_len
            seen |= {x.chunks for x in resolved}
    assert seen == set(range(1, 9))


def copies(tuning: Tuning = AUTO_TUNING, no_copies: str | None = None, **options: Any) -> bool:
    return resolve(tuning, ulysses=2, ring=2, no_copies=no_copies, **options).use_copy_engines


def test_copy_engines_are_used_where_they_can_be(monkeypatch):
    assert copies() and copies(Tuning(copies=True))
    assert not copies(Tuning(copies=False))
    assert not copies(no_copies=NO_COPIES) and not copies(no_copies=NO_COPIES, device="cpu")
    with pytest.raises(ConfigError, match=f"copies=True, but {NO_COPIES}"):
        copies(Tuning(copies=True), NO_COPIES)
    assert SequenceMesh.single().copy_engine_unavailable is not None
    for value, allowed in (("0", True), ("", True), ("1", False)):
        monkeypatch.setenv("NCCL_P2P_DISABLE", value)
        assert copies() == allowed, value
    with pytest.raises(ConfigError, match="copies=True, but NCCL_P2P_DISABLE=1"):
        copies(Tuning(copies=True))


def test_flashinfer_carries_short_calls_where_it_is_asked_for(monkeypatch):
    def fused(chunks: int = 1, copies: Any = "flashinfer", **options: Any) -> bool:
        sizes: dict[str, Any] = {"seq_len": 8192, "ulysses": 2, "ring": 1, "no_copies": None}
        resolved = resolve(Tuning(chunks, copies=copies), **sizes | options)
        assert resolved.use_copy_engines  # whose memory a graph of the call needs
        return resolved.use_fused

    with pytest.raises(ConfigError, match="copies='flashinfer', but FlashInfer cannot be imported"):
        fused()
    monkeypatch.setattr(fused_exchange, "communicator_class", lambda: object)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert fused() and not fused(copies="auto") and not fused(chunks=2)
    assert not fused(seq_len=8193) and not fused(batch=2) and not fused(keys=8193)
    for options, reason in (
        ({"ring": 2}, "the mesh is ulysses 2 x ring 2"),
        ({"ulysses": 3, "heads": 33}, "for ulysses 2, 4, 6, 8 without a ring"),
        ({"device": "cpu"}, "the tensors are on cpu"),
        ({"no_copies": NO_COPIES}, NO_COPIES),
    ):
        with pytest.raises(ConfigError, match=f"copies='flashinfer', but .*{reason}"):
            fused(**options)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not fused()


def test_copy_engines_are_refused_in_a_graph_where_all_streams_share_a_queue(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert copies()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for tuning in (Tuning(), Tuning(copies=True)):
        with pytest.raises(ConfigError, match=r"CUDA_DEVICE_MAX_CONNECTIONS \(it is 1\), or"):
            copies(tuning)
    assert not copies(Tuning(copies=False)) and not copies(no_copies=NO_COPIES)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert copies()
