"""The Triton kernels that sum blocks, beside torch's operations one by one."""

from __future__ import annotations

import pytest
import torch

from ds_usp.kernels.merge import _merge_into, _sum_into
from ds_usp.testing import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
SHAPE = 2, 70, 3, 40  # neither rows nor features fill a block


def strided(dtype: torch.dtype) -> torch.Tensor:
    """``[B, S, H, D]`` inside of a larger tensor."""
    batch, rows, heads, dim = SHAPE
    return (
        torch.randn(rows, batch, 2 * heads, dim, device="cuda")
        .to(dtype)[:, :, 1::2]
        .transpose(0, 1)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "into the first"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_merge_is_the_softmax_over_all_sets_of_keys(
    count: int, in_place: bool, dtype: torch.dtype
) -> None:
    acc_dtype = torch.promote_types(dtype, torch.float32)
    batch, rows, heads, _ = SHAPE
    partials = []
    for index in range(count):
        lse = 4 * torch.randn(batch, heads, rows, device="cuda", dtype=acc_dtype)
        lse[:, :, index::5] = float("-inf")  # and some rows attend to no key of any set
        lse[:, :, 4::5] = float("-inf")
        partials.append((strided(dtype), lse))
    sums = torch.stack([x for _, x in partials]).double()
    values = torch.stack([x for x, _ in partials]).double()
    out, lse = partials[0] if in_place else (strided(dtype), torch.empty_like(partials[0][1]))
    _merge_into(out, lse, partials)
    want_lse = sums.logsumexp(0)
    weights = (sums - want_lse).exp().nan_to_num(0.0).transpose(2, 3).unsqueeze(-1)
    want = (weights * values).sum(0)
    seen = want_lse > float("-inf")
    assert torch.equal(lse > float("-inf"), seen) and not seen.all()
    assert relative_error(lse[seen], want_lse[seen]) < (
        1e-13 if acc_dtype == torch.float64 else 1e-6
    )
    limit = {torch.bfloat16: 4e-3, torch.float32: 1e-6, torch.float64: 1e-13}[dtype]
    assert relative_error(out, want) < limit
    assert not out[~seen.transpose(1, 2)].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4, 8, 9])
def test_a_sum_is_rounded_once(count: int, dtype: torch.dtype) -> None:
    partials, out = [strided(dtype) for _ in range(count)], strided(dtype)
    _sum_into(out, partials)
    want = torch.stack(partials).double().sum(0)
    limit = {torch.bfloat16: 4e-3, torch.float32: 1e-6, torch.float64: 1e-13}[dtype]
    assert relative_error(out, want) < limit
