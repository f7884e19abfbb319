"""Megatron-DeepSpeed's biases: one kernel for what follows a product, beside its definition."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from oracle import relative_error

from megatron_patches.megatron_deepspeed.speedups import fused_bias

triton = pytest.importorskip(
    "megatron_patches.megatron_deepspeed.speedups.bias_triton", exc_type=ImportError
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_sum_with_a_residual_and_its_gradients(dtype: torch.dtype) -> None:
    x, residual, dy = (torch.randn(70, 2, 96, device="cuda").to(dtype) for _ in range(3))
    bias = torch.randn(96, device="cuda").to(dtype)
    given = [each.requires_grad_() for each in (x, bias, residual)]
    y = fused_bias.add_bias(
        lambda *_: pytest.fail("the host's"), x, bias.expand_as(x), residual, 0.0, True
    )
    limit = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}[dtype]
    assert relative_error(y.detach(), sum(each.detach().double() for each in given)) < limit
    dx, dbias, dresidual = torch.autograd.grad(y, given, dy)
    assert torch.equal(dx, dy) and torch.equal(dresidual, dy)
    assert relative_error(dbias, dy.double().sum((0, 1))) < 2 * limit


def test_a_product_gets_its_bias_where_it_is_made() -> None:
    x, weight, bias = (torch.randn(n, device="cuda") for n in ((5, 2, 64), (96, 64), (96,)))
    ctx = SimpleNamespace(save_for_backward=lambda *tensors: kept.extend(tensors))
    kept: list[torch.Tensor] = []
    y = fused_bias.linear(
        lambda *_: pytest.fail("the host's"), ctx, x, weight, bias, False, True, False
    )
    assert relative_error(y, x.double() @ weight.double().t() + bias.double()) < 1e-5
    assert kept[0] is x and kept[1] is weight
    assert ctx.use_bias and ctx.async_grad_allreduce and not ctx.sequence_parallel
    assert not ctx.gradient_accumulation_fusion
