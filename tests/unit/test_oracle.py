"""The oracle against torch's own attention and against numbers that were worked out by hand."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention


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
