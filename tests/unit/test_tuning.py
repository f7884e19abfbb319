"""Tuning: bad values are refused, and the default depends on what every rank knows alike."""

from __future__ import annotations

from bisect import bisect_left
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import ALL_LAYOUTS

from ds_usp import ConfigError, MaskSpec, SequenceMesh, TokenLayout, Tuning
from ds_usp.attention.tuning import AUTO_TUNING, ResolvedTuning
from ds_usp.geometry.chunking import ChunkPositions, chunk_positions, visible_pairs
from ds_usp.geometry.heads import HeadSplit

K = 1024
CAUSAL = MaskSpec.causal()


def tensor(tokens: int, heads: int, device: str, dim: int = 128, batch: int = 1) -> Any:
    """What is looked at of q ``[batch, tokens, heads, dim]`` in bf16, on any device."""
    return SimpleNamespace(
        shape=(batch, tokens, heads, dim),
        device=torch.device(device),
        is_cuda=device == "cuda",
        element_size=lambda: 2,
    )


def mesh_of(
    ulysses: int, ring: int, copy_engine_unavailable: str | None = "not here"
) -> SequenceMesh:
    return SequenceMesh(ulysses, ring, rank=0, copy_engine_unavailable=copy_engine_unavailable)


def resolved(
    tuning: Tuning = AUTO_TUNING,
    *,
    seq_len: int = 32 * K,
    kv_heads: int = 32,
    ulysses: int = 1,
    ring: int = 4,
    device: str = "cuda",
    mask: MaskSpec = CAUSAL,
) -> tuple[int, bool]:
    """Parts and whether to gather, for 32 query heads of 128."""
    layout = TokenLayout("zigzag", seq_len, ulysses, ring)
    q = tensor(layout.length(0), 32, device)
    split = HeadSplit(32, kv_heads, ulysses)
    return tuning.resolve(split, layout, q, mesh_of(ulysses, ring), mask)[:2]


@pytest.mark.parametrize("chunks", [0, -1, 1.5, 2.0, True, None, "all", "2"])
def test_parts_that_are_no_number_are_refused(chunks: Any) -> None:
    with pytest.raises(ConfigError, match=f"chunks={chunks!r} must be 'auto' or a number of 1"):
        Tuning(chunks=chunks)


@pytest.mark.parametrize("value", [None, "yes", 0, 1, 2, "True"])
@pytest.mark.parametrize("name", ["gather", "copies"])
def test_the_others_are_yes_no_or_auto(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r} must be 'auto', True or False"):
        Tuning(**{name: value})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_parts_than_heads_are_refused_with_the_numbers(device: str) -> None:
    def ask(chunks: int) -> tuple[int, bool]:
        return resolved(Tuning(chunks=chunks), kv_heads=8, ulysses=2, ring=2, device=device)

    assert ask(4)[0] == 4
    with pytest.raises(ConfigError) as caught:
        ask(5)
    for fragment in ("chunks=5", "only 4 key/value heads", "8 among 2 Ulysses", "Use at most 4"):
        assert fragment in str(caught.value)


@pytest.mark.parametrize("seq_len", [2 * K, 128 * K])
@pytest.mark.parametrize("ring", [1, 4])
def test_a_cpu_has_one_part_and_goes_block_by_block(ring: int, seq_len: int) -> None:
    assert resolved(ring=ring, seq_len=seq_len, device="cpu") == (1, False)
    real = torch.empty(1, seq_len // ring, 32, 1)
    layout = TokenLayout("zigzag", seq_len, 1, ring)
    cut = Tuning().resolve(HeadSplit(32, 32, 1), layout, real, mesh_of(1, ring), CAUSAL)
    assert cut == (1, False, False, None, (("only", "only"),))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_asked_for_is_done(device: str) -> None:
    for chunks in (1, 2, 3, 32):
        for gather in (True, False):
            assert resolved(Tuning(chunks, gather), device=device) == (chunks, gather)
    # There is nothing to gather from without a ring.
    assert resolved(Tuning(2, True), ulysses=4, ring=1, device=device) == (2, False)


def test_one_process_has_one_part() -> None:
    assert resolved(ring=1, seq_len=128 * K) == (1, False)


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 4), (2, 2), (4, 1)])
def test_long_sequences_have_more_parts(ulysses: int, ring: int) -> None:
    lengths = [2 * K, 8 * K, 16 * K, 32 * K, 128 * K, 1024 * K]
    parts = [resolved(seq_len=n, ulysses=ulysses, ring=ring)[0] for n in lengths]
    assert parts == sorted(parts), parts
    assert parts[0] == 1 < parts[3 if ulysses > 1 else 4] and max(parts) == min(16, 32 // ulysses)
    # A head too many would be one that no rank has.
    for kv_heads in (1, 2, 4, 8):
        most = max(kv_heads // ulysses, 1)
        assert resolved(seq_len=128 * K, kv_heads=kv_heads, ulysses=ulysses, ring=ring)[0] == most


# Heads of the parts, and each one's place forward and backward.
PLACES = [
    ([4], [("only", "only")]),
    ([1, 1], [("local_first", "local_last"), ("local_merged", "local_first")]),
    ([2, 6], [("local_first", "local_last"), ("local_first", "local_first")]),
    (
        [4, 3, 4],
        [
            ("local_first", "local_last"),
            ("local_merged", "local_merged"),
            ("local_merged", "local_first"),
        ],
    ),
    (
        [1, 6, 1],
        [
            ("local_first", "local_last"),
            ("local_first", "local_first"),
            ("local_merged", "local_first"),
        ],
    ),
    (
        [1, 3, 3, 1],
        [
            ("local_first", "local_last"),
            ("local_first", "local_merged"),
            ("local_merged", "local_first"),
            ("local_merged", "local_first"),
        ],
    ),
]


@pytest.mark.parametrize(("sizes", "found"), PLACES, ids=str)
def test_a_part_hides_the_next_one_if_it_is_as_large(
    sizes: list[int], found: list[tuple[str, str]]
) -> None:
    assert list(chunk_positions(sizes)) == found
    assert chunk_positions(sizes, launch_bound=True) == (
        (("local_merged", "local_merged"),) if len(sizes) == 1 else tuple(found)
    )


@pytest.mark.parametrize(
    ("seq_len", "place"), [(2 * K, "local_merged"), (8 * K, "local_merged"), (32 * K, "only")]
)
def test_little_work_takes_few_kernel_calls(seq_len: int, place: str) -> None:
    def found(device: str, copy_engine_unavailable: str | None = None) -> ChunkPositions:
        layout = TokenLayout("zigzag", seq_len, 1, 4)
        q, mesh = tensor(seq_len // 4, 32, device), mesh_of(1, 4, copy_engine_unavailable)
        return Tuning(1).resolve(HeadSplit(32, 32, 1), layout, q, mesh, CAUSAL).chunk_positions

    assert found("cuda") == ((place, place),)
    # What comes by messages may be long under way: something has to hide it.
    assert found("cuda", "not here") == found("cpu") == (("only", "only"),)


def test_less_work_has_fewer_parts() -> None:
    def parts(mask: MaskSpec) -> int:
        return resolved(seq_len=128 * K, ulysses=2, ring=2, mask=mask)[0]

    documents = list(range(0, 129 * K, 16 * K))
    assert parts(CAUSAL) == parts(MaskSpec.full()) == 16
    assert parts(MaskSpec.causal(documents)) == 4
    assert parts(MaskSpec.causal([documents, [0, 128 * K]])) == 16
    assert parts(MaskSpec.window(4 * K)) == 2
    assert parts(MaskSpec.window(64)) == 1


def test_the_work_is_what_is_seen() -> None:
    masks = [CAUSAL, MaskSpec.full(), MaskSpec.window(3, 2), MaskSpec.causal([0, 5, 6, 40])]
    masks += [MaskSpec.prefix_lm(7), MaskSpec(3, 1, (), 9)]
    for mask in masks:
        seen = sum(mask.allows(q, k) for q in range(40) for k in range(40))
        assert visible_pairs(mask, 40, 40) == seen, mask
    assert visible_pairs(MaskSpec.full(), 40, 7) == 280


def test_a_part_is_worth_launching() -> None:
    # 32 heads of 128, causal or not the same: 2 * heads * dim * S * S / ranks a rank.
    for seq_len in (2 * K, 8 * K, 16 * K, 24 * K, 32 * K):
        chunks, _ = resolved(seq_len=seq_len)
        flop = 2 * 32 * 128 * seq_len**2 / 4
        assert chunks == 1 or flop / chunks > 1.6e11, (seq_len, chunks)


def test_blocks_come_at_once_where_that_takes_no_more_memory() -> None:
    # Enough parts: the whole ring's keys of one are no more than this rank's of all.
    assert resolved(Tuning(chunks=4), seq_len=1024 * K)[1]
    assert not resolved(Tuning(chunks=3), seq_len=1024 * K)[1]
    assert not resolved(Tuning(chunks=1), seq_len=1024 * K)[1]
    # Little to hold: 2 * 32 heads * 128 * 2 bytes are 16 KiB a token, up to 512 MiB.
    assert resolved(Tuning(chunks=1), seq_len=32 * K)[1]
    assert not resolved(Tuning(chunks=1), seq_len=32 * K + 8)[1]
    assert resolved(Tuning(chunks=1), seq_len=128 * K, kv_heads=8)[1]
    assert not resolved(Tuning(chunks=1), seq_len=8 * K, device="cpu")[1]
    assert not resolved(ulysses=4, ring=1)[1]


@pytest.mark.parametrize("kind", ALL_LAYOUTS)
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 4), (2, 4), (4, 2)])
def test_every_rank_comes_to_the_same(kind: str, ulysses: int, ring: int) -> None:
    split, mesh = HeadSplit(32, 32, ulysses), mesh_of(ulysses, ring)

    def of_each_rank(seq_len: int) -> set[tuple[int, bool, bool]]:
        layout = TokenLayout(kind, seq_len, ulysses, ring)
        lengths = {layout.length(rank) for rank in range(layout.degree)}
        shares = [tensor(tokens, 32, "cuda") for tokens in lengths]
        return {Tuning().resolve(split, layout, q, mesh, CAUSAL) for q in shares}

    # Around the lengths at which one more part begins, where shares that differ by a token or two
    # would lead ranks to different numbers.
    found = set()
    for parts in range(2, 9):
        length = bisect_left(range(1024 * K), parts, K, key=lambda n: min(of_each_rank(n))[0])
        for seq_len in range(length - 9, length + 10):
            assert len(of_each_rank(seq_len)) == 1, seq_len
            found |= of_each_rank(seq_len)
    assert {chunks for chunks, *_ in found} == set(range(1, 9))


def copies(
    tuning: Tuning, copy_engine_unavailable: str | None = None, device: str = "cuda"
) -> bool:
    layout = TokenLayout("zigzag", 32 * K, 2, 2)
    q = tensor(8 * K, 32, device)
    return tuning.resolve(
        HeadSplit(32, 32, 2), layout, q, mesh_of(2, 2, copy_engine_unavailable), CAUSAL
    ).use_copy_engines


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_P2P_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)


def test_copy_engines_carry_what_they_can() -> None:
    assert copies(Tuning()) and copies(Tuning(copies=True))
    assert not copies(Tuning(copies=False))
    assert not copies(Tuning(), "the ranks are on several hosts")
    assert not copies(Tuning(), "the ranks do not exchange on GPUs", "cpu")
    with pytest.raises(ConfigError, match="copies=True, but the ranks are on several hosts"):
        copies(Tuning(copies=True), "the ranks are on several hosts")
    assert SequenceMesh.single().copy_engine_unavailable is not None


def inner(tuning: Tuning, *, ring: int = 8, node: int = 4, tokens: int = 64 * K) -> int | None:
    """The inner ring, of one KV head and bf16, on nodes of so many ring ranks."""
    layout, split = TokenLayout("zigzag", tokens, 1, ring), HeadSplit(8, 1, 1)
    mesh = SequenceMesh(1, ring, rank=0, ring_ranks_per_node=node)
    return tuning.resolve(split, layout, tensor(tokens // ring, 8, "cpu"), mesh, CAUSAL).inner_ring


def test_blocks_are_passed_on_where_nodes_share_a_ring_and_blocks_are_large() -> None:
    assert inner(Tuning()) == 4 and inner(Tuning(), node=2) == 2
    # 2 * 128 * 2 bytes a token: a block of 2048 tokens is the first of 1 MiB.
    assert inner(Tuning(), tokens=16 * K) == 4 and inner(Tuning(), tokens=16 * K - 8) is None
    for node in (1, 8, 3):  # a node a rank, one node, nodes that do not fill the ring
        assert inner(Tuning(), node=node) is None
    assert inner(Tuning(inner_ring=2), node=8, tokens=K) == 2
    assert inner(Tuning(inner_ring=1)) is None and inner(Tuning(inner_ring=8)) is None
    assert inner(Tuning(inner_ring=2), ring=1) is None  # as without a ring nothing is gathered
    with pytest.raises(ConfigError, match=r"inner_ring=3 does not divide the 8 .* 1, 2, 4, 8"):
        inner(Tuning(inner_ring=3))
    for wrong in (0, -2, 2.0, True, None, "node"):
        with pytest.raises(ConfigError, match=f"inner_ring={wrong!r} must be 'auto' or a number"):
            Tuning(inner_ring=wrong)  # type: ignore[arg-type]


def test_a_window_at_once_is_as_small_as_its_node() -> None:
    def cut(node: int, chunks: int) -> ResolvedTuning:
        layout, split = TokenLayout("zigzag", 1024 * K, 1, 8), HeadSplit(8, 8, 1)
        mesh = SequenceMesh(1, 8, rank=0, ring_ranks_per_node=node)
        return Tuning(chunks).resolve(split, layout, tensor(128 * K, 8, "cuda"), mesh, CAUSAL)

    # As many parts as the ranks whose blocks come together: 8 straight, 2 of a node.
    assert [cut(8, chunks).gather_kv for chunks in (2, 4, 8)] == [False, False, True]
    assert [cut(2, chunks).gather_kv for chunks in (1, 2, 8)] == [False, True, True]


def test_a_double_ring_goes_by_messages() -> None:
    layout, split = TokenLayout("zigzag", 64 * K, 1, 4), HeadSplit(8, 8, 1)
    mesh, q = mesh_of(1, 4, None), tensor(16 * K, 8, "cuda")
    assert Tuning().resolve(split, layout, q, mesh, CAUSAL).use_copy_engines
    assert not Tuning(inner_ring=2).resolve(split, layout, q, mesh, CAUSAL).use_copy_engines
    with pytest.raises(ConfigError, match=r"copies=True, but .* double ring \(inner_ring=2\)"):
        Tuning(copies=True, inner_ring=2).resolve(split, layout, q, mesh, CAUSAL)


def test_nobody_copies_where_nccl_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, allowed in (("0", True), ("", True), ("1", False)):
        monkeypatch.setenv("NCCL_P2P_DISABLE", value)
        assert copies(Tuning()) == allowed, value
    with pytest.raises(ConfigError, match="copies=True, but NCCL_P2P_DISABLE=1"):
        copies(Tuning(copies=True))


def test_a_graph_has_no_copies_where_all_streams_share_a_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert copies(Tuning())
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for tuning in (Tuning(), Tuning(copies=True)):
        with pytest.raises(ConfigError, match=r"CUDA_DEVICE_MAX_CONNECTIONS \(it is 1\), or"):
            copies(tuning)
    assert not copies(Tuning(copies=False)) and not copies(Tuning(), "not here")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert copies(Tuning())


def test_ranks_that_cut_otherwise_say_so() -> None:
    texts = {
        str(ResolvedTuning(*each)) for each in product((1, 2), *[(False, True)] * 2, (None, 2, 4))
    }
    assert len(texts) == 24


def test_equal_tunings_are_one_value() -> None:
    assert Tuning(2, True) == Tuning(chunks=2, gather=True) and len({Tuning(), Tuning()}) == 1
    assert Tuning() == Tuning("auto", "auto", "auto", "auto") == AUTO_TUNING
