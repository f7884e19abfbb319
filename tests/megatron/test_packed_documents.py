"""Packed sequences in the core attention slot: documents of any lengths, padded or not."""

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from cases import LaterMask, mesh_of
from harness import RankContext

from ds_usp import MaskSpec, SequenceMesh, UnsupportedAttentionError
from ds_usp import testing as oracle

H, G, D, E = 4, 2, 8, 6
GRIDS = {"2x1": (2, 2), "1x2": (2, 1), "2x2": (4, 2)}  # world, ulysses
# Lengths of documents, and of their places in the tensors: those of 8 ranks' chunks.
DOCUMENTS = {
    "without padding": ([8, 24, 16], None),
    "places of the same lengths": ([8, 24, 16], [8, 24, 16]),
    "padded": ([3, 24, 9], [8, 24, 16]),
    "one padded to the end": ([5], [48]),
    "an empty document, and only padding": ([8, 0, 0, 9], [8, 0, 16, 24]),
}
RULES = {"causal": {}, "no_mask": {"mask": "no_mask"}, "window": {"window_size": (4, 0)}}


def offsets(lengths: list[int] | None) -> list[int] | None:
    return lengths and [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def packed(qkv_format: str, *borders: Any) -> Any:
    """megatron-core's parameters of packed sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    tensors = (None if x is None else torch.tensor(x, dtype=torch.int32) for x in borders)
    return PackedSeqParams(qkv_format, *tensors)


def thd_params(documents: str) -> Any:
    """As ``get_thd_batch_on_this_cp_rank`` of megatron-core makes them."""
    lengths, places = map(offsets, DOCUMENTS[documents])
    return packed("thd", lengths, lengths, places, places)


def core_attention(layout: str, rule: str, softmax_type: str, ulysses: int, world: int) -> Any:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches.megatron_core.core_attention import USPCoreAttention

    options = dict(RULES[rule])
    mask = AttnMaskType[options.pop("mask", "causal")]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H * D,
        num_attention_heads=H,
        num_query_groups=G,
        context_parallel_size=world,
        attention_dropout=0.0,
        softmax_type=softmax_type,
        **options,
    )
    core = USPCoreAttention(
        mesh=mesh_of(ulysses), layout=layout, config=config, layer_number=1, attn_mask_type=mask
    )
    for offset in core.parameters():
        offset.data = torch.linspace(-1.0, 3.0, H)
    return core


def tensors(tokens: int) -> list[torch.Tensor]:
    """q, k, v and dout of the full sequence ``[1, tokens, heads, d]``, of padding too."""
    torch.manual_seed(3)
    return [torch.randn(1, tokens, *size) for size in ((H, D), (G, D), (G, E), (H, E))]


def local_tokens(rank: int, world: int, places: list[int]) -> list[int]:
    """Chunks ``rank`` and ``2 * world - 1 - rank`` of each document."""
    tokens: list[int] = []
    for begin, end in pairwise(places):
        chunk = (end - begin) // (2 * world)
        for index in (rank, 2 * world - 1 - rank):
            tokens += range(begin + index * chunk, begin + (index + 1) * chunk)
    return tokens


def thd(
    ctx: RankContext, *, documents: str, rule: str, softmax_type: str, ulysses: int
) -> list[torch.Tensor]:
    """Out and gradients of this rank's tokens, sharded per document as megatron-core does."""
    core = core_attention("context_parallel", rule, softmax_type, ulysses, ctx.world)
    lengths, places = DOCUMENTS[documents]
    tokens = local_tokens(ctx.rank, ctx.world, offsets(places or lengths))
    *inputs, dout = (x[0, tokens] for x in tensors(sum(places or lengths)))
    inputs = [x.requires_grad_() for x in inputs]
    params = thd_params(documents)
    out = core(*inputs, None, packed_seq_params=params)
    grads = torch.autograd.grad(out, (*inputs, *core.parameters()), dout.reshape(out.shape))
    assert core(*inputs, None, packed_seq_params=params).equal(out)  # documents of the cache
    return [out.detach()[:, 0], *grads]


def expected(documents: str, rule: str, softmax_type: str) -> list[torch.Tensor]:
    """Out and gradients of the documents alone, as if there were no padding in the tensors; zeros
    at the places of padding."""
    lengths, places = DOCUMENTS[documents]
    starts = offsets(places or lengths)[:-1]
    rows = [start + i for start, n in zip(starts, lengths, strict=True) for i in range(n)]
    full = tensors(sum(places or lengths))
    q, k, v, dout = (x[:, rows].double().requires_grad_() for x in full)
    positions = range(len(rows))
    allowed = (
        oracle.same_document(positions, positions, lengths)
        & {
            "causal": oracle.causal(positions, positions),
            "no_mask": oracle.full(positions, positions),
            "window": oracle.window(positions, positions, 4, 0),
        }[rule]
    )
    sinks = torch.linspace(-1.0, 3.0, H).double().requires_grad_()
    if softmax_type == "off-by-one":
        sinks = torch.zeros(H).double().requires_grad_()
    options = {} if softmax_type == "vanilla" else {"sinks": sinks}
    out, _ = oracle.dense_attention(q, k, v, allowed, **options)
    *grads, dsinks = torch.autograd.grad(out, (q, k, v, sinks), dout, allow_unused=True)
    results = []
    for x in (out.flatten(2), *grads):
        whole = x.new_zeros(full[0].shape[1], *x.shape[2:])
        whole[rows] = x.detach()[0]
        results.append(whole)
    return [*results, dsinks] if softmax_type == "learnable" else results


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("documents", "rule", "softmax_type"),
    [
        *((documents, "causal", "vanilla") for documents in DOCUMENTS),
        ("padded", "no_mask", "vanilla"),
        ("padded", "window", "learnable"),
        ("padded", "causal", "off-by-one"),
    ],
)
def test_documents_cut_one_by_one_are_the_oracles(pool, grid, documents, rule, softmax_type):
    world, ulysses = GRIDS[grid]
    case = {"documents": documents, "rule": rule, "softmax_type": softmax_type}
    want = expected(**case)
    ranks = pool.run(thd, world, **case, ulysses=ulysses)
    lengths, places = DOCUMENTS[documents]
    for rank, (out, dq, dk, dv, *_) in enumerate(ranks):
        tokens = local_tokens(rank, world, offsets(places or lengths))
        is_padding = (want[0][tokens] == 0).all(1)
        for actual, reference in zip((out, dq, dk, dv), want, strict=False):
            assert oracle.relative_error(actual, reference[tokens], 1e-3) < 1e-5
            assert actual[is_padding].count_nonzero() == 0  # not even a rounding error
    if softmax_type == "learnable":
        total = torch.stack([rank[-1] for rank in ranks]).sum(0)
        assert oracle.relative_error(total, want[-1]) < 1e-5


def padded_sbhd(ctx: RankContext, *, ulysses: int) -> list[torch.Tensor]:
    """Two samples of other documents and padding in the format ``sbhd``, any lengths."""
    core = core_attention("zigzag", "causal", "vanilla", ulysses, ctx.world)
    params = packed("sbhd", SBHD[0], SBHD[0], SBHD[1], SBHD[1])
    layout = core.mesh.layout("zigzag", SBHD_TOKENS)
    q, k, v, dout = (
        layout.shard(x.transpose(0, 1), 0, ctx.rank).requires_grad_() for x in sbhd_tensors()
    )
    out = core(q, k, v, None, packed_seq_params=params)
    grads = torch.autograd.grad(out, (q, k, v), dout.reshape(out.shape))
    results = [out.detach().unflatten(2, (H, E)), *grads]
    return [core.mesh.gather(x, layout, 0).transpose(0, 1) for x in results]


SBHD = [[0, 3, 9, 9], [0, 5, 8, 13]], [[0, 4, 16, 16], [0, 5, 9, 16]]
SBHD_TOKENS = 16


def sbhd_tensors() -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randn(2, SBHD_TOKENS, *size) for size in ((H, D), (G, D), (G, E), (H, E))]


@pytest.mark.parametrize("grid", GRIDS)
def test_padding_of_each_sample_is_left_out(pool, grid):
    world, ulysses = GRIDS[grid]
    for results in pool.run(padded_sbhd, world, ulysses=ulysses):
        for sample, (lengths, places) in enumerate(zip(*SBHD, strict=True)):
            sizes = [b - a for a, b in pairwise(lengths)]
            rows = [p + i for p, n in zip(places, sizes, strict=False) for i in range(n)]
            q, k, v, dout = (x[sample : sample + 1, rows].double() for x in sbhd_tensors())
            inputs = [x.requires_grad_() for x in (q, k, v)]
            positions = range(len(rows))
            allowed = oracle.same_document(positions, positions, sizes)
            allowed &= oracle.causal(positions, positions)
            out, _ = oracle.dense_attention(*inputs, allowed)
            want = [out, *torch.autograd.grad(out, inputs, dout)]
            padding = sorted(set(range(SBHD_TOKENS)) - set(rows))
            for actual, reference in zip(results, want, strict=True):
                assert oracle.relative_error(actual[sample, rows], reference[0]) < 1e-5
                assert actual[sample, padding].count_nonzero() == 0


BORDERS = [0, 4, 24, 32]
CP = "context_parallel"
# Layout, format and borders, and the numbers of the message.
REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("zigzag", ("thd", BORDERS), "'context_parallel'"),
    (CP, ("thd", [0, 6, 32]), "6 tokens does not divide into 4"),
    (CP, ("thd", [0, 4, 24]), "end at 24, the sequence has 32"),
    (CP, ("bshd", BORDERS), "'sbhd'"),
    (CP, ("thd",), "same documents"),
    (CP, ("thd", BORDERS, [0, 8, 24, 32]), "same documents"),
    (CP, ("thd", BORDERS, BORDERS, BORDERS, [0, 8, 24, 32]), "same places"),
    (CP, ("thd", BORDERS, None, [0, 4, 20, 32]), "places"),
    (CP, ("thd", BORDERS, None, [0, 32]), "places"),
    (CP, ("thd", [0, 3, 24], None, [[0, 4, 24], [0, 4, 24]]), "[[3], [2, 3]] of 'thd'"),
    (CP, ("sbhd", [0, 3, 24], None, [[0, 4, 32], [0, 4, 32]]), "places"),
    (CP, ("thd", [0, 24, 4, 32]), "must ascend: border 2 is 4, after one of 24"),
    (CP, ("thd", [4, 8, 32]), "[4, 8, 32] must be cumulative borders from 0"),
    (CP, ("thd", [4, 8, 32], None, [0, 8, 32]), "need a 0"),
]


def refused(ctx: RankContext) -> list[str]:
    """Messages where all ranks give such parameters, and then where the last rank alone does."""
    said = []
    for by in (range(ctx.world), (ctx.world - 1,)):
        for layout, params, _ in REFUSED:
            core = core_attention(layout, "causal", "vanilla", 1, ctx.world)
            tensors = (torch.zeros(32 // ctx.world, heads, D) for heads in (H, G, G))
            given = params if ctx.rank in by else ("sbhd", [0, 32])
            with pytest.raises(ValueError) as caught:
                core(*tensors, packed_seq_params=packed(*given))
            said.append(str(caught.value))
    return said


def test_documents_that_do_not_fit_are_refused(pool):
    for said in pool.run(refused, 2, timeout=30):
        for text, (*_, number) in zip(said, REFUSED * 2, strict=True):
            assert number in text, text


def test_a_group_of_its_own_is_refused():
    from megatron_patches.megatron_core.packed_documents import packed_documents

    params = packed("sbhd", [0, 8])
    params.local_cp_size = 1
    with pytest.raises(UnsupportedAttentionError, match="--hybrid-context-parallel"):
        packed_documents(params, MaskSpec.causal(), "zigzag", SequenceMesh.single(), torch.zeros(8))


@pytest.mark.parametrize("rule", [LaterMask(None, 0, stride=2), MaskSpec.causal([0, 8])])
def test_a_dense_mask_is_no_rule_that_has_more(rule):
    from megatron_patches.megatron_core.core_attention import check_dense_mask

    mesh, hidden = SequenceMesh.single(), ~oracle.causal(range(8), range(8))
    check_dense_mask(hidden, MaskSpec.causal(), "zigzag", mesh, 8)
    with pytest.raises(UnsupportedAttentionError, match="not the rule"):
        check_dense_mask(hidden, rule, "zigzag", mesh, 8)


class Layer(torch.nn.Module):
    """A layer that asks for the documents of its batch, as attention does."""

    def forward(self, params: Any, mesh: SequenceMesh, rule: MaskSpec) -> Any:
        from megatron_patches.megatron_core.packed_documents import packed_documents

        return packed_documents(params, rule, "zigzag", mesh, torch.zeros(8, 1))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

    def forward(self, *args: Any) -> list[Any]:
        return [layer(*args) for layer in self.layers]


def test_documents_are_read_once_a_pass():
    from megatron_patches.megatron_core import packed_documents as module

    mesh, model, params = SequenceMesh.single(), Model(), packed("sbhd", [0, 3, 8])
    causal, window = MaskSpec.causal(), MaskSpec.window(4)
    with mock.patch.object(module, "_read", wraps=module._read) as read:
        first, *others = model(params, mesh, causal)
        assert first.mask == MaskSpec.causal([0, 3, 8]) and all(x is first for x in others)
        assert model(params, mesh, window)[2].mask.left == 4
        assert read.call_count == 2
        params.cu_seqlens_q.numpy()[1] = 5  # which torch's version of the tensor does not show
        assert model(params, mesh, causal)[1].mask.documents == ((0, 5, 8),)
        assert Model()(params, mesh, causal)[1].mask.documents == ((0, 5, 8),)
        assert read.call_count == 4
    later = LaterMask(4, 0, stride=2)  # a rule keeps its fields
    assert model(params, mesh, later)[0].mask == LaterMask(4, 0, [0, 5, 8], stride=2)
    params.cu_seqlens_q_padded = torch.tensor([0, 5, 8])
    params.cu_seqlens_q = torch.tensor([0, 5, 7])
    assert model(params, mesh, causal)[0].padding.flatten().tolist() == [False] * 7 + [True]
