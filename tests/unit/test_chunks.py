"""An MLP in chunks of the tokens: the same gradients, and no wide tensor of all tokens."""

from __future__ import annotations

from collections.abc import Callable

import oracle
import pytest
import torch
from peak_memory import peak_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_usp import ConfigError
from ds_usp.memory import in_chunks

TOKENS, H, FFN = 23, 16, 64
Gradients = tuple[list[Tensor], int]


def mlp_of(h: int = H, ffn: int = FFN) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(h), nn.Linear(h, ffn), nn.GELU(), nn.Linear(ffn, h))


def gradients(mlp: nn.Sequential, chunks: int, tokens: slice = slice(None)) -> Gradients:
    """Of input and weights, for a loss of some tokens; and the largest tensor that the activation
    function gives."""
    mlp.zero_grad()
    x = torch.randn(2, TOKENS, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    widest = []
    hook = mlp[2].register_forward_hook(lambda _, __, out: widest.append(out.numel()))
    in_chunks(mlp, x, chunks, dim=1)[:, tokens].square().sum().backward()
    hook.remove()
    return [x.grad, *(p.grad.clone() for p in mlp.parameters())], max(widest)


@pytest.mark.parametrize("chunks", [2, 5, TOKENS])
@pytest.mark.parametrize("tokens", [slice(None), slice(7, 9)])
def test_gradients_are_those_of_all_tokens_at_once(chunks: int, tokens: slice) -> None:
    mlp = mlp_of()
    (input_grad, *wanted), whole = gradients(mlp, 1, tokens)
    (actual_input_grad, *actual), part = gradients(mlp, chunks, tokens)
    assert part == whole // TOKENS * -(-TOKENS // chunks)
    # The products of matrices of other sizes may sum in another order.
    assert oracle.relative_error(actual_input_grad, input_grad.double()) < 1e-6
    for g, w in zip(actual, wanted, strict=True):
        assert oracle.relative_error(g, w.double()) < 2e-5


def test_where_the_function_sums_in_one_order_the_inputs_gradient_is_equal_bit_for_bit() -> None:
    norm = nn.LayerNorm(H)
    for add in (norm, lambda x: x + torch.tanh(norm(x))):
        grads = []
        for chunks in (1, 5):
            x = torch.linspace(-3, 3, TOKENS * H).view(TOKENS, H).requires_grad_()
            in_chunks(add, x, chunks).square().sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


def test_each_parameter_gets_one_gradient_in_a_backward_pass() -> None:
    mlp, calls = mlp_of(), []
    for parameter in mlp.parameters():
        parameter.register_hook(calls.append)
        parameter.register_post_accumulate_grad_hook(calls.append)
    gradients(mlp, 5)
    assert len(calls) == 2 * len(list(mlp.parameters()))


def test_of_all_tokens_exist_the_output_and_the_inputs_gradient_alone() -> None:
    tokens, h, chunks = 8192, 64, 64
    mlp, x, grad = mlp_of(h, 4 * h), torch.randn(tokens, h), torch.randn(tokens, h)

    def in_split_and_cat(run: nn.Module, x: Tensor, chunks: int) -> Tensor:
        split = x.tensor_split(chunks)
        return torch.cat([checkpoint(run, part, use_reentrant=False) for part in split])

    def peak(compute: Callable[[nn.Module, Tensor, int], Tensor]) -> float:
        """In tensors of all tokens."""

        def step() -> None:
            mlp.zero_grad(set_to_none=False)
            compute(mlp, x.detach().requires_grad_(), chunks).backward(grad)

        step()
        return peak_of(step, repeats=2) / (4 * tokens * h)

    wanted, with_cat = peak(in_chunks), peak(in_split_and_cat)
    assert 2 < wanted < 2.6  # the tensors of a chunk are 20/64, its random state 5/2048 each
    assert with_cat - wanted > 1


def test_second_derivatives_and_inputs_without_a_gradient() -> None:
    mlp, seconds = mlp_of().double(), []
    for chunks in (1, 3):
        x = torch.linspace(-1, 1, TOKENS * H, dtype=torch.float64).view(TOKENS, H).requires_grad_()
        (first,) = torch.autograd.grad(in_chunks(mlp, x, chunks).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*seconds)
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(mlp, x, 3), mlp(x))
    mlp.zero_grad()
    in_chunks(mlp, x.detach(), 3).sum().backward()
    assert all(p.grad is not None for p in mlp.parameters())


def test_functions_and_numbers_that_are_no_chunks_are_refused() -> None:
    x = torch.zeros(2, TOKENS, H)
    for chunks in (0, TOKENS + 1):
        with pytest.raises(ConfigError, match=f"the size of dim 1, {TOKENS}"):
            in_chunks(nn.Identity(), x, chunks, dim=1)
    with pytest.raises(ConfigError, match="a chunk of 11 indices along dim 1 has a result of 1"):
        in_chunks(lambda part: part.mean(1, keepdim=True), x, 2, dim=1)
    with pytest.raises(RuntimeError, match="being modified inplace"):
        in_chunks(lambda part: part.mul_(2), x.requires_grad_().clone(), 2, dim=1)


def low_precision(chunks: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Gradients of a module's parameters at the same point in both precisions; its second linear
    layer's weight is that of the first one too."""
    mlp = mlp_of(64, 64).bfloat16().to(dtype)
    mlp[3].weight = mlp[1].weight
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(4096, 64, generator=generator).bfloat16().to(dtype) for _ in range(2))
    in_chunks(mlp, x, chunks).backward(grad + 0.5)
    return [p.grad.double() for p in mlp.parameters()]


@pytest.mark.parametrize("chunks", [2, 32, 1024])
def test_gradients_of_bf16_parameters_are_as_good_as_of_all_tokens_at_once(chunks: int) -> None:
    exact = low_precision(1, torch.float64)
    for whole, actual, wanted in zip(low_precision(1), low_precision(chunks), exact, strict=True):
        error = oracle.relative_error(actual, wanted)
        assert error < 1.5 * max(oracle.relative_error(whole, wanted), 2**-9)


def test_a_closure_names_the_module_whose_gradients_are_summed_in_fp32() -> None:
    mlp, x = mlp_of().bfloat16(), torch.randn(64, H).bfloat16()

    def total(module: nn.Module | None) -> list[Tensor]:
        mlp.zero_grad()
        in_chunks(lambda part: mlp(part), x, 64, module=module).sum().backward()
        return [p.grad for p in mlp.parameters()]

    unnamed, named = total(None), total(mlp)
    assert not all(map(torch.equal, unnamed, named))
    mlp.zero_grad()
    in_chunks(mlp, x, 64).sum().backward()
    assert all(map(torch.equal, named, [p.grad for p in mlp.parameters()]))


def test_parameters_stay_the_modules_own_and_a_failed_backward_pass_leaves_nothing() -> None:
    mlp, x = mlp_of().bfloat16(), torch.randn(32, H).bfloat16().requires_grad_()
    mlp[3].weight.requires_grad_(False)
    before = dict(mlp.named_parameters())

    def gradients_of(loss: Tensor) -> list[Tensor]:
        used = [p for p in mlp.parameters() if p.requires_grad]
        return list(torch.autograd.grad(loss, used, retain_graph=True))

    loss = in_chunks(mlp, x, 4).float().square().sum()
    first = gradients_of(loss)
    calls = []

    def fail(_: Tensor) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("in the middle")

    hook = mlp[3].bias.register_hook(lambda _: None)
    hook.remove()
    with pytest.raises(ValueError, match="in the middle"):
        fails = mlp[2].register_forward_hook(lambda *_: fail(x))
        gradients_of(loss)
    fails.remove()
    assert all(map(torch.equal, gradients_of(loss), first))
    assert all(p is before[name] for name, p in mlp.named_parameters())
    second = torch.autograd.grad(loss, list(before.values())[:2], create_graph=True)
    torch.autograd.grad(second[0].float().square().sum(), x)
