"""An MLP in chunks of the tokens: the same gradients, and no wide tensor of all tokens."""

import copy
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from peak_memory import peak_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_usp import ConfigError
from ds_usp import testing as oracle
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
def test_gradients_are_those_of_all_tokens_at_once(chunks, tokens):
    mlp = mlp_of()
    (input_grad, *wanted), whole = gradients(mlp, 1, tokens)
    (actual_input_grad, *actual), part = gradients(mlp, chunks, tokens)
    assert part == whole // TOKENS * -(-TOKENS // chunks)
    # The products of matrices of other sizes may sum in another order.
    assert oracle.relative_error(actual_input_grad, input_grad.double()) < 1e-6
    for g, w in zip(actual, wanted, strict=True):
        assert oracle.relative_error(g, w.double()) < 2e-5


def test_where_the_function_sums_in_one_order_the_inputs_gradient_is_equal_bit_for_bit():
    norm = nn.LayerNorm(H)
    for add in (norm, lambda x: x + torch.tanh(norm(x))):
        grads = []
        for chunks in (1, 5):
            x = torch.linspace(-3, 3, TOKENS * H).view(TOKENS, H).requires_grad_()
            in_chunks(add, x, chunks).square().sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


CHUNKS = 64


def seen_by_hooks(
    run: Callable[[nn.Module, Tensor], Tensor], dtype: torch.dtype = torch.bfloat16
) -> list[list[Tensor]]:
    """For each parameter what the hooks of DDP and ZeRO would send in a backward pass, call by
    call; weights and input are those of bf16 in every dtype."""
    mlp = mlp_of().bfloat16().to(dtype)
    seen: list[list[Tensor]] = [[] for _ in mlp.parameters()]
    for calls, parameter in zip(seen, mlp.parameters(), strict=True):
        parameter.register_post_accumulate_grad_hook(lambda p, c=calls: c.append(p.grad.double()))
    draw = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(4 * CHUNKS, H, generator=draw).bfloat16().to(dtype) for _ in range(2))
    run(mlp, x.requires_grad_()).backward(grad + 0.5)
    return seen


def test_each_parameter_gets_one_gradient_in_a_backward_pass():
    """The hook sees the sum over chunks at once, rounded once."""
    exact = seen_by_hooks(lambda mlp, x: mlp(x), torch.float64)
    whole = seen_by_hooks(lambda mlp, x: mlp(x))
    chunked = seen_by_hooks(partial(in_chunks, chunks=CHUNKS))
    for (wanted,), (at_once,), calls in zip(exact, whole, chunked, strict=True):
        assert len(calls) == 1
        limit = 1.5 * max(oracle.relative_error(at_once, wanted), 2**-9)
        assert oracle.relative_error(calls[0], wanted) < limit


def test_of_all_tokens_exist_the_output_and_the_inputs_gradient_alone():
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


def test_second_derivatives_and_inputs_without_a_gradient():
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


def test_functions_and_numbers_that_are_no_chunks_are_refused():
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
def test_gradients_of_bf16_parameters_are_as_good_as_of_all_tokens_at_once(chunks):
    exact = low_precision(1, torch.float64)
    for whole, actual, wanted in zip(low_precision(1), low_precision(chunks), exact, strict=True):
        error = oracle.relative_error(actual, wanted)
        assert error < 1.5 * max(oracle.relative_error(whole, wanted), 2**-9)


def test_a_closure_names_the_module_whose_gradients_are_summed_in_fp32():
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


def test_parameters_stay_the_modules_own_and_a_failed_backward_pass_leaves_nothing():
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


class _OwnAndNoGrad(nn.Module):
    """A weight of its own, which a reentrant checkpoint uses too, and a layer that runs without
    gradients first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(H, H) / 4), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.linear(x).abs().mean(-1, keepdim=True)
        weight = self.weight  # the checkpoint's backward pass runs inside that of the other uses
        x = checkpoint(lambda part: (part @ weight).tanh(), x @ weight, use_reentrant=True)
        return self.linear(x @ weight) * scale


@pytest.mark.parametrize("call", ["its forward", "with its hooks"])
def test_no_gradient_is_lost_without_grad_mode_or_in_a_backward_pass_inside_another(call):
    torch.manual_seed(0)
    module, x = _OwnAndNoGrad().bfloat16(), torch.randn(64, H).bfloat16()
    exact = copy.deepcopy(module).double()
    exact(x.double()).square().sum().backward()
    run = partial(_OwnAndNoGrad.forward, module) if call == "its forward" else module
    in_chunks(run, x, 4).float().square().sum().backward()
    for actual, wanted in zip(module.parameters(), exact.parameters(), strict=True):
        assert oracle.relative_error(actual.grad.double(), wanted.grad) < 2**-7


def test_hooks_before_a_modules_forward_see_its_own_parameters_and_may_gather_them():
    torch.manual_seed(0)
    module, x = nn.Linear(H, H).bfloat16(), torch.randn(64, H).bfloat16()
    wanted = torch.autograd.grad(in_chunks(module, x, 4).sum(), list(module.parameters()))
    weight, whole, seen = module.weight, module.weight.data, []

    def gather(part: nn.Module, _: object) -> None:  # as ZeRO-3's hook does
        seen.append(part.weight)
        part.weight.data = whole

    def release(*_: object) -> None:
        weight.data = whole.new_empty(0)

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(release)
    release()
    out = in_chunks(module, x, 4).sum()
    weight.data = whole
    actual = torch.autograd.grad(out, list(module.parameters()))
    assert len(seen) >= 4 and all(parameter is weight for parameter in seen)
    assert all(map(torch.equal, actual, wanted))


def test_calls_from_another_thread_leave_no_view_in_a_module():
    mlp, x = mlp_of().bfloat16(), torch.randn(32, H).bfloat16()
    before = dict(mlp.named_parameters())
    inside, over = threading.Event(), threading.Event()

    def wait(*_: object) -> None:  # the other thread's call has taken the hooks of this one's chunk
        inside.set()
        over.wait(10)

    def call_in_the_other_thread() -> None:
        handle = mlp[1].register_forward_pre_hook(
            lambda *_: wait() if threading.current_thread() is other else None, prepend=True
        )
        other.start()
        inside.wait(10)
        handle.remove()

    def run(part: Tensor) -> Tensor:
        if not inside.is_set():
            call_in_the_other_thread()
        return mlp(part)

    other = threading.Thread(target=mlp, args=(x,))
    in_chunks(run, x, 2, module=mlp)
    over.set()
    other.join()
    assert all(p is before[name] for name, p in mlp.named_parameters())
    assert len(before) == len(list(mlp.named_parameters()))


def test_a_compiled_forward_method_keeps_the_sums_of_autograd():
    mlp, x = mlp_of().bfloat16(), torch.randn(32, H).bfloat16()
    mlp.forward = torch.compile(mlp.forward, backend="aot_eager")
    for _ in range(2):
        mlp.zero_grad()
        in_chunks(mlp, x, 4).sum().backward()
    assert all(p.grad is not None for p in mlp.parameters())


def test_subclasses_of_transformer_engines_layers_keep_the_sums_of_autograd():
    engines = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.linear"})
    megatrons = type("TELinear", (engines,), {"__module__": "megatron.core.extensions"})
    linear, seen = megatrons(H, H).bfloat16(), []

    def run(part: Tensor) -> Tensor:
        seen.append(linear.weight)
        return part @ linear.weight

    in_chunks(run, torch.ones(4, H).bfloat16(), 2, module=linear)
    assert len(seen) == 2 and all(weight is linear.weight for weight in seen)
