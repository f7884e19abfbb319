"""Fused biases of Megatron-DeepSpeed against their definition in fp64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ds_usp.testing import relative_error
from megatron_patches.megatron_deepspeed import speedups

kernels = pytest.importorskip(
    "megatron_patches.megatron_deepspeed.bias_triton", exc_type=ImportError
)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gelu_and_its_gradient_are_torchs_in_fp64(dtype: torch.dtype) -> None:
    x = (3 * torch.randn(70, 2, 96, device="cuda")).to(dtype)
    bias, dy = torch.randn(96, device="cuda").to(dtype), torch.randn_like(x)
    x.view(-1)[:4] = torch.tensor([0.0, -80.0, 80.0, -6.0])
    total = (x.double() + bias.double()).requires_grad_()
    y = torch.nn.functional.gelu(total, approximate="tanh")
    (dx,) = torch.autograd.grad(y, total, dy.double())
    limit = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}[dtype]
    assert relative_error(kernels.gelu(x, bias), y) < limit
    assert relative_error(kernels.gelu_backward(dy, x, bias), dx) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_sum_with_a_residual_and_its_gradients(dtype: torch.dtype) -> None:
    x, residual, dy = (torch.randn(70, 2, 96, device="cuda").to(dtype) for _ in range(3))
    bias = torch.randn(96, device="cuda").to(dtype)
    inputs = [tensor.requires_grad_() for tensor in (x, bias, residual)]
    y = speedups.add_bias(
        lambda *_: pytest.fail("the original was called"), x, bias.expand_as(x), residual, 0.0, True
    )
    limit = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}[dtype]
    assert relative_error(y.detach(), sum(tensor.detach().double() for tensor in inputs)) < limit
    dx, dbias, dresidual = torch.autograd.grad(y, inputs, dy)
    assert torch.equal(dx, dy) and torch.equal(dresidual, dy)
    assert relative_error(dbias, dy.double().sum((0, 1))) < 2 * limit


def test_the_gemm_adds_its_bias() -> None:
    x, weight, bias = (torch.randn(n, device="cuda") for n in ((5, 2, 64), (96, 64), (96,)))
    ctx = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors))
    saved: list[torch.Tensor] = []
    y = speedups.linear(
        lambda *_: pytest.fail("the original was called"), ctx, x, weight, bias, False, True, False
    )
    assert relative_error(y, x.double() @ weight.double().t() + bias.double()) < 1e-5
    assert saved[0] is x and saved[1] is weight
    assert ctx.use_bias and ctx.async_grad_allreduce and not ctx.sequence_parallel
    assert not ctx.gradient_accumulation_fusion
