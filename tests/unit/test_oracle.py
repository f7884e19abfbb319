"""The oracle against torch's own attention and against numbers that were worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import ds_usp
from ds_usp import testing as oracle
from ds_usp.cli.verify_run import VerifyCase
from ds_usp.geometry.layout import KINDS, ORDERS


@pytest.mark.parametrize("left, right", [(None, 0), (None, None), (2, 0), (1, 3), (0, 1)])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_dense_attention_is_torchs(kv_heads: int, left: int | None, right: int | None) -> None:
    q = torch.randn(2, 7, 6, 5, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 2, 7, kv_heads, 5, dtype=torch.float64).requires_grad_()
    allowed = oracle.window(range(7), range(7), left, right)
    out, _ = oracle.dense_attention(q, k, v, allowed, 0.3)
    reference = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=allowed, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    dout = torch.randn_like(out)
    actual = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    want = [reference, *torch.autograd.grad(reference, (q, k, v), dout)]
    assert max(oracle.relative_error(a, b) for a, b in zip(actual, want, strict=True)) < 1e-13


def test_equal_scores_average_the_values() -> None:
    q, k = torch.zeros(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
    v = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1).expand(1, 2, 1, 4)
    out, lse = oracle.dense_attention(q, k, v, oracle.causal([0, 1], [0, 1]))
    assert out[0, :, 0, 0].tolist() == [1.0, 2.0]
    assert lse[0, 0].tolist() == pytest.approx([0.0, math.log(2)])


def test_masks_follow_positions_not_storage() -> None:
    assert oracle.causal([3, 0], [0, 3, 1]).tolist() == [[True, True, True], [True, False, False]]
    assert oracle.window([2], range(5), 1, 1).tolist() == [[False, True, True, True, False]]
    assert bool(oracle.full([0], [5, 9]).all())


def test_what_has_no_answer_is_refused() -> None:
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="2 kv heads do not divide 3"):
        oracle.dense_attention(x, x[:, :, :2], x[:, :, :2], oracle.full([0, 1], [0, 1]))
    with pytest.raises(ValueError, match="no key"):
        oracle.dense_attention(x, x, x, oracle.causal([0, 1], [1, 1]))
    with pytest.raises(ValueError, match="shapes differ"):
        oracle.relative_error(torch.zeros(1), torch.zeros(2))


def test_relative_error_is_a_ratio_of_norms() -> None:
    assert oracle.relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == 0.1
    assert oracle.relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert oracle.relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert oracle.relative_error(torch.tensor([math.nan]), torch.ones(1)) == math.inf
    assert oracle.relative_error(torch.ones(1), torch.tensor([math.nan])) == math.inf


@pytest.mark.parametrize(
    ("case", "softcap"),
    [
        (VerifyCase(), None),
        (VerifyCase(mask=(None, None, 0)), None),
        (VerifyCase(mask=(5, 2, 0)), None),
        (VerifyCase(mask=(None, 0, 9)), 2.0),
        (VerifyCase(documents=((1, 13, 10), (20, 4))), None),
        (VerifyCase(mask=(4, 0, 0), documents=((7, 17),)), None),
    ],
    ids=["causal", "full", "window", "prefix", "documents", "documents of all samples"],
)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "alibi and sinks"])
def test_blocks_make_the_whole(case: VerifyCase, softcap: float | None, extras: bool) -> None:
    """Also that verify hands its cases' masks to the oracle, by another way to spell them."""
    batch, length, heads, kv_heads = 2, 24, 4, 2
    q, dout = torch.randn(batch, length, heads, 8).double(), torch.randn(batch, length, heads, 6)
    k, v = torch.randn(batch, length, kv_heads, 8), torch.randn(batch, length, kv_heads, 6)
    slopes, sinks = (torch.rand(heads), torch.randn(heads)) if extras else (None, None)
    tensors, position = oracle.Tensors(q, k, v, dout, slopes, sinks), range(length)
    blocks = oracle.attention_in_blocks(
        tensors, case.allowed, scale=0.3, softcap=softcap, block_elements=200 * length
    )
    left, right, prefix = case.mask
    allowed = oracle.window(position, position, left, right) | (torch.arange(length) < prefix)
    if case.documents:
        inside = [oracle.same_document(position, position, each) for each in case.documents]
        allowed = allowed & torch.stack(inside).expand(batch, -1, -1)
    wanted = [x.double().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    out, lse = oracle.dense_attention(
        *wanted[:3],
        allowed,
        0.3,
        softcap=softcap,
        bias=None if slopes is None else oracle.alibi(slopes, position),
        sinks=wanted[3] if extras else None,
    )
    grads = torch.autograd.grad(out, wanted, dout.double())
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    for name, reference in zip(names, (out, lse, *grads), strict=False):
        assert oracle.relative_error(blocks[name], reference) <= 1e-12, name
    assert len(blocks) == 2 + len(grads)
    forward = oracle.attention_in_blocks(
        tensors, case.allowed, scale=0.3, softcap=softcap, backward=False
    )
    assert set(forward) == {"out", "lse"}
    assert oracle.relative_error(forward["lse"], blocks["lse"]) <= 1e-14


def test_gradients_are_the_formulas() -> None:
    """Of softmax, soft cap and sinks, written out: autograd is not asked."""
    q, k, v, dout = torch.randn(4, 1, 5, 1, 3, dtype=torch.float64)
    sinks, cap = torch.tensor([0.3], dtype=torch.float64), 2.0
    tensors = oracle.Tensors(q, k, v, dout, sinks=sinks)
    blocks = oracle.attention_in_blocks(tensors, oracle.causal, scale=0.7, softcap=cap)
    q, k, v, dout = (x[0, :, 0] for x in (q, k, v, dout))
    capped = cap * torch.tanh(0.7 * q @ k.T / cap)
    weights = torch.exp(capped).tril()
    total = weights.sum(1) + sinks.exp()
    weights = weights / total[:, None]
    out = weights @ v
    delta = (dout * out).sum(1)
    dscores = weights * (dout @ v.T - delta[:, None]) * (1 - (capped / cap) ** 2)
    wanted = {"dq": 0.7 * dscores @ k, "dk": 0.7 * dscores.T @ q, "dv": weights.T @ dout}
    for name, gradient in wanted.items():
        assert oracle.relative_error(blocks[name][0, :, 0], gradient) <= 1e-13, name
    dsinks = -(sinks.exp() / total * delta).sum()
    assert float(blocks["dsinks"]) == pytest.approx(float(dsinks), rel=1e-12)


def test_expected_positions_are_the_documented_ones() -> None:
    for kind in KINDS:
        for order in ORDERS:
            for length, ulysses, ring in ((64, 2, 2), (67, 3, 2), (41, 1, 4), (16, 4, 1)):
                expected = oracle.expected_positions(kind, length, ulysses, ring, order)
                if kind == "balanced":
                    assert expected is None
                    continue
                layout = ds_usp.TokenLayout(kind, length, ulysses, ring, order)
                claimed = [list(layout.positions(rank)) for rank in range(ulysses * ring)]
                assert [x.tolist() for x in expected or ()] == claimed
    zigzag = oracle.expected_positions("zigzag", 8, 1, 2, ORDERS[0])
    assert [x.tolist() for x in zigzag or ()] == [[0, 1, 6, 7], [2, 3, 4, 5]]
