"""Megatron-DeepSpeed's GELU as one kernel, beside the definition."""

from __future__ import annotations

import pytest
import torch
from oracle import relative_error

triton = pytest.importorskip(
    "megatron_patches.megatron_deepspeed.gelu_triton", exc_type=ImportError
)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gelu_and_its_gradient_are_torchs_in_fp64(dtype: torch.dtype) -> None:
    x = (3 * torch.randn(70, 2, 96, device="cuda")).to(dtype)
    bias, dy = torch.randn(96, device="cuda").to(dtype), torch.randn_like(x)
    x.view(-1)[:4] = torch.tensor([0.0, -80.0, 80.0, -6.0])
    wide = (x.double() + bias.double()).requires_grad_()
    y = torch.nn.functional.gelu(wide, approximate="tanh")
    (dx,) = torch.autograd.grad(y, wide, dy.double())
    limit = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}[dtype]
    assert relative_error(triton.gelu(x, bias), y) < limit
    assert relative_error(triton.gelu_backward(dy, x, bias), dx) < limit
